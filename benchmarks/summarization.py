"""Summarization beside transformers' ``Seq2SeqTrainer``: fine-tuning, evaluation with generation, and peak memory.

Both sides get one model, one tokenizer and one file of rows, which a process of its own makes: ``python -m
benchmarks.summarization FOLDER [--small]``. Every word of a text is one token, so lengths are as drawn: lognormal, in a
correlation of a half between text and summary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.contests import OURS, Contest, Measured, Row, Settings
from benchmarks.turns import REPOSITORY, Turns, rates, run_command, take_turns

BEAMS = 4
SPECIAL = ["<pad>", "</s>", "<unk>"]
LARGE_SIZES = {
    "model": {"vocab_size": 32_128, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4},
    "rows": {"train": 640, "validation": 64},
    "longest": (256, 64),  # tokens of text and summary, end included
    "median": (90, 24),
    "batch": 16,
}
SMALL_SIZES = {
    "model": {"vocab_size": 512, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "rows": {"train": 24, "validation": 10},
    "longest": (32, 16),
    "median": (12, 6),
    "batch": 4,
}


def sizes(settings: Settings) -> dict[str, Any]:
    """Sizes of model and data."""
    return SMALL_SIZES if settings.small else LARGE_SIZES


# --- What both sides read ---------------------------------------------------------------------------------------------


def draw_rows(sizes: dict[str, Any], count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of token numbers, ends included: random words, and as summary the last steps of one chain of words."""
    import numpy as np

    draw, rows, chain = np.random.default_rng(seed), [], [*range(len(SPECIAL), len(SPECIAL) + sizes["longest"][1] - 1)]
    for common, *own in draw.standard_normal((count, 3)):
        spreads = [0.5 * (common + other) / 2**0.5 for other in own]
        limits = zip(sizes["median"], spreads, sizes["longest"], strict=True)
        text, summary = (int(np.clip(round(median * np.exp(by)), 3, most)) for median, by, most in limits)
        words = draw.integers(len(SPECIAL) + len(chain), sizes["model"]["vocab_size"], text - 1)
        rows.append({"text": [*words.tolist(), 1], "summary": [*chain[1 - summary :], 1]})
    return rows


def make_tokenizer(vocabulary: int) -> Any:
    """A tokenizer that makes of each word one token: 0 is padding, 1 ends a text, and the others are called w<N>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL + [f"w{number}" for number in range(len(SPECIAL), vocabulary)]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=[]
    )


def teach_to_end(model: Any, rows: list[dict[str, list[int]]]) -> None:
    """Fit the decoder's last layer to the rows' summaries, in closed form, so that texts end where they should.

    A model of random weights never writes the end, and all its texts would be of one length, as no trained model's are.
    The layer's input x becomes ``relu(x) - relu(-x)``, and its output a least-squares guess of the next word's vector.
    """
    import torch

    last, seen = model.decoder.block[-1].layer[-1], []
    hook = last.layer_norm.register_forward_hook(lambda module, given, found: seen.append(found[0]))
    with torch.no_grad():
        for row in rows:
            model(input_ids=torch.tensor([row["text"]]), labels=torch.tensor([row["summary"]]))
        hook.remove()
        wanted = [20 * model.shared.weight[row["summary"]] for row in rows]
        for states, words in zip(seen, wanted, strict=True):  # on the first word depends how long the text becomes
            states[0] *= 4
            words[0] *= 4
        fit = torch.linalg.lstsq(torch.cat(seen).double(), torch.cat(wanted).double(), driver="gelsd").solution.float()
        width, layer = len(fit), last.DenseReluDense
        for sign, at in ((1, slice(width)), (-1, slice(width, 2 * width))):
            layer.wi.weight[at] = sign * torch.eye(width)
            layer.wo.weight[:, at] = sign * fit.T
        layer.wi.weight[2 * width :] = 0


def write_all(folder: Path, sizes: dict[str, Any]) -> None:
    """Write ``model`` (random weights), ``taught`` (which ends its texts), both with tokenizer, and the rows' files."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(**sizes["model"], decoder_start_token_id=0, dropout_rate=0.1)
    model, tokenizer = T5ForConditionalGeneration(config).eval(), make_tokenizer(config.vocab_size)
    drawn = {split: draw_rows(sizes, count, seed) for seed, (split, count) in enumerate(sizes["rows"].items())}
    for split, rows in drawn.items():
        texts = [{key: " ".join(f"w{token}" for token in tokens[:-1]) for key, tokens in row.items()} for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    for name in ("model", "taught"):
        if name == "taught":
            teach_to_end(model, drawn["validation"])
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    facts = {f"mean tokens of a {key}": mean(drawn["train"], key) for key in ("text", "summary")}
    facts |= {"parameters": model.num_parameters(), "threads": torch.get_num_threads()}
    (folder / "facts.json").write_text(json.dumps(facts))


def mean(rows: list[dict[str, list[int]]], key: str) -> float:
    """Mean length of a column."""
    return round(sum(len(row[key]) for row in rows) / len(rows), 1)


def prepare(settings: Settings) -> dict[str, Any]:
    """Have `write_all` done by a process of its own: this one stays small. Returns the facts."""
    small = ["--small"] if settings.small else []
    run_command([sys.executable, "-m", "benchmarks.summarization", settings.folder, *small], caches(settings))
    made = sizes(settings)
    facts = {"model": made["model"], "rows": made["rows"], "batch": made["batch"], "longest": made["longest"]}
    return facts | json.loads((settings.folder / "facts.json").read_text())


def caches(settings: Settings) -> dict[str, str]:
    """Where datasets keeps what it has read: in the contest's folder."""
    return {"HF_HOME": str(settings.folder / "hf")}


# --- Our side ---------------------------------------------------------------------------------------------------------


def recipe_flags(settings: Settings, folder: Path, model: str) -> list[str]:
    """Flags that name model, rows and sizes."""
    made, (text, summary) = sizes(settings), sizes(settings)["longest"]
    files = {split: folder / f"{split}.jsonl" for split in made["rows"]}
    flags = ["--model_name_or_path", folder / model, "--gaudi_config", "t5"]
    flags += ["--max_source_length", text, "--max_target_length", summary]
    flags += ["--per_device_train_batch_size", made["batch"], "--per_device_eval_batch_size", made["batch"]]
    return [str(flag) for flag in flags + [f"--{split}_file={file}" for split, file in files.items()]]


def our_training(settings: Settings, turns: Turns) -> None:
    """Fine-tuning by the recipe."""
    flags = recipe_flags(settings, settings.folder.parent, "model")
    ours.train_in_turns("summarization", [*flags, "--bf16"], settings, turns)


def our_evaluation(settings: Settings, turns: Turns) -> None:
    """Evaluation by the recipe, over and over."""
    recipe = ours.load_recipe("summarization")
    evaluate = recipe.evaluate

    def in_turns(*args: Any) -> None:
        while True:
            metrics, texts = evaluate(*args)
            finish_turn(settings, turns, texts, metrics["eval_loss"], metrics["eval_rougeL"])

    recipe.evaluate = in_turns
    flags = recipe_flags(settings, settings.folder.parent, "taught")
    flags += ["--do_eval", "--predict_with_generate", "--num_beams", str(BEAMS)]
    recipe.main([*flags, *ours.common_flags(settings, settings.folder / "run")])


def finish_turn(settings: Settings, turns: Turns, texts: list[str], loss: float, rouge: float) -> None:
    """End a turn of evaluation; what was generated is compared at the end."""
    (settings.folder / "texts.json").write_text(json.dumps({"texts": texts, "loss": loss, "rouge": rouge}))
    turns.over(samples=len(texts), tokens=sum(len(text.split()) for text in texts))


# --- Seq2SeqTrainer ---------------------------------------------------------------------------------------------------


def make_trainer(settings: Settings, model: str, **options: Any) -> tuple[Any, Any]:
    """A ``Seq2SeqTrainer`` with its defaults but for ``options`` and what is written, and its rows by split."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    folder, made = settings.folder.parent, sizes(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / model)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(batch["text"], max_length=made["longest"][0], truncation=True)
        labels = tokenizer(text_target=batch["summary"], max_length=made["longest"][1], truncation=True)
        return {**found, "labels": labels["input_ids"]}

    rows = load_dataset("json", data_files={split: str(folder / f"{split}.jsonl") for split in made["rows"]})
    rows = rows.map(encode, batched=True, remove_columns=["text", "summary"])
    arguments = Seq2SeqTrainingArguments(
        output_dir=settings.folder / "run",
        per_device_train_batch_size=made["batch"],
        per_device_eval_batch_size=made["batch"],
        num_train_epochs=ours.FOREVER,
        use_cpu=settings.device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Seq2SeqTrainer(
        model, arguments, collator, train_dataset=rows["train"], processing_class=tokenizer, compute_metrics=None
    )
    return trainer, rows


def their_training(settings: Settings, turns: Turns, **options: Any) -> None:
    """Fine-tuning by ``Seq2SeqTrainer``; a turn is an epoch."""
    from transformers import TrainerCallback

    trainer, rows = make_trainer(settings, "model", bf16=True, **options)
    tokens = sum(len(row["input_ids"]) + len(row["labels"]) for row in rows["train"])

    class EndsTurns(TrainerCallback):
        """Each epoch is a turn."""

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            if settings.device != "cpu":
                synchronize()
            turns.over(samples=len(rows["train"]), tokens=tokens)

    trainer.add_callback(EndsTurns())
    trainer.train()


def synchronize() -> None:
    """Wait for the device."""
    import torch

    torch.accelerator.synchronize()


def their_evaluation(settings: Settings, turns: Turns) -> None:
    """``Seq2SeqTrainer.predict`` with generation, with the same ROUGE, over and over."""
    import numpy as np

    limits = {"generation_num_beams": BEAMS, "generation_max_length": sizes(settings)["longest"][1]}
    trainer, rows = make_trainer(settings, "taught", predict_with_generate=True, **limits)
    tokenizer, texts = trainer.processing_class, []

    def score(found: Any) -> dict[str, float]:
        both = (np.where(tokens < 0, tokenizer.pad_token_id, tokens) for tokens in (found.predictions, found.label_ids))
        decoded = [tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in both]
        texts[:] = decoded[0]
        return mean_rouge(*decoded)

    trainer.compute_metrics = score
    while True:
        metrics = trainer.predict(rows["validation"]).metrics
        finish_turn(settings, turns, texts, metrics["test_loss"], metrics["test_rougeL"])


def mean_rouge(predictions: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE as the recipe takes it."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(kinds := ["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


SIDES: dict[str, Callable[[Settings, Turns], None]] = {
    "ours_training": our_training,
    "trainer": their_training,
    "grouped": partial(their_training, train_sampling_strategy="group_by_length"),
    "ours_evaluation": our_evaluation,
    "predict": their_evaluation,
}


# --- The contests -----------------------------------------------------------------------------------------------------


def turns_of(names: list[str], settings: Settings) -> dict[str, list[dict[str, float]]]:
    """Reports of the sides, ours the first of them."""
    reports = take_turns(__name__, names, settings, caches(settings))
    return {OURS if side == names[0] else side: found for side, found in reports.items()}


def measure_training(settings: Settings) -> Measured:
    """Fine-tuning: samples per second."""
    facts = prepare(settings) | {"precision": "bf16 autocast", "optimiser": "fused AdamW on all sides"}
    reports = turns_of(["ours_training", "trainer", "grouped"], settings)
    facts |= {f"samples and tokens of a turn, {side}": counts(found) for side, found in reports.items()}
    known = [each for each in reports[OURS] if each.get("flops")]
    return Measured(rates(reports, "samples"), facts, [each["flops"] / each["seconds"] for each in known])


def counts(reports: list[dict[str, float]]) -> list[list[float]]:
    """The different numbers of samples and tokens that turns had: one pair, if all did the same."""
    return sorted({(each["samples"], each["tokens"]) for each in reports})


def measure_evaluation(settings: Settings) -> Measured:
    """Evaluation with generation: samples per second.

    Raises:
        RuntimeError: the two sides did not generate the same: more than one text of twenty differs.
    """
    facts = prepare(settings) | {"precision": "fp32", "beams": BEAMS}
    reports = turns_of(["ours_evaluation", "predict"], settings)
    found = [json.loads((settings.folder / side / "texts.json").read_text()) for side in ("ours_evaluation", "predict")]
    texts = [one["texts"] for one in found]
    same = sum(a == b for a, b in zip(*texts, strict=True)) / len(texts[0])
    if same < 0.95:
        raise RuntimeError(f"of the generated texts only {same:.0%} are the same")
    lengths = sorted(len(text.split()) for text in texts[0])
    facts |= {"same texts": same, "words of a text, quartiles": [lengths[len(lengths) * n // 4] for n in (1, 2, 3)]}
    facts |= {"loss": [one["loss"] for one in found], "ROUGE-L": [one["rouge"] for one in found]}
    return Measured(rates(reports, "samples"), facts)


def measure_memory(settings: Settings) -> Measured:
    """Peak resident memory of one whole run after another: an epoch, and an evaluation with generation."""
    facts, made, folder = prepare(settings), sizes(settings), settings.folder
    facts |= {"precision": "bf16 autocast", "beams": BEAMS}
    common = ["--do_train", "--do_eval", "--bf16", "--predict_with_generate", "--num_train_epochs", "1", "--use_cpu"]
    common += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"]
    recipe = [REPOSITORY / "recipes" / "summarization" / "run.py", *recipe_flags(settings, folder, "taught"), *common]
    script = ["-m", "benchmarks.seq2seq_script", *script_flags(folder, made), *common]
    sides = {OURS: [*recipe, "--num_beams", BEAMS], "script": [*script, "--generation_num_beams", BEAMS]}
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(settings.rounds):
        for name, words in sides.items():
            output = folder / f"{name}_{number}"
            command = [sys.executable, *words, "--output_dir", output]
            found = run_command(command, caches(settings), memory=True)
            values[name].append(found.peak_bytes / 1e6)
    return Measured(values, facts)


def script_flags(folder: Path, made: dict[str, Any]) -> list[str]:
    """The same rows and sizes for `benchmarks.seq2seq_script`."""
    flags = ["--model_name_or_path", folder / "taught"]
    flags += ["--max_source_length", made["longest"][0], "--max_target_length", made["longest"][1]]
    flags += ["--per_device_train_batch_size", made["batch"], "--per_device_eval_batch_size", made["batch"]]
    return [str(flag) for flag in flags + [f"--{split}_file={folder / split}.jsonl" for split in made["rows"]]]


CONTESTS = [
    Contest(
        "summarization",
        "samples/s",
        [
            Row("summarization, fine-tuning", "trainer", "Seq2SeqTrainer, its defaults", 2.7),
            Row("summarization, fine-tuning", "grouped", "Seq2SeqTrainer, grouped by length", 1.4),
        ],
        measure_training,
    ),
    Contest(
        "summarization_evaluation",
        "samples/s",
        [Row("summarization, evaluation with generation", "predict", "Seq2SeqTrainer.predict", 1.2)],
        measure_evaluation,
    ),
    Contest(
        "summarization_memory",
        "MB",
        [Row("summarization, peak memory of a run", "script", "a script on Seq2SeqTrainer", 1.0, at_most=True)],
        measure_memory,
        devices=("cpu",),
    ),
]


def main() -> None:
    """Write what both sides read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_all(args.folder, SMALL_SIZES if args.small else LARGE_SIZES)


if __name__ == "__main__":
    main()
