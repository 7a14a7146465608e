"""Which rows an optimiser step takes, and in which padded shape: pure functions of lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from core.errors import say

Part = tuple[list[int], int, tuple[int, ...]]
MULTIPLE = 8  # of which padded lengths are; on a CPU in bf16 and fp32, steps of 16 or 32 are no faster than their size
GROUPED = 50  # windows whose rows are put in order of their lengths together


def as_array(lengths: Any, axes: int) -> np.ndarray:
    """Lengths per row, in a list or an array, as int32 of shape (rows, axes)."""
    return np.asarray(lengths, np.int32).reshape(len(lengths), axes)


def make_buckets(lengths: Any, limits: Sequence[int], count: int, multiple: int = MULTIPLE) -> list[tuple[int, ...]]:
    """Declare at most ``count`` padded shapes from the quantiles of the rows' lengths.

    Args:
        lengths: per row, one length per axis, e.g. (source, target): a list, or an array of shape (rows, axes).
        limits: largest length per axis.
        count: 1 means one shape, the limits themselves.
        multiple: shapes are rounded up to it, within the limits.

    Returns:
        Shapes, smallest first; each axis grows from one to the next, and the last one holds every row.
    """
    if count == 1 or not len(lengths):
        return [tuple(limits)]
    at = [-(-len(lengths) * part // count) - 1 for part in range(1, count + 1)]
    quantiles = np.partition(as_array(lengths, len(limits)), at, axis=0)[at]
    shapes = np.minimum(_rounded(np.minimum(quantiles, limits), multiple), limits)
    return sorted(set(map(tuple, shapes.tolist())))


def _rounded(lengths: np.ndarray, multiple: int = MULTIPLE) -> np.ndarray:
    return np.maximum(-(-lengths // multiple), 1) * multiple


def assign(lengths: Any, buckets: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The smallest bucket that holds each row: small integers; longer rows go to the last and are cut there.

    Args:
        lengths: (..., axes).
        buckets: as `make_buckets` declares them.
    """
    lengths = np.asarray(lengths)
    found = np.zeros(lengths.shape[:-1], np.min_scalar_type(len(buckets)))
    for axis, sizes in enumerate(np.asarray(buckets, np.int32).T):
        found = np.maximum(found, np.searchsorted(sizes, lengths[..., axis]).astype(found.dtype))
    return np.minimum(found, len(buckets) - 1)


def group(rows: np.ndarray, lengths: np.ndarray, window_rows: int) -> np.ndarray:
    """Put rows in an order in which each ``window_rows`` of them have like lengths, on every axis.

    They are parted in two, where that saves most padding, and each part again. Lengths that are padded to the same
    multiple are alike: such rows stay in the order that they had.

    Args:
        rows: row numbers, of whole windows.
        lengths: (rows, axes), by row number.
    """
    return rows[_parted(np.arange(len(rows)), -(-lengths[rows] // MULTIPLE), window_rows)]


def _parted(at: np.ndarray, sizes: np.ndarray, window_rows: int) -> np.ndarray:
    """`group` for positions in ``sizes``, (rows, axes). No closure: it would be a cycle, and keep the arrays alive."""
    saved, cut, ends = 0, 0, np.arange(window_rows, len(at), window_rows)
    for of in sizes[at].T if len(ends) else ():
        ordered = np.argsort(of, kind="stable")
        saves = ends * (of[ordered[-1]] - of[ordered[ends - 1]])
        most = saves.argmax()
        if saves[most] > saved:
            saved, cut, best = saves[most], ends[most], ordered
    if not cut:
        return at
    return np.concatenate([_parted(part, sizes, window_rows) for part in (at[best[:cut]], at[best[cut:]])])


def plan_epoch(
    bucket_of_row: np.ndarray,
    window_rows: int,
    seed: int | None,
    epoch: int = 0,
    drop_last: bool = False,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Put an epoch's rows in order: each ``window_rows`` are a window of one bucket, and of like lengths in it.

    A bucket's remainder moves up into the next larger one, so that only the last window can be short. The rows of an
    optimiser step do not depend on how it is split into micro-batches or ranks, only on (seed, epoch).

    Args:
        bucket_of_row: per row, its bucket.
        window_rows: batch size x accumulation x ranks.
        seed: None keeps the order of the rows, as far as ``lengths`` do.
        epoch: which epoch; in the first, the largest shape comes first, so that memory runs out at once or never.
        drop_last: leave the short window out.
        lengths: (rows, axes); a window's longest rows come first. None: any rows of a bucket.

    Returns:
        Row numbers, int32.
    """
    generator, order = None, np.arange(len(bucket_of_row), dtype=np.int32)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator).numpy().astype(np.int32)
    order = order[np.argsort(bucket_of_row[order], kind="stable")]
    ends = np.cumsum(np.bincount(bucket_of_row)) // window_rows  # per bucket, how many windows end in it or before
    full = len(order) // window_rows
    windows, rest = order[: full * window_rows].reshape(full, window_rows), order[full * window_rows :]
    if lengths is not None:
        for first, end in _blocks(ends):
            block = group(windows[first:end].ravel(), lengths, window_rows)
            windows[first:end] = _longest_first(block.reshape(-1, window_rows), lengths)
        rest[:] = _longest_first(rest[None], lengths)
    if generator is not None and full:
        shuffled = torch.randperm(full, generator=generator).numpy()
        if epoch == 0:
            at = np.argmax(shuffled >= ends[ends < full].max(initial=0))  # the first window of the last bucket
            shuffled[: at + 1] = np.roll(shuffled[: at + 1], 1)
        order[: full * window_rows] = windows[shuffled].ravel()
    return order[: full * window_rows] if drop_last else order


def _blocks(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Part each bucket's windows into blocks of equal size, `GROUPED` at most: where each begins and ends.

    At least two: of one, windows would hardly differ between epochs.

    Args:
        ends: per bucket, how many windows end in it or before.
    """
    for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        windows = end - first
        count = max(min(windows, 2), -(-windows // GROUPED))
        for number in range(count):
            yield first + windows * number // count, first + windows * (number + 1) // count


def _longest_first(windows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sort each window, (windows, rows), by its rows' lengths on all axes together."""
    return np.take_along_axis(windows, np.argsort(-lengths[windows].sum(-1), kind="stable"), axis=1)


def share(rows: list[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Cut a window into micro-batches of at most ``batch_size`` rows, dealt out to the ranks in turn.

    Every rank gets the same number, since ranks that do unequal work wait for ever: some of the last may be empty.
    """
    parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    parts += [[]] * (-len(parts) % world_size)
    return parts[rank::world_size]


def shapes_of(
    rows: Sequence[int], lengths: np.ndarray, buckets: Sequence[tuple[int, ...]], together: int, trims: bool
) -> list[tuple[int, ...]]:
    """The padded shapes of a window's micro-batches, one for all that the ranks take at the same time: equal work.

    Args:
        rows: the window's.
        lengths: (rows, axes), by row number.
        buckets: the declared shapes; each shape is the smallest that holds the rows.
        together: rows that the ranks take at the same time.
        trims: cut a shape to the longest row on each axis, rounded up to `MULTIPLE`.
    """
    longest = np.maximum.reduceat(lengths[rows], range(0, len(rows), together))
    shapes = np.asarray(buckets)[assign(longest, buckets)]
    if trims:
        shapes = np.minimum(_rounded(longest), shapes)
    return list(map(tuple, shapes.tolist()))


class Composition:
    """The windows of a loader's epochs, and the shapes of their micro-batches.

    Args:
        lengths: per row, its length on each axis: a list, or an array of shape (rows, axes).
        buckets: the declared shapes.
        window: rows of a window, those of all ranks.
        seed: shuffles each epoch anew; None keeps the order of the rows, as far as their lengths do.
        drop_last: leave an epoch's short window out.

    Attributes:
        trims: whether batches are padded to their own longest row, see `declare`.
        grouped: how many windows are made together of rows of like lengths; None: of any rows of a bucket.
    """

    def __init__(
        self,
        lengths: Any,
        buckets: list[tuple[int, ...]],
        window: int,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.lengths = as_array(lengths, len(buckets[0]))
        self.buckets, self.window, self.seed, self.drop_last = buckets, window, seed, drop_last
        self.bucket_of_row = assign(self.lengths, buckets)
        self.trims, self.grouped = False, GROUPED if len(buckets) > 1 else None

    def declare(self, any_shape: bool) -> int | None:
        """Trim batches where the device takes ``any_shape`` and there is more than one; returns how many there are.

        None: as many as the rows' lengths make.
        """
        self.trims = any_shape and len(self.buckets) > 1
        return None if self.trims else len(self.buckets)

    def order(self) -> dict[str, Any]:
        """What the rows' order depends on."""
        order = {"rows": len(self.lengths), "window": self.window, "seed": self.seed, "drop_last": self.drop_last}
        order["buckets"] = [list(shape) for shape in self.buckets]
        return order | ({"grouped": self.grouped} if self.grouped else {})

    def follow(self, order: dict[str, Any]) -> None:
        """Keep to an `order` of before there were windows of rows of like lengths."""
        if self.grouped and "grouped" not in order:
            self.grouped = None
            say("the checkpoint's windows are of any rows of a bucket, whatever their lengths: so are all of this run")

    def rows(self, epoch: int) -> np.ndarray:
        """The epoch's rows in order, int32: each ``window`` of them are one, and only the last can be short."""
        lengths = self.lengths if self.grouped else None
        return plan_epoch(self.bucket_of_row, self.window, self.seed, epoch, self.drop_last, lengths)

    def parts(self, rows: list[int], batch_size: int, rank: int, world_size: int, first: bool = False) -> list[Part]:
        """A rank's micro-batches of a window: rows, the row that filler repeats, and the padded shape.

        Args:
            first: it is the first window of training, in the largest shape: memory runs out at once or never.
        """
        together = batch_size * world_size
        shapes = shapes_of(rows, self.lengths, self.buckets, together, self.trims)
        if first and self.seed is not None:
            shapes = [self.buckets[-1]] * len(shapes)
        return list(zip(share(rows, batch_size, rank, world_size), rows[::together], shapes, strict=True))

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of rows, on all axes together."""
        return int(self.lengths[rows].sum())
