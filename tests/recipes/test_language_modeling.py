"""The recipe end to end on tiny real models: objectives, documents, data, published commands, bad input, copies."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import UserError
from tests.conftest import REPOSITORY, WORDS, save_text_model, texts, write_jsonl

SCRIPT = REPOSITORY / "recipes" / "language_modeling" / "run.py"
QUIET = ["--disable_tqdm", "--report_to", "none", "--use_cpu"]
BLOCK = ["--block_size", "16"]
KINDS = {"causal": "tiny_gpt2", "masked": "tiny_bert"}
CAUSAL_ROLES = {"eos_token": "<eos>", "pad_token": "<pad>"}
MASKED_ROLES = {f"{name}_token": f"<{name}>" for name in ("pad", "cls", "sep", "mask")}
CHAT = "{% for m in messages %}: {{ m['content'] }} .{% endfor %}{% if add_generation_prompt %} :{% endif %}"


def flags_of(files: dict[str, str], *splits: str) -> list[str]:
    return [token for name, path in files.items() if name[2:-5] in splits for token in (name, path)]


class Recipe:
    """The recipe's ``main`` with a new output folder for each run, and what it made on the way."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder, self.runs = module, folder, 0

    def __call__(self, *flags: str, model: Path | None = None, files: dict[str, str] | None = None) -> dict[str, Any]:
        self.runs += 1
        self.output = self.folder / f"run{self.runs}"
        named = ["--model_name_or_path", str(model)] if model else []
        data = flags_of(files or {}, "train", "validation", "test")
        return self.module.main([*named, *data, "--output_dir", str(self.output), *QUIET, *flags])

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "all_results.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.output / "model.safetensors")


@pytest.fixture
def recipe(language_modeling: ModuleType, tmp_path: Path) -> Recipe:
    return Recipe(language_modeling, tmp_path)


@pytest.fixture
def made(language_modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the next run makes: its rows of text and its loaders, by split."""
    found, make = SimpleNamespace(rows={}, loaders={}), language_modeling.make_loader

    def watch(args: Any, rows: Any, tokenizer: Any, split: str) -> Any:
        found.rows[split], found.loaders[split] = rows, make(args, rows, tokenizer, split)
        return found.loaders[split]

    monkeypatch.setattr(language_modeling, "make_loader", watch)
    return found


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def without_dropout(model: Path, folder: Path) -> Path:
    """A copy: its dropout masks would depend on the micro-batches' shapes."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    still = {name: 0.0 for name in config if name.endswith(("pdrop", "dropout_prob"))}
    (folder / "config.json").write_text(json.dumps({**config, **still}))
    return folder


def as_program(*flags: str, script: Path = SCRIPT, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=240, **options)


# ----------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("kind", KINDS)
def test_train_evaluate_predict_writes_everything(
    recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, kind: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    steps = ["--logging_steps", "2", "--save_steps", "3", "--eval_strategy", "epoch", "--num_train_epochs", "2"]
    model = request.getfixturevalue(KINDS[kind])
    metrics = recipe("--do_train", "--do_eval", "--do_predict", *BLOCK, *steps, model=model, files=text_files)
    written = recipe.results
    for key, value in metrics.items():
        assert written[key] == pytest.approx(value) if isinstance(value, float) else written[key] == value
    keys = {"train_loss", "train_runtime", "train_samples_per_second", "train_tokens_per_second", "perplexity"}
    keys |= {f"{phase}_{name}" for phase in ("eval", "predict") for name in ("loss", "perplexity", "accuracy")}
    assert keys <= written.keys()
    assert written["perplexity"] == written["eval_perplexity"] == pytest.approx(math.exp(written["eval_loss"]))
    assert written["predict_perplexity"] == pytest.approx(math.exp(written["predict_loss"]))
    assert 0 < written["eval_accuracy"] < 1
    assert written["run"]["arguments"]["objective"] == kind
    assert {"train", "eval", "predict", "save"} <= set(written["run"]["peak_memory (GB)"])
    assert [len(shapes) for shapes in written["run"]["batch_shapes"].values()] == [1, 1, 1]
    rows = list(csv.DictReader((recipe.output / "logs" / "metrics.csv").open()))
    assert len([row for row in rows if row["eval_perplexity"]]) == 2
    assert float(rows[-1]["eval_loss"]) == pytest.approx(metrics["eval_loss"], abs=1e-6)
    for name in ("loss_curve.png", "gaudi_config.json", "checkpoint-3"):
        assert (recipe.output / name).exists()
    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForMaskedLM
    loaded, tokenizer = auto.from_pretrained(recipe.output), AutoTokenizer.from_pretrained(recipe.output)
    assert loaded.get_output_embeddings().weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    assert tokenizer("alpha beta")["input_ids"]
    alone = recipe("--do_eval", *BLOCK, model=recipe.output, files=text_files)
    assert alone["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)


@pytest.mark.parametrize(("kind", "share"), [("causal", "0.15"), ("masked", "0.3")])
def test_a_model_learns_its_training_rows(
    recipe: Recipe, request: pytest.FixtureRequest, tmp_path: Path, kind: str, share: str
) -> None:
    rows = [{"text": " ".join(WORDS[i:] + WORDS[:i])} for i in range(0, 19, 3)]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    data = ["--train_file", file, "--validation_file", file, "--do_train", "--do_eval"]
    rate = ["--learning_rate", "0.01", "--num_train_epochs", "150", "--per_device_train_batch_size", "16"]
    given = [*data, *BLOCK, *rate, "--save_strategy", "no", "--mlm_probability", share]
    metrics = recipe(*given, model=request.getfixturevalue(KINDS[kind]))
    assert metrics["perplexity"] < 8
    assert metrics["eval_accuracy"] > 0.25


def test_nothing_is_saved_that_is_not_asked_for(recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path) -> None:
    short = ["--do_train", "--max_steps", "1", *BLOCK, "--save_strategy", "no", "--save_last_ckpt", "False"]
    recipe(*short, model=tiny_gpt2, files=text_files)
    assert not list(recipe.output.rglob("*.safetensors"))


def test_weights_are_loaded_in_the_dtype_that_is_asked_for(
    recipe: Recipe, text_files: dict[str, str], tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["--do_train", "--max_steps", "1", *BLOCK, "--save_strategy", "no"]
    for dtype in ("bfloat16", "float32"):
        recipe(*short, "--torch_dtype", dtype, model=tiny_llama, files=text_files)
        assert {str(tensor.dtype) for tensor in recipe.weights.values()} == {f"torch.{dtype}"}
        assert ("trainable parameters are not fp32" in caplog.text) is (dtype == "bfloat16")
        caplog.clear()


def test_a_sample_shows_what_was_learned(
    recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path, tiny_bert: Path,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    given = ["--do_eval", *BLOCK, "--sample_prompt", "alpha beta"]
    recipe(*given, model=tiny_gpt2, files=text_files)
    found = re.search(r"sample: alpha beta(.*)", capsys.readouterr().out)
    assert len(found[1].split()) > 5
    assert not any("--sample_prompt" in message for message in caplog.messages)
    recipe(*given, model=tiny_bert, files=text_files)
    assert "sample:" not in capsys.readouterr().out
    assert sum("--sample_prompt has no effect" in message for message in caplog.messages) == 1


def test_a_sample_begins_as_the_rows_do(
    recipe: Recipe, text_files: dict[str, str], tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer's first token, and without its last."""
    from transformers import BertLMHeadModel

    begun, generate = [], BertLMHeadModel.generate

    def watch(model: Any, inputs: torch.Tensor, **options: Any) -> Any:
        begun.append(inputs.tolist())
        return generate(model, inputs, **options)

    monkeypatch.setattr(BertLMHeadModel, "generate", watch)
    given = ["--do_eval", *BLOCK, "--objective", "causal", "--sample_prompt", "alpha beta"]
    recipe(*given, model=tiny_bert, files=text_files)
    assert begun == [[[3, 6, 7]]]


def test_the_best_perplexity_is_the_lowest(recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path) -> None:
    """The rate is far too high: at the end it is not the best."""
    each = [f"--{what}_{name}" for what in ("eval", "save") for name in ("strategy", "steps")]
    steps = [word for flag, value in zip(each, ("steps", "1", "steps", "1"), strict=True) for word in (flag, value)]
    best = ["--load_best_model_at_end", "--metric_for_best_model", "perplexity"]
    given = ["--do_train", "--do_eval", "--max_steps", "4", "--learning_rate", "1", *steps, *best, *BLOCK]
    metrics = recipe(*given, "--lr_scheduler_type", "constant", model=tiny_gpt2, files=text_files)
    rows = csv.DictReader((recipe.output / "logs" / "metrics.csv").open())
    found = [float(row["eval_perplexity"]) for row in rows if row["eval_perplexity"]]
    assert min(found[:4]) < found[3]
    assert metrics["perplexity"] == pytest.approx(min(found[:4]), rel=1e-6)


# --------------------------------------------------------------------------------------------------------------- loss


def batches(loader: Any, epoch: int = 0, start: int = 0) -> list[dict[str, torch.Tensor]]:
    return [batch for window in loader.windows(epoch, start) for batch in window.batches]


def test_the_causal_loss_is_the_models_own(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    """Transformers shifts labels itself: a shift made twice, or not at all, would be another loss."""
    from transformers import AutoModelForCausalLM

    metrics = recipe("--do_eval", *BLOCK, model=tiny_gpt2, files=text_files)
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2).eval()
    total = targets = 0
    with torch.no_grad():
        for block in made.loaders["validation"].dataset:
            ids = torch.tensor(block["input_ids"])[None]
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            targets += ids.shape[1] - 1
        for batch in batches(made.loaders["validation"]):
            labels = torch.nn.functional.pad(batch["labels"], (1, 0), value=-100)[:, :-1]
            own = model(input_ids=batch["input_ids"], labels=labels).loss
            ours = recipe.module.loss_sum(model, batch) / (batch["labels"] >= 0).sum()
            torch.testing.assert_close(ours, own)
    assert metrics["eval_loss"] == pytest.approx(total / targets, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_loss(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], request: pytest.FixtureRequest, kind: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    folder = request.getfixturevalue(KINDS[kind])
    recipe("--do_eval", "--line_by_line", "--per_device_eval_batch_size", "4", model=folder, files=text_files)
    model = (AutoModelForCausalLM if kind == "causal" else AutoModelForMaskedLM).from_pretrained(folder).eval()
    loader, loss = made.loaders["validation"], recipe.module.loss_sum
    window = next(iter(loader.windows()))
    first = window.batches[0]
    lengths = torch.tensor([len(loader.dataset[i]["input_ids"]) for i in window.row_ids])
    real = torch.arange(first["input_ids"].shape[1]) < lengths[:, None]
    assert not real.all()
    scrambled = {**first, "input_ids": torch.where(real, first["input_ids"], 17)}
    assert torch.equal(loss(model, scrambled), loss(model, first))
    tight = [
        {name: value[i : i + 1, : lengths[i]] for name, value in first.items() if value.ndim == 2} for i in range(4)
    ]
    torch.testing.assert_close(sum(loss(model, one) for one in tight), loss(model, first))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_blocks_use_every_token_once_and_in_order(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path,
    capsys: pytest.CaptureFixture[str], workers: str,
) -> None:  # fmt: skip
    from transformers import AutoTokenizer

    given = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--preprocessing_num_workers", workers]
    recipe(*given, *BLOCK, model=tiny_gpt2, files=text_files)
    tokenizer, rows = AutoTokenizer.from_pretrained(tiny_gpt2), made.rows["train"]["text"]
    documents = [[*tokenizer(text)["input_ids"], 1] for text in rows if text]
    expected, loader = joined(documents), made.loaders["train"]
    assert [token for block in loader.dataset for token in block["input_ids"]] == expected
    seen = [(row, window.batches[0]) for window in loader.windows() for row in window.row_ids]
    assert sorted(row for row, _ in seen) == list(range(len(loader.dataset)))
    said = f"train: {len(expected):,} tokens of {len(rows)} documents ({rows.count('')} of them empty): "
    assert f"{said}{len(expected):,} used in {len(loader.dataset)} blocks of 16, 0 dropped" in capsys.readouterr().out


WAYS = {
    "causal": ("tiny_gpt2", BLOCK),
    "rows": ("tiny_gpt2", ["--line_by_line"]),
    "documents": ("tiny_llama", ["--pack_documents", *BLOCK]),
    "stream": ("tiny_gpt2", ["--streaming", *BLOCK]),
    "masked": ("tiny_bert", BLOCK),
    "masked rows": ("tiny_bert", ["--line_by_line"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_does_not_depend_on_the_batch(
    recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, way: str
) -> None:
    """13 ragged rows; the masks of a masked model are the same at each evaluation."""
    model, flags = WAYS[way]
    found = [
        recipe(
            *["--do_eval", "--max_eval_samples", "13", *flags, "--per_device_eval_batch_size", batch],
            model=request.getfixturevalue(model),
            files=text_files,
        )
        for batch in ("1", "2", "5", "13")
    ]
    for metrics in found[1:]:
        for key in ("eval_loss", "perplexity", "eval_accuracy"):
            assert metrics[key] == pytest.approx(found[0][key], rel=1e-6)


@pytest.mark.parametrize("way", ["causal", "masked rows"])
def test_weights_and_loss_do_not_depend_on_the_split_of_a_window(
    recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path, way: str
) -> None:
    model, flags = WAYS[way]
    still = without_dropout(request.getfixturevalue(model), tmp_path / "still")
    given = ["--do_train", "--num_train_epochs", "1", "--max_train_samples", "20", "--save_strategy", "no", *flags]
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        split = ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
        rate = ["--learning_rate", "0.01", "--optim", "sgd"]
        results.append((recipe(*given, *split, *rate, model=still, files=text_files)["train_loss"], recipe.weights))
    for loss, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=1e-6)


def test_processes_that_prepare_rows_change_nothing(
    recipe: Recipe, text_files: dict[str, str], tiny_bert: Path
) -> None:
    found = []
    for flags in ([], ["--preprocessing_num_workers", "2", "--dataloader_num_workers", "2"]):
        given = ["--do_train", "--max_steps", "4", "--max_train_samples", "20", "--save_strategy", "no", *BLOCK]
        loss = recipe(*given, "--overwrite_cache", *flags, model=tiny_bert, files=text_files)["train_loss"]
        found.append((loss, recipe.weights))
    assert found[0][0] == found[1][0]
    assert same_weights(found[0][1], found[1][1])


RESUMED = {
    "causal": ("tiny_gpt2", []),
    "masked": ("tiny_bert", []),
    "adapters": ("tiny_llama", ["--lora_rank", "2", "--lora_dropout", "0.2"]),
    "stream": ("tiny_gpt2", ["--streaming", "--max_steps", "6"]),
    "masked stream": ("tiny_bert", ["--streaming", "--max_steps", "6"]),
}


@pytest.mark.parametrize("way", RESUMED)
def test_resume_equals_the_straight_run_at_every_step(
    recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path, way: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two epochs of three steps; the model's dropout is on, masks are drawn anew in the second epoch."""
    model, flags = RESUMED[way]
    given = ["--do_train", "--num_train_epochs", "2", "--max_train_samples", "20", "--learning_rate", "0.01", *BLOCK]
    given += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", *flags]
    named = {"model": request.getfixturevalue(model), "files": text_files}
    recipe(*given, "--save_steps", "1", **named)
    straight, expected = recipe.output, recipe.weights
    assert (recipe.results["train_steps"], recipe.results["epoch"]) == (6, 2)
    for step in range(1, 6):
        folder = tmp_path / f"from{step}"
        shutil.copytree(straight / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        again = ["--output_dir", str(folder), "--resume_from_checkpoint", "auto", "--save_strategy", "no"]
        recipe(*given, *again, **named)
        recipe.output = folder
        assert f"checkpoint-{step} at step {step}" in capsys.readouterr().out
        assert same_weights(recipe.weights, expected), f"from step {step}"


def hidden_places(loader: Any, **position: int) -> dict[int, list[int]]:
    """The places that have to be guessed of each row, by its number."""
    found = {}
    for window in loader.windows(**position):
        rows = [(row >= 0).nonzero()[:, 0].tolist() for batch in window.batches for row in batch["labels"]]
        found |= dict(zip(window.row_ids, rows, strict=False))  # filler comes last
    return found


def test_masks_are_new_in_each_epoch_and_the_same_in_each_evaluation(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_bert: Path
) -> None:
    given = ["--do_train", "--do_eval", "--max_steps", "1", "--save_strategy", "no", "--line_by_line"]
    recipe(*given, model=tiny_bert, files=text_files)
    train, validation = made.loaders["train"], made.loaders["validation"]
    first, second = (hidden_places(train, epoch=epoch) for epoch in (0, 1))
    assert first.keys() == second.keys()
    assert sum(first[row] != second[row] for row in first) > len(first) / 2
    rest = hidden_places(train, epoch=1, start=3)
    assert 0 < len(rest) < len(second)
    assert all(second[row] == places for row, places in rest.items())
    assert hidden_places(validation) == hidden_places(validation)
    targets = torch.cat([batch["labels"][batch["labels"] >= 0] for batch in batches(train)])
    assert targets.min() > 5  # no special token has to be guessed


def test_the_share_of_masked_tokens_is_a_choice(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_bert: Path
) -> None:
    for share in (0.05, 0.15, 0.6):
        recipe("--do_eval", *BLOCK, "--mlm_probability", str(share), model=tiny_bert, files=text_files)
        every = torch.cat([batch["labels"][batch["row_weights"] > 0] for batch in batches(made.loaders["validation"])])
        words = sum(token > 5 for token in joined(tokens_of(made, "validation")))
        found = int((every >= 0).sum())
        assert abs(found - share * words) < 4 * (words * share * (1 - share)) ** 0.5


def test_smoothed_labels_are_for_training_alone(recipe: Recipe, text_files: dict[str, str], tiny_llama: Path) -> None:
    """On fixed weights: the evaluation's loss does not move."""
    given = ["--do_train", "--do_eval", "--max_steps", "1", "--learning_rate", "0", "--save_strategy", "no", *BLOCK]
    factors = (["--label_smoothing_factor", factor] for factor in ("0", "0.5"))
    sharp, smooth = (recipe(*given, *factor, model=tiny_llama, files=text_files) for factor in factors)
    assert abs(sharp["train_loss"] - smooth["train_loss"]) > 1e-4
    assert sharp["eval_loss"] == smooth["eval_loss"]


def test_compiled_equals_eager(recipe: Recipe, text_files: dict[str, str], tiny_llama: Path) -> None:
    given = ["--do_train", "--do_eval", "--max_steps", "2", "--save_strategy", "no", *BLOCK]
    modes = (["--execution_mode", "eager"], ["--torch_compile", "--torch_compile_backend", "aot_eager"])
    found = [recipe(*given, *mode, model=tiny_llama, files=text_files) for mode in modes]
    for key in ("train_loss", "eval_loss"):
        assert found[1][key] == pytest.approx(found[0][key], abs=1e-5)
    assert recipe.results["run"]["graphs_compiled"] > 0


# ---------------------------------------------------------------------------------------------------------- documents


def logits_of(recipe: Recipe, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return recipe.module.predict(model, batch)


APART = [("tiny_gpt2", "sdpa"), ("tiny_gpt2", "eager"), ("tiny_llama", "sdpa"), ("tiny_bert", "sdpa")]
APART += [("tiny_llama", "eager"), ("tiny_bert", "eager")]


@pytest.mark.parametrize(("name", "attention"), APART)
def test_documents_of_a_block_do_not_see_each_other(
    recipe: Recipe, made: SimpleNamespace, tmp_path: Path, request: pytest.FixtureRequest, name: str, attention: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    folder, causal = request.getfixturevalue(name), name != "tiny_bert"
    file = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS[:5])}, {"text": " ".join(WORDS[5:12])}]))
    size = 14 if causal else 16  # one block of both: words and their ends
    given = ["--do_eval", "--validation_file", file, "--pack_documents", "--block_size", str(size)]
    recipe(*given, "--mlm_probability", "0.5", "--attn_implementation", attention, model=folder)
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = auto.from_pretrained(folder, attn_implementation=attention).eval()
    batch = {key: value[:1] for key, value in batches(made.loaders["validation"])[0].items()}
    documents = batch["document_ids"][0]
    first, second = (documents == 0).nonzero()[:, 0], (documents == 1).nonzero()[:, 0]
    assert len(first) + len(second) == size
    if causal:  # the first document's last token does not have to foretell the second's first
        assert batch["labels"][0, first[-1]] == -100
    logits = logits_of(recipe, model, batch)
    for changed, other in ((first[1], second), (second[1], first)):
        touched = {**batch, "input_ids": batch["input_ids"].clone()}
        touched["input_ids"][0, changed] = 24
        assert torch.equal(logits_of(recipe, model, touched)[0, other], logits[0, other])
    if causal:
        with torch.no_grad():
            for at in (first, second):
                torch.testing.assert_close(model(batch["input_ids"][:, at]).logits[0], logits[0, at])
    together = {key: value for key, value in batch.items() if key != "document_ids"}
    assert not torch.allclose(logits_of(recipe, model, together)[0, second], logits[0, second])


def test_a_model_that_takes_no_positions_cannot_keep_documents_apart(
    recipe: Recipe, text_files: dict[str, str], tmp_path: Path
) -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=27, hidden_size=16, n_layer=1, n_head=2)
    model = save_text_model(tmp_path / "bloom", config, "BloomForCausalLM", **CAUSAL_ROLES)
    assert recipe("--do_eval", *BLOCK, model=model, files=text_files)["perplexity"] > 1
    with pytest.raises(UserError, match="--pack_documents: this model takes no positions"):
        recipe("--do_eval", *BLOCK, "--pack_documents", model=model, files=text_files)


def bert_configs(tiny_bert: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Ways to name a BERT that has to be made causal."""
    config = json.loads((tiny_bert / "config.json").read_text())
    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    own = ["--tokenizer_name", str(tiny_bert)]
    named = {"model": ["--model_name_or_path", str(tiny_bert)], "config": ["--config_name", str(tiny_bert), *own]}
    changed = ",".join(f"{name}={config[name]}" for name in sizes)
    named["type"] = ["--model_type", "bert", "--config_overrides", f"{changed},max_position_embeddings=64", *own]
    for name, architectures in {"no architecture": None, "another architecture": ["BertModel"]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        named[name] = ["--config_name", str(tmp_path / name), *own]
    return named


def sees_the_future(model: Any) -> bool:
    ids = torch.arange(6, 20)[None]
    later = ids.clone()
    later[0, 10:] = 7
    with torch.no_grad():
        return not torch.equal(*(model.eval()(each).logits[:, :10] for each in (ids, later)))


@pytest.mark.parametrize("name", ["model", "config", "type", "no architecture", "another architecture"])
def test_a_causal_bert_does_not_see_the_future(
    recipe: Recipe, text_files: dict[str, str], tiny_bert: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    given = ["--objective", "causal", "--do_train", "--max_steps", "1", "--save_strategy", "no", *BLOCK]
    recipe(*given, *bert_configs(tiny_bert, tmp_path)[name], files=text_files)
    assert not sees_the_future(AutoModelForCausalLM.from_pretrained(recipe.output))


def test_a_causal_model_that_calls_it_otherwise_does_not_see_the_future(
    recipe: Recipe, text_files: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, XLMConfig

    sizes = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}
    config = XLMConfig(vocab_size=27, **sizes, use_lang_emb=False, pad_index=0, eos_index=1)
    model = save_text_model(tmp_path / "xlm", config, "XLMWithLMHeadModel", **MASKED_ROLES)
    given = ["--objective", "causal", "--do_train", "--max_steps", "1", "--save_strategy", "no", *BLOCK]
    assert sees_the_future(AutoModelForCausalLM.from_pretrained(model))
    recipe(*given, model=model, files=text_files)
    assert not sees_the_future(AutoModelForCausalLM.from_pretrained(recipe.output))


# ------------------------------------------------------------------------------------------------- models and objective


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        (["--model_name_or_path", "tiny_gpt2"], "causal"),
        (["--model_name_or_path", "tiny_llama", "--model_type", "llama"], "causal"),
        (["--model_name_or_path", "tiny_bert"], "masked"),
        (["--model_name_or_path", "tiny_bert", "--objective", "causal"], "causal"),
        (["--config_name", "tiny_bert", "--tokenizer_name", "tiny_bert"], "masked"),
        (["--config_name", "tiny_gpt2", "--tokenizer_name", "tiny_bert"], "causal"),
    ],
)
def test_the_objective_is_what_the_model_is_for(
    recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, flags: list[str], objective: str
) -> None:
    named = [str(request.getfixturevalue(word)) if word.startswith("tiny") else word for word in flags]
    metrics = recipe("--do_eval", *BLOCK, *named, files=text_files)
    assert recipe.results["run"]["arguments"]["objective"] == objective
    assert metrics["perplexity"] == pytest.approx(25, abs=8)  # of untrained models of 27 tokens


def test_a_named_configuration_starts_from_random_weights(
    recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    own = ["--tokenizer_name", str(tiny_gpt2), "--do_eval", *BLOCK]
    loaded = recipe("--model_name_or_path", str(tiny_gpt2), *own, files=text_files)["eval_loss"]
    seeds = (["--seed", seed] for seed in ("1", "1", "2"))
    drawn = [recipe("--config_name", str(tiny_gpt2), *own, *s, files=text_files)["eval_loss"] for s in seeds]
    assert drawn[0] == drawn[1]
    assert len({loaded, *drawn}) == 3


def test_a_model_type_and_its_overrides(recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path) -> None:
    given = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--tokenizer_name", str(tiny_gpt2), *BLOCK]
    changed = ["--config_overrides", "n_embd=24,n_layer=1,n_head=3,vocab_size=27,n_positions=32"]
    recipe("--model_type", "gpt2", *changed, *given, files=text_files)
    config, weights = json.loads((recipe.output / "config.json").read_text()), recipe.weights
    assert [config[name] for name in ("n_embd", "n_layer", "n_head", "n_positions")] == [24, 1, 3, 32]
    assert weights["transformer.wte.weight"].shape == (27, 24)
    assert weights["transformer.wpe.weight"].shape == (32, 24)
    assert len({name.split(".")[2] for name in weights if ".h." in name}) == 1


def test_the_block_size_without_a_flag(
    recipe: Recipe, made: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer's limit; where it has none, or more than the model's positions, these; at most 1024."""
    from transformers import GPT2Config

    file = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS * 60)}]))
    for positions, limit, flags, expected in (
        (64, None, [], 64),
        (64, 48, [], 48),
        (64, 128, [], 64),
        (1100, None, [], 1024),
        (64, 48, ["--block_size", "50"], 48),
        (64, None, ["--max_seq_length", "20"], 20),
        (64, None, ["--max_seq_len", "20"], 20),
    ):
        folder = tmp_path / f"{positions}-{limit}"
        if not folder.exists():
            config = GPT2Config(vocab_size=27, n_positions=positions, n_embd=8, n_layer=1, n_head=1)
            save_text_model(folder, config, "GPT2LMHeadModel", **CAUSAL_ROLES)
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(
                json.dumps({**settings, **({"model_max_length": limit} if limit else {})})
            )
        recipe("--do_eval", "--validation_file", file, *flags, model=folder)
        assert made.loaders["validation"].buckets[-1] == (expected,)
    assert caplog.text.count("50 tokens a row: the tokenizer's limit is 48, which is used") == 1


@pytest.mark.parametrize("offset", [0, 1])
def test_the_block_size_of_a_model_whose_positions_begin_after_padding(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tmp_path: Path, offset: int
) -> None:
    from transformers import RobertaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=27, **sizes, max_position_embeddings=34, pad_token_id=offset)
    roles = MASKED_ROLES | ({"pad_token": "<eos>"} if offset else {})
    model = save_text_model(tmp_path / "roberta", config, "RobertaForMaskedLM", **roles)
    assert recipe("--do_eval", model=model, files=text_files)["perplexity"] > 1
    assert 30 <= made.loaders["validation"].buckets[0][0] < 34 - offset
    with pytest.raises(UserError, match="positions"):
        recipe("--do_eval", "--block_size", "34", model=model, files=text_files)


def test_a_tokenizer_larger_than_the_embedding_grows_it(
    recipe: Recipe, text_files: dict[str, str], tmp_path: Path
) -> None:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    model = save_text_model(tmp_path / "small", config, "GPT2LMHeadModel", eos_token="<eos>")
    recipe("--do_train", "--max_steps", "1", "--save_strategy", "no", *BLOCK, model=model, files=text_files)
    assert recipe.weights["transformer.wte.weight"].shape == (27, 16)
    assert recipe("--do_eval", *BLOCK, model=recipe.output, files=text_files)["perplexity"] > 1


def test_adapters_are_trained_alone_and_merged_into_what_is_saved(
    recipe: Recipe, text_files: dict[str, str], tiny_llama: Path
) -> None:
    from safetensors.torch import load_file

    lora = ["--lora_rank", "2", "--lora_alpha", "8", "--lora_target_modules", "q_proj", "v_proj"]
    train = ["--do_train", "--do_eval", "--num_train_epochs", "2", "--learning_rate", "0.05", *BLOCK]
    before = load_file(tiny_llama / "model.safetensors")
    train += ["--save_steps", "2", "--torch_dtype", "float32"]
    metrics = recipe(*train, *lora, model=tiny_llama, files=text_files)
    merged, adapter = recipe.weights, load_file(recipe.output / "adapter" / "adapter_model.safetensors")
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert merged.keys() == before.keys()
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter} == {"q_proj", "v_proj"}
    assert {tuple(tensor.shape) for name, tensor in adapter.items() if "lora_A" in name} == {(2, 16)}
    start = recipe("--do_eval", *BLOCK, model=tiny_llama, files=text_files)["perplexity"]
    alone = recipe("--do_eval", *BLOCK, model=recipe.folder / "run1", files=text_files)["perplexity"]
    assert alone == pytest.approx(metrics["perplexity"], rel=1e-4)
    assert abs(alone - start) > 0.05
    with pytest.raises(UserError, match="checkpoint-2 is a LoRA adapter, no whole model; name its run's folder"):
        recipe("--do_eval", *BLOCK, model=recipe.folder / "run1" / "checkpoint-2", files=text_files)


def test_adapters_of_a_masked_model(recipe: Recipe, text_files: dict[str, str], tiny_bert: Path) -> None:
    given = ["--do_train", "--do_eval", "--max_steps", "2", *BLOCK, "--lora_rank", "2", "--learning_rate", "0.05"]
    metrics = recipe(*given, model=tiny_bert, files=text_files)
    alone = recipe("--do_eval", *BLOCK, model=recipe.output, files=text_files)
    assert alone["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-4)


# --------------------------------------------------------------------------------------------------------------- data


def rows_of(made: SimpleNamespace, split: str = "train") -> list[str]:
    return [row["text"] for row in made.rows[split]]


def tokens_of(made: SimpleNamespace, split: str = "train") -> list[list[int]]:
    return [list(map(int, row["input_ids"])) for row in made.loaders[split].dataset]


def joined(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


@pytest.mark.parametrize("extension", ["csv", "json", "jsonl", "parquet"])
def test_every_kind_of_file_is_read(
    recipe: Recipe, made: SimpleNamespace, tiny_gpt2: Path, tmp_path: Path, extension: str
) -> None:
    import pandas

    path, rows = tmp_path / f"rows.{extension}", [row for row in texts(8) if row["text"]]
    table = pandas.DataFrame([{"id": 1, "text": row["text"], "note": "alpha"} for row in rows])
    write = {"csv": lambda: table.to_csv(path, index=False), "parquet": lambda: table.to_parquet(path)}
    write["json"] = write["jsonl"] = lambda: table.to_json(path, orient="records", lines=extension == "jsonl")
    write[extension]()
    recipe("--do_eval", "--validation_file", str(path), *BLOCK, model=tiny_gpt2)
    assert rows_of(made, "validation") == [row["text"] for row in rows]
    named = ["--validation_file", str(path), "--block_size", "4", "--append_eos", "False", "--text_column_name", "note"]
    recipe("--do_eval", *named, model=tiny_gpt2)
    assert joined(tokens_of(made, "validation")) == [6] * len(rows)


TEXT = "alpha beta\ngamma\n\ndelta\n\n\nzeta\n"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], ["alpha beta\ngamma", "delta", "zeta"]),
        (["--line_by_line"], ["alpha beta", "gamma", "", "delta", "", "", "zeta"]),
        (["--keep_linebreaks", "False"], ["alpha beta gamma", "delta", "zeta"]),
    ],
)
def test_a_text_file_holds_paragraphs_or_lines(
    recipe: Recipe, made: SimpleNamespace, tiny_gpt2: Path, tmp_path: Path, ending: str, flags: list[str],
    rows: list[str],
) -> None:  # fmt: skip
    (tmp_path / "rows.txt").write_bytes(TEXT.replace("\n", ending).encode())
    recipe("--do_eval", "--validation_file", str(tmp_path / "rows.txt"), "--block_size", "4", *flags, model=tiny_gpt2)
    assert [text.strip() for text in rows_of(made, "validation")] == rows


def test_rows_of_lines_are_rows_of_the_batch(
    recipe: Recipe, made: SimpleNamespace, tiny_gpt2: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.txt").write_text(TEXT)
    given = ["--do_eval", "--validation_file", str(tmp_path / "rows.txt"), "--block_size", "8", "--line_by_line"]
    recipe(*given, model=tiny_gpt2)
    assert tokens_of(made, "validation") == [[6, 7, 1], [8, 1], [9, 1], [11, 1]]
    shapes = {tuple(batch["input_ids"].shape) for batch in batches(made.loaders["validation"])}
    recipe(*given, "--pad_to_max_length", model=tiny_gpt2)
    assert shapes | {tuple(b["input_ids"].shape) for b in batches(made.loaders["validation"])} == {(8, 8)}


@pytest.mark.parametrize(
    ("name", "flags", "marked"),
    [
        ("prose", [], True),
        ("prose", ["--append_eos", "False"], False),
        ("wikitext", [], False),
        ("wikitext", ["--append_eos"], True),
    ],
)
def test_the_ends_of_documents_are_marked_unless_rows_are_lines(
    recipe: Recipe, made: SimpleNamespace, tiny_gpt2: Path, tmp_path: Path, name: str, flags: list[str], marked: bool
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_jsonl(folder / "validation.jsonl", [{"text": "alpha"}, {"text": ""}, {"text": "beta gamma delta"}])
    recipe("--do_eval", "--dataset_name", str(folder), "--block_size", "4", *flags, model=tiny_gpt2)
    assert joined(tokens_of(made, "validation")) == ([6, 1, 7, 8, 9, 1] if marked else [6, 7, 8, 9])


def test_the_training_rows_give_the_validation_rows_where_there_are_none(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    files = {"--train_file": text_files["--train_file"]}
    given = ["--do_train", "--do_eval", "--max_steps", "1", "--save_strategy", "no", *BLOCK]
    whole = [json.loads(line)["text"] for line in Path(files["--train_file"]).read_text().splitlines()]
    for flags, count in (([], 3), (["--validation_split_percentage", "20"], 12)):
        recipe(*given, *flags, model=tiny_gpt2, files=files)
        assert rows_of(made, "validation") + rows_of(made) == whole
        assert len(rows_of(made, "validation")) == count
    made.rows.clear()
    recipe("--do_train", "--max_steps", "1", "--save_strategy", "no", *BLOCK, model=tiny_gpt2, files=files)
    assert rows_of(made) == whole
    assert made.rows.keys() == {"train"}


def test_the_first_rows_alone(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    limits = ["--max_train_samples", "9", "--max_eval_samples", "5", "--max_predict_samples", "2"]
    given = ["--do_train", "--do_eval", "--do_predict", "--max_steps", "1", "--save_strategy", "no", *BLOCK]
    for flags in ([], ["--line_by_line"], ["--streaming"]):
        recipe(*given, *limits, *flags, model=tiny_gpt2, files=text_files)
        counts = {split: sum(window.rows for window in loader.windows()) for split, loader in made.loaders.items()}
        assert counts == {"train": 9, "validation": 5, "test": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_gives_the_numbers_of_the_whole(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], request: pytest.FixtureRequest, kind: str
) -> None:
    """The masks of a masked model, too: they come from a row's number."""
    given = ["--do_eval", "--do_predict", *BLOCK]
    found, places = [], []
    for flags in ([], ["--streaming"]):
        found.append(recipe(*given, *flags, model=request.getfixturevalue(KINDS[kind]), files=text_files))
        assert hasattr(made.rows["validation"], "num_rows") is not bool(flags)
        places.append(hidden_places(made.loaders["validation"]))
    for key in ("eval_loss", "eval_accuracy", "predict_loss"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-6)
    assert places[0] == places[1]


def test_a_stream_is_read_in_a_new_order_in_each_epoch(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    given = ["--do_train", "--max_steps", "1", "--save_strategy", "no", *BLOCK]
    recipe(*given, model=tiny_gpt2, files=text_files)
    whole = joined(tokens_of(made))
    recipe(*given, "--streaming", model=tiny_gpt2, files=text_files)

    def read(epoch: int) -> list[int]:
        rows = [batch["input_ids"][batch["row_weights"] > 0] for batch in batches(made.loaders["train"], epoch)]
        return torch.cat(rows).flatten().tolist()[: len(whole)]  # the last row is padded

    first, second = read(0), read(1)
    assert first != second != read(2)
    assert sorted(first) == sorted(second) == sorted(whole)
    assert read(1) == second


def test_a_stream_without_validation_rows_is_parted_by_row(
    recipe: Recipe, made: SimpleNamespace, text_files: dict[str, str], tiny_gpt2: Path
) -> None:
    files = {"--train_file": text_files["--train_file"]}
    given = ["--do_train", "--do_eval", "--max_steps", "2", "--streaming", "--save_strategy", "no", "--block_size", "8"]
    metrics = recipe(*given, "--validation_split_percentage", "20", model=tiny_gpt2, files=files)
    train, held = ({text for text in rows_of(made, split) if text} for split in ("train", "validation"))
    whole = {json.loads(line)["text"] for line in Path(files["--train_file"]).read_text().splitlines()} - {""}
    assert metrics["perplexity"] > 1
    assert train | held == whole
    assert not train & held
    assert 0.05 < len(held) / len(whole) < 0.4


def test_a_prepared_data_set_is_taken_as_it_is(
    recipe: Recipe, made: SimpleNamespace, prepared: Path, tiny_bert: Path
) -> None:
    """BERT's pre-training: from a configuration, with LAMB."""
    own = ["--config_name", str(tiny_bert), "--tokenizer_name", str(tiny_bert), "--dataset_name", str(prepared)]
    given = ["--do_train", "--do_eval", "--num_train_epochs", "1", "--optim", "lamb", "--learning_rate", "0.01"]
    metrics = recipe(*own, *given, *BLOCK, "--save_strategy", "no")
    assert metrics["perplexity"] > 1
    rows = [list(row["input_ids"]) for split in ("validation", "train") for row in made.rows[split]]
    assert joined(tokens_of(made, "validation") + tokens_of(made)) == joined(rows)
    optimizer = recipe.results["run"]["arguments"]["optim"]
    assert optimizer == "lamb"
    assert {name for batch in batches(made.loaders["train"]) for name in batch} == {
        *("input_ids", "attention_mask", "labels", "row_weights")
    }


def test_texts_beside_prepared_tokens_are_read_if_they_are_named(
    recipe: Recipe, made: SimpleNamespace, tiny_gpt2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [9] * 5, "text": "alpha beta gamma"}]))
    for flags, found in (([], [9] * 5), (["--text_column", "text"], [6, 7, 8, 1])):
        recipe("--do_eval", "--validation_file", file, "--block_size", "4", *flags, model=tiny_gpt2)
        assert joined(tokens_of(made, "validation")) == found
        assert ("input_ids alone is taken; not used: text" in caplog.text) is (not flags)
        caplog.clear()


# ------------------------------------------------------------------------------------------------- prompts and answers

COLUMNS = ["--instruction_column_name", "instruction", "--input_column_name", "input"]
COLUMNS += ["--output_column_name", "output"]


def instructions(count: int = 30) -> list[dict[str, str]]:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        words = [" ".join(draw.choices(WORDS, k=draw.randint(low, 6))) for low in (2, 0, 1)]
        row = dict(zip(("instruction", "input", "output"), words, strict=True))
        rows.append({**row, "text": " ".join(words)})
    return rows


def words_of(folder: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).decode(ids)


def test_prompts_and_answers(recipe: Recipe, made: SimpleNamespace, tiny_llama: Path, tmp_path: Path) -> None:
    rows = instructions()
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    given = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--train_file", file, *COLUMNS]
    losses = {}
    for learn in ("True", "False"):
        losses[learn] = recipe(*given, "--train_on_inputs", learn, model=tiny_llama)["train_loss"]
        loader = made.loaders["train"]
        assert len(loader.dataset) == len(rows)
        for window in loader.windows():
            for number, ids, labels in zip(
                window.row_ids, window.batches[0]["input_ids"], window.batches[0]["labels"], strict=False
            ):
                row, bear = rows[number], (labels >= 0).nonzero()[:, 0]
                said = words_of(tiny_llama, ids[ids > 0].tolist())
                for part in ("instruction", "input"):
                    assert row[part] in said
                assert said.endswith(f"{row['output']} <eos>")
                answer = words_of(tiny_llama, labels[bear].tolist())
                if learn == "False":
                    assert answer == f"{row['output']} <eos>"
                else:
                    assert len(bear) == int((ids > 0).sum()) - 1
    assert losses["True"] != losses["False"]


def test_prompts_in_blocks(recipe: Recipe, made: SimpleNamespace, tiny_llama: Path, tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", instructions()))
    given = ["--do_eval", "--validation_file", file, *COLUMNS, "--dataset_concatenation", *BLOCK]
    recipe(*given, model=tiny_llama)
    found = tokens_of(made, "validation")
    assert {len(block) for block in found[:-1]} == {16}
    assert joined(found).count(1) == 30  # each row's end is marked


def test_prompts_in_the_tokenizers_own_words(
    recipe: Recipe, made: SimpleNamespace, tiny_llama: Path, tmp_path: Path
) -> None:
    model = tmp_path / "chatting"
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text(CHAT)
    rows = instructions()
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    recipe("--do_eval", "--validation_file", file, "--chat_prompt", "True", model=model)
    for row, ids in zip(rows, tokens_of(made, "validation"), strict=True):
        parts = " ".join(filter(None, (row["instruction"], row["input"])))
        assert words_of(model, ids) == f": {parts} . : {row['output']} <eos>"


def test_rows_whose_prompt_fills_the_block_are_left_out(
    recipe: Recipe, made: SimpleNamespace, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = instructions(6)
    rows[2]["instruction"] = " ".join(WORDS)
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    given = ["--do_eval", "--validation_file", file, *COLUMNS, "--train_on_inputs", "False", "--block_size"]
    assert math.isfinite(recipe(*given, "20", model=tiny_llama)["eval_loss"])
    assert "1 of 6 validation rows have nothing to foretell" in caplog.text
    assert len(made.loaders["validation"].dataset) == 5
    with pytest.raises(UserError, match="the validation split has no rows"):
        recipe(*given, "2", model=tiny_llama)


# --------------------------------------------------------------------------------------------------- published commands

# Every run_clm, run_mlm and run_lora_clm command of optimum-habana's documentation, without launcher and output folder,
# with smaller sizes. Names of models, data and DeepSpeed files stand in braces: tiny local ones take their place.
WIKITEXT = "--dataset_name {wikitext} --dataset_config_name wikitext-2-raw-v1 "
GPT2 = "--gaudi_config_name Habana/gpt2 --use_habana --use_lazy_mode --use_hpu_graphs_for_inference "
WARM = "--throughput_warmup_steps 3 "
BOTH = "--do_train --do_eval "
FOURS = "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 "
EIGHTS = "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 "
QV, QVKO = ("--lora_target_modules " + names for names in ("q_proj v_proj ", "q_proj v_proj k_proj o_proj "))
ALPACA = "--dataset_name {alpaca} --bf16 True --dataset_concatenation --validation_split_percentage 4 "
LORA = BOTH + WARM + "--use_habana --logging_steps 1 --save_strategy no "
CLM = {
    "gpt2": "--model_name_or_path {gpt2} " + WIKITEXT + FOURS + BOTH + GPT2 + WARM,
    "gpt2 on 8": "--model_name_or_path {gpt2} "
    + WIKITEXT + FOURS + BOTH + GPT2 + WARM + "--gradient_checkpointing --use_cache False",
    "gpt2 on files": "--model_name_or_path {gpt2} --train_file {train} --validation_file {validation} "
    + EIGHTS + BOTH + GPT2 + WARM,
    "gpt2 from scratch": "--config_name {gpt2} --tokenizer_name {gpt2} " + WIKITEXT + FOURS + BOTH + GPT2 + WARM
    + "--bf16",
    "gpt2 of its own size": "--model_type gpt2 --tokenizer_name {gpt2} "
    "--config_overrides=n_embd=32,n_head=2,n_layer=4,n_positions=64 "
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_checkpointing --use_cache False "
    + WIKITEXT + BOTH + GPT2 + WARM,
    "gpt2 as a stream": "--model_name_or_path {gpt2} " + WIKITEXT + FOURS + BOTH + GPT2 + WARM + "--streaming",
    "gpt2 evaluated": "--model_name_or_path {gpt2} "
    + WIKITEXT + "--per_device_eval_batch_size 4 --do_eval --bf16 " + GPT2,
    "gpt2-xl evaluated": "--model_name_or_path {gpt2} "
    + WIKITEXT + "--per_device_eval_batch_size 8 --do_eval --use_habana --use_lazy_mode "
    "--gaudi_config_name Habana/gpt2",
    "roberta-base": "--model_name_or_path {roberta} " + WIKITEXT + EIGHTS + BOTH + WARM
    + "--use_habana --use_lazy_mode --use_hpu_graphs_for_inference --gaudi_config_name Habana/roberta-base --bf16",
    "roberta-base by lines": "--model_name_or_path {roberta} " + WIKITEXT + EIGHTS + BOTH + WARM
    + "--use_habana --use_lazy_mode --use_hpu_graphs_for_inference --gaudi_config_name Habana/roberta-base --bf16 "
    "--line_by_line --pad_to_max_length",
    "roberta-large compiled": "--model_name_or_path {roberta} " + WIKITEXT + EIGHTS + BOTH + WARM
    + "--use_habana --use_lazy_mode False --gaudi_config_name Habana/roberta-base --bf16 "
    "--torch_compile --torch_compile_backend hpu_backend",
    "bert from scratch": "--config_name {bert} --tokenizer_name {bert} --model_type bert --dataset_name {processed} "
    "--do_train --use_habana --use_lazy_mode True --gaudi_config_name Habana/bert-base-uncased "
    "--num_train_epochs 1 --per_device_train_batch_size 8 --learning_rate 5e-5 --logging_steps 10",
}  # fmt: skip
PEFT = {
    "llama-7b": "--model_name_or_path {llama} --num_train_epochs 3 --per_device_train_batch_size 16 "
    "--eval_strategy no --learning_rate 1e-4 --warmup_ratio 0.03 --lr_scheduler_type constant --max_grad_norm 0.3 "
    "--use_lazy_mode --lora_rank=8 --lora_alpha=16 --lora_dropout=0.05 --max_seq_length 512 --low_cpu_mem_usage True "
    "--adam_epsilon 1e-08 " + QV + ALPACA + LORA,
    "gemma-2b-it": "--model_name_or_path {gemma} --per_device_train_batch_size 16 --per_device_eval_batch_size 16 "
    "--num_train_epochs 15 --save_total_limit 1 --gaudi_config_name Habana/gpt2 --use_habana --gradient_checkpointing "
    "--use_lazy_mode --pipelining_fwd_bwd --bf16 --logging_strategy epoch --evaluation_strategy epoch "
    "--lora_target_modules q_proj o_proj k_proj v_proj gate_proj up_proj down_proj "
    "--lora_rank=8 --lora_alpha=16 --lora_dropout=0.05 --dataset_name {finred} --chat_prompt True " + BOTH + WARM,
    "falcon-40b": "--model_name_or_path {falcon} --dataset_name {guanaco} --bf16 True --num_train_epochs 3 "
    "--per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 16 "
    "--eval_strategy no --learning_rate 4e-4 --max_grad_norm 0.3 --warmup_ratio 0.03 --lr_scheduler_type constant "
    "--use_lazy_mode --pipelining_fwd_bwd --lora_rank=64 --lora_alpha=16 --lora_dropout=0.1 "
    "--lora_target_modules query_key_value dense dense_h_to_4h dense_4h_to_h --dataset_concatenation "
    "--max_seq_length 256 --ddp_bucket_cap_mb 50 --adam_epsilon 1e-08 --low_cpu_mem_usage True "
    "--validation_split_percentage 6 " + LORA,
    "starcoder on files": "--model_name_or_path {gpt_bigcode} --train_file {train} --validation_file {validation} "
    "--bf16 --use_habana --use_lazy_mode --use_hpu_graphs_for_inference --dataset_concatenation "
    + EIGHTS + BOTH + WARM,
}  # fmt: skip
SHARDED = {
    "gpt-j-6b": "--model_name_or_path {gptj} --per_device_train_batch_size 16 --per_device_eval_batch_size 4 "
    "--gradient_checkpointing --deepspeed zero2 " + WIKITEXT + BOTH + GPT2 + WARM,
    "gpt-neox-20b": "--model_name_or_path {gpt_neox} --per_device_train_batch_size 2 --per_device_eval_batch_size 2 "
    "--gradient_checkpointing --deepspeed deepspeed_configs/zero2.json " + WIKITEXT + BOTH + GPT2 + WARM,
    "gpt2-xl": "--model_name_or_path {gpt2} --gaudi_config_name Habana/gpt2 --do_train --learning_rate 4e-04 "
    "--per_device_train_batch_size 16 --num_train_epochs 1 --use_habana --use_lazy_mode --gradient_checkpointing "
    "--use_cache False --deepspeed zero2 " + WIKITEXT + WARM,
    "llama-3.1-8b in fp8": "--model_name_or_path {llama} --deepspeed zero1 --num_train_epochs 3 --max_seq_len 4096 "
    "--per_device_train_batch_size 1 --per_device_eval_batch_size 4 --gradient_accumulation_steps 16 "
    "--eval_strategy no --learning_rate 3e-4 --max_grad_norm 1.0 --use_lazy_mode False --lora_rank 8 --lora_alpha 16 "
    "--lora_dropout 0.05 --attn_implementation gaudi_fused_sdpa --flash_attention_causal_mask True "
    "--cache_size_limit 64 --use_regional_compilation --compile_from_sec_iteration --torch_compile "
    "--torch_compile_backend hpu_backend --fp8 " + QV + ALPACA + LORA,
    "llama-2-70b in fp8": "--model_name_or_path {llama} --deepspeed zero3 --num_train_epochs 2 --max_seq_len 2048 "
    "--per_device_train_batch_size 10 --per_device_eval_batch_size 1 --gradient_checkpointing --eval_strategy epoch "
    "--eval_delay 2 --learning_rate 0.0018 --warmup_ratio 0.03 --lr_scheduler_type cosine --attn_softmax_bf16 True "
    "--use_lazy_mode --pipelining_fwd_bwd --lora_rank 4 --use_flash_attention True --flash_attention_causal_mask True "
    "--fp8 True " + QVKO + ALPACA + LORA,
    "llama-2-70b by fsdp": "--model_name_or_path {llama} --max_seq_len 2048 --gradient_checkpointing "
    "--per_device_train_batch_size 5 --learning_rate 0.0004 --warmup_ratio 0.03 --lr_scheduler_type constant "
    "--lora_rank 4 --attn_softmax_bf16 True --use_lazy_mode False --fsdp_config fsdp_config.json --fsdp auto_wrap "
    "--num_train_epochs 2 --eval_strategy epoch --per_device_eval_batch_size 1 --eval_delay 2 "
    "--pipelining_fwd_bwd False --use_fused_rope False --torch_compile_backend hpu_backend --torch_compile "
    "--gradient_accumulation_steps 2 --use_flash_attention True --flash_attention_causal_mask True "
    + QVKO + ALPACA + LORA,
    "llama-3.1-8b of long rows": "--model_name_or_path {llama} --max_seq_len 32768 --per_device_train_batch_size 1 "
    "--per_device_eval_batch_size 1 --learning_rate 0.0004 --warmup_ratio 0.03 --lr_scheduler_type constant "
    "--lora_rank 8 --attn_softmax_bf16 True --flash_attention_causal_mask True --evaluation_strategy epoch "
    "--pipelining_fwd_bwd --use_lazy_mode --use_flash_attention True --deepspeed zero1 --num_train_epochs 3 "
    "--eval_delay 3 --lora_alpha 16 --lora_dropout 0.05 --gradient_accumulation_steps 4 "
    "--flash_attention_recompute True --context_parallel_size 4 " + QVKO + ALPACA + LORA,
}  # fmt: skip
# What is not here, and has to be said: a part of the one warning about each flag.
MISSING = {
    "--use_habana": "--use_habana: no Gaudi was found",
    "--use_lazy_mode": "lazy mode is a Gaudi's own",
    "--fp8": "--fp8 True: not available here; used instead: bf16",
    "--fsdp": "--fsdp auto_wrap: not available here; used instead: ZeRO-3",
    "--fsdp_config": "--fsdp_config has no effect here",
    "--context_parallel_size": "--context_parallel_size 4: not available here",
    "--use_flash_attention": "has no fused attention; torch's sdpa is used",
    "--use_fused_rope": "--use_fused_rope has no effect here",
    "--low_cpu_mem_usage": "--low_cpu_mem_usage has no effect here",
    "--torch_compile_backend": "--torch_compile_backend hpu_backend is a Gaudi's own",
}


def configurations() -> dict[str, tuple[Any, str]]:
    """One or two layers of width 16 of each family, and the class that is saved."""
    import transformers as t

    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": 27}
    wide = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **ends}
    inner = {"intermediate_size": 32, "max_position_embeddings": 64}
    narrow = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, **ends}
    return {
        "gptj": (t.GPTJConfig(**narrow, rotary_dim=4), "GPTJForCausalLM"),
        "gpt_neox": (t.GPTNeoXConfig(**wide, **inner), "GPTNeoXForCausalLM"),
        "gpt_bigcode": (t.GPTBigCodeConfig(**narrow), "GPTBigCodeForCausalLM"),
        "falcon": (t.FalconConfig(**wide), "FalconForCausalLM"),
        "gemma": (t.GemmaConfig(**wide, **inner, num_key_value_heads=1, head_dim=8), "GemmaForCausalLM"),
        "roberta": (t.RobertaConfig(**wide, **inner), "RobertaForMaskedLM"),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rows of token numbers, as BERT's pre-training takes them."""
    folder, draw = tmp_path_factory.mktemp("processed"), random.Random(0)
    rows = []
    for _ in range(24):
        ids = [3, *(draw.randrange(6, 25) for _ in range(14)), 4]
        special = [int(token < 6) for token in ids]
        rows.append({"input_ids": ids, "attention_mask": [1] * 16, "token_type_ids": [0] * 16,
                     "special_tokens_mask": special})  # fmt: skip
    write_jsonl(folder / "train.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def stand_ins(
    tmp_path_factory: pytest.TempPathFactory, prepared: Path, text_files: dict[str, str], request: Any
) -> dict[str, str]:
    """What takes the place of each published name."""
    root = tmp_path_factory.mktemp("published")
    found = {name: str(request.getfixturevalue(f"tiny_{name}")) for name in ("gpt2", "llama", "bert")}
    for name, (config, kind) in configurations().items():
        roles = MASKED_ROLES if name == "roberta" else CAUSAL_ROLES
        found[name] = str(save_text_model(root / name, config, kind, **roles))
    (root / "gemma" / "chat_template.jinja").write_text(CHAT)
    wikitext = root / "wikitext"
    wikitext.mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        write_jsonl(wikitext / f"{split}.jsonl", texts(30, seed, longest=20))
    parts = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation", "test"))
    (wikitext / "README.md").write_text(f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n{parts}---\n")
    for name in ("alpaca", "finred", "guanaco"):
        (root / name).mkdir()
        rows = [{"text": row["text"]} for row in instructions(60)] if name == "guanaco" else instructions(60)
        write_jsonl(root / name / "train.jsonl", rows)
        found[name] = str(root / name)
    files = {name[2:-5]: path for name, path in text_files.items()}
    return found | files | {"wikitext": str(wikitext), "processed": str(prepared)}


def shorter(command: str, names: dict[str, str], steps: int = 2) -> list[str]:
    """The published command with local names, rows of 16 tokens and few steps: nothing else changes."""
    command = re.sub(r"(--max_seq_len(?:gth)?) \d+", r"\1 16", command)
    cut = [] if "--max_seq_len" in command else ["--block_size", "16" if "--chat_prompt" not in command else "32"]
    cut += ["--max_steps", str(steps)] if "--do_train" in command else []
    return [*command.format(**names).split(), *cut]


def said_about(command: str) -> list[str]:
    """What the warnings about a published command must say."""
    flags = [part.split()[0] for part in command.split(" --")]
    given = {f"--{flag.removeprefix('--')}" for flag in flags}
    off = {flag for flag in given if f"{flag} False" in command and flag != "--use_fused_rope"}
    without = {"--torch_compile_backend"} if "--fsdp " in command else set()  # its substitute compiles nothing
    return [text for flag, text in MISSING.items() if flag in given - off - without]


@pytest.mark.parametrize("name", [*CLM, *PEFT])
def test_published_command_runs_with_only_the_path_changed(
    recipe: Recipe, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, name: str,
) -> None:  # fmt: skip
    """Where it says hpu_backend, which there is on a Gaudi only, aot_eager compiles: it is faster than inductor."""
    from core.device import Device

    command = (CLM | PEFT)[name]
    monkeypatch.setattr(Device, "compile_backend", "aot_eager")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0" if "--use_lazy_mode False" in command else "1")
    if name == "falcon-40b":
        (tmp_path / "ops_bf16.txt").write_text("linear\nmatmul\nsoftmax\n")
        monkeypatch.setenv("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", str(tmp_path / "ops_bf16.txt"))
    output = tmp_path / "published"
    flags = [*shorter(command, stand_ins), "--output_dir", str(output), "--disable_tqdm", "--report_to", "none"]
    metrics = recipe.module.main(flags)
    assert ("perplexity" in metrics) is ("--do_eval" in command)
    for key in ("train_loss", "eval_loss", "perplexity"):
        assert math.isfinite(metrics.get(key, 0.0))
    for part in said_about(command):
        assert sum(part in message for message in caplog.messages) == 1, part
    run = json.loads((output / "all_results.json").read_text())["run"]
    assert run["arguments"]["objective"] == ("masked" if "bert" in name else "causal")
    assert run["device"]["precision"].startswith("bf16" if "--bf16" in command else ("fp32", "bf16 autocast"))
    assert run["device"]["execution_mode"] == ("compile" if "--torch_compile" in command else "eager")
    if "--lora" in command:
        assert (output / "adapter" / "adapter_model.safetensors").exists()


IN_ONE_PROCESS = """
import json, sys
from core import errors
from core.device import Device
from tests.conftest import load_recipe

Device.compile_backend = "aot_eager"
recipe, results = load_recipe("language_modeling"), {}
for name, flags in json.load(sys.stdin).items():
    errors._warned.clear()
    print(f"<{name}>", file=sys.stderr, flush=True)
    try:
        metrics = recipe.main(flags)
        results[name] = {key: value for key, value in metrics.items() if isinstance(value, float)}
    except Exception as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"}
with open(sys.argv[1], "w") as file:
    json.dump(results, file)
"""


@pytest.fixture(scope="module")
def sharded(stand_ins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, str], Path]:
    """All commands for DeepSpeed in one process, for its groups live as long as that: metrics, and what was said."""
    root = tmp_path_factory.mktemp("sharded")
    commands = {
        name: [*shorter(command, stand_ins), "--output_dir", str(root / name), "--disable_tqdm", "--report_to", "none"]
        for name, command in SHARDED.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(root / "results.json")],
        input=json.dumps(commands), capture_output=True, text=True, timeout=240, cwd=REPOSITORY,
    )  # fmt: skip
    assert (root / "results.json").exists(), done.stderr
    said = dict(zip(SHARDED, re.split(r"^<.*>\n", done.stderr, flags=re.MULTILINE)[1:], strict=True))
    return json.loads((root / "results.json").read_text()), said, root


@pytest.mark.parametrize("name", SHARDED)
def test_published_command_for_deepspeed_runs_with_only_the_path_changed(
    sharded: tuple[dict, dict[str, str], Path], name: str
) -> None:
    metrics, command = sharded[0][name], SHARDED[name]
    assert "error" not in metrics, metrics
    assert math.isfinite(metrics["train_loss"])
    assert math.isfinite(metrics.get("perplexity", 0.0))
    assert ("perplexity" in metrics) is ("--do_eval" in command)
    for part in said_about(command):
        assert sharded[1][name].count(part) == 1, part
    run = json.loads((sharded[2] / name / "all_results.json").read_text())["run"]
    assert run["device"]["precision"].startswith("bf16") is ("--bf16" in command)


# ----------------------------------------------------------------------------------------------------------- bad input


def broken_input(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name: flags on top of a good run, and what the one line must say. A model is not needed to say it."""
    latin = b"alpha\n\nbeta\nc\xe4 delta\n"
    (folder / "empty.jsonl").write_text("")
    (folder / "rows.xyz").write_text("a")
    (folder / "broken.jsonl").write_text('{"text": "a", \n')
    (folder / "latin.txt").write_bytes(latin)
    (folder / "latin.csv").write_bytes(b"text\nalpha\n\xe4\n")
    (folder / "latin.jsonl").write_bytes(b'{"text": "alpha"}\n{"text": "\xe4"}\n')
    (folder / "latin").mkdir()
    (folder / "latin" / "train.jsonl").write_bytes(b'{"text": "alpha"}\n{"text": "\xe4"}\n')
    (folder / "one.txt").write_text(" ".join(WORDS * 20))
    (folder / "run.json").write_text('{"args": {"lerning_rate": 1}}')
    another = folder / "another"
    another.mkdir()
    (another / "all_results.json").write_text("{}")
    train = "--train_file"
    prompts = [*COLUMNS, "--do_train"]
    return {
        "missing": ([train, str(folder / "absent.txt")], "--train_file.*absent.txt does not exist"),
        "empty": ([train, str(folder / "empty.jsonl")], "--train_file.*empty.jsonl is empty"),
        "extension": ([train, str(folder / "rows.xyz")], "must end in .csv, .json, .jsonl, .parquet, .txt"),
        "broken": ([train, str(folder / "broken.jsonl")], "--train_file.*broken.jsonl cannot be loaded"),
        "latin txt": ([train, str(folder / "latin.txt")], "latin.txt, line 4, byte 1.*not UTF-8"),
        "latin csv": ([train, str(folder / "latin.csv")], "latin.csv, line 3, byte 0.*not UTF-8"),
        "latin jsonl": ([train, str(folder / "latin.jsonl")], "latin.jsonl, line 2, byte 10.*not UTF-8"),
        "latin stream": ([train, str(folder / "latin.jsonl"), "--streaming", "--max_steps", "1"], "line 2, byte 10"),
        "latin folder": ([train, "", "--dataset_name", str(folder / "latin")], "train.jsonl, line 2, byte 10.*UTF-8"),
        "one row to part": ([train, str(folder / "one.txt"), "--do_eval"], "of 1 rows none would be left"),
        "two sources": (["--dataset_name", "wikitext"], "exclude each other"),
        "no validation": (["--do_eval", "--validation_split_percentage", "0"], "--do_eval needs a validation split"),
        "no test": (["--do_predict"], "--do_predict needs a test split"),
        "share": (["--do_eval", "--validation_split_percentage", "100"], "percentage must be below 100: the others"),
        "masks": (["--mlm_probability", "1"], "--mlm_probability must be above 0 and below 1"),
        "no masks": (["--mlm_probability", "0"], "--mlm_probability must be above 0 and below 1"),
        "rows as a stream": (["--streaming", "--max_steps", "1", "--line_by_line"], "--streaming.*no --line_by_line"),
        "rows apart": (["--pack_documents", "--line_by_line"], "--pack_documents is about blocks"),
        "targets": (["--lora_target_modules", "q_proj"], "needs? --lora_rank"),
        "scale": (["--lora_alpha", "8"], "needs? --lora_rank"),
        "no prompts": (["--train_on_inputs", "False"], "--train_on_inputs False needs rows of prompt and answer"),
        "packed prompts": ([*prompts, "--train_on_inputs", "False", "--dataset_concatenation"], "not packed"),
        "overrides": (["--config_overrides", "n_layer=1"], "--config_overrides needs a model from scratch"),
        "block": (["--block_size", "0"], "--block_size must be at least 1"),
        "rank": (["--lora_rank", "0"], "--lora_rank must be at least 1"),
        "flag": (["--mlm_probabilty", "0.1"], "unknown flag --mlm_probabilty.*did you mean '--mlm_probability'"),
        "two names": (["--block_size", "8", "--max_seq_length", "9"], "--block_size.*--max_seq_length.*contradict"),
        "objective": (["--objective", "prefix"], "--objective: invalid choice: 'prefix'"),
        "run file": (["--config", str(folder / "run.json")], "lerning_rate.*did you mean '--learning_rate'"),
        "another run": (["--output_dir", str(another)], "--output_dir.*holds another run.*all_results"),
        "mode": (["--use_lazy_mode", "True", "--torch_compile"], "contradict"),
        "sharding": (["--deepspeed", "zero4"], "--deepspeed: no configuration 'zero4'.*zero2"),
        "two ways to shard": (["--fsdp", "auto_wrap", "--deepspeed", "zero2"], "--fsdp.*--deepspeed.*give one"),
        "optimiser": (["--optim", "sgd", "--optim_args", "momentun=0.9"], "--optim_args.*did you mean 'momentum'"),
    }  # fmt: skip


BROKEN = [
    "missing", "empty", "extension", "broken", "latin txt", "latin csv", "latin jsonl", "latin stream", "latin folder",
    "one row to part", "two sources", "no validation", "no test", "share", "masks", "no masks", "rows as a stream",
    "rows apart", "targets", "scale", "no prompts", "packed prompts", "overrides", "block", "rank", "flag", "two names",
    "objective", "run file", "another run", "mode", "sharding", "two ways to shard", "optimiser",
]  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input_is_one_clear_line(
    recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before any model is built: building one would fail here."""
    flags, message = broken_input(recipe.folder)[name]
    monkeypatch.setattr(recipe.module, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(UserError) as caught:
        recipe("--train_file", text_files["--train_file"], "--do_train", *flags, model=tiny_gpt2)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_cases_of_bad_input_are_tried(tmp_path: Path) -> None:
    assert list(broken_input(tmp_path)) == BROKEN


ROWS = {
    "short": [{"text": "alpha beta"}],
    "blank": [{"text": ""}] * 9,
    "null": [{"text": None}] * 9,
    "numbers": [{"text": 3}] * 9,
    "long": [{"instruction": " ".join(WORDS), "output": "alpha"}] * 9,
    "foreign": [{"input_ids": [6, 7, 99] * 9}] * 9,
    "words": [{"input_ids": "alpha beta"}] * 9,
    "holes": [{"input_ids": [6, None, 7] * 9}] * 9,
    "negative": [{"input_ids": [6, -1, 7] * 9}] * 9,
    "nameless": [{}] * 9,
    "context": [{"instruction": "alpha", "context": "beta", "response": "gamma"}] * 9,
    "broken": b'{"text": "alpha", \n',
}
# Name: rows (None: good ones), model, flags, what the one line must say.
UNFIT = {
    "unknown column": (None, "tiny_gpt2", ["--text_column", "txt"], "--text_column.*no column 'txt'.*mean 'text'"),
    "shorter than a block": ("short", "tiny_gpt2", [], "^train split: 3 tokens make no block of 16; give more"),
    "no text": ("blank", "tiny_gpt2", [], "^train split: 0 tokens make no block of 16"),
    "no rows": ("blank", "tiny_gpt2", ["--line_by_line"], "the train split has no rows"),
    "no stream": ("blank", "tiny_gpt2", ["--streaming"], "^stream: 0 tokens make no block of 16"),
    "null": ("null", "tiny_gpt2", [], "^train split: 0 tokens make no block of 16"),
    "no words": ("numbers", "tiny_gpt2", [], "--text_column: 'text' holds .*int64.*, not text"),
    "foreign tokens": ("foreign", "tiny_gpt2", [], "input_ids has the token 99, the vocabulary ends at 26"),
    "tokens in words": ("words", "tiny_gpt2", [], "input_ids holds string, not lists of token numbers"),
    "null tokens": ("holes", "tiny_gpt2", [], "input_ids: a token is null"),
    "negative token": ("negative", "tiny_gpt2", [], "input_ids has the token -1; token numbers begin at 0"),
    "broken stream": ("broken", "tiny_gpt2", ["--streaming"], "the first row of the stream cannot be read: "),
    "empty stream": ("nameless", "tiny_gpt2", ["--streaming"], "the stream has no rows"),
    "one token": (None, "tiny_gpt2", ["--block_size", "1"], "a row of one token has nothing to foretell; give"),
    "input alone": ("context", "tiny_gpt2", ["--input_column_name", "context"], "--output_column_name: no column"),
    "instruction": (None, "tiny_gpt2", COLUMNS, "--instruction_column_name: no column 'instruction'"),
    "no template": ("long", "tiny_gpt2", ["--chat_prompt"], "--chat_prompt: the tokenizer has no chat template"),
    "few positions": (None, "tiny_gpt2", ["--block_size", "65"], "the model has 64 positions.*65 tokens"),
    "long sample": (None, "tiny_gpt2", ["--sample_prompt", "alpha " * 16], "--sample_prompt has 16 tokens.*fewer than"),
    "no sample": (None, "tiny_gpt2", ["--sample_prompt", " "], "--sample_prompt has 0 tokens; it needs 1"),
    "adapted layer": (None, "tiny_llama", ["--lora_rank", "2", "--lora_target_modules", "q_prj"], "mean 'q_proj'"),
    "no mask": (None, "tiny_gpt2", ["--objective", "masked"], "GPT2Config.* for this kind.*ForMaskedLM"),
    "no mask token": (None, "tiny_bert", ["--tokenizer_name", "tiny_gpt2"], "the tokenizer has no mask token"),
    "drop last": (None, "tiny_gpt2", ["--dataloader_drop_last", "--per_device_train_batch_size", "512"], "68 rows"),
    "endless": (None, "tiny_gpt2", ["--streaming", "--max_steps", "-1"], "stream needs --max_steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_the_model_is_one_clear_line(
    recipe: Recipe, text_files: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    kind, model, flags, message = UNFIT[name]
    file, rows = str(tmp_path / "rows.jsonl") if kind else text_files["--train_file"], ROWS.get(kind)
    if isinstance(rows, bytes):
        Path(file).write_bytes(rows)
    elif kind:
        write_jsonl(Path(file), rows)
    named = [str(request.getfixturevalue(word)) if word.startswith("tiny_") else word for word in flags]
    sizes = [] if "--block_size" in flags else BLOCK
    steps = [] if "--max_steps" in flags else ["--max_steps", "1"]
    given = ["--do_train", "--train_file", file, *sizes, *steps, *named]
    with pytest.raises(UserError) as caught:
        recipe(*given, model=request.getfixturevalue(model))
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


MODELS = {
    "another kind": ("t5", "T5Config.* for this kind.*AutoModelForCausalLM"),
    "no causal kind": ("xlnet", "^xlnet sees the tokens that it would have to foretell; take another model"),
    "unknown type": (["--model_type", "gpt3"], "--model_type: there is no 'gpt3'.*did you mean 'gpt"),
    "no tokenizer": (
        ["--model_type", "gpt2"],
        "--model_type says nothing of the tokenizer: name one with --tokenizer_name",
    ),
    "unknown override": (["--model_type", "gpt2", "--config_overrides", "n_lyer=1"], "n_lyer isn't in the original"),
    "override without value": (
        ["--model_type", "gpt2", "--config_overrides", "n_layer"],
        "gpt2 cannot be loaded: .*2 is",
    ),
    "dtype of nothing": (["--model_type", "gpt2", "--torch_dtype", "float32"], "--torch_dtype needs a model to load"),
    "no such folder": (["--model_name_or_path", "/no/such/model"], "there is no /no/such/model; give a folder"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_had_is_one_clear_line(
    recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path, tmp_path: Path, name: str
) -> None:
    from transformers import T5Config, XLNetConfig

    flags, message = MODELS[name]
    if isinstance(flags, str):
        kinds = {"t5": T5Config(architectures=["T5ForConditionalGeneration"]), "xlnet": XLNetConfig()}
        kinds[flags].save_pretrained(tmp_path / flags)
        flags = ["--objective", "causal", "--config_name", str(tmp_path / flags)]
    own = [] if name == "no tokenizer" else ["--tokenizer_name", str(tiny_gpt2)]
    with pytest.raises(UserError) as caught:
        recipe("--do_train", "--max_steps", "1", *BLOCK, *own, *flags, files=text_files)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 400


def test_missing_and_empty_texts_are_counted(
    recipe: Recipe, tiny_gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "alpha beta gamma"}, {"text": None}, {"text": ""}, {"text": "delta"}]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    recipe("--do_eval", "--validation_file", file, "--block_size", "4", model=tiny_gpt2)
    assert "validation: 6 tokens of 4 documents (2 of them empty): 6 used in 2 blocks of 4" in capsys.readouterr().out


def test_bad_input_ends_with_code_2_and_no_traceback(
    text_files: dict[str, str], tiny_gpt2: Path, tmp_path: Path
) -> None:
    output = ["--output_dir", str(tmp_path), *QUIET]
    named = ["--model_name_or_path", str(tiny_gpt2), *flags_of(text_files, "train")]
    done = as_program(*named, *output, "--do_train", "--mlm_probability", "2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: --mlm_probability")


def test_an_unreachable_hub_is_said_without_retries(text_files: dict[str, str], tmp_path: Path) -> None:
    """A real process, an endpoint where nothing listens; the time is that of the look-up, start-up left out."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    given = ["--model_name_or_path", "openai-community/gpt2", *flags_of(text_files, "train"), "--do_train", *QUIET]
    start = time.monotonic()
    done = as_program(*given, "--output_dir", str(tmp_path / "run"), env=environment)
    assert done.returncode == 2
    assert "openai-community/gpt2 cannot be loaded" in done.stderr
    assert "not reachable" in done.stderr
    assert time.monotonic() - start < 20  # start-up on a busy machine; the retries alone would take 23 s more


# ------------------------------------------------------------------------------------------------- copies, help, golden


def test_a_copy_beside_the_recipe_runs(text_files: dict[str, str], tiny_gpt2: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SCRIPT.parent, root / "recipes" / "mine")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    flags = ["--model_name_or_path", str(tiny_gpt2), *flags_of(text_files, "train"), *BLOCK, *QUIET]
    script = root / "recipes" / "mine" / "run.py"
    done = as_program(*flags, "--do_train", "--max_steps", "1", script=script, cwd=tmp_path, env=clean)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/mine/*/all_results.json"))) == 1


def test_help_answers_at_once_without_torch() -> None:
    code = f"import runpy, sys; sys.argv = ['run.py', '--help']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    ended = f"try:\n    {code}\nfinally:\n    assert 'torch' not in sys.modules, 'torch'"
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", ended], capture_output=True, text=True, cwd=REPOSITORY)
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 3
    for group in ("model and data", "LoRA", "hub", "run", "training", "device", "several devices"):
        assert re.search(f"^{group}", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("objective", "counted", "bounds"), [("causal", "trigram", (8, 40)), ("masked", "unigram", (80, 400))]
)
def test_without_a_model_and_data_it_learns_what_is_installed(
    recipe: Recipe,
    made: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    objective: str,
    counted: str,
    bounds: tuple[int, int],
) -> None:
    """A short run on the standard library's part; `test_built_in.py` runs it to its end."""
    monkeypatch.setattr("core.sample_data.DEFAULT_PACKAGES", ("stdlib",))
    short = ["--max_steps", "40", "--warmup_steps", "5", "--max_eval_samples", "100", "--cpu_threads", "1"]
    metrics = recipe("--objective", objective, *short, "--do_predict", "False")
    low, high = bounds
    assert low < metrics[f"eval_{counted}_perplexity"] < high
    assert metrics["eval_perplexity"] < 480, "the vocabulary has 512 tokens"
    sums = (recipe.output / "data" / "sha256.txt").read_text().splitlines()
    assert [line.split()[1] for line in sums] == ["train.jsonl", "validation.jsonl", "test.jsonl"]
    assert ("sample: The function returns" in capsys.readouterr().out) == (objective == "causal")
    vocabulary = made.loaders["train"].dataset[0]["input_ids"].max()
    assert vocabulary < 512


def test_when_to_evaluate_and_when_to_log(recipe: Recipe, text_files: dict[str, str], tiny_gpt2: Path) -> None:
    flags = ["--do_train", "--eval_strategy", "epoch", "--eval_delay", "2", "--logging_strategy", "epoch"]
    recipe(*flags, *BLOCK, "--num_train_epochs", "3", model=tiny_gpt2, files=text_files)
    rows = list(csv.DictReader((recipe.output / "logs" / "metrics.csv").open()))
    assert [float(row["epoch"]) for row in rows if row["loss"]] == [1, 2, 3]
    evaluated = [int(row["step"]) for row in rows if row["eval_loss"]]
    assert [step / int(rows[-1]["step"]) for step in evaluated] == pytest.approx([2 / 3, 1])
    steps = ["--eval_strategy", "steps", "--eval_steps", "2", "--eval_delay", "5", "--logging_strategy", "no"]
    recipe("--do_train", *steps, *BLOCK, "--max_steps", "8", model=tiny_gpt2, files=text_files)
    rows = list(csv.DictReader((recipe.output / "logs" / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["loss"]] == ["8"]
    assert [row["step"] for row in rows if row["eval_loss"]] == ["6", "8"]


@pytest.mark.parametrize("kind", KINDS)
def test_golden_losses(recipe: Recipe, text_files: dict[str, str], request: pytest.FixtureRequest, kind: str) -> None:
    """Four recorded losses: a refactoring must not move them. ``--rebase`` records this machine's."""
    flags = ["--do_train", "--max_steps", "4", "--logging_steps", "1", "--learning_rate", "0.01", *BLOCK]
    recipe(*flags, "--save_strategy", "no", model=request.getfixturevalue(KINDS[kind]), files=text_files)
    losses = [float(row["loss"]) for row in csv.DictReader((recipe.output / "logs" / "metrics.csv").open())]
    path, name = REPOSITORY / "tests" / "baselines" / "cpu.json", f"language_modeling_{kind}"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if request.config.getoption("--rebase"):
        path.write_text(json.dumps({**recorded, name: losses}, indent=2) + "\n")
        return
    assert losses == pytest.approx(recorded[name], abs=1e-5)
