"""FusedSGD."""

from __future__ import annotations

from typing import Any

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)


class FusedSGD(torch.optim.SGD):
    """Torch's SGD, by its formula and its state, with fewer options."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
