"""Processes that read ahead: what goes wrong in them is one line, as it would be without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from core.errors import UserError


def read_ahead(source: Dataset, workers: int, pin_memory: bool) -> Iterator[Any]:
    """Yield what ``source`` holds, in order, made ahead in worker processes if there are any.

    Raises:
        UserError: an item of ``source`` is one (raised in a worker it would arrive as the text of a traceback), or a
            worker was killed.
    """
    # The loader draws seeds for its workers: from a generator of its own, or the number of workers would move
    # the global one and with it every dropout mask.
    options = {"num_workers": workers, "pin_memory": pin_memory, "generator": torch.Generator().manual_seed(0)}
    try:
        for made in DataLoader(source, batch_size=None, **options):
            if isinstance(made, UserError):
                raise made
            yield made
    except (RuntimeError, ConnectionError, EOFError) as error:  # the last two: it died while it handed something over
        of_worker = workers and "Original Traceback" not in str(error)
        if not of_worker or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
            raise
        raise UserError(
            f"a process of --dataloader_num_workers {workers} ended ({error}); the system may have run out of memory: "
            "give fewer"
        ) from None
