"""Documents cut into blocks of one length, without padding and without a lost token, and masks that keep them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from core.errors import UserError

if TYPE_CHECKING:
    import datasets

Block = dict[str, np.ndarray]


def require_block(documents: int, tokens: int, length: int, name: str) -> None:
    """Raise a `UserError` if there is no document, or less than one block of tokens in all of them."""
    if documents == 0:
        raise UserError(f"{name}: there are no documents; give more text")
    if tokens < length:
        raise UserError(f"{name}: {tokens} tokens make no block of {length}; give more text or a smaller --block_size")


def make_block(pieces: Sequence[np.ndarray]) -> Block:
    """Join pieces of documents, none empty, into ``input_ids``, int64 (n,), and ``document_ids``, int32 (n,).

    The latter number the documents within the block: 0, 1, 2, ...
    """
    numbers = np.arange(len(pieces), dtype=np.int32)
    sizes = [len(piece) for piece in pieces]
    return {"input_ids": np.concatenate(pieces, dtype=np.int64), "document_ids": np.repeat(numbers, sizes)}


def cut(documents: Iterable[Sequence[int]], length: int) -> Iterator[Block]:
    """Cut documents as they come into the blocks that `Blocks` has of them.

    Raises:
        UserError: they end before one block is full.
    """
    pieces: list[np.ndarray] = []
    missing, read, full = length, 0, False
    for document in documents:
        read += 1
        rest = np.asarray(document, dtype=np.int64)
        while len(rest):
            pieces.append(rest[:missing])
            rest, missing = rest[missing:], missing - len(pieces[-1])
            if not missing:
                yield make_block(pieces)
                pieces, missing, full = [], length, True
    if not full:
        require_block(read, length - missing, length, "stream")
    if pieces:
        yield make_block(pieces)


class Blocks(Dataset):
    """Blocks of ``length`` tokens of all documents, one after the other; the last one may be shorter.

    Tokens are read where they lie, in the Arrow table on disk: memory is needed for two numbers a document.

    Args:
        documents: has a column ``input_ids`` of token numbers; end tokens are among them.
        length: tokens of a block.
        limit: the first N blocks only.
        name: what errors call the documents.
        may_be_short: fewer tokens than one block are one short block, instead of an error.

    Attributes:
        tokens: of all documents; ``used`` of them are in a block.
        documents: how many there are; ``empty`` of them have no token.

    Raises:
        UserError: there is no full block (``may_be_short``: no two tokens).
    """

    def __init__(
        self,
        documents: datasets.Dataset,
        length: int,
        limit: int | None = None,
        name: str = "data",
        may_be_short: bool = False,
    ) -> None:
        self.source, self.length, self.limit = documents, length, limit
        self.name, self.may_be_short = name, may_be_short
        self._open()

    def _open(self) -> None:
        import pyarrow.compute as pc

        chunks = self.source.data.column("input_ids").chunks
        sizes = [pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False) for chunk in chunks]
        lengths = np.concatenate([np.zeros(0, np.int64), *sizes]).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        if self.source._indices is not None:  # selected or shuffled: these rows of the table, in this order
            order = self.source._indices.column(0).to_numpy()
            lengths, starts = lengths[order], starts[order]
        some = lengths > 0
        self._starts, self._ends = starts[some], np.cumsum(lengths[some])
        self.documents, self.empty = len(lengths), int(len(lengths) - some.sum())
        self.tokens = int(lengths.sum())
        require_block(self.documents, self.tokens, 2 if self.may_be_short else self.length, self.name)
        flat = [chunk.flatten() for chunk in chunks]  # without what a slice leaves out, and without null lists
        if any(values.null_count for values in flat):
            raise UserError("input_ids: a token is null; mend the data")
        self._chunks = [values.to_numpy(zero_copy_only=True) for values in flat]
        self._chunk_ends = np.cumsum([len(values) for values in flat])
        blocks = -(-self.tokens // self.length)
        self._count = blocks if self.limit is None else min(blocks, self.limit)
        self.used = min(self.tokens, self._count * self.length)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process opens the table itself: arrays that lie in it would be sent as copies."""
        return {name: getattr(self, name) for name in ("source", "length", "limit", "name", "may_be_short")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> np.ndarray:
        """Per block, its tokens: int32 of shape (blocks, 1)."""
        lengths = np.full((self._count, 1), self.length, np.int32)
        lengths[-1] = self.used - (self._count - 1) * self.length
        return lengths

    def describe(self) -> str:
        """Tokens in, used and dropped, in one line."""
        found = f"{self.tokens:,} tokens of {self.documents:,} documents ({self.empty:,} of them empty)"
        dropped = f"{self.tokens - self.used:,} dropped"
        return f"{found}: {self.used:,} used in {self._count:,} blocks of {self.length}, {dropped}"

    def __getitem__(self, number: int) -> Block:
        """Return the block as `make_block` does, of ``length`` tokens; the last one may have fewer."""
        if not 0 <= number < self._count:
            raise IndexError(f"block {number} of {self._count}")
        begin = number * self.length
        end = min(begin + self.length, self.tokens)
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        pieces = []
        for document in range(first, last + 1):
            stop = min(self._ends[document], end)
            before = self._ends[document - 1] if document else 0
            at = self._starts[document] + max(begin - before, 0)
            chunk = np.searchsorted(self._chunk_ends, at, side="right")
            at -= self._chunk_ends[chunk] - len(self._chunks[chunk])
            pieces.append(self._chunks[chunk][at : at + stop - max(begin, before)])
        return make_block(pieces)


def document_mask(document_ids: torch.Tensor, causal: bool) -> torch.Tensor:
    """Which token may attend to which: those of its own document, and if ``causal`` none after it.

    Args:
        document_ids: (rows, length); padding is -1, and attends to itself alone, so that no softmax is empty.

    Returns:
        Bool (rows, 1, length, length), true where a query (third axis) may attend to a key (last axis).
    """
    at = torch.arange(document_ids.shape[1], device=document_ids.device)
    same = (document_ids[:, :, None] == document_ids[:, None, :]) & (document_ids >= 0)[:, :, None]
    allowed = same | (at[:, None] == at)
    if causal:
        allowed = allowed & (at[:, None] >= at)
    return allowed[:, None]


def document_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions that start again at 0 with each document of a row: int64, (rows, length) as ``document_ids``."""
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], dim=1)
    at = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    number = begins.long().cumsum(1) - 1
    start_of = torch.zeros_like(at).scatter_add(1, number, at * begins)  # one term that is not 0 for each document
    return at - start_of.gather(1, number)


def packed_inputs(document_ids: torch.Tensor, causal: bool, attention: str) -> dict[str, torch.Tensor]:
    """What a model of transformers needs to keep documents apart: ``attention_mask``, and for causal ``position_ids``.

    Args:
        document_ids: as for `document_mask`.
        attention: the model's implementation: "eager" adds its mask to the scores.
    """
    allowed = document_mask(document_ids, causal)
    inputs = {"attention_mask": ~allowed * -1e9 if attention == "eager" else allowed}
    return inputs | ({"position_ids": document_positions(document_ids)} if causal else {})


def require_separable(model: torch.nn.Module, length: int) -> None:
    """Refuse a causal model of transformers whose documents `packed_inputs` would not keep apart, or not alike.

    Raises:
        UserError: it takes no positions or begins them elsewhere, hands a state on, or sees a window of a row only.
    """
    config = model.config
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if not getattr(config, "use_sliding_window", True):
        windows = []
    kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    reasons = {
        "takes no positions": "position_ids" not in signature(model.forward).parameters
        or getattr(config, "alibi", False),
        "numbers positions from the padding on": getattr(table, "padding_idx", None) is not None,
        "takes no mask of two sides": hasattr(config, "causal"),
        "hands a state from token to token": getattr(model, "_is_stateful", False)
        or not set(getattr(config, "layer_types", None) or ()) <= kinds,
        f"attends to fewer tokens than the {length} of a row": any(window and window < length for window in windows),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UserError(f"--pack_documents: this model {reason}, so its documents cannot be kept apart; leave it out")
