"""Processes that read ahead: what goes wrong in them is one line, as without them; signals are the main process's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from core import preemption
from core.errors import UserError


def read_ahead(source: Dataset, workers: int, pin_memory: bool) -> Iterator[Any]:
    """Yield what ``source`` holds, in order, made ahead in worker processes if there are any.

    Raises:
        UserError: an item of ``source`` is one (raised in a worker it would arrive as the text of a traceback), or a
            worker was killed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    start = partial(_leave_signals_to, os.getpid(), in_main_thread) if sys.platform == "linux" else None
    # The loader draws seeds for its workers: from a generator of its own, or the number of workers would move
    # the global one and with it every dropout mask.
    options = {"num_workers": workers, "pin_memory": pin_memory, "generator": torch.Generator().manual_seed(0)}
    loader, batches = DataLoader(source, batch_size=None, worker_init_fn=start, **options), None
    try:
        with _signals_wait(workers):
            batches = iter(loader)
        for made in batches:
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
    finally:
        batches = None  # else an error, whose traceback holds this frame, would keep the workers


def _signals_wait(workers: int) -> AbstractContextManager[None]:
    """Signals come after the fork of workers: they would end one that is not ready for them."""
    forks = workers and torch.multiprocessing.get_start_method() == "fork"  # a server would hand it on to all it forks
    return preemption.later() if forks else nullcontext()


def _leave_signals_to(parent: int, dies_with_it: bool, _number: int) -> None:
    """In a worker: a scheduler's signals, which often go to all processes of a job, are not for it.

    The main process needs it for the step after which it ends; with torch's own handlers it would die at once.

    Args:
        parent: the main process, whose SIGTERM ends it as ever.
        dies_with_it: whether it was forked by the main thread, whose end the kernel takes for the parent's.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGTERM,))
    threading.Thread(target=_end_when_asked, args=(parent,), daemon=True).start()
    if dies_with_it and os.getppid() == parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: torch looks every 5 seconds


def _end_when_asked(parent: int) -> None:
    while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
        pass
    os._exit(0)
