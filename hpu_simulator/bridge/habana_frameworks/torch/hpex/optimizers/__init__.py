"""The fused optimisers."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks.torch.hpex.optimizers.adamw import FusedAdamW
from habana_frameworks.torch.hpex.optimizers.lamb import FusedLamb
from habana_frameworks.torch.hpex.optimizers.sgd import FusedSGD

__all__ = ["FusedAdamW", "FusedLamb", "FusedSGD"]
__getattr__ = _lacking.attribute(__name__)
