"""Summarization: fine-tune and evaluate an encoder-decoder model (T5, BART) on pairs of text and summary.

One device:    python recipes/summarization/run.py --gaudi_config gaudi_configs/t5.json
Eight devices: python gaudi_spawn.py --world_size 8 recipes/summarization/run.py --gaudi_config gaudi_configs/t5.json

Without a model and data it trains a small T5 on documented source code that every machine has. Expected: a ROUGE-1
above those of the text's lead sentence and of the bare name, which it prints beside it.
"""

# --- Bootstrap and imports --------------------------------------------------------------------------------------------
# torch and what builds on it are imported inside functions: the execution mode has to be in the environment before
# torch loads the Gaudi bridge, and --help answers at once.

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

for folder in Path(__file__).resolve().parents:  # a copy beside this folder finds core; elsewhere it is installed
    if (folder / "core" / "engine.py").is_file():
        sys.path.insert(0, str(folder))
        break

from core.arguments import flag, parse_arguments
from core.errors import UserError, exit_with_one_line, say, warn_once
from core.hub import NAMED, HubArguments, TokenizerArguments, fit, load_splits, loading, model_options
from core.mixed_precision import prepare_environment
from core.splits import PHASES, map_rows, needed_splits, token_lengths

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

    from core.data import Batch, BatchLoader
    from core.engine import Engine
    from core.run import Run

BUILT_IN = Path(__file__).with_name("built_in.json")  # flags of the run without a model and data
COLUMNS = {  # text and summary: the known data sets that call them so
    "article highlights": ("cnn_dailymail", "wiki_summary"),
    "description abstract": ("big_patent",),
    "dialogue summary": ("samsum",),
    "document summary": ("gigaword", "multi_news", "xsum"),
    "text summary": ("billsum",),
}

# --- Arguments --------------------------------------------------------------------------------------------------------


@dataclass
class SummarizationArguments:
    """Which model, which pairs of text and summary, and how they are cut and generated."""

    _argument_group_name = "model and data"
    model_name_or_path: str | None = flag(None, "a hub's model or a folder (default: a small T5, built here)")
    text_column: str | None = flag(None, "column of the texts (default: the known data set's, else the first)")
    summary_column: str | None = flag(None, "column of the summaries (default: the known data set's, else the second)")
    drop_empty_rows: bool = flag(False, "leave out rows without text or summary, instead of stopping")
    source_prefix: str | None = flag(None, "put before every text, e.g. 'summarize: ' for T5")
    max_source_length: int = flag(1024, "cut texts to this many tokens")
    max_target_length: int = flag(128, "cut summaries to this many tokens")
    val_max_target_length: int | None = flag(None, "the same for evaluation (default: --max_target_length)")
    ignore_pad_token_for_loss: bool = flag(True, "padding bears no loss; False trains the model to write it")
    predict_with_generate: bool = flag(False, "generate summaries in evaluation, for ROUGE")
    generation_max_length: int | None = flag(None, "tokens of a generated summary (default: --val_max_target_length)")
    num_beams: int | None = flag(None, "beams (default: the model's)", aliases=["--generation_num_beams"])


# --- Data -------------------------------------------------------------------------------------------------------------


def load_data(args: Namespace, output_dir: Path) -> dict[str, Dataset]:
    """Return the splits that the flags ask for, each with the columns ``text`` and ``summary``."""
    files = {split: getattr(args, f"{split}_file") for split in PHASES}
    named = args.dataset_name or any(files.values())
    splits, found = load_splits(args, files) if named else documented_pairs(output_dir), {}
    for split, phase in needed_splits(args, splits).items():
        count = min(len(splits[split]), getattr(args, f"max_{phase}_samples") or len(splits[split]))
        found[split] = check_rows(splits[split].select(range(count)), split, args)
    return found


def documented_pairs(output_dir: Path) -> dict[str, Dataset]:
    """Make pairs from documented source code: name and description (or code) as text, the summary line as summary."""
    from datasets import Dataset

    from core.sample_data import documented_code, write_splits

    things = [x for x in documented_code() if x.kind == "function" and len(x.summary.split()) <= 16]
    pairs = [(x.path, {"text": f"{x.title} : {x.body}", "summary": x.summary}) for x in things]
    return {split: Dataset.from_list(rows) for split, rows in write_splits(pairs, output_dir / "data").items()}


def check_rows(rows: Dataset, split: str, args: Namespace) -> Dataset:
    """Name the two columns ``text`` and ``summary``, and refuse (or drop, if asked to) rows without either."""
    from core.data import require_rows

    data_set = (args.dataset_name or "").rpartition("/")[2]
    known = next((names.split() for names, sets in COLUMNS.items() if data_set in sets), None)
    columns = rows.column_names
    text = args.text_column or (known or columns)[0]
    names = [text, args.summary_column or (known[1] if known else next((c for c in columns if c != text), text))]
    for name, option in zip(names, ("text_column", "summary_column"), strict=True):
        if name not in columns or names[0] == names[1]:
            found = ", ".join(columns)
            raise UserError(f"--{option}: the {split} split has no column {name!r} of its own; it has: {found}")
    pairs = zip(rows[names[0]][:], rows[names[1]][:], strict=True)  # whole: one row after the other is slow
    full = [at for at, pair in enumerate(pairs) if all(isinstance(text, str) and text.strip() for text in pair)]
    if missing := sorted(set(range(len(rows))) - set(full)):
        empty = f"{len(missing)} of {len(rows)} {split} rows lack text in {names} (first: row {missing[0] + 1})"
        if not args.drop_empty_rows:
            raise UserError(f"{empty}; mend the data, name other columns, or pass --drop_empty_rows")
        warn_once(f"{empty}; they are left out")
    require_rows(len(full), split, args)
    return rows.select(full).select_columns(names).rename_columns(dict(zip(names, ("text", "summary"), strict=True)))


def tokenize(rows: Dataset, tokenizer: Any, args: Namespace, max_target: int) -> Dataset:
    """Return rows of ``input_ids`` and ``labels``, cut to the maximum lengths, not padded."""
    prefix, max_source = args.source_prefix or "", args.max_source_length  # not args: any flag would spoil the cache

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [prefix + text for text in batch["text"]]
        inputs = tokenizer(texts, max_length=max_source, truncation=True)["input_ids"]
        labels = tokenizer(text_target=batch["summary"], max_length=max_target, truncation=True)["input_ids"]
        return {"input_ids": inputs, "labels": labels}

    return map_rows(rows, encode, args, ("input_ids", "labels"))


def collate(rows: list[dict], shape: tuple[int, int], pad: int, label_pad: int) -> Batch:
    """Pad rows to (source, target) lengths: input_ids and attention_mask (rows, source), labels (rows, target)."""
    from core.data import pad_rows

    batch = {"input_ids": pad_rows([row["input_ids"] for row in rows], shape[0], pad)}
    batch["attention_mask"] = pad_rows([[1] * len(row["input_ids"]) for row in rows], shape[0], 0)
    batch["labels"] = pad_rows([row["labels"] for row in rows], shape[1], label_pad)
    return batch


def make_loader(rows: Dataset, tokenizer: Any, args: Namespace, train: bool) -> BatchLoader:
    """Tokenize a split and put it into windows of length buckets (or of one maximum length)."""
    from core.data import IGNORE_INDEX, BatchLoader

    limits = (args.max_source_length, args.max_target_length if train else args.val_max_target_length)
    rows = tokenize(rows, tokenizer, args, limits[1])
    lengths = token_lengths(rows, ["input_ids", "labels"])
    label_pad = IGNORE_INDEX if args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    padded = partial(collate, pad=tokenizer.pad_token_id, label_pad=label_pad)
    return BatchLoader.from_arguments(args, rows, padded, lengths, limits, train)


# --- Model ------------------------------------------------------------------------------------------------------------


def build_model(args: Namespace, run: Run, data: dict[str, Dataset]) -> tuple[Any, Any]:
    """Load the named tokenizer and model, or build small ones from the training texts and the seed."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

    from core import attention, heads

    name, options = args.model_name_or_path or args.config_name, model_options(args)
    with loading(f"the model {name}", name, args.tokenizer_name):
        if name is not None:
            config = AutoConfig.from_pretrained(args.config_name or name, **options)
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or name, **options)
        else:
            tokenizer, config = small_t5(data)
        attention.register(run.device, args)
        choice = attention.supported(AutoModelForSeq2SeqLM, attention.choose(args, run.device), config)
        if args.model_name_or_path:
            kinds = {"dtype": "float32", "attn_implementation": choice, "use_safetensors": True}
            model = AutoModelForSeq2SeqLM.from_pretrained(name, config=config, **kinds, **options)
        else:
            model = AutoModelForSeq2SeqLM.from_config(config, dtype="float32", attn_implementation=choice)
    if name is None:
        model.generation_config.update(num_beams=4, length_penalty=1.5, no_repeat_ngram_size=2)
    model.config.use_cache = args.use_cache
    fit(model, tokenizer, max(args.max_source_length, args.max_target_length, args.val_max_target_length))
    if model.config.decoder_start_token_id is None or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UserError(f"the model {name} cannot shift labels (decoder_start_token_id), so it cannot be trained here")
    heads.narrow(model, run.device)
    return tokenizer, model


def small_t5(data: dict[str, Dataset]) -> tuple[Any, Any]:
    """Train a tokenizer on the texts, and configure a T5 of 0.6 million parameters."""
    from transformers import T5Config

    from core.sample_data import train_tokenizer

    rows = data.get("train") or next(iter(data.values()))
    tokenizer = train_tokenizer([*rows["text"][:], *rows["summary"][:]], vocab_size=2000)
    sizes = {"vocab_size": 2000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    return tokenizer, T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)


# --- Task functions: loss and metric ----------------------------------------------------------------------------------


def loss_sum(model: Any, batch: Batch, smoothing: float = 0.0, encoded: Any = None) -> torch.Tensor:
    """Sum of the cross-entropies of all real target tokens, in fp32. ``encoded``: the encoder's outputs, if known."""
    from core import heads, losses

    start = model.prepare_decoder_input_ids_from_labels(batch["labels"])  # the shift is done here, once
    inputs = {"input_ids": batch["input_ids"]} if encoded is None else {"encoder_outputs": encoded}
    inputs |= {"attention_mask": batch["attention_mask"], "decoder_input_ids": start, "use_cache": False}
    with heads.targets_only(model, batch["labels"]) as labels:
        return losses.cross_entropy_sum(model(**inputs).logits, labels, smoothing)


def split_sentences(text: str) -> list[str]:
    """Split at the ends of sentences, not after initials and common abbreviations. Needs no download."""
    short = r"(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|No|St|vs)\.)(?<!\b(?:Mrs|etc|e\.g|i\.e)\.)"
    lines = re.sub(rf"(?<=[.!?]){short}\s+(?=\S)", "\n", text).splitlines()
    return [line for line in lines if line.strip()]


def rouge(predictions: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE-1, 2, L and Lsum: mean F-measure x 100, with stemming; Lsum over sentences, one a line."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(kinds := ("rouge1", "rouge2", "rougeL", "rougeLsum"), use_stemmer=True)
    if references and not any(re.search("[a-z0-9]", text.lower()) for text in references):
        warn_once("ROUGE counts the letters a to z and digits only: references in other scripts score 0")
    lines = [["\n".join(split_sentences(text)) for text in texts] for texts in (references, predictions)]
    scores = [scorer.score(reference, prediction) for reference, prediction in zip(*lines, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / max(len(scores), 1) for kind in kinds}


# --- Train ------------------------------------------------------------------------------------------------------------


def train(engine: Engine, tokenizer: Any, smoothing: float, evaluation: Callable[[], dict]) -> dict[str, Any]:
    """The loop: one window is one optimiser step; the engine owns normalisation, clipping and step boundaries."""
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch, smoothing)
            engine.backward(loss)
        engine.step(window)
        if engine.due("log"):
            engine.log()
        if engine.due("eval"):
            engine.evaluate(evaluation)
        if engine.due("save"):
            engine.save(tokenizer)
    return engine.finish_training()


# --- Evaluate ---------------------------------------------------------------------------------------------------------


def move_beams(cache: Any, beams: torch.Tensor) -> Any:
    """Move what beams of a text wrote, and not what they read: of the text itself all have the same keys and values."""
    getattr(cache, "self_attention_cache", cache).reorder_cache(beams)
    return cache


def evaluate(run: Run, tokenizer: Any, loader: BatchLoader, rows: Dataset, phase: str) -> tuple[dict, list[str]]:
    """Return loss, ROUGE (with ``--predict_with_generate``) and speed of a split, and the generated summaries."""
    from torch.nn.functional import pad

    args, model = run.args, run.inference_model()
    limit = args.generation_max_length or args.val_max_target_length
    beams = args.num_beams or model.generation_config.num_beams or 1
    options = {"max_length": limit, "num_beams": beams, "use_cache": args.use_cache}
    options |= {"max_new_tokens": None, "num_return_sequences": 1, "return_dict_in_generate": False}  # the flags decide

    if not hasattr(model, "_reorder_cache"):  # where transformers looks first
        model._reorder_cache = move_beams

    def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not args.predict_with_generate:
            return loss_sum(model, batch), None
        texts = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        encoded = model.get_encoder()(**texts, return_dict=True)  # once, for both
        loss = loss_sum(model, batch, encoded=encoded)
        tokens = model.generate(**texts, encoder_outputs=encoded, **options)
        return loss, pad(tokens, (0, limit - tokens.shape[1]), value=tokenizer.pad_token_id)

    metrics, outputs = run.evaluate(loader, forward, phase)
    texts = [text.strip() for text in tokenizer.batch_decode(outputs, skip_special_tokens=True)] if outputs else []
    if texts:
        metrics |= {f"{phase}_{name}": round(value, 4) for name, value in rouge(texts, rows["summary"]).items()}
        ends = (tokenizer.pad_token_id, tokenizer.eos_token_id)  # beams that ended are filled with either
        metrics[f"{phase}_gen_len"] = sum(token not in ends for row in outputs for token in row.tolist()) / len(outputs)
    return metrics, texts


def baselines(rows: Dataset, phase: str, named: bool) -> dict[str, float]:
    """ROUGE of what needs no model: the text's lead sentence and, where texts are ``name : rest``, the bare name."""
    parts = [text.partition(" : ") if named else ("", "", text) for text in rows["text"]]
    guesses = {"lead": [(split_sentences(rest) or [""])[0] for _, _, rest in parts]}
    guesses |= {"name": [name for name, _, _ in parts]} if named else {}
    scores = {f"{phase}_{guess}_": rouge(texts, rows["summary"]) for guess, texts in guesses.items()}
    return {prefix + kind: round(value, 4) for prefix, values in scores.items() for kind, value in values.items()}


def show(texts: list[str], rows: Dataset, metrics: dict[str, Any], phase: str) -> None:
    """Print five examples, and ROUGE-1 beside that of the baselines."""
    for at in range(0, len(texts), -(-len(texts) // 5) or 1):
        say(f"\ntext       {rows[at]['text'][:200]}\nreference  {rows[at]['summary']}\noutput     {texts[at]}")
    names = {"this model": "rouge1", "lead sentence": "lead_rouge1", "bare name": "name_rouge1"}
    figures = [f"{name} {metrics[f'{phase}_{key}']:.2f}" for name, key in names.items() if f"{phase}_{key}" in metrics]
    say(f"\nROUGE-1 ({phase}): {', '.join(figures)}" if figures else "")


# --- Main -------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run what the flags ask for, write ``all_results.json``, and return its metrics."""
    groups = (SummarizationArguments, HubArguments, TokenizerArguments)
    args = parse_arguments(argv, *groups, description=__doc__, built_in=(BUILT_IN, NAMED))
    gaudi_config = prepare_environment(args)
    from core.engine import Engine
    from core.run import Run

    args.val_max_target_length = args.val_max_target_length or args.max_target_length
    args.pad_to_max_length |= not args.ignore_pad_token_for_loss  # or the loss would depend on a row's bucket
    run = Run(args, gaudi_config, Path(__file__).parent.name)
    data = load_data(args, run.output_dir)
    tokenizer, model = build_model(args, run, data)
    loaders = {split: make_loader(rows, tokenizer, args, split == "train") for split, rows in data.items()}
    if args.do_train:
        engine = Engine(run, model, loaders["train"])
        evaluation = partial(evaluate, run, tokenizer, loaders.get("validation"), data.get("validation"), "eval")
        metrics = train(engine, tokenizer, args.label_smoothing_factor, lambda: evaluation()[0])
        run.save_model(run.output_dir, tokenizer)
        run.report("train", metrics)
    else:
        run.place(model)
    for split, phase in (("validation", "eval"), ("test", "predict")):
        if getattr(args, f"do_{phase}"):
            metrics, texts = evaluate(run, tokenizer, loaders[split], data[split], phase)
            built_in = args.config == str(BUILT_IN)
            run.report(phase, metrics | (baselines(data[split], phase, built_in) if texts else {}), texts)
            show(texts, data[split], run.metrics, phase)
    return run.finish()


if __name__ == "__main__":
    exit_with_one_line(main, preemptible=True)
