"""Everything that ranks tell each other, once; each prints what it got."""

from __future__ import annotations

import json
import math
import sys
import time

import torch
from setting import outcome, this_device

from core import distributed
from core.errors import UserError


def fail_on(number: int, error: Exception) -> str:
    if distributed.rank() == number:
        raise error
    return "fine"


def wide(number: int) -> torch.Tensor:
    """(number, 2, 3), filled with the rank."""
    return torch.full((number, 2, 3), float(distributed.rank()), dtype=torch.bfloat16)


def in_turn() -> list[float]:
    with distributed.once_per_machine("test", sys.argv[1]):
        began = time.monotonic()
        time.sleep(0.05)
        return [began, time.monotonic()]


device = this_device()
distributed.start(device, timeout_s=60)
distributed.start(device, timeout_s=60)  # keeps the group
rank, size = distributed.rank(), distributed.world_size()
on_device = torch.full((3,), 1.0 + rank, device=device.torch_device)
torch.distributed.all_reduce(on_device)
found = {
    "backend": torch.distributed.get_backend(),
    "on_device": on_device.tolist(),
    "sum": distributed.sum_over_ranks(
        [2.0**53, 1.0 + rank, [1e16, 1.0, -1e16][rank % 3], 2.0**53 * (rank == 0) + (rank > 0)]
    ),
    "nan": distributed.sum_over_ranks([math.inf * (-1) ** rank, [1.0, math.inf, 2.0][rank]]),
    "rows": [rows.tolist() for rows in distributed.gather_rows(torch.arange(rank * 2).reshape(rank, 2))],
    "flags": [rows.tolist() for rows in distributed.gather_rows(torch.arange(rank) % 2 == 0)],
    "wide": [[list(rows.shape), rows.float().sum().item()] for rows in distributed.gather_rows(wide(2 - rank % 3))],
    "none": [rows.tolist() for rows in distributed.gather_rows(torch.empty(0, dtype=torch.int32))],
    "unlike": outcome(lambda: distributed.gather_rows(torch.zeros(2, 1 + rank))),
    "texts": distributed.gather_texts("" if rank == 0 else f"zwölf {rank}\n"),
    "on_main": distributed.on_main(lambda: f"from {rank}"),
    "on_main_user": outcome(lambda: distributed.on_main(lambda: fail_on(0, UserError("mend --it")))),
    "on_main_bug": outcome(lambda: distributed.on_main(lambda: fail_on(0, KeyError("it")))),
    "together": outcome(lambda: distributed.together(lambda: rank)),
    "together_user": outcome(lambda: distributed.together(lambda: fail_on(size - 1, UserError("mend --it")))),
    "together_bug": outcome(lambda: distributed.together(lambda: fail_on(size - 1, ValueError("")))),
    "in_turn": in_turn(),
}
distributed.sum_over_ranks([0.0])
if "third" in sys.argv:
    import accelerate
    import deepspeed

    state = accelerate.PartialState(cpu=device.torch_device.type == "cpu")
    deepspeed.init_distributed()
    deepspeed.comm.all_reduce(on_device)
    found["accelerate"] = [str(state.distributed_type), state.process_index, state.num_processes, str(state.device)]
    found["deepspeed"] = [deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), on_device.tolist()]
    found["kept"] = torch.distributed.get_backend()
distributed.stop()
distributed.stop()
print(json.dumps(found))
