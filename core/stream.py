"""Windows of blocks cut from documents as they are read: for data that is larger than the disk."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core import distributed
from core.buckets import share
from core.data import Augment, Batch, BatchLoader, Collate, Window, loader_options, make_batch, make_window
from core.errors import UserError, warn_once
from core.packing import Block, cut

if TYPE_CHECKING:
    import datasets


SHUFFLED_TOGETHER = 10_000  # documents that are held, and drawn from, while a stream is read for training


class Part(NamedTuple):
    """What a rank reads for one window: its micro-batches and rows, how long the rows of all ranks are, and the end."""

    batches: list[Batch]
    row_ids: list[int]
    lengths: list[int]
    last: bool


class StreamLoader:
    """Windows of micro-batches over a stream of documents, with what `core.data.BatchLoader` offers.

    Row i of an epoch is the i-th block of the stream, cut as `core.packing.Blocks` cuts. Every rank reads the whole
    stream, and makes only its own micro-batches of it.

    Args:
        documents: examples with ``input_ids``, shuffled with a fixed seed or not; each epoch is announced to it.
        collate: makes a batch of equal tensors from blocks and the shape to pad them to, ``(length,)``.
        length: tokens of a block.
        batch_size: rows of a micro-batch.
        accumulation: micro-batches of a window on each rank.
        seed: with which the documents were shuffled.
        drop_last: leave an epoch's short window out.
        pin_memory: page-locked batches, for copies that do not wait.
        augment: returns a block changed at random, by the generator that it is given.
        augment_seed: of those changes, which are new in each epoch.
        max_rows: the first N blocks only.

    Attributes:
        windows_per_epoch: infinite until an epoch has been read to its end.
    """

    def __init__(
        self,
        documents: datasets.IterableDataset,
        collate: Collate,
        length: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        augment: Augment | None = None,
        augment_seed: int = 0,
        max_rows: int | None = None,
    ) -> None:
        self.documents, self.collate, self.length, self.buckets = documents, collate, length, [(length,)]
        self.batch_size, self.seed, self.drop_last, self.max_rows = batch_size, seed, drop_last, max_rows
        self.pin_memory, self.augment, self.augment_seed = pin_memory, augment, augment_seed
        self.window = batch_size * accumulation * distributed.world_size()
        self.windows_per_epoch: float = math.inf

    @classmethod
    def from_arguments(
        cls,
        args: Namespace,
        documents: datasets.IterableDataset,
        collate: Collate,
        length: int,
        train: bool,
        augment: Augment | None = None,
        max_rows: int | None = None,
    ) -> StreamLoader:
        """Make a loader as the shared flags say: shuffled to train on, see `core.data.loader_options`."""
        options = loader_options(args, train)
        if options.pop("workers"):  # in a worker process, datasets would read the shards in another order
            warn_once("--dataloader_num_workers has no effect on a stream: the main process reads it, in order")
        if train and max_rows is None:  # the first N blocks would be others in each epoch
            documents = documents.shuffle(seed=options["seed"], buffer_size=SHUFFLED_TOGETHER)
        return cls(documents, collate, length, augment=augment, max_rows=max_rows, **options)

    def declare(self, any_shape: bool) -> int:
        """How many shapes there are: one, whatever the device takes."""
        return 1

    def order(self) -> dict[str, Any]:
        """What the rows' order depends on: a position in an epoch means the same rows only where this is equal."""
        return {
            "stream": True,
            "rows": self.max_rows,
            "window": self.window,
            "seed": self.seed,
            "buckets": [list(shape) for shape in self.buckets],
            "drop_last": self.drop_last,
        }

    def follow(self, order: dict[str, Any]) -> None:
        """Nothing: the order of blocks has always been this one."""

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Yield the epoch's windows from number ``start`` on; earlier ones are read, but their batches are not made.

        Raises:
            UserError: a document cannot be read, on any rank, or there are too few for a block or a window.
        """
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)
        parts = self._parts(epoch, start)
        number = 0
        while part := distributed.together(partial(next, parts, None)):
            number += 1
            if part.last:
                self.windows_per_epoch = number
            if number > start:
                yield make_window(part.batches, len(part.lengths), sum(part.lengths), part.row_ids, part.last)

    def _parts(self, epoch: int, start: int) -> Iterator[Part]:
        """Yield this rank's part of each window; up to ``start`` without batches."""
        blocks = islice(cut(self._documents(), self.length), self.max_rows)
        rows, number = list(islice(blocks, self.window)), 0
        if self.drop_last and len(rows) < self.window:
            what = f"{len(rows)} rows make no optimiser step of {self.window} rows"
            raise UserError(f"{what}; give more rows or smaller batches")
        while rows:
            ahead = list(islice(blocks, self.window))  # only so is it known which window is the last
            if self.drop_last and len(ahead) < self.window:
                ahead = []
            numbers = range(number * self.window, number * self.window + len(rows))
            mine = share(list(numbers), self.batch_size, distributed.rank(), distributed.world_size())
            batches = self._batches(mine, dict(zip(numbers, rows, strict=True)), epoch) if number >= start else []
            lengths = [len(row["input_ids"]) for row in rows]
            yield Part(batches, [row for one in mine for row in one], lengths, last=not ahead)
            rows, number = ahead, number + 1

    def _batches(self, mine: list[list[int]], rows: dict[int, Block], epoch: int) -> list[Batch]:
        at_once = [*rows][:: self.batch_size * distributed.world_size()]  # the first of those that all ranks take
        parts = [(one, filler, self.buckets[0]) for one, filler in zip(mine, at_once, strict=True)]
        batches = [make_batch(self, rows.__getitem__, part, epoch) for part in parts]
        if self.pin_memory:
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        return batches

    def _documents(self) -> Iterator[np.ndarray]:
        try:
            for document in self.documents:
                tokens = document["input_ids"]
                yield np.asarray([] if tokens is None else tokens, dtype=np.int64)
        except UserError:
            raise
        except Exception as error:
            what = f"the stream of documents broke off: {type(error).__name__}: {error}"
            raise UserError(f"{what}; mend it, and go on with --resume_from_checkpoint auto") from error


Loader = BatchLoader | StreamLoader
