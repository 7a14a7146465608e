"""From rows to batches of few, declared shapes: length buckets, windows, filler rows of zero weight, position."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from core import distributed
from core.errors import UserError, say

IGNORE_INDEX = -100  # torch's cross-entropy leaves these targets out
Batch = dict[str, torch.Tensor]


def pad_rows(rows: Sequence[Sequence[int]], length: int, value: int) -> torch.Tensor:
    """Cut or pad rows of token numbers on the right to one length: (rows, length), int64."""
    padded = [[*row[:length], *[value] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), length)


@dataclass
class Window:
    """The micro-batches of one optimiser step. Filler rows are in no count, and counts are those of all ranks.

    Attributes:
        batches: this rank's micro-batches on the host, each of the declared batch size, as many as on other ranks.
        rows: real rows.
        tokens: their tokens, on all axes together.
        targets: their targets that bear loss: labels other than -100.
        row_ids: the positions of this rank's real rows in the data set, in the order of its batches.
        last_in_epoch: whether the epoch ends after it.
    """

    batches: list[Batch]
    rows: int
    tokens: int
    targets: int
    row_ids: list[int]
    last_in_epoch: bool

    def scale(self) -> torch.Tensor:
        """Ranks / targets, a scalar tensor: as a Python number it would be a constant of the graph, new at each step.

        The sum of a rank's token losses times this, averaged over the ranks, is the loss per target of the window.
        """
        return torch.tensor(distributed.world_size() / max(self.targets, 1))


def require_rows(count: int, split: str, args: Namespace) -> None:
    """Raise a `UserError` if there is no row, or too few for one optimiser step: before a model is loaded."""
    window = args.per_device_train_batch_size * args.gradient_accumulation_steps * distributed.world_size()
    if count == 0:
        raise UserError(f"the {split} split has no rows")
    if split == "train" and args.dataloader_drop_last and count < window:
        raise UserError(f"--dataloader_drop_last: {count} rows make no optimiser step of {window} rows; leave it out")


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


def fill(batch: Batch, size: int, real: int | None = None) -> Batch:
    """Fill a short batch to ``size`` with rows that weigh nothing, and add ``row_weights`` of shape (size,).

    Filler repeats the first row, so that no attention row is empty; its ``labels`` are all -100. The first ``real``
    rows count (None: all that are there).
    """
    rows = len(next(iter(batch.values())))
    missing, real = size - rows, rows if real is None else real
    if missing:
        batch = {key: torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for key, value in batch.items()}
    if real < size and "labels" in batch:
        batch["labels"][real:] = IGNORE_INDEX
    batch["row_weights"] = torch.cat([torch.ones(real), torch.zeros(size - real)])
    return batch


def share(rows: list[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Cut a window into micro-batches of at most ``batch_size`` rows, dealt out to the ranks in turn.

    Every rank gets the same number, since ranks that do unequal work wait for ever: some of the last may be empty.
    """
    parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    parts += [[]] * (-len(parts) % world_size)
    return parts[rank::world_size]


class MicroBatches(Dataset):
    """Micro-batch number i of an epoch, made when asked for: in a worker process, if there are any.

    Args:
        parts: per micro-batch, its rows (none: it is all filler), the row that filler repeats, and the padded shape.
    """

    def __init__(self, loader: BatchLoader, parts: list[tuple[list[int], int, tuple[int, ...]]]) -> None:
        self.loader, self.parts = loader, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: int) -> Batch:
        real, filler, shape = self.parts[number]
        rows = [self.loader.dataset[row] for row in real or [filler]]
        return fill(self.loader.collate(rows, shape), self.loader.batch_size, len(real))


class BatchLoader:
    """Windows of micro-batches over a data set, epoch by epoch.

    Args:
        dataset: rows by number.
        collate: makes a batch of equal tensors from rows and the shape to pad them to.
        lengths: per row, its length on each axis.
        buckets: the declared shapes.
        batch_size: rows of a micro-batch.
        accumulation: micro-batches of a window on each rank.
        seed: shuffles each epoch anew; None keeps the order.
        drop_last: leave an epoch's short window out.
        workers: processes that make batches ahead.
        pin_memory: page-locked batches, for copies that do not wait.

    Raises:
        UserError: no window can be made.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any], tuple[int, ...]], Batch],
        lengths: Sequence[Sequence[int]],
        buckets: list[tuple[int, ...]],
        batch_size: int,
        accumulation: int = 1,
        seed: int | None = None,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.collate, self.buckets = dataset, collate, buckets
        self.batch_size, self.accumulation, self.seed, self.drop_last = batch_size, accumulation, seed, drop_last
        self.workers, self.pin_memory = workers, pin_memory
        self.tokens_of_row = [sum(length) for length in lengths]
        self.bucket_of_row = [assign(length, buckets) for length in lengths]
        self.window = batch_size * accumulation * distributed.world_size()
        rows, window = len(lengths), self.window
        self.windows_per_epoch = rows // window if drop_last else -(-rows // window)
        if self.windows_per_epoch == 0:
            raise UserError(f"{rows} rows make no optimiser step of {window} rows; give more rows or smaller batches")
        if drop_last and rows % window:
            say(f"dataloader_drop_last: {rows % window} of {rows} rows are left out of each epoch")

    @classmethod
    def from_arguments(
        cls,
        args: Namespace,
        dataset: Any,
        collate: Callable[[list[Any], tuple[int, ...]], Batch],
        lengths: Sequence[Sequence[int]],
        limits: Sequence[int],
        train: bool,
    ) -> BatchLoader:
        """Make a loader as the shared flags say: shuffled windows to train on, rows in order to evaluate.

        ``limits`` are the largest length per axis; with ``--pad_to_max_length`` every row is padded to it.
        """
        seed = args.seed if args.data_seed is None else args.data_seed
        buckets = make_buckets(lengths, limits, 1 if args.pad_to_max_length else args.length_buckets)
        batch_size = args.per_device_train_batch_size if train else args.per_device_eval_batch_size
        pinned = args.non_blocking_data_copy and torch.accelerator.is_available()
        options: dict[str, Any] = {"workers": args.dataloader_num_workers, "pin_memory": pinned}
        if train:
            accumulation, drop_last = args.gradient_accumulation_steps, args.dataloader_drop_last
            options |= {"accumulation": accumulation, "seed": seed, "drop_last": drop_last}
        return cls(dataset, collate, lengths, buckets, batch_size, **options)

    def order(self) -> dict[str, Any]:
        """What the rows' order depends on: a position in an epoch means the same rows only where this is equal."""
        return {
            "rows": len(self.tokens_of_row),
            "window": self.window,
            "seed": self.seed,
            "buckets": [list(shape) for shape in self.buckets],
            "drop_last": self.drop_last,
        }

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Yield the epoch's windows from number ``start`` on; earlier ones are skipped, not made.

        Every rank knows a window's rows, but only its own part's targets: the ranks meet in each window, on the host.
        """
        plan = plan_epoch(self.bucket_of_row, self.window, self.seed, epoch, self.drop_last)
        shares, parts = [], []
        for rows, bucket in zip(plan.windows[start:], plan.buckets[start:], strict=True):
            mine = share(rows, self.batch_size, distributed.rank(), distributed.world_size())
            parts += [(part, rows[0], self.buckets[bucket]) for part in mine]
            shares.append(mine)
        # The loader draws seeds for its workers: from a generator of its own, or the number of workers would move
        # the global one and with it every dropout mask.
        options = {"num_workers": min(self.workers, len(parts)), "pin_memory": self.pin_memory}
        generator = torch.Generator().manual_seed(0)
        batches = iter(DataLoader(MicroBatches(self, parts), batch_size=None, generator=generator, **options))
        for number, mine in enumerate(shares):
            rows = plan.windows[start + number]
            window = distributed.together(partial(list, islice(batches, len(mine))))  # a row that one rank cannot read
            targets = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in window if "labels" in batch)
            targets = int(distributed.sum_over_ranks([targets])[0])
            tokens, ids = sum(self.tokens_of_row[row] for row in rows), [row for part in mine for row in part]
            yield Window(window, len(rows), tokens, targets, ids, number + 1 == len(shares))
