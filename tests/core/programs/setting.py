"""What every program here begins with: the device of this process, and its errors as text."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from core.device import Device, decide_execution_mode, select_device


def this_device() -> Device:
    """The simulated device if the environment asks for it, else the CPU."""
    compiled = dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_lazy_mode"))
    mode = decide_execution_mode(Namespace(execution_mode="auto", **compiled))
    return select_device(Namespace(cpu_threads=0, use_habana=None, use_cpu="HPU_SIMULATOR" not in os.environ), mode)


def outcome(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or the name and text of its error."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
