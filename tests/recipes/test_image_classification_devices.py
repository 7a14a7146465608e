"""The recipe over several devices and on cards: the numbers of one, whatever is drawn; pixels that travel as bytes."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.conftest import ANIMALS, save_picture_model, save_pictures
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
STEPS, STOP = 6, 4  # two epochs of 16, 16 and 3 rows; the checkpoint is one step into the second epoch
ROWS = {"train": 35, "validation": 13, "test": 3}
MIXED = ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--rand_augment", "2", "--label_smoothing_factor", "0.1"]
MIXED += ["--data_seed", "47"]  # the torn image is in a step before the checkpoint, and in one after it
FEW = ["--max_train_samples", "3", "--max_eval_samples", "3"]
RUNS = {  # the model, the folder of images, and what else there is
    "plain": ("vit", "whole", []),
    "mixed": ("vit", "torn", MIXED),
    "few": ("vit", "whole", FEW),
    "swin": ("swin", "whole", []),
}
AT = {
    2: {"plain": ("ddp", "fast_ddp", "zero2", "zero3"), **dict.fromkeys(("mixed", "swin"), ("ddp",))},
    4: {**dict.fromkeys(("plain", "few"), ("ddp", "fast_ddp", "zero2")), "mixed": ("ddp",)},
}
# Micro-batches as large as one process's: their short window has more filler rows, on ranks that have nothing else.
FILLED = {2: ("4", "2"), 4: ("2", "2")}
ON_CARDS = ("plain", "mixed", "swin")
LONGER = ["--logging_steps", "1000", "--num_train_epochs", "4"]  # on cards: one record, and epochs without news
PAGES = ("predictions.csv", "eval_confusion_matrix.png", "eval_mistakes.png", "README.md")


def pairs_at(size: int) -> list[tuple[str, str]]:
    return [(kind, strategy) for kind, strategies in AT[size].items() for strategy in strategies]


def sizes(kind: str, size: int) -> list[str]:
    """Flags of micro-batches whose windows have 16 rows at every size."""
    if kind not in ("mixed", "few") or size == 1:
        return at_size(size)
    batch, accumulation = FILLED[size]
    return ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "image_classification")


@pytest.fixture(scope="module")
def models(folder: Path, tiny_vit: Path) -> dict[str, Path]:
    """A ViT, a Swin with shifted windows, and a ResNet with batch normalisation, all without dropout."""
    from transformers import ResNetConfig, SwinConfig

    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    new = {
        "swin": (SwinConfig(**swin, drop_path_rate=0.0, initializer_range=0.2), "SwinModel"),
        "resnet": (ResNetConfig(**resnet), "ResNetModel"),
    }
    for name, (config, kind) in new.items():
        with made_once(folder / name) as made:
            if not made:
                save_picture_model(folder / name, config, kind)
    return {"vit": without_dropout(tiny_vit, folder / "vit"), **{name: folder / name for name in new}}


@pytest.fixture(scope="module")
def images(folder: Path) -> dict[str, Path]:
    """Folders of three splits: ``whole``, and ``torn``, where each has one more image, that cannot be read.

    The images of the test split have no classes.
    """
    kinds = {"whole": folder / "whole", "torn": folder / "torn"}
    with made_once(folder / "images") as made:
        for path in () if made else kinds.values():
            for seed, (split, count) in enumerate(ROWS.items()):
                save_pictures(path / split, count, seed)
            for file in list((path / "test").rglob("*.*")):
                file.rename(path / "test" / file.name)
        for split in () if made else ROWS:
            file = next((kinds["torn"] / split).rglob("00.png"))
            file.with_name("torn.png").write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return kinds


@pytest.fixture(scope="module")
def flags(models: dict[str, Path], images: dict[str, Path]) -> dict[str, list[str]]:
    """Flags of each kind of run: it trains with large steps, evaluates and predicts."""
    phases = ["--do_train", "--do_eval", "--do_predict", "--per_device_eval_batch_size", "3"]
    steps = ["--num_train_epochs", "2", "--learning_rate", "0.02", "--lr_scheduler_type", "cosine", "--warmup_steps"]
    steps += ["1", "--weight_decay", "0.01", "--max_grad_norm", "3"]
    steps += ["--adam_epsilon", "1e-4"]  # a bias of keys has no gradient, and of mere rounding Adam makes a step
    made = {}
    for kind, (model, data, how) in RUNS.items():
        folders = [word for split in ROWS for word in (f"--{split}_dir", str(images[data] / split))]
        made[kind] = ["--model_name_or_path", str(models[model]), *folders, *phases, *steps, *QUIET, *how]
    return made | {"resnet": [str(models["resnet"]) if at == 1 else word for at, word in enumerate(made["plain"])]}


@pytest.fixture(scope="module")
def alone(image_classification: ModuleType, flags: dict[str, list[str]], folder: Path) -> dict[str, Ran]:
    """One process, in this one."""
    runs = {kind: flags[kind] for kind in RUNS} | {f"{kind}_longer": [*flags[kind], *LONGER] for kind in ON_CARDS}
    here = folder / "alone"
    with made_once(here) as made:
        for name, how in runs.items():
            if not made:
                with restored_environment():
                    image_classification.main([*how, *at_size(1), "--use_cpu", "--output_dir", str(here / name)])
    return {name: Ran(here / name) for name in runs}


def resuming(flags: list[str], size: int, folder: Path) -> list[str]:
    """Flags of a run that goes on from where two ranks were stopped."""
    stopped = str(folder / "two" / "mixed_ddp" / f"checkpoint-{STOP}")
    return [*flags, *sizes("mixed", size), "--use_cpu", "--resume_from_checkpoint", stopped]


@pytest.fixture(scope="module")
def two(flags: dict[str, list[str]], folder: Path) -> dict[str, Ran]:
    plan = Plan("image_classification", folder / "two")
    for kind, strategy in [*pairs_at(2), ("resnet", "ddp")]:
        how = [*flags[kind], *sizes(kind, 2), "--use_cpu", *STRATEGIES[strategy]]
        saving = ["--save_strategy", "steps", "--save_steps", str(STOP)] if kind == "mixed" else []
        plan.add(f"{kind}_{strategy}", [*how, *saving], watch=kind == "mixed")
    plan.add("resumed", [*resuming(flags["mixed"], 2, folder), "--dataloader_num_workers", "2"])
    stopping = ["--mixup_alpha", "0", "--cutmix_alpha", "0", "--on_bad_image", "fail"]
    plan.add("stopped", [*flags["mixed"], *at_size(2), "--use_cpu", *stopping], fails=True)
    return plan.run(2)


@pytest.fixture(scope="module")
def four(flags: dict[str, list[str]], folder: Path, two: dict[str, Ran]) -> dict[str, Ran]:
    plan = Plan("image_classification", folder / "four")
    for kind, strategy in pairs_at(4):
        plan.add(f"{kind}_{strategy}", [*flags[kind], *sizes(kind, 4), "--use_cpu", *STRATEGIES[strategy]])
    plan.add("resumed", resuming(flags["mixed"], 4, folder))
    return plan.run(4)


def watched(run: Ran, rank: int) -> dict[str, Any]:
    return json.loads((run.folder / f"watched-rank{rank}.json").read_text())


def predictions(run: Ran) -> list[list[str]]:
    return list(csv.reader((run.folder / "predictions.csv").open()))


def assert_same_predictions(run: Ran, expected: Ran) -> None:
    mine, theirs = predictions(run), predictions(expected)
    assert [row[:2] for row in mine] == [row[:2] for row in theirs]
    numbers = [[float(row[2] or "nan") for row in rows[1:]] for rows in (mine, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5, nan_ok=True)


# --- The same numbers -------------------------------------------------------------------------------------------------


def test_the_runs_are_ones_that_show_a_difference(alone: dict[str, Ran], models: dict[str, Path]) -> None:
    """Weights move, some steps are clipped and some are not, epochs end with a short step, and some rows are wrong."""
    for kind, (model, _, _) in RUNS.items():
        before, after = load_file(models[model] / "model.safetensors"), alone[kind].weights()
        changes = [(after[f"{model}.{name}"] - before[name]).abs().max() for name in before if "embeddings" in name]
        assert min(changes) > 0.01
        assert len(alone[kind].column("loss")) == (2 if kind == "few" else STEPS)
        assert alone[kind].metrics["train_data_wait_seconds"] >= 0
    assert set(alone["plain"].column("grad_clipped")) == {0, 1}
    batches = {phase: shapes[0]["batches"] for phase, shapes in alone["plain"].metrics["run"]["batch_shapes"].items()}
    assert batches == {"train": 18, "eval": 5, "predict": 1}, "not four, four and one micro-batch an epoch"
    assert len({tuple(alone[kind].column("loss")) for kind in ("plain", "mixed")}) == 2
    torn = alone["mixed"].figures()
    assert 0 < torn["eval_accuracy"] < torn["eval_top5_accuracy"] < 1
    assert [torn[f"{phase}_unreadable_images"] for phase in ("train", "eval", "predict")] == [1, 1, 1]


@pytest.mark.parametrize(("kind", "strategy"), pairs_at(2))
def test_two_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, two: dict[str, Ran], alone: dict[str, Ran]
) -> None:
    assert_same(two[f"{kind}_{strategy}"], alone[kind])
    assert_same_predictions(two[f"{kind}_{strategy}"], alone[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), pairs_at(4))
def test_four_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, four: dict[str, Ran], alone: dict[str, Ran]
) -> None:
    """Ranks without a row: in the last step of an epoch, in the test split and, of a few rows, in every step."""
    assert_same(four[f"{kind}_{strategy}"], alone[kind])
    assert_same_predictions(four[f"{kind}_{strategy}"], alone[kind])


def test_rank_0_writes_and_says_everything_once(folder: Path, two: dict[str, Ran]) -> None:
    files = [watched(two["mixed_ddp"], rank)["files"] for rank in (0, 1)]
    assert {Counter(files[0])[page] for page in PAGES} == {1}, files
    assert not files[1]
    out = (folder / "two" / "out.txt").read_text()
    lines = own_lines(out)
    assert len(lines) == out.count("[rank 0]")
    for start, runs in (("all results: ", len(two)), (r"device  .* x 2", len(two) + 1)):  # also the one that stopped
        assert len([line for line in lines if re.match(start, line)]) == runs, (start, out)


def test_statistics_of_batches_are_those_of_rank_0(
    image_classification: ModuleType, flags: dict[str, list[str]], two: dict[str, Ran], tmp_path: Path
) -> None:
    """A model with batch normalisation trains on each rank's own statistics: of another size it is another model.

    But one model is evaluated on all ranks, the one that is saved.
    """
    trained = two["resnet_ddp"]
    how = ["--model_name_or_path", str(trained.folder), "--do_train", "False", "--use_cpu"]
    image_classification.main([*flags["resnet"], *how, "--output_dir", str(tmp_path)])
    evaluated = Ran(tmp_path)
    expected = {name: value for name, value in trained.figures().items() if not name.startswith("train_")}
    assert evaluated.figures() == pytest.approx(expected, abs=1e-5)
    assert_same_predictions(evaluated, trained)
    assert trained.weights()["resnet.embedder.embedder.normalization.num_batches_tracked"] == 18


# --- Images that cannot be read ---------------------------------------------------------------------------------------


def test_an_image_that_one_rank_cannot_read_ends_all(folder: Path, two: dict[str, Ran]) -> None:
    """Each of them says which one it is; its own error, or that of the rank that met it."""
    said = [(folder / "two" / "stopped" / f"error-rank{rank}.txt").read_text() for rank in (0, 1)]
    path = folder / "torn" / "train" / ANIMALS[0] / "torn.png"
    line = f"(rank [01]: )?{path} cannot be read as an image: .*; mend or remove it, or give --on_bad_image skip"
    assert all(re.fullmatch(line, one) for one in said), said
    assert sorted(one.startswith("rank") for one in said) == [False, True], said


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_two_ranks_go_on_where_they_stopped_bit_for_bit(two: dict[str, Ran]) -> None:
    """With the views and mixtures of a run that was not stopped, although worker processes make them now."""
    straight, resumed = two["mixed_ddp"], two["resumed"]
    for column in ("loss", "grad_norm"):
        assert resumed.column(column) == straight.column(column)[STOP:]
    assert_same_weights(resumed, straight, 0)
    assert predictions(resumed) == predictions(straight)


@pytest.mark.slow
def test_four_ranks_go_on_where_two_stopped(four: dict[str, Ran], alone: dict[str, Ran]) -> None:
    assert_same(four["resumed"], alone["mixed"], last=STEPS - STOP)


def test_one_process_goes_on_where_two_ranks_stopped(
    image_classification: ModuleType,
    flags: dict[str, list[str]],
    folder: Path,
    two: dict[str, Ran],
    alone: dict[str, Ran],
    tmp_path: Path,
) -> None:
    image_classification.main([*resuming(flags["mixed"], 1, folder), "--output_dir", str(tmp_path)])
    assert_same(Ran(tmp_path), alone["mixed"], last=STEPS - STOP)


# --- On the simulated device ------------------------------------------------------------------------------------------


def on_cards(size: int, mode: str, folder: Path, flags: dict[str, list[str]], kinds: tuple[str, ...]) -> dict[str, Ran]:
    plan = Plan("image_classification", folder / f"{mode}{size}")
    for kind in kinds:
        longer = [] if kind == "resnet" else LONGER
        plan.add(kind, [*flags[kind], *longer, *sizes(kind, size)], watch=True)
    report = str(plan.folder / "report.json")
    return plan.run(size, mode=mode, HPU_SIMULATOR_DEVICES=str(size), HPU_SIMULATOR_JSON=report)


@pytest.fixture(scope="module")
def lazy(folder: Path, flags: dict[str, list[str]]) -> dict[str, Ran]:
    return on_cards(2, "lazy", folder, flags, (*ON_CARDS, "resnet"))


@pytest.fixture(scope="module", params=[1, 2])
def eager(folder: Path, flags: dict[str, list[str]], request: pytest.FixtureRequest) -> Ran:
    """On one card and on two."""
    return on_cards(request.param, "eager", folder, flags, ("mixed",))["mixed"]


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
def test_two_cards_have_the_numbers_of_one_cpu(kind: str, lazy: dict[str, Ran], alone: dict[str, Ran]) -> None:
    assert_same_losses(lazy[kind], alone[f"{kind}_longer"])
    assert lazy[kind].figures() == pytest.approx(alone[f"{kind}_longer"].figures(), abs=1e-4)
    assert lazy[kind].metrics["train_data_wait_seconds"] >= 0
    facts = lazy[kind].metrics["run"]["device"]
    assert (facts["name"], facts["execution_mode"], facts["world_size"]) == ("gaudi2", "lazy", 2)


@pytest.mark.compiles
def test_so_have_they_in_eager_mode(eager: Ran, alone: dict[str, Ran]) -> None:
    assert_same_losses(eager, alone["mixed_longer"])
    assert eager.metrics["run"]["device"]["execution_mode"] == "eager"


@pytest.mark.compiles
def test_statistics_of_batches_on_cards_are_those_of_two_ranks(lazy: dict[str, Ran], two: dict[str, Ran]) -> None:
    assert_same_losses(lazy["resnet"], two["resnet_ddp"])
    assert lazy["resnet"].figures() == pytest.approx(two["resnet_ddp"].figures(), abs=1e-4)
    kinds = {tuple(kind) for rank in (0, 1) for kind in watched(lazy["resnet"], rank)["collectives"]}
    assert {dtype for _, dtype in kinds} <= {"float32", "int32", "int64"}, "HCCL lacks the others"


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_steady_step_on_two_cards_compiles_nothing_and_waits_for_nothing(
    rank: int, kind: str, lazy: dict[str, Ran]
) -> None:
    assert_steady(lazy[kind], rank, steps=12)


@pytest.mark.compiles
def test_a_steady_step_in_eager_mode_waits_for_nothing(eager: Ran) -> None:
    _, waits = zip(*watched(eager, 0)["steps"], strict=True)
    assert len(waits) == 12
    assert set(waits[2:]) == {waits[2]}, waits


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ON_CARDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_waits_once_a_batch(rank: int, kind: str, lazy: dict[str, Ran]) -> None:
    """For the rows' outputs; and once at the end, for the sum of the losses. Before, rank 0 hands out its buffers."""
    buffers = {"swin": 4}.get(kind, 0)
    for batches, waits in watched(lazy[kind], rank)["evaluations"]:
        assert waits == buffers + batches + 1


@pytest.mark.compiles
@pytest.mark.parametrize(("kind", "rows", "batches", "labels"), [("plain", 2, 4, 8), ("mixed", 4, 2, 8 + 8 + 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_pixels_travel_as_bytes(
    rank: int, kind: str, rows: int, batches: int, labels: int, lazy: dict[str, Ran]
) -> None:
    """To each card, per row: three channels of 16 x 16 bytes, class and weight, or two classes, share and weight.

    And a window's scale, of four bytes; nothing else in a steady step. An epoch's last window is one batch a card.
    """
    copied = np.diff(watched(lazy[kind], rank)["copied"])
    batch = rows * (3 * 16 * 16 + labels + 4)
    assert copied[2:].tolist() == [batches * batch + 4, batches * batch + 4, batch + 4] * 3


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cards_can_do_all_that_is_asked_of_them(rank: int, lazy: dict[str, Ran]) -> None:
    """No collective on a dtype that they lack, no number that is too large, no shape that depends on values."""
    report = json.loads((lazy["plain"].folder.parent / f"report-rank{rank}.json").read_text())
    found = [one["title"] for one in report["findings"]]
    assert not [one for one in report["findings"] if one["severity"] == "error"], found
    assert not [title for title in found if title.startswith("shape depends")], found
