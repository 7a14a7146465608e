"""Device types and the execution mode."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks.torch.utils import experimental, internal

__all__ = ["experimental", "internal"]
__getattr__ = _lacking.attribute(__name__)
