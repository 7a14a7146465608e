"""The backend of `torch.compile`."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks.torch.dynamo import compile_backend

__all__ = ["compile_backend"]
__getattr__ = _lacking.attribute(__name__)
