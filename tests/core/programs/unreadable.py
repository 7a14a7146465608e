"""Rows that only the last rank reads, and cannot: in worker processes. Each rank prints what it got."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import torch
from setting import outcome, this_device

from core import distributed
from core.data import IGNORE_INDEX, Batch, BatchLoader
from core.errors import UserError

BAD = (6, 7)  # of 10 rows in windows of 4: the second window's part of the last rank; the third has none for it


class Rows:
    def __init__(self, fail: bool) -> None:
        self.fail = fail

    def __getitem__(self, row: int) -> int:
        if self.fail and row in BAD:
            raise UserError(f"row {row} cannot be read; mend it")
        return row


def collate(rows: list[int], shape: tuple[int, ...]) -> Batch:
    bad = torch.tensor([row in BAD for row in rows])
    labels = torch.tensor(rows).masked_fill(bad, IGNORE_INDEX)
    return {"inputs": torch.tensor(rows).masked_fill(bad, 0), "labels": labels, "unreadable": bad}


def go(workers: int, fail: bool) -> dict[str, Any]:
    told: list[list[int]] = []
    lengths, shapes = [(1,)] * 10, [(1,)]
    loader = BatchLoader(Rows(fail), collate, lengths, shapes, 2, workers=workers, on_unreadable=told.append)
    windows = [(one.unreadable, one.rows, one.targets, one.tokens, one.row_ids) for one in loader.windows()]
    return {"windows": windows, "told": told}


distributed.start(this_device(), timeout_s=60)
found = {
    f"{workers} {fail}": outcome(lambda workers=workers, fail=fail: go(workers, fail))
    for workers in (0, 2)
    for fail in (False, True)
}
found["left"] = len(multiprocessing.active_children())
distributed.stop()
print(json.dumps(found))
