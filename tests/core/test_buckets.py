"""Declared shapes that hold every row, and windows of like lengths that depend on (lengths, seed, epoch) alone."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Sequence
from statistics import correlation, mean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.buckets import GROUPED, Composition, assign, group, make_buckets, plan_epoch, shapes_of, share


def lengths_of(count: int, longest: int = 23, seed: int = 0) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(3, longest), draw.randint(1, longest)) for _ in range(count)]


def planned(bucket_of_row: Sequence[int], window_rows: int, *given: Any, **more: Any) -> list[list[int]]:
    """The windows of `plan_epoch`."""
    return windows_in(plan_epoch(np.array(bucket_of_row), window_rows, *given, **more), window_rows)


def windows_in(rows: np.ndarray, window: int) -> list[list[int]]:
    assert rows.dtype == np.int32
    return [rows[at : at + window].tolist() for at in range(0, len(rows), window)]


def windows_of(made: Composition, epoch: int) -> list[list[int]]:
    return windows_in(made.rows(epoch), made.window)


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


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 13, 22])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_comes_once_over_the_ranks_which_do_equal_work(rows: int, world: int) -> None:
    """With one row or none for a rank, too; and the rows of a window are the same at any number of ranks."""
    for batch, accumulation, epoch in itertools.product((1, 4, 8, 32), (1, 3), (0, 1)):
        windows = planned([0] * rows, batch * accumulation * world, 5, epoch)
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


def test_order_is_new_in_each_epoch_and_the_same_in_each_run() -> None:
    first = [planned([0] * 50, 4, seed=7, epoch=epoch) for epoch in (0, 1)]
    torch.manual_seed(123)
    again = [planned([0] * 50, 4, seed=7, epoch=epoch) for epoch in (0, 1)]
    assert first == again
    assert first[0] != first[1]
    assert planned([0] * 50, 4, seed=8) != first[0]
    assert planned([0] * 5, 2, seed=None) == [[0, 1], [2, 3], [4]]
    assert planned([0] * 5, 2, seed=None, drop_last=True) == [[0, 1], [2, 3]]


def test_the_largest_shape_comes_first_in_the_first_epoch() -> None:
    buckets = [0] * 40 + [1] * 8
    for seed in range(10):
        assert buckets[planned(buckets, 4, seed)[0][0]] == 1
    assert {buckets[planned(buckets, 4, seed, epoch=1)[0][0]] for seed in range(10)} == {0, 1}


# ------------------------------------------------------------------------------------------------------ like lengths


def skewed(count: int, axes: int = 2, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths as those of texts and of what is written about them: few are long."""
    draw = random.Random(seed)
    kinds = ((90, 0.6, 8, 256), (24, 0.5, 4, 64))[:axes]
    return [
        tuple(
            round(min(max(draw.lognormvariate(math.log(middle), spread), least), most))
            for middle, spread, least, most in kinds
        )
        for _ in range(count)
    ]


def composed(lengths: list[tuple[int, ...]], window: int = 16, trims: bool = True, seed: int | None = 1) -> Composition:
    made = Composition(lengths, make_buckets(lengths, (256, 64)[: len(lengths[0])], 4), window, seed)
    made.declare(trims)
    return made


def waste(made: Composition, batch: int = 16, epoch: int = 1) -> float:
    """Padded tokens / real tokens."""
    parts = [part for rows in windows_of(made, epoch) for part in made.parts(rows, batch, 0, 1)]
    return sum(len(rows) * sum(shape) for rows, _, shape in parts) / sum(made.tokens(rows) for rows, *_ in parts)


@pytest.mark.parametrize(("count", "axes", "most"), [(640, 2, 1.25), (640, 1, 1.12), (5000, 2, 1.12), (5000, 1, 1.06)])
def test_little_is_padded(count: int, axes: int, most: float) -> None:
    lengths = skewed(count, axes)
    assert waste(composed(lengths)) < most
    assert waste(composed(lengths, trims=False)) > 1.25  # which is what few shapes cost
    plain = composed(lengths)
    plain.grouped = None
    assert waste(plain) > 1.2  # which is what any rows of a bucket cost
    assert waste(composed(lengths, seed=None), epoch=0) < most  # of an evaluation, too
    assert waste(composed(lengths, window=64)) < most + 0.06


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 200, 1001])
def test_every_row_comes_once_in_windows_that_their_bucket_holds(rows: int, seed: int | None) -> None:
    lengths = skewed(rows)
    made = composed(lengths, seed=seed)
    for epoch in (0, 1):
        windows = windows_of(made, epoch)
        assert sorted(itertools.chain(*windows)) == list(range(rows))
        assert [len(window) for window in windows] == [16] * (rows // 16) + [rows % 16] * bool(rows % 16)
        for window in windows:
            assert window == sorted(window, key=lambda row: -sum(lengths[row]))
        of_window = [[made.bucket_of_row[row] for row in window] for window in windows]
        over = sum(bucket < max(buckets) for buckets in of_window for bucket in buckets)
        assert over <= 15 * (len(made.buckets) - 1)  # what of a smaller one makes no whole window


def test_windows_are_new_in_each_epoch_and_the_same_in_each_run() -> None:
    made, again = composed(skewed(640)), composed(skewed(640))
    epochs = [{frozenset(window) for window in windows_of(made, epoch)} for epoch in range(4)]
    assert [again.rows(epoch).tolist() for epoch in range(4)] == [made.rows(epoch).tolist() for epoch in range(4)]
    for one, other in itertools.combinations(epochs, 2):
        assert len(one & other) <= 2  # of 40
    pairs = [{frozenset(pair) for window in epoch for pair in itertools.combinations(window, 2)} for epoch in epochs]
    assert len(pairs[1] & pairs[2]) < 0.4 * len(pairs[1])


def test_the_step_number_says_nothing_of_lengths() -> None:
    lengths = skewed(640)
    found = []
    for seed in range(60):
        windows = windows_of(composed(lengths, seed=seed), epoch=1)
        found.append(correlation(range(len(windows)), [mean(sum(lengths[row]) for row in rows) for rows in windows]))
    assert abs(mean(found)) < 3 / math.sqrt(60 * 40)
    assert max(map(abs, found)) < 0.6


def test_rows_of_one_length_stay_in_their_order() -> None:
    """And where one shape holds all rows, nothing is composed: checkpoints of before mean the same rows."""
    rows = np.array(random.Random(0).sample(range(100), 100))
    for lengths in ([(17, 5)] * 100, [(17 + row % 8, 5) for row in range(100)]):  # 24 in a batch, all of them
        assert group(rows, np.array(lengths), 10).tolist() == rows.tolist()
    assert planned([0] * 50, 4, 7, lengths=np.full((50, 2), 8)) == planned([0] * 50, 4, 7)
    alike = Composition([(5, 3)] * 50, [(8, 8)], 4, 7)
    assert windows_of(alike, 1) == planned([0] * 50, 4, 7, 1)
    assert alike.order() == {"rows": 50, "window": 4, "seed": 7, "drop_last": False, "buckets": [[8, 8]]}
    assert alike.declare(any_shape=True) == 1
    assert not alike.trims


def test_axes_are_parted_where_most_is_saved() -> None:
    lengths = [(8 + 80 * (row % 2), 8 + 8 * (row % 3)) for row in range(12)]
    rows = group(np.arange(12), np.array(lengths), 2).tolist()
    assert all(lengths[one] == lengths[other] for one, other in zip(rows[::2], rows[1::2], strict=True))


def test_the_order_of_before_is_followed() -> None:
    lengths = skewed(200)
    made, buckets = composed(lengths), make_buckets(lengths, (256, 64), 4)
    order = made.order()
    assert order["grouped"] == GROUPED
    made.follow(order)
    assert made.grouped == GROUPED
    del order["grouped"]
    made.follow(order)
    assert made.order() == order
    for epoch in (0, 1):
        assert windows_of(made, epoch) == planned(assign(lengths, buckets), 16, 1, epoch)


# --------------------------------------------------------------------------------------- the same, said row by row


def parted(rows: list[int], lengths: list[tuple[int, ...]], window: int) -> list[int]:
    """What `group` does, for a few rows."""
    found = []
    for axis in range(len(lengths[0])):
        ordered = sorted(rows, key=lambda row: math.ceil(lengths[row][axis] / 8))
        sizes = [math.ceil(lengths[row][axis] / 8) for row in ordered]
        found += [(at * (sizes[-1] - sizes[at - 1]), ordered, at) for at in range(window, len(rows), window)]
    saved, ordered, at = max(found, key=lambda one: one[0], default=(0, rows, 0))
    return parted(ordered[:at], lengths, window) + parted(ordered[at:], lengths, window) if saved else rows


def stated(
    lengths: list[tuple[int, ...]], shapes: list[tuple[int, ...]], window: int, seed: int | None, epoch: int
) -> list[list[int]]:
    """The windows of an epoch, by the rules alone."""
    order, generator = list(range(len(lengths))), torch.Generator()
    if seed is not None:
        generator.manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator).tolist()
    windows, rows, largest = [], [], 0
    for shape in shapes:
        for row in order:
            holding = [n for n, one in enumerate(shapes) if all(map(lambda a, b: a <= b, lengths[row], one))]
            rows += [row] * (shape == shapes[min(holding, default=len(shapes) - 1)])
        full = len(rows) // window
        largest = len(windows) if full else largest
        blocks = max(min(full, 2), -(-full // GROUPED))
        for block in range(blocks):
            inside = rows[full * block // blocks * window : full * (block + 1) // blocks * window]
            inside = parted(inside, lengths, window) if len(shapes) > 1 else inside
            windows += [inside[at : at + window] for at in range(0, len(inside), window)]
        rows = rows[full * window :]
    if seed is not None:
        shuffled = torch.randperm(len(windows), generator=generator).tolist()
        if epoch == 0 and shuffled:
            shuffled.insert(0, shuffled.pop(next(at for at, number in enumerate(shuffled) if number >= largest)))
        windows = [windows[number] for number in shuffled]
    windows += [rows] * bool(rows)
    return [sorted(one, key=lambda row: -sum(lengths[row])) for one in windows] if len(shapes) > 1 else windows


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2).flatmap(lambda axes: st.lists(st.tuples(*[st.integers(0, 70)] * axes), min_size=1, max_size=60)),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([None, 3]),
    st.integers(0, 1),
)
def test_windows_are_what_the_rules_say(lengths, window: int, count: int, seed: int | None, epoch: int) -> None:
    limits = (64, 40)[: len(lengths[0])]
    quantiles = [math.ceil(len(lengths) * part / count) - 1 for part in range(1, count + 1)]
    sizes = [sorted(axis) for axis in zip(*lengths, strict=True)]
    shapes = [
        tuple(min(max(math.ceil(of[at] / 8), 1) * 8, limit) for of, limit in zip(sizes, limits, strict=True))
        for at in quantiles
    ]
    shapes = [limits] if count == 1 else sorted(set(shapes))
    assert make_buckets(lengths, limits, count) == shapes
    windows = stated(lengths, shapes, window, seed, epoch)
    for drop_last in (False, True):
        made = Composition(lengths, shapes, window, seed, drop_last)
        assert windows_of(made, epoch) == [one for one in windows if len(one) == window or not drop_last]


def test_blocks_of_many_windows_are_what_the_rules_say() -> None:
    lengths = skewed(700)
    made = composed(lengths, window=2)
    assert windows_of(made, 0) == stated(lengths, made.buckets, 2, 1, 0)


def test_to_start_makes_nothing_of_each_row() -> None:
    """Python's lists took 250 bytes a row. What is kept: lengths, bucket and place; the rest is one sort at a time."""
    count = 100_000
    lengths = np.random.default_rng(0).integers(4, 200, (count, 1), dtype=np.int32)
    composed([(1,)] * 20).rows(0)  # imports what it needs
    tracemalloc.start()
    made = Composition(lengths.copy(), make_buckets(lengths, (200,), 4), 16, 1)
    rows = made.rows(0)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == count
    assert kept < 10 * count
    assert peak < 40 * count


# ------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_ranks_take_together_has_one_shape_that_holds_it(world: int, trims: bool) -> None:
    lengths = skewed(203)
    made = composed(lengths, 12 * world, trims)
    limit, real = made.buckets[-1], 0
    for rows in windows_of(made, 1):
        of_ranks = [made.parts(rows, 4, rank, world) for rank in range(world)]
        for turn in zip(*of_ranks, strict=True):
            (shape,) = {shape for *_, shape in turn}
            members = [row for part, *_ in turn for row in part]
            real += len(members)
            assert {filler for _, filler, _ in turn} == {members[0]}
            longest = [max(lengths[row][axis] for row in members) for axis in (0, 1)]
            expected = made.buckets[assign(longest, made.buckets)]
            if trims:
                expected = tuple(min(-(-size // 8) * 8, most) for size, most in zip(longest, limit, strict=True))
            assert shape == expected
    assert real == 203


def test_longer_rows_are_cut_and_empty_ones_have_a_shape() -> None:
    buckets = [(16, 8), (100, 20)]
    few, long = np.array([(0, 0), (3, 9)]), np.array([(5000, 1), (97, 17)])
    assert shapes_of([0, 1], long, buckets, 1, trims=True) == [(100, 8), (100, 20)]
    assert shapes_of([0, 1], few, buckets, 1, trims=True) == [(8, 8), (8, 16)]
    assert shapes_of([0, 1], few, buckets, 1, trims=False) == [(16, 8), (100, 20)]
    assert shapes_of([0, 1], few, buckets, 2, trims=True) == [(8, 16)]


@pytest.mark.parametrize("trims", [True, False])
def test_the_first_window_of_training_is_padded_to_the_largest_shape(trims: bool) -> None:
    for seed in (None, 2):
        made = composed(skewed(203), 16, trims, seed)
        shapes = [shape for *_, shape in made.parts(windows_of(made, 0)[0], 4, 0, 1, first=True)]
        assert (set(shapes) == {made.buckets[-1]}) is (seed is not None)
