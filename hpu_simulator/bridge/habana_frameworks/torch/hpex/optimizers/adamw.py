"""FusedAdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from habana_frameworks import _lacking
from habana_frameworks.torch._ops import optimizer_adamw
from habana_frameworks.torch.hpex.optimizers.base import FusedOptimizer, bias_corrections, evaluate

__getattr__ = _lacking.attribute(__name__)


class FusedAdamW(FusedOptimizer):
    """AdamW with defaults of its own: epsilon 1e-6 and no decay. See `FusedOptimizer` for how it differs from torch's.

    Epsilon is added to the root of the squares before their bias is corrected (see `optimizer_adamw`), so that it
    weighs more in the first steps than torch's does. Step size and decay factor are rounded to the weights' type.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdamW: lr={lr} and eps={eps} cannot be negative, betas={betas} are in [0, 1)")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = evaluate(closure)
        self.refuse_sparse()
        for group in self.param_groups:
            weights, gradients, means, squares = self.gather(group)
            if not weights:
                continue
            first, root = bias_corrections(group)
            # Both travel as tensors: a number inside a lazy graph would compile a new one whenever it changes.
            step_size, decay = (
                torch.tensor(value, dtype=weights[0].dtype).to(weights[0].device, non_blocking=True)
                for value in (-group["lr"] * root / first, 1 - group["lr"] * group["weight_decay"])
            )
            decays = group["weight_decay"] != 0
            numbers = (step_size, *group["betas"], group["eps"], decay, decays)
            optimizer_adamw(gradients, weights, means, squares, *numbers)
        return loss
