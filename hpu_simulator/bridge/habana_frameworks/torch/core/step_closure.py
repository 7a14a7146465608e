"""The step boundary that asks for the mode itself, as DeepSpeed's optimisers call it."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)


def _mark_step_if_lazy(device_str: str = "", sync: bool = False) -> None:
    if runtime.lazy:
        (runtime.synchronize if sync else runtime.mark_step)()
