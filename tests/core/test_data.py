"""Few declared shapes, filler of zero weight, an order that depends on (seed, epoch) alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from core import distributed
from core.arguments import parse_arguments
from core.data import IGNORE_INDEX, BatchLoader, assign, fill, make_buckets, plan_epoch, require_rows, share
from core.errors import UserError


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


def test_buckets_hold_every_row_and_grow_on_both_axes() -> None:
    lengths = lengths_of(200)
    buckets = make_buckets(lengths, (23, 23), 4)
    assert 1 < len(buckets) <= 4
    assert buckets[-1] == (23, 23)
    for small, large in itertools.pairwise(buckets):
        assert small[0] <= large[0]
        assert small[1] <= large[1]
    for length in lengths:
        shape = buckets[assign(length, buckets)]
        assert length[0] <= shape[0]
        assert length[1] <= shape[1]


def test_buckets_follow_the_rows_and_stay_within_the_limits() -> None:
    assert make_buckets([(5, 3)] * 10, (1024, 128), 4) == [(8, 8)]
    assert make_buckets([(5, 3)] * 10, (1024, 128), 1) == [(1024, 128)]
    assert make_buckets([(5000, 300)] * 10, (1024, 128), 4) == [(1024, 128)]
    assert assign((5000, 1), [(8, 8), (1024, 128)]) == 1


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


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 13, 22])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_comes_once_over_the_ranks_which_do_equal_work(rows: int, world: int) -> None:
    """With one row or none for a rank, too; and the rows of a window are the same at any number of ranks."""
    for batch, accumulation, epoch in itertools.product((1, 4, 8, 32), (1, 3), (0, 1)):
        windows = plan_epoch([0] * rows, batch * accumulation * world, 5, epoch).windows
        seen = []
        for window in windows:
            shares = [share(window, batch, rank, world) for rank in range(world)]
            assert len({len(one) for one in shares}) == 1
            assert 1 <= len(shares[0]) <= accumulation
            assert all(len(part) <= batch for one in shares for part in one)
            # Only the end is empty, so that a rank's real rows come first.
            assert all(one == sorted(one, key=len, reverse=True) for one in shares)
            dealt = [row for one in shares for part in one for row in part]
            assert sorted(dealt) == sorted(window)
            seen += dealt
        assert sorted(seen) == list(range(rows))


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


def test_order_is_new_in_each_epoch_and_the_same_in_each_run() -> None:
    first = [plan_epoch([0] * 50, 4, seed=7, epoch=epoch).windows for epoch in (0, 1)]
    torch.manual_seed(123)
    again = [plan_epoch([0] * 50, 4, seed=7, epoch=epoch).windows for epoch in (0, 1)]
    assert first == again
    assert first[0] != first[1]
    assert plan_epoch([0] * 50, 4, seed=8).windows != first[0]
    assert plan_epoch([0] * 5, 2, seed=None).windows == [[0, 1], [2, 3], [4]]


def test_skipped_windows_are_the_first_ones() -> None:
    loader = loader_of(lengths_of(30), 4, seed=2)
    whole = [window.row_ids for window in loader.windows(2)]
    for start in range(len(whole) + 1):
        assert [window.row_ids for window in loader.windows(2, start)] == whole[start:]


def test_the_largest_shape_comes_first_in_the_first_epoch() -> None:
    buckets = [0] * 40 + [1] * 8
    for seed in range(10):
        assert plan_epoch(buckets, 4, seed).buckets[0] == 1
    assert {plan_epoch(buckets, 4, seed, epoch=1).buckets[0] for seed in range(10)} == {0, 1}


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
    assert torch.equal(results[0][1], results[1][1])
