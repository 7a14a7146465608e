"""Fused kernels: the functions of the bridge's, written as plain torch operators on the device."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks.torch.hpex import kernels, normalization, optimizers

__all__ = ["kernels", "normalization", "optimizers"]
__getattr__ = _lacking.attribute(__name__)
