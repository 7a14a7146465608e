"""The execution mode that was read at import."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)


def is_lazy() -> bool:
    """Whether ``PT_HPU_LAZY_MODE`` was 1 when the bridge was imported."""
    return runtime.lazy
