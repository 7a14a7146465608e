"""LAMB for devices that have no fused kernel of it."""

from __future__ import annotations

import math
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction, rescaled per tensor by the ratio of weight norm to update norm.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, algorithm 2,
    with bias correction. The ratio is 1 where either norm is 0 and for groups without weight decay, as in the paper's
    own training of BERT (biases and norms).

    Like torch's fused kernels it can leave a step out on the device: with ``found_inf`` set, a scalar tensor there that
    is 1 or 0, a step at 1 changes neither weights nor state. The step counts are kept on the device then.
    """

    _step_supports_amp_scaling = True  # torch's sign for that

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float = 1e-6, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient. One that is left out is set to zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                self._update(parameter, group, state)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        (beta1, beta2), gradient, bad = group["betas"], parameter.grad, getattr(self, "found_inf", None)
        if bad is None:
            state["step"] += 1
            step = state["step"].item()  # kept on the host: reading it waits for no device
            first, second, toward, keep = 1 - beta1**step, 1 - beta2**step, 1 - beta1, beta2
        else:
            good = 1 - bad
            step = state["step"] = state["step"].to(bad.device) + good
            first, second = (_complement(beta, step) for beta in (beta1, beta2))
            toward, keep = ((1 - beta1) * good).to(gradient.dtype), torch.where(bad.bool(), 1.0, beta2)
            gradient.masked_fill_(bad.bool(), 0)
        mean = state["exp_avg"].lerp_(gradient, toward)
        square = state["exp_avg_sq"].mul_(keep).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / second).sqrt_().add_(group["eps"])
        update = (mean / first).div_(denominator)
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
            weight_norm, update_norm = parameter.norm(), update.norm()
            usable = (weight_norm > 0) & (update_norm > 0)
            update.mul_(torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm)))
        if bad is not None:
            update.masked_fill_(bad.bool(), 0)
        parameter.add_(update, alpha=-group["lr"])


def _complement(beta: float, step: torch.Tensor) -> torch.Tensor:
    """1 - beta^step, without the rounding in fp32 of a power close to 1."""
    return -(step * (math.log(beta) if beta else -math.inf)).expm1()
