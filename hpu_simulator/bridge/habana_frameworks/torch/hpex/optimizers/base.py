"""What the fused Adam and LAMB share: moments per parameter, the step count per group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimisers. As with the bridge's:

    - the moments have the parameter's type,
    - the step count is ``param_group["step"]``: a parameter that gets its first gradient late meets the group's count,
    - an empty parameter group is an `IndexError`,
    - sparse gradients are refused.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            IndexError: it has no parameter.
        """
        super().add_param_group(param_group)
        self.param_groups[-1]["params"][0]

    def refuse_sparse(self) -> None:
        """Raise `RuntimeError` if a gradient is sparse."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")

    def gather(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        """Count a step of ``group``; return its weights that have a gradient, their gradients and both moments."""
        group["step"] = group.get("step", 0) + 1
        weights = [parameter for parameter in group["params"] if parameter.grad is not None]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
        moments = ([self.state[weight][key] for weight in weights] for key in ("exp_avg", "exp_avg_sq"))
        return weights, [weight.grad for weight in weights], *moments


def bias_corrections(group: dict[str, Any]) -> tuple[float, float]:
    """Return what divides the mean and the root of the squares at this step: 1 and 1 if corrections are off.

    Groups of old checkpoints say ``correct_bias`` in place of ``bias_correction``.
    """
    if not group.get("bias_correction", group.get("correct_bias", True)):
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], math.sqrt(1 - beta2 ** group["step"])


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Call an optimiser's closure, with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
