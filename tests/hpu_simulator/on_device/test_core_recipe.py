"""The summarization recipe on the simulated card against itself on the CPU, and with each of the card's options."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from core.device import LAZY_VARIABLE
from hpu_simulator import runtime
from tests.conftest import REPOSITORY

LAZY = os.environ[LAZY_VARIABLE] == "1"
lazy_only = pytest.mark.skipif(not LAZY, reason="HPU graphs exist in lazy mode only")
BUILT_IN = str(REPOSITORY / "recipes" / "summarization" / "built_in.json")
EVALUATE = ["--do_eval", "--do_predict", "--predict_with_generate", "--num_beams", "2"]


@pytest.fixture
def base(tiny_t5: Path, pair_files: dict[str, str]) -> list[str]:
    files = [word for pair in pair_files.items() for word in pair]
    lengths = ["--max_source_length", "32", "--max_target_length", "12", "--logging_steps", "1", "--optim", "sgd"]
    quiet = ["--disable_tqdm", "--report_to", "none", "--save_strategy", "no", "--learning_rate", "0.02"]
    return ["--model_name_or_path", str(tiny_t5), *files, *lengths, *quiet]


class Ran:
    """What a run left in its folder."""

    def __init__(self, recipe: ModuleType, folder: Path, *flags: str) -> None:
        self.metrics = recipe.main([*flags, "--output_dir", str(folder)])
        self.folder, log = folder, folder / "logs" / "metrics.csv"
        rows = list(csv.DictReader(log.open())) if log.exists() else []
        self.losses = [float(row["loss"]) for row in rows if row.get("loss")]
        self.run = json.loads((folder / "all_results.json").read_text())["run"]
        texts = folder / "generated_predictions.txt"
        self.texts = texts.read_text() if texts.exists() else None

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


def still(tiny: Path, folder: Path) -> str:
    """The model without dropout, whose masks differ between devices and between graphs and none."""
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    T5ForConditionalGeneration.from_pretrained(tiny, dropout_rate=0.0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


def test_the_built_in_model_loses_the_same_as_on_the_cpu(
    summarization: ModuleType, pair_files: dict[str, str], tmp_path: Path
) -> None:
    files = [word for pair in pair_files.items() for word in pair]
    quiet = ["--disable_tqdm", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "1"]
    flags = ["--config", BUILT_IN, *files, *quiet, "--max_steps", "20", "--gaudi_config", "t5"]
    flags += ["--learning_rate", "0.01"]  # the built-in rate makes a last bit of a gradient's norm a thousandfold
    card = Ran(summarization, tmp_path / "card", *flags)
    host = Ran(summarization, tmp_path / "host", *flags, "--use_cpu")
    assert (card.run["device"]["name"], card.run["device"]["execution_mode"]) == ("gaudi2", "lazy" if LAZY else "eager")
    assert host.run["device"]["name"].startswith("cpu")
    assert len(card.losses) == 20
    assert card.losses == pytest.approx(host.losses, abs=1e-5)
    assert card.metrics["train_loss"] == pytest.approx(host.metrics["train_loss"], abs=1e-5)
    for name in ("eval_loss", "predict_loss"):
        assert card.metrics[name] == pytest.approx(host.metrics[name], abs=1e-4)
    assert card.texts == host.texts
    assert card.run["graphs_compiled"] > 0
    assert card.run["peak_memory (GB)"]["train"] > 0


OPTIONS = {
    "fused": ["--gaudi_config", "t5", "--optim", "adamw_torch", "--adam_epsilon", "1e-12", "--learning_rate", "1e-4"],
    "pipelined": ["--pipelining_fwd_bwd", "--non_blocking_data_copy"],
    "accumulated": ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"],
    "checkpointed": ["--gradient_checkpointing"],
    "torchs attention": ["--attn_implementation", "sdpa"],
    "workers": ["--dataloader_num_workers", "1", "--non_blocking_data_copy"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_card_change_no_loss(
    summarization: ModuleType, base: list[str], tiny_t5: Path, tmp_path: Path, name: str
) -> None:
    flags = [*base, "--model_name_or_path", still(tiny_t5, tmp_path / "model"), "--do_train", "--do_eval"]
    flags += ["--max_steps", "6"]
    card = Ran(summarization, tmp_path / "card", *flags, *OPTIONS[name])
    of_host = OPTIONS[name] if name == "fused" else []
    host = Ran(summarization, tmp_path / "host", *flags, *of_host, "--use_cpu")
    assert card.losses == pytest.approx(host.losses, abs=1e-5)
    assert card.metrics["eval_loss"] == pytest.approx(host.metrics["eval_loss"], abs=1e-5)


@lazy_only
@pytest.mark.parametrize("name", ["accumulated", "pipelined"])
def test_recorded_graphs_change_no_loss_and_no_text(
    summarization: ModuleType, base: list[str], tiny_t5: Path, tmp_path: Path, name: str
) -> None:
    """Trained, evaluated on the way, evaluated and generated after it; with and without a cache while generating."""
    model = still(tiny_t5, tmp_path / "model")
    flags = [*base, "--model_name_or_path", model, "--do_train", *EVALUATE, *OPTIONS[name], "--max_steps", "8"]
    flags += ["--eval_strategy", "steps", "--eval_steps", "3"]
    plain = Ran(summarization, tmp_path / "plain", *flags)
    for way in (["--use_hpu_graphs"], ["--use_hpu_graphs", "--use_cache", "False", "--max_hpu_graphs", "3"]):
        recorded = Ran(summarization, tmp_path / f"recorded{len(way)}", *flags, *way)
        assert recorded.losses == pytest.approx(plain.losses, abs=1e-5)
        for key in ("eval_loss", "predict_loss", "predict_rouge1", "predict_gen_len"):
            assert recorded.metrics[key] == pytest.approx(plain.metrics[key], abs=1e-5)
        assert recorded.texts == plain.texts


@lazy_only
def test_recorded_evaluation_graphs_alone(
    summarization: ModuleType, base: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Ran(summarization, tmp_path / "plain", *base, *EVALUATE)
    flags = ["--use_hpu_graphs_for_inference", "--disable_tensor_cache_hpu_graphs"]
    recorded = Ran(summarization, tmp_path / "recorded", *base, *EVALUATE, *flags)
    assert recorded.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], abs=1e-6)
    assert recorded.texts == plain.texts
    assert not caplog.messages


def test_evaluation_in_bf16_throughout(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    wide = Ran(summarization, tmp_path / "wide", *base, "--do_eval")
    narrow = Ran(summarization, tmp_path / "narrow", *base, "--do_eval", "--bf16_full_eval")
    assert narrow.metrics["eval_loss"] == pytest.approx(wide.metrics["eval_loss"], rel=0.01)
    assert narrow.metrics["eval_loss"] != wide.metrics["eval_loss"]


def test_a_resumed_run_with_dropout_ends_with_the_same_weights(
    summarization: ModuleType, base: list[str], tmp_path: Path
) -> None:
    flags = [*base, "--do_train", "--save_strategy", "steps", "--save_steps", "2", "--optim", "adamw_torch"]
    flags += ["--gaudi_config", "t5", "--bf16"]
    straight = Ran(summarization, tmp_path / "straight", *flags, "--max_steps", "5")
    Ran(summarization, tmp_path / "resumed", *flags, "--max_steps", "5")
    (tmp_path / "resumed" / "checkpoint-4").rename(tmp_path / "four")
    (tmp_path / "resumed" / "checkpoint-5").rename(tmp_path / "five")
    torch.rand(7, device="hpu")
    again = [*flags, "--max_steps", "5", "--resume_from_checkpoint", "auto"]
    resumed = Ran(summarization, tmp_path / "resumed", *again)
    assert resumed.losses == straight.losses
    for name, tensor in resumed.weights().items():
        assert torch.equal(tensor, straight.weights()[name]), name
    other = Ran(summarization, tmp_path / "other", *flags, "--max_steps", "5", "--seed", "7", "--data_seed", "42")
    assert other.losses != straight.losses


def test_checkpointed_dropout_drops_the_same_again(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    flags = [*base, "--do_train", "--max_steps", "4"]
    kept = Ran(summarization, tmp_path / "kept", *flags)
    again = Ran(summarization, tmp_path / "again", *flags, "--gradient_checkpointing")
    assert again.losses == pytest.approx(kept.losses, abs=1e-5)


def test_a_profile_is_written(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    profile = ["--profiling_warmup_steps", "1", "--profiling_steps", "2"]
    ran = Ran(summarization, tmp_path / "run", *base, "--do_train", "--max_steps", "4", *profile)
    (trace,) = (ran.folder / "profile").glob("*.json")
    assert "aten::mm" in trace.read_text()


def test_a_steady_step_waits_for_nothing(
    summarization: ModuleType, base: list[str], pair_files: dict[str, str], tmp_path: Path
) -> None:
    """Reads in core/ and recipes/ are as many in 40 steps as in 20, and every compiled graph is an early one."""
    files = [word for pair in pair_files.items() for word in pair]
    quiet = ["--disable_tqdm", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "1000"]
    flags = ["--config", BUILT_IN, *files, *quiet, "--do_eval", "False", "--do_predict", "False"]
    flags += ["--per_device_train_batch_size", "4"]  # 7 steps an epoch, the last one filled
    counts = []
    for number, steps in enumerate(("21", "42", "42")):
        before = sum(sync["count"] for sync in runtime.snapshot()["syncs"])
        compiled = runtime.graph_compilations()
        Ran(summarization, tmp_path / str(number), *flags, "--max_steps", steps)
        reads = sum(sync["count"] for sync in runtime.snapshot()["syncs"]) - before
        counts.append((reads, runtime.graph_compilations() - compiled))
    assert counts[0][0] == counts[1][0] == counts[2][0]
    assert counts[2][1] == 0


@pytest.mark.skipif(LAZY, reason="torch.compile needs eager mode")
def test_a_compiled_run_loses_the_same(
    summarization: ModuleType, base: list[str], tiny_t5: Path, tmp_path: Path
) -> None:
    flags = [*base, "--model_name_or_path", still(tiny_t5, tmp_path / "model"), "--do_train", "--max_steps", "3"]
    flags += ["--pad_to_max_length"]
    eager = Ran(summarization, tmp_path / "eager", *flags)
    compiled = Ran(summarization, tmp_path / "compiled", *flags, "--torch_compile", "--use_regional_compilation")
    assert compiled.run["device"]["execution_mode"] == "compile"
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-5)
