"""Step boundaries of lazy mode, and the same ``hpu`` module as ``torch.hpu``."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch import hpu
from habana_frameworks.torch.core import step_closure

__all__ = ["hpu", "mark_step", "step_closure"]
__getattr__ = _lacking.attribute(__name__)


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the lazy graph: what was gathered since the last boundary is compiled, if it is new, and runs.

    Args:
        device_str: not used; there is one device.
        sync: also wait until it has run.
    """
    (runtime.synchronize if sync else runtime.mark_step)()
