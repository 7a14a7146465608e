"""Declared shapes that hold every row, and an order of windows that depends on (seed, epoch) alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from core.buckets import assign, make_buckets, plan_epoch, share


def lengths_of(count: int, longest: int = 23, seed: int = 0) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(3, longest), draw.randint(1, longest)) for _ in range(count)]


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


def test_order_is_new_in_each_epoch_and_the_same_in_each_run() -> None:
    first = [plan_epoch([0] * 50, 4, seed=7, epoch=epoch).windows for epoch in (0, 1)]
    torch.manual_seed(123)
    again = [plan_epoch([0] * 50, 4, seed=7, epoch=epoch).windows for epoch in (0, 1)]
    assert first == again
    assert first[0] != first[1]
    assert plan_epoch([0] * 50, 4, seed=8).windows != first[0]
    assert plan_epoch([0] * 5, 2, seed=None).windows == [[0, 1], [2, 3], [4]]


def test_the_largest_shape_comes_first_in_the_first_epoch() -> None:
    buckets = [0] * 40 + [1] * 8
    for seed in range(10):
        assert plan_epoch(buckets, 4, seed).buckets[0] == 1
    assert {plan_epoch(buckets, 4, seed, epoch=1).buckets[0] for seed in range(10)} == {0, 1}
