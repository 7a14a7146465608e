"""Which rows an optimiser step takes, and in which padded shape: pure functions of lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def make_buckets(
    lengths: Sequence[Sequence[int]], limits: Sequence[int], count: int, multiple: int = 8
) -> list[tuple[int, ...]]:
    """Declare at most ``count`` padded shapes from the quantiles of the rows' lengths.

    Args:
        lengths: per row, one length per axis, e.g. (source, target).
        limits: largest length per axis.
        count: 1 means one shape, the limits themselves.
        multiple: shapes are rounded up to it, within the limits.

    Returns:
        Shapes, smallest first; each axis grows from one to the next, and the last one holds every row.
    """
    if count == 1 or not lengths:
        return [tuple(limits)]
    columns = zip(zip(*lengths, strict=True), limits, strict=True)
    axes = [sorted(min(length, limit) for length in axis) for axis, limit in columns]
    shapes = []
    for part in range(1, count + 1):
        at = -(-len(lengths) * part // count) - 1
        rounded = [max(1, -(-axis[at] // multiple)) * multiple for axis in axes]
        shapes.append(tuple(min(length, limit) for length, limit in zip(rounded, limits, strict=True)))
    return sorted(set(shapes))


def assign(length: Sequence[int], buckets: Sequence[tuple[int, ...]]) -> int:
    """Return the smallest bucket that holds a row of this length; longer rows go to the last and are cut there."""
    for number, shape in enumerate(buckets):
        if all(size <= limit for size, limit in zip(length, shape, strict=True)):
            return number
    return len(buckets) - 1


@dataclass
class Plan:
    """The windows of one epoch: row numbers, and the bucket that each window is padded to."""

    windows: list[list[int]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)

    def add(self, rows: list[int], bucket: int) -> None:
        self.windows.append(rows)
        self.buckets.append(bucket)


def plan_epoch(
    bucket_of_row: Sequence[int], window_rows: int, seed: int | None, epoch: int = 0, drop_last: bool = False
) -> Plan:
    """Cut an epoch into windows of ``window_rows`` rows of one bucket.

    A bucket's remainder moves up into the next larger one, so that only one window of an epoch can be short. The rows
    of an optimiser step do not depend on how it is split into micro-batches or ranks, only on (seed, epoch).

    Args:
        bucket_of_row: per row, its bucket.
        window_rows: batch size x accumulation x ranks.
        seed: None keeps the order of the rows.
        epoch: which epoch; in the first, the largest shape comes first, so that memory runs out at once or never.
        drop_last: leave the short window out.
    """
    generator, order = None, range(len(bucket_of_row))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator).tolist()
    rows_of: list[list[int]] = [[] for _ in range(max(bucket_of_row, default=0) + 1)]
    for row in order:
        rows_of[bucket_of_row[row]].append(row)
    plan, carried = Plan(), []
    for bucket, rows in enumerate(rows_of):
        rows = carried + rows
        full = len(rows) - len(rows) % window_rows
        for start in range(0, full, window_rows):
            plan.add(rows[start : start + window_rows], bucket)
        carried = rows[full:]
    if generator is not None:
        shuffled = torch.randperm(len(plan.windows), generator=generator).tolist()
        if epoch == 0 and shuffled:
            largest = max(shuffled, key=lambda number: plan.buckets[number])
            shuffled.remove(largest)
            shuffled.insert(0, largest)
        plan = Plan([plan.windows[number] for number in shuffled], [plan.buckets[number] for number in shuffled])
    if carried and not drop_last:
        plan.add(carried, len(rows_of) - 1)
    return plan


def share(rows: list[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Cut a window into micro-batches of at most ``batch_size`` rows, dealt out to the ranks in turn.

    Every rank gets the same number, since ranks that do unequal work wait for ever: some of the last may be empty.
    """
    parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    parts += [[]] * (-len(parts) % world_size)
    return parts[rank::world_size]
