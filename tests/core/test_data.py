"""Few declared shapes, filler of zero weight, changes and an order that depend on (seed, epoch) alone."""

from __future__ import annotations

import multiprocessing
import random
import time
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

from core import distributed
from core.arguments import parse_arguments
from core.buckets import make_buckets
from core.data import IGNORE_INDEX, BatchLoader, MicroBatches, fill, loader_options, require_rows
from core.errors import UserError
from tests.core.ranks import results, start_ranks
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


@pytest.mark.parametrize(("rows", "drop_last"), [(30, False), (31, False), (31, True), (25, False)])
@pytest.mark.parametrize("start", [0, 2, 4])
def test_micro_batches_are_those_of_the_windows_wherever_they_are_sent(rows: int, drop_last: bool, start: int) -> None:
    """As to a process that is spawned, which gets what is left of the epoch and no list of its rows."""
    loader = loader_of(lengths_of(rows), 3, seed=2, accumulation=2, drop_last=drop_last)
    loader.declare(any_shape=True)
    for epoch in (0, 1):
        windows = list(loader.windows(epoch, start))
        assert all(type(row) is int for window in windows for row in [*window.row_ids, window.tokens])
        expected = [batch for window in windows for batch in window.batches]
        sent = ForkingPickler.dumps(MicroBatches(loader, loader.composition.rows(epoch), epoch, start))
        received = ForkingPickler.loads(sent)
        assert len(received) == len(expected)
        for number, batch in enumerate(expected):
            assert all(torch.equal(value, batch[name]) for name, value in received[number].items())


def trimmed(loader: BatchLoader) -> BatchLoader:
    assert loader.declare(any_shape=True) is None
    return loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trimmed_batches_hold_the_same_rows_in_shorter_shapes(accumulation: int, workers: int) -> None:
    """Also from any start; the first batch of all is as large as any can be."""
    lengths = lengths_of(150)
    options = {"seed": 2, "accumulation": accumulation, "workers": workers}
    plain, short = loader_of(lengths, 8, **options), trimmed(loader_of(lengths, 8, **options))
    assert plain.declare(any_shape=False) == len(plain.buckets) > 1
    assert short.order() == plain.order()
    for epoch, start in ((0, 0), (1, 0), (1, 3)):
        pairs = list(zip(plain.windows(epoch, start), short.windows(epoch, start), strict=True))
        assert [one.last_in_epoch for one, _ in pairs] == [False] * (len(pairs) - 1) + [True]
        for number, (one, other) in enumerate(pairs):
            assert (one.row_ids, one.rows, one.tokens, one.targets) == (
                other.row_ids, other.rows, other.tokens, other.targets,
            )  # fmt: skip
            ids = iter(one.row_ids)
            for whole, cut in zip(one.batches, other.batches, strict=True):
                real = [next(ids) for _ in range(int(whole["row_weights"].sum()))]
                for axis, name in enumerate(("inputs", "labels")):
                    longest = max(lengths[row][axis] for row in real)
                    size = cut[name].shape[1]
                    assert torch.equal(whole[name][:, :size], cut[name])
                    if epoch == number == 0:
                        assert size == short.buckets[-1][axis]
                    else:
                        assert size == min(-(-longest // 8) * 8, 23)
    assert_no_worker()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_have_one_shape_at_a_time(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)
    shapes, rows = [], []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        windows = list(trimmed(loader_of(lengths_of(101), 4, seed=1, accumulation=2)).windows(1))
        shapes.append([[tuple(batch["labels"].shape) for batch in window.batches] for window in windows])
        rows += [row for window in windows for row in window.row_ids]
    assert all(one == shapes[0] for one in shapes)
    assert len({shape for window in shapes[0] for shape in window}) > 1
    assert sorted(rows) == list(range(101))


@pytest.mark.parametrize("flag", [["--pad_to_max_length"], ["--length_buckets", "1"]])
def test_one_shape_that_is_asked_for_is_never_cut(tmp_path: Path, flag: list[str]) -> None:
    args, lengths = arguments(tmp_path, *flag), lengths_of(40, longest=5)
    loader = BatchLoader.from_arguments(args, list(enumerate(lengths)), collate, lengths, (23, 23), train=True)
    assert loader.declare(any_shape=True) == 1
    assert {tuple(batch["inputs"].shape) for window in loader.windows() for batch in window.batches} == {(8, 23)}


def test_drop_last_says_how_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    loader = loader_of(lengths_of(22), 4, seed=0, drop_last=True)
    assert "2 of 22 rows" in capsys.readouterr().out
    assert [window.rows for window in loader.windows(0)] == [4] * 5


@pytest.mark.parametrize(("rows", "options"), [(0, {}), (3, {"drop_last": True})])
def test_no_update_is_an_error(rows: int, options: dict) -> None:
    with pytest.raises(UserError, match="no optimiser step"):
        loader_of(lengths_of(rows), 4, **options)


def test_workers_change_neither_batches_nor_random_numbers() -> None:
    """Rows, their order, their random changes, and what the model draws."""
    torch.manual_seed(0)
    untouched, first = torch.rand(3), None
    for workers in (0, 1, 3):
        torch.manual_seed(0)
        made = loader_of(lengths_of(22), 4, seed=1, workers=workers, accumulation=2, augment=noisy, augment_seed=7)
        windows = [window for epoch, start in ((0, 0), (1, 1)) for window in made.windows(epoch, start)]
        assert torch.equal(torch.rand(3), untouched)
        first = first or windows
        assert [window.row_ids for window in windows] == [window.row_ids for window in first]
        for window, before in zip(windows, first, strict=True):
            for batch, other in zip(window.batches, before.batches, strict=True):
                assert all(torch.equal(value, other[name]) for name, value in batch.items())


def assert_no_worker(within: float = 5.0) -> None:
    until = time.monotonic() + within
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


@pytest.mark.processes
def test_no_worker_outlives_its_epoch() -> None:
    loader = loader_of(lengths_of(22), 4, workers=2)
    whole = loader.windows()
    next(whole)
    assert len(multiprocessing.active_children()) == 2
    for _ in whole:
        pass
    assert_no_worker()
    for _ in loader.windows(1):
        break  # as training does at its last step
    assert_no_worker()


@pytest.mark.parametrize(
    ("flags", "there", "pinned"),
    [
        (["--non_blocking_data_copy"], True, True),
        (["--non_blocking_data_copy"], False, False),
        (["--non_blocking_data_copy", "--use_cpu"], True, False),
        ([], True, False),
    ],
)
def test_memory_is_pinned_for_an_accelerator_alone(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], there: bool, pinned: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    args = parse_arguments(["--do_train", *flags], description="")
    assert loader_options(args, train=True)["pin_memory"] is pinned
    assert loader_options(args, train=False)["pin_memory"] is pinned


class Rows(list):
    """Rows that are (number, lengths); those of ``missing`` end the run."""

    missing: tuple[int, ...] = ()

    def __getitem__(self, number: int) -> tuple[int, tuple[int, int]]:
        if number in self.missing:
            raise UserError(f"row {number}.jpg cannot be\nread; mend it")
        return super().__getitem__(number)


class Marking:
    """Collates, and marks the rows of these numbers as unreadable."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __call__(self, rows: list[tuple[int, tuple[int, int]]], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        batch, marks = collate(rows, shape), torch.tensor([number in self.bad for number, _ in rows])
        batch["inputs"][marks], batch["labels"][marks] = 0, IGNORE_INDEX
        return batch | {"unreadable": marks}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_user_comes_out_of_a_worker_as_one_line(workers: int) -> None:
    loader = loader_of(lengths_of(22), 4, count=1, workers=workers)
    loader.dataset = Rows(loader.dataset)
    loader.dataset.missing = (9, 21)
    seen = []
    with pytest.raises(UserError) as error:
        seen.extend(window.row_ids for window in loader.windows())
    assert str(error.value) == "row 9.jpg cannot be read; mend it"
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]  # those before it were given, in order
    assert_no_worker()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_unreadable_row_counts_no_more_and_keeps_its_place(accumulation: int, workers: int) -> None:
    """Row 20 is the first of the last micro-batch: filler repeats it."""
    lengths, told, bad = lengths_of(22), [], (0, 5, 6, 20)
    options = {"accumulation": accumulation, "workers": workers, "on_unreadable": told.append}
    loader = loader_of(lengths, 4, count=1, **options)
    loader.collate = Marking(*bad)
    windows = list(loader.windows())
    plain = list(loader_of(lengths, 4, count=1, accumulation=accumulation).windows())
    assert [one.row_ids for one in windows] == [one.row_ids for one in plain]
    by_window = [[row for row in one.row_ids if row in bad] for one in windows]
    assert [one.unreadable for one in windows] == by_window
    assert told == [rows for rows in by_window if rows]
    assert not any(one.unreadable for one in plain)
    for one, before in zip(windows, plain, strict=True):
        good = [lengths[row] for row in one.row_ids if row not in one.unreadable]
        assert (one.rows, before.rows) == (len(good), len(one.row_ids))
        assert (one.tokens, one.targets) == (sum(map(sum, good)), sum(target for _, target in good))
        assert not any("unreadable" in batch for batch in one.batches)
        weights = torch.cat([batch["row_weights"] for batch in one.batches])[: len(one.row_ids)].tolist()
        assert weights == [float(row not in one.unreadable) for row in one.row_ids]
    assert sum(float(batch["row_weights"].sum()) for one in windows for batch in one.batches) == 18


def test_filler_is_readable() -> None:
    """Of a rank without rows all is filler, and repeats a row that another rank counts."""
    marks = {"inputs": torch.zeros(2, 1), "unreadable": torch.tensor([True, False])}
    for real, expected in ((2, [True, False, False, False]), (1, [True, False, False, False]), (0, [False] * 4)):
        batch = fill({name: value.clone() for name, value in marks.items()}, 4, real)
        assert batch["unreadable"].tolist() == expected


def test_what_is_called_does_not_have_to_travel_to_a_worker() -> None:
    assert loader_of(lengths_of(4), 2, on_unreadable=lambda rows: None).__getstate__()["on_unreadable"] is None


@pytest.fixture(scope="module")
def on_two() -> list[dict]:
    return results(start_ranks(2, "unreadable", timeout=60))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_agree_on_the_rows_that_one_of_them_cannot_read(on_two: list[dict], workers: int) -> None:
    for found, own in zip(on_two, ([0, 1], [2, 3]), strict=True):
        made = found[f"{workers} False"]
        assert made["told"] == [[6, 7]]
        totals = [one[:4] for one in made["windows"]]
        assert totals == [[[], 4, 4, 4], [[6, 7], 2, 2, 2], [[], 2, 2, 2]]
        assert [one[4] for one in made["windows"]] == [own, [row + 4 for row in own], [8, 9] if own[0] == 0 else []]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_one_ranks_worker_ends_all_and_names_the_rank(on_two: list[dict], workers: int) -> None:
    said = [found[f"{workers} True"] for found in on_two]
    error = "row 6 cannot be read; mend it"
    assert said == [f"UserError: rank 1: {error}", f"UserError: {error}"]
    assert [found["left"] for found in on_two] == [0, 0]


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
