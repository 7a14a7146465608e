"""The recipe over several devices and on cards: the numbers of one, and no second copy of the logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import texts, write_jsonl
from tests.recipes.devices import (
    QUIET,
    STRATEGIES,
    Plan,
    Ran,
    assert_same,
    assert_same_losses,
    assert_same_weights,
    assert_steady,
    at_size,
    made_once,
    own_lines,
    restored_environment,
    shared_folder,
    without_dropout,
)

pytestmark = pytest.mark.processes
STEPS, STOP = 6, 4  # two epochs of 16, 16 and few rows; the checkpoint is one step into the second epoch
RUNS = {  # the model, and how its rows are made
    "causal": ("gpt2", []),
    "packed": ("gpt2", ["--pack_documents"]),
    "lines": ("gpt2", ["--line_by_line", "--length_buckets", "2"]),
    "stream": ("gpt2", ["--streaming", "--max_steps", str(STEPS)]),
    "masked": ("bert", []),
    "lora": ("llama", ["--lora_rank", "4", "--lora_dropout", "0"]),
}
AT = {
    2: {
        "causal": ("ddp", "fast_ddp", "zero2", "zero3"),
        "masked": ("ddp", "zero2"),
        "lora": ("ddp", "zero3"),
        **dict.fromkeys(("packed", "lines", "stream"), ("ddp",)),
    },
    4: {"causal": ("ddp", "fast_ddp", "zero2"), "masked": ("ddp",)},
}
RESUMED = ("masked", "stream")
ON_CARDS = ("packed", "masked", "lora")
LONGER = ["--logging_steps", "1000", "--num_train_epochs", "4"]  # on cards: one record, and epochs without news


def pairs_at(size: int) -> list[tuple[str, str]]:
    return [(kind, strategy) for kind, strategies in AT[size].items() for strategy in strategies]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "language_modeling")


@pytest.fixture(scope="module")
def models(folder: Path, tiny_gpt2: Path, tiny_bert: Path, tiny_llama: Path) -> dict[str, Path]:
    saved = {"gpt2": tiny_gpt2, "bert": tiny_bert, "llama": tiny_llama}
    return {name: without_dropout(path, folder / name) for name, path in saved.items()}


@pytest.fixture(scope="module")
def flags(models: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """Flags of each kind of run: it trains with large steps, and evaluates."""
    files = {"train": texts(23, 1), "validation": texts(11, 2), "test": texts(3, 3, longest=18)}
    paths = {split: folder / f"{split}.jsonl" for split in files}
    with made_once(folder / "files") as made:
        for split, rows in files.items():
            if not made:
                write_jsonl(paths[split], rows)
    phases = ["--do_train", "--do_eval", "--do_predict", "--block_size", "16", "--per_device_eval_batch_size", "3"]
    steps = ["--num_train_epochs", "2", "--learning_rate", "0.02", "--lr_scheduler_type", "cosine", "--warmup_steps"]
    steps += ["1", "--weight_decay", "0.01", "--max_grad_norm", "0.7"]
    data = [word for split, path in paths.items() for word in (f"--{split}_file", str(path))]
    shared = [*data, *phases, *steps, *QUIET]
    return {kind: ["--model_name_or_path", str(models[name]), *shared, *how] for kind, (name, how) in RUNS.items()}


def saving(kind: str) -> list[str]:
    return ["--save_strategy", "steps", "--save_steps", str(STOP)] if kind in RESUMED else []


@pytest.fixture(scope="module")
def alone(language_modeling: ModuleType, flags: dict[str, list[str]], folder: Path) -> dict[str, Ran]:
    """One process, in this one."""
    runs = {kind: [*flags[kind], *saving(kind)] for kind in RUNS}
    runs |= {f"{kind}_longer": [*flags[kind], *LONGER] for kind in ON_CARDS}
    here = folder / "alone"
    with made_once(here) as made:
        for name, how in runs.items():
            if not made:
                with restored_environment():
                    language_modeling.main([*how, *at_size(1), "--use_cpu", "--output_dir", str(here / name)])
    return {name: Ran(here / name) for name in runs}


@pytest.fixture(scope="module")
def two(flags: dict[str, list[str]], folder: Path, alone: dict[str, Ran]) -> dict[str, Ran]:
    plan = Plan("language_modeling", folder / "two")
    for kind, strategy in pairs_at(2):
        how = [*flags[kind], *at_size(2), "--use_cpu", *saving(kind)]
        plan.add(f"{kind}_{strategy}", [*how, *STRATEGIES[strategy]], watch=kind == "causal")
    for kind in RESUMED:
        for name, run in (("two", plan.folder / f"{kind}_ddp"), ("one", alone[kind].folder)):
            stopped = ["--resume_from_checkpoint", str(run / f"checkpoint-{STOP}")]
            plan.add(f"{kind}_from_{name}", [*flags[kind], *at_size(2), "--use_cpu", *stopped])
    return plan.run(2)


@pytest.fixture(scope="module")
def four(flags: dict[str, list[str]], folder: Path) -> dict[str, Ran]:
    plan = Plan("language_modeling", folder / "four")
    for kind, strategy in pairs_at(4):
        plan.add(f"{kind}_{strategy}", [*flags[kind], *at_size(4), "--use_cpu", *STRATEGIES[strategy]])
    return plan.run(4)


# --- The same numbers -------------------------------------------------------------------------------------------------


def test_the_runs_are_ones_that_show_a_difference(alone: dict[str, Ran], models: dict[str, Path]) -> None:
    """Weights move, some steps are clipped and some are not; blocks and windows are short at the end."""
    for kind, (model, _) in RUNS.items():
        before, after = load_file(models[model] / "model.safetensors"), alone[kind].weights()
        assert max((after[name] - before[name]).abs().max() for name in after) > 0.01
        assert len(alone[kind].column("loss")) == (4 if kind == "lines" else STEPS)
    assert {flag for run in alone.values() for flag in run.column("grad_clipped")} == {0, 1}
    batches = {phase: shapes[0]["batches"] for phase, shapes in alone["causal"].metrics["run"]["batch_shapes"].items()}
    assert batches == {"train": 18, "eval": 3, "predict": 1}, "not four, four and one micro-batch an epoch"
    losses = [alone[kind].column("loss") for kind in ("causal", "packed", "stream")]
    assert len({tuple(each) for each in losses}) == 3


@pytest.mark.parametrize(("kind", "strategy"), pairs_at(2))
def test_two_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, two: dict[str, Ran], alone: dict[str, Ran]
) -> None:
    assert_same(two[f"{kind}_{strategy}"], alone[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), pairs_at(4))
def test_four_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, four: dict[str, Ran], alone: dict[str, Ran]
) -> None:
    """Micro-batches of one row; ranks without a row in the last step and in the test split."""
    assert_same(four[f"{kind}_{strategy}"], alone[kind])


@pytest.mark.parametrize("strategy", AT[2]["lora"])
def test_adapters_are_those_of_one(strategy: str, two: dict[str, Ran], alone: dict[str, Ran]) -> None:
    ours, theirs = (load_file(run.folder / "adapter" / "adapter_model.safetensors")
                    for run in (two[f"lora_{strategy}"], alone["lora"]))  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_rank_0_says_everything_once(folder: Path, two: dict[str, Ran]) -> None:
    out = (folder / "two" / "out.txt").read_text()
    lines = own_lines(out)
    assert len(lines) == out.count("[rank 0]")
    blocks = [name for name in two if not name.startswith(("lines", "stream"))]
    for start, runs in (("all results: ", two), (r"device  .* x 2", two), (r"validation: .* in \d blocks ", blocks)):
        assert len([line for line in lines if re.match(start, line)]) == len(runs), (start, out)


# --- Resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RESUMED)
def test_two_ranks_go_on_where_they_stopped_bit_for_bit(kind: str, two: dict[str, Ran]) -> None:
    """With the masks, or the place in the stream, of a run that was not stopped."""
    straight, resumed = two[f"{kind}_ddp"], two[f"{kind}_from_two"]
    for column in ("loss", "grad_norm"):
        assert resumed.column(column) == straight.column(column)[STOP:]
    assert_same_weights(resumed, straight, 0)


@pytest.mark.parametrize("kind", RESUMED)
def test_two_ranks_go_on_where_one_stopped(kind: str, two: dict[str, Ran], alone: dict[str, Ran]) -> None:
    assert_same(two[f"{kind}_from_one"], alone[kind], last=STEPS - STOP)


# --- On the simulated device ------------------------------------------------------------------------------------------


def on_cards(size: int, mode: str, folder: Path, flags: dict[str, list[str]]) -> dict[str, Ran]:
    plan = Plan("language_modeling", folder / mode)
    for kind in ON_CARDS:
        plan.add(kind, [*flags[kind], *LONGER, *at_size(size)], watch=True)
    report = str(plan.folder / "report.json")
    return plan.run(size, mode=mode, HPU_SIMULATOR_DEVICES=str(size), HPU_SIMULATOR_JSON=report)


@pytest.fixture(scope="module")
def lazy(folder: Path, flags: dict[str, list[str]]) -> dict[str, Ran]:
    return on_cards(2, "lazy", folder, flags)


@pytest.fixture(scope="module")
def eager(folder: Path, flags: dict[str, list[str]]) -> dict[str, Ran]:
    return on_cards(1, "eager", folder, flags)


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
def test_two_cards_have_the_numbers_of_one_cpu(kind: str, lazy: dict[str, Ran], alone: dict[str, Ran]) -> None:
    assert_same_losses(lazy[kind], alone[f"{kind}_longer"])
    assert lazy[kind].figures() == pytest.approx(alone[f"{kind}_longer"].figures(), abs=1e-4)
    facts = lazy[kind].metrics["run"]["device"]
    assert (facts["name"], facts["execution_mode"], facts["world_size"]) == ("gaudi2", "lazy", 2)


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
def test_so_has_one_in_eager_mode(kind: str, eager: dict[str, Ran], alone: dict[str, Ran]) -> None:
    assert_same_losses(eager[kind], alone[f"{kind}_longer"])
    assert eager[kind].metrics["run"]["device"]["execution_mode"] == "eager"


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_steady_step_on_two_cards_compiles_nothing_and_waits_for_nothing(
    rank: int, kind: str, lazy: dict[str, Ran]
) -> None:
    assert_steady(lazy[kind], rank, steps=12)


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
def test_a_steady_step_in_eager_mode_waits_for_nothing(kind: str, eager: dict[str, Ran]) -> None:
    """One card's first losses are looked at with the others, when a record is written."""
    _, waits = zip(*json.loads((eager[kind].folder / "watched-rank0.json").read_text())["steps"], strict=True)
    assert len(waits) == 12
    assert set(waits[2:]) == {waits[2]}, waits


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cards_can_do_all_that_is_asked_of_them(rank: int, lazy: dict[str, Ran]) -> None:
    """No collective on a dtype that they lack, no number that is too large, no shape that depends on values."""
    report = json.loads((lazy["packed"].folder.parent / f"report-rank{rank}.json").read_text())
    assert report["steps"] == 12 * len(ON_CARDS)
    found = [one["title"] for one in report["findings"]]
    assert not [one for one in report["findings"] if one["severity"] == "error"], found
    assert not [title for title in found if title.startswith("shape depends")], found


# --- Memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most tensors of ``size`` bytes or more that were there at one time, of those made inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.most = size, 0
        self.live: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        storages = [tensor.untyped_storage() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        self.live |= {StorageWeakRef(one) for one in storages if one.nbytes() >= self.size}
        self.live = {one for one in self.live if not one.expired()}
        self.most = max(self.most, len(self.live))
        return out


@pytest.fixture
def tensors_of_logits_size(
    language_modeling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., int]:
    """Counts them in a run with many classes that trains and evaluates: those that are there at one time."""
    from core import losses

    rows, length, classes = 8, 64, 512
    monkeypatch.setattr(losses, "CHUNK", rows * length * classes // 16)
    file = str(write_jsonl(tmp_path / "rows.jsonl", texts(60, 1)))
    data = ["--train_file", file, "--validation_file", file, "--do_train", "--do_eval", "--max_steps", "3"]

    def count(model: Path, bytes_each: int, *precision: str) -> int:
        made = ["--config_name", str(model), "--tokenizer_name", str(model), "--config_overrides"]
        flags = [*made, f"vocab_size={classes}", *data, *QUIET, *precision, "--use_cpu", "--output_dir"]
        with Largest(bytes_each * rows * length * classes) as largest:
            language_modeling.main([*flags, str(tmp_path / "run")])
        return largest.most

    return count


@pytest.mark.parametrize(("bytes_each", "precision"), [(4, []), (2, ["--bf16"])])
@pytest.mark.parametrize("model", ["tiny_gpt2", "tiny_llama", "tiny_bert"])
def test_the_logits_are_the_one_tensor_of_their_size(
    model: str,
    bytes_each: int,
    precision: list[str],
    tensors_of_logits_size: Callable[..., int],
    request: pytest.FixtureRequest,
) -> None:
    assert tensors_of_logits_size(request.getfixturevalue(model), bytes_each, *precision) == 1


def test_were_they_kept_their_gradient_would_be_another(
    language_modeling: ModuleType,
    tensors_of_logits_size: Callable[..., int],
    tiny_gpt2: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predict, kept = language_modeling.predict, []

    def keeping(*inputs: object) -> torch.Tensor:
        kept[:] = [predict(*inputs)]
        return kept[0]

    monkeypatch.setattr(language_modeling, "predict", keeping)
    assert tensors_of_logits_size(tiny_gpt2, 4) == 2


@pytest.mark.parametrize("strategy", AT[2]["causal"])
@pytest.mark.parametrize("rank", [0, 1])
def test_so_they_are_over_several_devices(rank: int, strategy: str, two: dict[str, Ran]) -> None:
    found = json.loads((two[f"causal_{strategy}"].folder / f"watched-rank{rank}.json").read_text())
    assert found["in_place"] == [True] * 18


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
def test_so_they_are_on_cards(kind: str, lazy: dict[str, Ran]) -> None:
    found = json.loads((lazy[kind].folder / "watched-rank0.json").read_text())
    assert set(found["in_place"]) == {True}
