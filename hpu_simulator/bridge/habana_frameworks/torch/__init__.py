"""Starts the simulated device and gives torch its ``torch.hpu``.

``PT_HPU_LAZY_MODE`` (1: lazy, 0 or unset: eager) and the two files of autocast operators are read here, once.
"""

from __future__ import annotations

import os

import torch

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch import _ops, autocast_lists, core, distributed, hpex, hpu, utils
from habana_frameworks.torch.distributed import hccl  # noqa: F401 - registers its backend
from habana_frameworks.torch.hpu import (
    get_autocast_hpu_dtype,
    is_autocast_hpu_enabled,
    metrics,
    set_autocast_hpu_dtype,
    set_autocast_hpu_enabled,
)

__all__ = [
    "core",
    "distributed",
    "get_autocast_hpu_dtype",
    "hpex",
    "hpu",
    "is_autocast_hpu_enabled",
    "set_autocast_hpu_dtype",
    "set_autocast_hpu_enabled",
    "utils",
]
__getattr__ = _lacking.attribute(__name__)

torch._register_device_module("hpu", hpu)
runtime.set_autocast_lists(*autocast_lists.effective(os.environ))
_ops.register(runtime.lazy)
metrics.start_file(os.environ)
