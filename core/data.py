"""From rows to batches of few, declared shapes: windows, filler rows of zero weight, random changes, position."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from core import distributed, preemption
from core.buckets import Composition, Part, make_buckets, share
from core.errors import UserError, say
from core.losses import IGNORED as IGNORE_INDEX
from core.splits import PHASES
from core.workers import read_ahead

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[Any], tuple[int, ...]], Batch]
Augment = Callable[[Any, np.random.Generator], Any]
OnUnreadable = Callable[[list[int]], None]


def pad_rows(rows: Sequence[Sequence[int]], length: int, value: int) -> torch.Tensor:
    """Cut or pad rows of token numbers on the right to one length: (rows, length), int64."""
    padded = np.full((len(rows), length), value, dtype=np.int64)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row[:length]
    return torch.from_numpy(padded)


@dataclass
class Window:
    """The micro-batches of one optimiser step. Filler rows are in no count, and counts are those of all ranks.

    Attributes:
        batches: this rank's micro-batches on the host, of the declared batch size, as many as on other ranks.
        rows, tokens: real rows whose content could be read, and their tokens, on all axes together.
        targets: their targets that bear loss: labels other than -100.
        row_ids: the positions of this rank's real rows in the data set, read or not, in the order of its batches.
        last_in_epoch: whether the epoch ends after it.
        unreadable: the positions of all ranks' rows that could not be read, sorted.
        asked_to_end: whether any rank was asked to end, see `core.preemption`.
    """

    batches: list[Batch]
    rows: int
    tokens: int
    targets: int
    row_ids: list[int]
    last_in_epoch: bool
    unreadable: list[int] = field(default_factory=list)
    asked_to_end: bool = False

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


def chosen_rows(rows: Any, split: str, args: Namespace) -> Any:
    """Return a split's rows, ``--max_<phase>_samples`` at most, drawn: those of a kind lie together. Not too few."""
    limit = getattr(args, f"max_{PHASES[split]}_samples")
    if limit and limit < len(rows):
        rows = rows.shuffle(seed=args.seed).select(range(limit))
    require_rows(len(rows), split, args)
    return rows


def fill(batch: Batch, size: int, real: int | None = None) -> Batch:
    """Fill a short batch to ``size`` with rows that weigh nothing, and add ``row_weights`` of shape (size,).

    Filler repeats the first row, so that no attention row is empty; its ``labels`` are all -100, and it is never
    ``unreadable``. The first ``real`` rows count (None: all that are there).
    """
    rows = len(next(iter(batch.values())))
    missing, real = size - rows, rows if real is None else real
    if missing:
        batch = {key: torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for key, value in batch.items()}
    if real < size and "labels" in batch:
        batch["labels"][real:] = IGNORE_INDEX
    if "unreadable" in batch:
        batch["unreadable"][real:] = False
    batch["row_weights"] = torch.cat([torch.ones(real), torch.zeros(size - real)])
    return batch


def changed(loader: Any, row: Any, number: int, epoch: int) -> Any:
    """Return a row with its random change, if ``loader`` has one, drawn from (seed, epoch, row number) alone."""
    if loader.augment is None:
        return row
    return loader.augment(row, np.random.default_rng([loader.augment_seed, epoch, number]))


def make_batch(loader: Any, row: Callable[[int], Any], part: Part, epoch: int) -> Batch:
    """Make one micro-batch as ``loader`` says: its ``augment`` and ``augment_seed``, ``collate`` and ``batch_size``.

    Neither workers, ranks, batch size nor a resume move a row's random change.

    Args:
        row: gives a row by its number.
        part: the micro-batch's rows (none: it is all filler), the row that filler repeats, and the padded shape.
    """
    real, filler, shape = part
    rows = [changed(loader, row(number), number, epoch) for number in real or [filler]]
    return fill(loader.collate(rows, shape), loader.batch_size, len(real))


def take_unreadable(batches: list[Batch], row_ids: list[int]) -> list[int]:
    """Take the mark ``unreadable`` out of a rank's micro-batches; returns its rows that had it: they weigh nothing."""
    found, numbers = [], iter(row_ids)
    for batch in batches:
        rows = list(islice(numbers, int(batch["row_weights"].sum())))  # the real ones, which come first
        marks = batch.pop("unreadable", None)
        if marks is not None:
            batch["row_weights"][marks] = 0
            found += [row for row, marked in zip(rows, marks.tolist(), strict=False) if marked]
    return found


def make_window(batches: list[Batch], rows: int, tokens: int, row_ids: list[int], last: bool) -> Window:
    """Make a window of this rank's micro-batches; the ranks meet here, on the host, to count their targets.

    Args:
        batches: may hold ``unreadable``, bool of shape (rows,): where True, a row's content could not be read, and
            ``collate`` left it without targets. The mark is taken out, and the row counts no more.
        rows: real rows, those of all ranks; ``tokens`` are theirs.
        row_ids: this rank's own.
    """
    mine = take_unreadable(batches, row_ids)
    targets = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches if "labels" in batch)
    targets, count, asked = map(int, distributed.sum_over_ranks([targets, len(mine), float(preemption.asked())]))
    of_ranks = distributed.gather_rows(torch.tensor(mine, dtype=torch.int64)) if count else []
    unreadable = sorted(row for rows in of_ranks for row in rows.tolist())
    return Window(batches, rows - count, tokens, targets, row_ids, last, unreadable, bool(asked))


def loader_options(args: Namespace, train: bool) -> dict[str, Any]:
    """What the shared flags say of a loader: shuffled windows to train on, rows in order to evaluate."""
    seed = args.seed if args.data_seed is None else args.data_seed
    options = {
        "batch_size": args.per_device_train_batch_size if train else args.per_device_eval_batch_size,
        "workers": args.dataloader_num_workers,
        "pin_memory": args.non_blocking_data_copy and not args.use_cpu and torch.accelerator.is_available(),
        "augment_seed": seed if train else seed + 1,  # the rows of both have the same numbers
    }
    if train:
        options["accumulation"] = args.gradient_accumulation_steps
        options |= {"seed": seed, "drop_last": args.dataloader_drop_last}
    return options


class MicroBatches(Dataset):
    """Micro-batch number i of an epoch, made when asked for: in a worker process, if there are any.

    A `UserError` is returned: one that is raised in a worker arrives as the text of a traceback.
    """

    def __init__(self, loader: BatchLoader, rows: np.ndarray, epoch: int, start: int) -> None:
        self.loader, self.epoch, self.rows = loader, epoch, rows[start * loader.window :]
        self.at = loader.batch_size, distributed.rank(), distributed.world_size()
        self.together = loader.batch_size * distributed.world_size()  # a window is a multiple of it
        self.first = loader.accumulation if epoch == start == 0 else 0  # how many are of the first window of all

    def __len__(self) -> int:
        return -(-len(self.rows) // self.together)

    def __getitem__(self, number: int) -> Batch | UserError:
        rows = self.rows[number * self.together : (number + 1) * self.together].tolist()
        (part,) = self.loader.composition.parts(rows, *self.at, first=number < self.first)
        try:
            return make_batch(self.loader, self.loader.dataset.__getitem__, part, self.epoch)
        except UserError as error:
            return error


class BatchLoader:
    """Windows of micro-batches over a data set, epoch by epoch.

    Args:
        dataset: rows by number.
        collate: makes a batch of equal tensors from rows and the shape to pad them to; for marks, see `make_window`.
        lengths: per row, its length on each axis: a list, or an array of shape (rows, axes).
        buckets: the declared shapes.
        batch_size: rows of a micro-batch.
        accumulation: micro-batches of a window on each rank.
        seed: shuffles each epoch anew; None keeps the order.
        drop_last: leave an epoch's short window out.
        workers: processes that make batches ahead.
        pin_memory: page-locked batches, for copies that do not wait.
        augment: returns a row changed at random, by the generator that it is given; the row itself it leaves as it is.
        augment_seed: of those changes, which are new in each epoch.
        on_unreadable: is called on all ranks alike with what of a window is unreadable, if anything, when it is made.

    Raises:
        UserError: no window can be made.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        lengths: Any,
        buckets: list[tuple[int, ...]],
        batch_size: int,
        accumulation: int = 1,
        seed: int | None = None,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
        augment: Augment | None = None,
        augment_seed: int = 0,
        on_unreadable: OnUnreadable | None = None,
    ) -> None:
        self.dataset, self.collate, self.buckets = dataset, collate, buckets
        self.augment, self.augment_seed, self.on_unreadable = augment, augment_seed, on_unreadable
        self.batch_size, self.accumulation, self.seed, self.drop_last = batch_size, accumulation, seed, drop_last
        self.workers, self.pin_memory = workers, pin_memory
        self.window = window = batch_size * accumulation * distributed.world_size()
        rows, self.composition = len(lengths), Composition(lengths, buckets, window, seed, drop_last)
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
        collate: Collate,
        lengths: Any,
        limits: Sequence[int],
        train: bool,
        augment: Augment | None = None,
        on_unreadable: OnUnreadable | None = None,
    ) -> BatchLoader:
        """Make a loader as the shared flags say, see `loader_options`; every evaluation draws the same changes.

        ``limits`` are the largest length per axis; with ``--pad_to_max_length`` every row is padded to it.
        """
        buckets = make_buckets(lengths, limits, 1 if args.pad_to_max_length else args.length_buckets)
        options = loader_options(args, train) | {"augment": augment, "on_unreadable": on_unreadable}
        return cls(dataset, collate, lengths, buckets, **options)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_unreadable": None}  # what a worker process that is not forked gets: it cannot call

    def rows(self) -> Iterator[Any]:
        """Yield every row as an evaluation sees it, on any rank."""
        return (changed(self, self.dataset[number], number, epoch=0) for number in range(len(self.composition.lengths)))

    def declare(self, any_shape: bool) -> int | None:
        """Say whether the device takes ``any_shape``: see `core.buckets.Composition.declare`."""
        return self.composition.declare(any_shape)

    def order(self) -> dict[str, Any]:
        """What the rows' order depends on: a position in an epoch means the same rows only where this is equal."""
        return self.composition.order()

    def follow(self, order: dict[str, Any]) -> None:
        """Keep to the `order` of an older checkpoint, if it can be had."""
        self.composition.follow(order)

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Yield the epoch's windows from number ``start`` on; earlier ones are skipped, not made.

        Every rank knows a window's rows, but only its own part's targets: the ranks meet in each window, on the host.
        A `UserError` that reading a row raises, on any rank and in any process, is raised on all.
        """
        order, tokens = self.composition.rows(epoch), self.composition.tokens
        source = MicroBatches(self, order, epoch, start)
        batches = read_ahead(source, min(self.workers, len(source)), self.pin_memory)
        for at in range(start * self.window, len(order), self.window):
            rows = order[at : at + self.window].tolist()
            mine = share(rows, *source.at)
            window = distributed.together(partial(list, islice(batches, len(mine))))  # a row that one rank cannot read
            made = make_window(window, len(rows), tokens(rows), [*chain(*mine)], last=at + len(rows) == len(order))
            if made.unreadable:
                made.tokens -= tokens(made.unreadable)
                if self.on_unreadable:
                    self.on_unreadable(made.unreadable)
            yield made
