"""FusedLamb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from habana_frameworks import _lacking
from habana_frameworks.torch.hpex.optimizers.base import FusedOptimizer, bias_corrections, evaluate

__getattr__ = _lacking.attribute(__name__)


class FusedLamb(FusedOptimizer):
    """LAMB after You et al., 2020, with a clip of its own. See `FusedOptimizer` for how it differs from torch's.

    Unless ``max_grad_norm`` is None, the norm over the gradients of all groups is clipped at it, without the gradients
    being changed. The ratio of norms applies to groups with decay, or to all with ``use_lamb``. With
    ``grad_averaging`` the gradient enters the mean times 1 - beta1, else as it is. ``zero_grad`` takes no argument.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_lamb: bool = False,
    ) -> None:
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, options)
        self.set_grad_none = set_grad_none
        self.use_lamb = use_lamb

    def zero_grad(self) -> None:
        """Drop the gradients, or fill them with 0 if ``set_grad_none`` is False."""
        super().zero_grad(set_to_none=self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = evaluate(closure)
        self.refuse_sparse()
        shrink = self._shrink()
        for group in self.param_groups:
            for parts in zip(*self.gather(group), strict=True):
                self._update(group, shrink, *parts)
        return loss

    def _shrink(self) -> torch.Tensor | None:
        """Return what divides the gradients, on the device; None where nothing is clipped."""
        limit = self.defaults["max_grad_norm"]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if limit is None or not gradients:
            return None
        return (torch.nn.utils.get_total_norm(gradients) / limit).clamp_(min=1)

    def _update(
        self,
        group: dict[str, Any],
        shrink: torch.Tensor | None,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
    ) -> None:
        beta1, beta2 = group["betas"]
        first, root = bias_corrections(group)
        gradient = gradient if shrink is None else gradient / shrink.to(gradient.dtype)
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = square.sqrt().div_(root).add_(group["eps"])
        torch.div(mean, update, out=update)
        update.div_(first).add_(weight, alpha=group["weight_decay"])
        if group["weight_decay"] or self.use_lamb:
            weight_norm, update_norm = weight.norm(), update.norm()
            usable = (weight_norm > 0) & (update_norm > 0)
            update.mul_(torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm)))
        weight.add_(update, alpha=-group["lr"])
