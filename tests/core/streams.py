"""A stream of short documents, a loader of its blocks, and all that its windows are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from core.data import IGNORE_INDEX, Window
from core.stream import StreamLoader

LENGTH = 7
DOCUMENTS = [[(row * 3 + at) % 32 for at in range(row * 5 % 9)] for row in range(40)]  # 156 tokens: 23 blocks


class Listed:
    """Documents of a list, as a stream gives them."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"input_ids": document} for document in self.documents)


class Broken(Listed):
    """Cannot be read beyond the first ``after`` documents."""

    def __init__(self, documents: list[list[int]], after: int) -> None:
        super().__init__(documents[:after])

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from super().__iter__()
        raise OSError("connection lost")


def collate(rows: list[dict[str, np.ndarray]], shape: tuple[int]) -> dict[str, torch.Tensor]:
    """Inputs, mask and labels (rows, length); a label is the document's number, so that it matters."""
    batch = {
        "inputs": torch.zeros(len(rows), *shape, dtype=torch.long),
        "mask": torch.zeros(len(rows), *shape),
        "labels": torch.full((len(rows), *shape), IGNORE_INDEX),
    }
    for at, row in enumerate(rows):
        size = len(row["input_ids"])
        batch["inputs"][at, :size] = torch.as_tensor(row["input_ids"])
        batch["mask"][at, :size] = 1
        batch["labels"][at, :size] = torch.as_tensor(row["document_ids"])
    return batch


def loader_of(documents: Any, batch: int = 4, **options: Any) -> StreamLoader:
    documents = Listed(documents) if isinstance(documents, list) else documents
    return StreamLoader(documents, collate, LENGTH, batch, **options)


def seen(windows: Iterable[Window]) -> list[list[Any]]:
    """All that a window is, as lists."""
    return [
        [
            [{name: value.tolist() for name, value in batch.items()} for batch in window.batches],
            *(window.rows, window.tokens, window.targets, window.row_ids, window.last_in_epoch),
        ]
        for window in windows
    ]
