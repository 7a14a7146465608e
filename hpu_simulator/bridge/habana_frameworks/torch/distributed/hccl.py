"""The ``hccl`` backend of `torch.distributed`: gloo between the processes, the tensors' memory on the device."""

from __future__ import annotations

import os

import torch
import torch.distributed

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)

RANK_VARIABLES = (
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Return (world size, rank, local rank): as given, else from the launcher's environment (torchrun's, then Open
    MPI's), else of a single process: (1, 0, -1)."""
    found = (1, 0, -1)
    for names in reversed(RANK_VARIABLES):
        if all(name in os.environ for name in names):
            found = tuple(int(os.environ[name]) for name in names)
    given = (world_size, rank, local_rank)
    return tuple(known if value is None else value for value, known in zip(given, found, strict=True))


def _register() -> None:
    if not hasattr(torch.distributed.Backend, "HCCL"):
        torch.distributed.Backend.register_backend("hccl", runtime.make_backend, devices=["hpu"])


_register()
