"""Checkpoints that are written while training goes on: state is copied once, and a thread writes the copies."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core import checkpoint, distributed
from core.checkpoint import OnMain
from core.device import Device
from core.errors import UserError, is_main_process, warn_once
from core.memory import free_host_memory

SMALL = 65_536  # bytes of a tensor that is copied at once: it is no work for a thread


class Later(OnMain):
    """Puts off what can be written `later`, until `write`.

    Args:
        at_once: copy tensors when they are given, not in `fill`: those of a device that queues work.
    """

    puts_off = True

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self._queue: list[Callable[[], None]] = []
        self._unfilled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def later(self, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        if is_main_process():
            self._queue.append(lambda: self(work, *args, **options))

    def copy(self, tensor: torch.Tensor, at_once: bool = False) -> torch.Tensor:
        """A tensor on the host, which `fill` fills at the latest; the tensor itself on a rank that writes nothing."""
        tensor = tensor.detach()
        if not is_main_process():
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if at_once or self.at_once or tensor.nbytes <= SMALL or not tensor.is_contiguous():
            host.copy_(tensor)
        else:
            self._unfilled.append((host, tensor))
        return host

    def fill(self) -> None:
        """Copy what has not been copied. On one thread, by bytes: torch would wake those that training uses."""
        while self._unfilled:
            host, tensor = self._unfilled.pop()
            np.copyto(host.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())

    def write(self) -> None:
        """Do what was put off."""
        for work in self._queue:
            work()
        self._queue.clear()  # and with it the copies


class Writer:
    """Writes one checkpoint at a time, in a thread that outlives an error of the main one.

    Args:
        device: whose state it is.
        stop: a checkpoint that cannot be written ends the run; else it is one warning.

    Attributes:
        lost: seconds for which each save kept training from going on.
        writing: seconds from its beginning until it was complete.
        complete: step of the last checkpoint that is known to be complete, on all ranks.
    """

    def __init__(self, device: Device, stop: bool) -> None:
        self.device, self.stop = device, stop
        self.lost: list[float] = []
        self.writing: list[float] = []
        self._thread: threading.Thread | None = None
        self._main: OnMain | None = None
        self._bug: BaseException | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._path, self._step = Path(), 0
        self.complete: int | None = None

    def save(
        self,
        output_dir: Path,
        step: int,
        write: Callable[[OnMain, Path], None],
        size: int = 0,
        keep: tuple[int | None, str | None] = (None, None),
    ) -> None:
        """Begin to save ``checkpoint-<step>``; see `checkpoint.begin`. All ranks call it.

        Args:
            size: bytes of the state. What would take more than half of the host's free memory is written at once.
            keep: what `checkpoint.prune` is told once it is complete.

        Raises:
            UserError: the one before could not be written, or this one is written at once and cannot; on all ranks.
        """
        asked = time.perf_counter()
        self.finish()
        began = time.perf_counter()
        if self.lost:
            self.lost[-1] += began - asked
        (crowded,) = distributed.sum_over_ranks([float(is_main_process() and size > free_host_memory() / 2)])
        self._main = main = OnMain() if crowded else Later(self.device.queues_work)
        self._path, self._step = output_dir / f"checkpoint-{step}", step
        temporary = checkpoint.begin(main, output_dir, step, write)
        if is_main_process():
            self._copied.clear()
            self._thread = threading.Thread(target=self._write, args=(main, temporary, step, began, keep))
            self._thread.start()
        if crowded:
            warn_once(f"{size / 1e9:.1f} GB of state are more than half of the free memory: training waits for saves")
            self.finish()
        self.lost.append(time.perf_counter() - began)

    def _write(self, main: OnMain, temporary: Path, step: int, began: float, keep: tuple[Any, ...]) -> None:
        try:
            if isinstance(main, Later):
                main(main.fill)
                self._copied.set()
                with suppress(OSError, AttributeError):  # a thread's own, on Linux: from now on training goes first
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
                main.write()
            checkpoint.complete(main, temporary, step)
            if main.failure is None:
                self.writing.append(time.perf_counter() - began)
                _prune(temporary.parent, *keep)
        except BaseException as error:  # raised where the main thread waits for this one
            self._bug = error
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            self._copied.set()

    def settle(self) -> None:
        """Wait until the state is copied: before anything changes weights, moments or averages."""
        if not self._copied.is_set():  # only the thread of a save that has returned
            began = time.perf_counter()
            self._copied.wait()
            self.lost[-1] += time.perf_counter() - began

    def failed(self) -> bool:
        """Whether `finish` has an error to tell; on rank 0, which alone knows."""
        return bool(self._bug or (self._main and self._main.failure))

    def join(self) -> None:
        """Wait until the checkpoint is complete or has failed, on this rank; raises nothing."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until the checkpoint is complete. All ranks call it.

        Raises:
            UserError: it could not be written, and ``stop`` is true; all ranks raise it.
        """
        if self._main is None:
            return
        main = self._main
        self.join()
        self._thread = self._main = None
        if self._bug is not None:
            main.failure, self._bug = self._bug, None
        reason = main.reason(checkpoint.UNWRITTEN.format(self._path))
        if not reason:
            self.complete = self._step
        elif self.stop:
            raise UserError(reason) from main.failure
        else:
            warn_once(f"--on_save_error continue: {reason}")

    def metrics(self) -> dict[str, Any]:
        """Seconds that a save has cost training, and that it took in the background: the mean; None without a save."""
        means = {"lost": self.lost, "write": self.writing}
        return {f"save_{name}_seconds": sum(of) / len(of) if of else None for name, of in means.items()}


def _prune(output_dir: Path, limit: int | None, keep: str | None) -> None:
    try:
        checkpoint.prune(output_dir, limit, keep)
    except OSError as error:
        warn_once(f"an old checkpoint cannot be removed: {error}")
