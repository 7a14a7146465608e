"""Attention and rotary position embedding."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks.torch.hpex.kernels.attention import FusedSDPA
from habana_frameworks.torch.hpex.kernels.rotary import RotaryPosEmbeddingHelperV2

__all__ = ["FusedSDPA", "RotaryPosEmbeddingHelperV2"]
__getattr__ = _lacking.attribute(__name__)
