"""Ranks, the process group, and exact sums, rows and texts over ranks."""

from __future__ import annotations

import atexit
import functools
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from core import preflight
from core.device import Device
from core.errors import UserError
from core.gradients import all_reduce_gradients  # noqa: F401 - its published place

T = TypeVar("T")
BACKENDS = {"hpu": "hccl", "cuda": "nccl"}  # by type of device, beside gloo for the host's tensors
_started = False  # by `start`, and so ended by `stop`


def rank() -> int:
    """This process's number among all, from the launcher's environment.

    Raises:
        UserError: the environment's numbers are none, or do not fit together.
    """
    return _ranks()[0]


def world_size() -> int:
    """Number of processes of the run, from the launcher's environment. Raises as `rank` does."""
    return _ranks()[1]


def local_rank() -> int:
    """This process's number among those of its machine, from the launcher's environment. Raises as `rank` does."""
    return _ranks()[2]


def _ranks() -> tuple[int, int, int]:
    return _checked(os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_RANK"))


@functools.cache  # asked at every step; errors are not kept
def _checked(rank: str | None, world_size: str | None, local_rank: str | None) -> tuple[int, int, int]:
    """The environment's numbers, from its texts."""
    at, size = _number("RANK", rank, 0), _number("WORLD_SIZE", world_size, 1)
    local = _number("LOCAL_RANK", local_rank, 0)
    if size > 1 and not rank:
        raise UserError(f"WORLD_SIZE is {size}, but RANK is not set; start with gaudi_spawn.py or torchrun")
    if not 0 <= at < size:
        raise UserError(f"RANK is {at} and WORLD_SIZE is {size}; RANK goes from 0 to WORLD_SIZE - 1")
    if not 0 <= local < size:
        raise UserError(f"LOCAL_RANK is {local} and WORLD_SIZE is {size}; LOCAL_RANK goes from 0 to WORLD_SIZE - 1")
    return at, size, local


def _number(name: str, value: str | None, default: int) -> int:
    value = value or str(default)
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"the environment has {name}={value}, which is no number of processes; mend or unset it")
    return int(value)


def start(device: Device, timeout_s: int, always: bool = False, reach_s: float = preflight.REACH_S) -> None:
    """Join the ranks in torch's default process group; one process needs none, unless ``always``.

    Host tensors travel over gloo and the device's over its own backend, in one group: a number that only the host needs
    never waits for the device. A group that exists already is kept, and libraries that come later keep this one.

    Args:
        timeout_s: seconds after which a collective that a rank does not join fails.
        always: also for one process, whose group needs neither the launcher's environment nor a port.
        reach_s: seconds in which the others must be reachable over the network, see `preflight.meet`.

    Raises:
        UserError: the environment is incomplete, or a rank cannot be reached; the line names host, port and interface.
    """
    global _started
    if dist.is_initialized() or (world_size() == 1 and not always):
        return
    own = BACKENDS.get(device.torch_device.type)
    if own == "nccl":
        device.runtime.set_device(local_rank())
    if own == "hccl":
        device.bridge("distributed.hccl")  # makes torch know it
    store = preflight.meet(rank(), world_size(), timeout_s, reach_s) if world_size() > 1 else dist.HashStore()
    backend = f"cpu:gloo,{device.torch_device.type}:{own}" if own else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank(), world_size=world_size(), timeout=timedelta(seconds=timeout_s)
    )
    _started = True
    atexit.register(stop)


def stop() -> None:
    """Leave the group that `start` made, if it made one. The interpreter's end does so, too."""
    global _started
    if _started and dist.is_initialized():
        dist.destroy_process_group()
        # A thread of gloo's that lets go of its last tensors while the interpreter ends aborts the process (seen in
        # one exit of ten on a busy machine). They are joined with the group's last reference, which a model may hold.
        gc.collect()
        time.sleep(0.1)
    _started = False


def sum_over_ranks(values: list[float]) -> list[float]:
    """Sum each number over all ranks, rounded once, to float64: the same on all ranks, in any order of them."""
    return [math.fsum(one) if all(map(math.isfinite, one)) else sum(one) for one in _of_every_rank(values)]


def _of_every_rank(values: list[float]) -> list[list[float]]:
    """For each number a list of what it is on the ranks, by rank."""
    if world_size() == 1 or not values:
        return [[float(value)] for value in values]
    numbers = torch.zeros(world_size(), len(values), dtype=torch.float64)
    numbers[rank()] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers)  # zeros elsewhere: nothing is rounded
    return numbers.T.tolist()


def gather_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's rows on all ranks, as a list by rank.

    Args:
        tensor: (n, ...) on the host, of any dtype; n differs between ranks and may be 0, all else is the same.

    Raises:
        ValueError: rows differ in their bytes between ranks; all ranks raise it.
    """
    if world_size() == 1:
        return [tensor]
    row_bytes = tensor[:1].numel() if len(tensor) else tensor.new_empty((1, *tensor.shape[1:])).numel()
    mine = torch.tensor([len(tensor), row_bytes * tensor.element_size()])
    gathered = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(gathered, mine)
    sizes = torch.stack(gathered)
    if len(set(sizes[:, 1].tolist())) > 1:
        raise ValueError(f"rows of {sizes[:, 1].tolist()} bytes on the ranks; they must be of one shape and dtype")
    # As bytes: gloo lacks some dtypes. Padded to the longest: it gathers equal shares only.
    share = torch.zeros(int(sizes.prod(dim=1).max()), dtype=torch.uint8)
    mine = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    share[: len(mine)] = mine
    shares = [torch.empty_like(share) for _ in range(world_size())]
    dist.all_gather(shares, share)
    return [
        part[: rows * width].clone().view(tensor.dtype).reshape(rows, *tensor.shape[1:])
        for part, (rows, width) in zip(shares, sizes.tolist(), strict=True)
    ]


def gather_texts(text: str) -> list[str]:
    """Return every rank's text on all ranks, as a list by rank."""
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(part.tolist()).decode() for part in gather_rows(encoded)]


def on_main(make: Callable[[], str]) -> str:
    """Call ``make`` on rank 0 only, and return its text on all ranks.

    Raises:
        UserError: ``make`` raised it on rank 0, or raised something else there, which rank 0 raises as it is.
    """
    if world_size() == 1:
        return make()
    made, failure = "", None
    if rank() == 0:
        try:
            made = f"+{make()}"
        except Exception as error:
            made, failure = f"-{_described(error, 0)}", error
    made = gather_texts(made)[0]
    if failure is not None:
        raise failure
    if made[0] == "-":
        raise UserError(made[1:])
    return made[1:]


def together(work: Callable[[], T]) -> T:
    """Call ``work`` on every rank; if it raises on one, all ranks end, instead of waiting for that one.

    ``work`` is local: it must not wait for other ranks.

    Raises:
        UserError: ``work`` raised on another rank, which is named; a rank's own error is raised as it is.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    if sum_over_ranks([float(failure is not None)])[0] and world_size() > 1:
        texts = gather_texts("" if failure is None else _described(failure, rank(), always=True))
        if failure is None:
            raise UserError(next(text for text in texts if text))
    if failure is not None:
        raise failure
    return result


def _described(error: Exception, number: int, always: bool = False) -> str:
    """What the other ranks say of it: a `UserError` speaks for itself, another error needs its name."""
    if isinstance(error, UserError):
        return f"rank {number}: {error}" if always else str(error)
    return f"rank {number}: {type(error).__name__}: {error}"


@contextmanager
def once_per_machine(name: str = "prepare", folder: Path | None = None) -> Iterator[None]:
    """Let this machine's processes enter one after the other: the first prepares, the others find it in the cache.

    A lock on a file of this user's, in ``folder`` (default: the machine's own temporary folder, since a lock on
    a shared file system may not hold). The system frees it when its holder dies, and no collective waits meanwhile.
    """
    if world_size() == 1:
        yield
        return
    from filelock import FileLock

    user = os.getuid() if hasattr(os, "getuid") else "user"
    with FileLock(Path(folder or tempfile.gettempdir()) / f"gaudi_recipes_{user}_{name}.lock"):
        yield
