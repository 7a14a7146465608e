"""Adds up one number of each process on the device."""

import json
import os

import habana_frameworks.torch.distributed.hccl  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group("hccl")
total = torch.ones(3, device="hpu") * (1 + dist.get_rank())
dist.all_reduce(total)
found = {"total": total.tolist(), "name": torch.hpu.get_device_name(), "lazy": os.environ.get("PT_HPU_LAZY_MODE")}
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
