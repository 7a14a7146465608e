"""Few declared shapes, filler of zero weight, changes and an order that depend on (seed, epoch) alone."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from core import distributed
from core.arguments import parse_arguments
from core.buckets import make_buckets
from core.data import IGNORE_INDEX, BatchLoader, fill, require_rows
from core.errors import UserError
from tests.core.toy import arguments


def lengths_of(count: int, longest: int = 23, seed: int = 0) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(3, longest), draw.randint(1, longest)) for _ in range(count)]


def collate(rows: list[tuple[int, tuple[int, int]]], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Each row is its own number, repeated; labels as many as its second length."""
    inputs, labels = torch.zeros(len(rows), shape[0]), torch.full((len(rows), shape[1]), IGNORE_INDEX)
    for at, (number, (source, target)) in enumerate(rows):
        inputs[at, :source] = number
        labels[at, :target] = number
    return {"inputs": inputs, "labels": labels}


def loader_of(lengths: list[tuple[int, int]], batch: int, count: int = 4, **options) -> BatchLoader:
    buckets = make_buckets(lengths, (23, 23), count)
    return BatchLoader(list(enumerate(lengths)), collate, lengths, buckets, batch, **options)


@pytest.mark.parametrize("rows", [21, 22, 1, 3])
def test_shapes_are_declared_and_the_second_epoch_adds_none(rows: int) -> None:
    loader = loader_of(lengths_of(rows), 4, seed=1)
    met = []
    for epoch in (0, 1):
        met.append({tuple(batch["inputs"].shape) for window in loader.windows(epoch) for batch in window.batches})
    declared = {(4, shape[0]) for shape in loader.buckets}
    assert met[0] <= declared
    assert met[1] <= declared
    assert len(declared) <= 4


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_row_comes_once_an_epoch(batch: int, accumulation: int) -> None:
    lengths = lengths_of(22)
    loader = loader_of(lengths, batch, seed=5, accumulation=accumulation)
    windows = list(loader.windows(0))
    assert len(windows) == loader.windows_per_epoch
    seen = [
        int(row[0])
        for window in windows
        for micro in window.batches
        for row, weight in zip(micro["inputs"], micro["row_weights"], strict=True)
        if weight
    ]
    assert sorted(seen) == list(range(22))
    assert seen == [row for window in windows for row in window.row_ids]
    assert sum(window.rows for window in windows) == 22
    assert sum(window.targets for window in windows) == sum(target for _, target in lengths)
    assert sum(window.tokens for window in windows) == sum(map(sum, lengths))
    assert [window.last_in_epoch for window in windows] == [False] * (len(windows) - 1) + [True]


@pytest.mark.parametrize("rows", [5, 13])
def test_a_rank_without_rows_has_filler_of_the_windows_shape(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """World 2, batch 4: of 5 rows rank 1 has one; of the last 5 of 13 too; then a third rank has none."""
    counts = {}
    for world in (2, 3):
        for rank in range(world):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(distributed, "world_size", lambda world=world: world)
            monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)
            windows = list(loader_of(lengths_of(rows), 4).windows())
            shapes = {tuple(batch["inputs"].shape) for window in windows for batch in window.batches}
            assert {size for size, _ in shapes} == {4}
            real = [int(batch["row_weights"].sum()) for window in windows for batch in window.batches]
            assert sum(real) == sum(len(window.row_ids) for window in windows)
            for window in windows:
                for batch in window.batches:
                    filler = batch["row_weights"] == 0
                    assert (batch["labels"][filler] == IGNORE_INDEX).all()
                    assert (batch["inputs"][filler] == batch["inputs"][0]).all()
            counts[world, rank] = sum(real)
    assert counts[2, 0] + counts[2, 1] == sum(counts[3, rank] for rank in range(3)) == rows
    assert counts[3, 2] == (0 if rows == 5 else 4)


def test_a_window_of_all_ranks_must_fit_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_arguments(
        ["--do_train", "--dataloader_drop_last", "--per_device_train_batch_size", "4"], description=""
    )
    require_rows(4, "train", args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="4 rows make no optimiser step of 8 rows"):
        require_rows(4, "train", args)
    with pytest.raises(UserError, match="the validation split has no rows"):
        require_rows(0, "validation", args)


def test_only_one_window_of_an_epoch_is_short() -> None:
    windows = list(loader_of(lengths_of(101), 4, seed=3, accumulation=2).windows(0))
    assert [window.rows for window in windows] == [8] * 12 + [5]


def test_filler_weighs_nothing() -> None:
    batch = fill({"inputs": torch.arange(6.0).reshape(3, 2), "labels": torch.tensor([[1, 2], [3, 4], [5, 6]])}, 5)
    assert batch["inputs"].shape == (5, 2)
    assert batch["row_weights"].tolist() == [1, 1, 1, 0, 0]
    assert (batch["labels"][3:] == IGNORE_INDEX).all()
    assert (batch["labels"][:3] > 0).all()


def test_the_rows_of_a_window_do_not_depend_on_how_it_is_split() -> None:
    orders = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        loader = loader_of(lengths_of(30), batch, seed=2, accumulation=accumulation)
        orders.append([sorted(window.row_ids) for window in loader.windows(1)])
    assert orders[0] == orders[1] == orders[2] == orders[3]


def test_skipped_windows_are_the_first_ones() -> None:
    loader = loader_of(lengths_of(30), 4, seed=2)
    whole = [window.row_ids for window in loader.windows(2)]
    for start in range(len(whole) + 1):
        assert [window.row_ids for window in loader.windows(2, start)] == whole[start:]


def test_drop_last_says_how_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    loader = loader_of(lengths_of(22), 4, seed=0, drop_last=True)
    assert "2 of 22 rows" in capsys.readouterr().out
    assert [window.rows for window in loader.windows(0)] == [4] * 5


@pytest.mark.parametrize(("rows", "options"), [(0, {}), (3, {"drop_last": True})])
def test_no_update_is_an_error(rows: int, options: dict) -> None:
    with pytest.raises(UserError, match="no optimiser step"):
        loader_of(lengths_of(rows), 4, **options)


def test_workers_change_neither_batches_nor_random_numbers() -> None:
    results = []
    for workers in (0, 2):
        torch.manual_seed(0)
        windows = list(loader_of(lengths_of(22), 4, seed=1, workers=workers).windows(0))
        results.append(([batch["inputs"] for window in windows for batch in window.batches], torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    torch.manual_seed(0)
    assert torch.equal(results[0][1], untouched := torch.rand(3))
    assert torch.equal(results[1][1], untouched)


def noisy(row: tuple[int, tuple[int, int]], draw: np.random.Generator) -> tuple[float, tuple[int, int]]:
    return row[0] + draw.random(), row[1]


def changes(loader: BatchLoader, epoch: int = 0, start: int = 0) -> dict[int, float]:
    """By row, what it became."""
    found = {}
    for window in loader.windows(epoch, start):
        real = [row for batch in window.batches for row in batch["inputs"][batch["row_weights"] > 0]]
        found |= {number: float(row[0]) for number, row in zip(window.row_ids, real, strict=True)}
    return found


def test_a_rows_change_depends_on_seed_epoch_and_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(batch: int = 4, **options) -> BatchLoader:
        options = {"seed": 3, "augment": noisy, "augment_seed": 7, **options}
        return loader_of(lengths_of(22), batch, **options)

    first = changes(loader())
    assert all(row < value < row + 1 for row, value in first.items())
    assert len({round(value % 1, 4) for value in first.values()}) == 22
    for other in (loader(), loader(3), loader(2, accumulation=3), loader(workers=2), loader(seed=None)):
        assert changes(other) == first
    for start in range(len(list(loader().windows()))):
        assert changes(loader(), 0, start).items() <= first.items()
    second = changes(loader(), epoch=1)
    assert all(second[row] != first[row] for row in first)
    assert all(value != first[row] for row, value in changes(loader(augment_seed=8)).items())
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)
    of_ranks = {}
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        of_ranks |= changes(loader())
    assert of_ranks == first


def test_the_change_leaves_filler_without_targets() -> None:
    (window,) = loader_of(lengths_of(1), 4, augment=noisy).windows()
    (batch,) = window.batches
    assert (batch["labels"][1:] == IGNORE_INDEX).all()
    assert (batch["inputs"] == batch["inputs"][0]).all()


def test_every_evaluation_draws_the_same_which_training_does_not(tmp_path: Path) -> None:
    args, lengths = arguments(tmp_path, "--data_seed", "5"), lengths_of(22)
    make = partial(BatchLoader.from_arguments, args, list(enumerate(lengths)), collate, lengths, (23, 23))
    evaluation, train = make(train=False, augment=noisy), make(train=True, augment=noisy)
    first = changes(evaluation)
    assert changes(evaluation) == first
    for epoch in (0, 1):
        drawn = changes(train, epoch)
        assert all(drawn[row] != first[row] for row in first)
    assert changes(make(train=True)) == {row: row for row in range(22)}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_what_an_evaluation_sees_on_any_rank(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, seen, rows = lengths_of(13), [], []
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)

    def noisy(row: tuple[int, tuple[int, int]], draw: np.random.Generator) -> tuple[int, tuple[int, int]]:
        return int(draw.integers(1, 1000)), row[1]

    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loader = loader_of(lengths, 3, augment=noisy, augment_seed=7)
        for window in loader.windows():
            real = [row for batch in window.batches for row in batch["inputs"][batch["row_weights"] > 0, 0].tolist()]
            seen += zip(window.row_ids, real, strict=True)
        rows.append([number for number, _ in loader.rows()])
    assert rows == [[int(number) for _, number in sorted(seen)]] * world
