"""FusedClipNorm and FusedRMSNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)


class FusedClipNorm:
    """Clips the L2 norm over all gradients, at a limit that is fixed here.

    Args:
        parameters: not used; `clip_norm` gets its own.
        max_norm: the limit.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float) -> None:
        self.max_norm = float(max_norm)

    def clip_norm(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Scale the gradients in place so that their norm is at most the limit.

        Returns:
            The norm before, of shape (1,) on the device; a scalar 0 on the host if there is no gradient.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        parameters = [parameter for parameter in given if parameter.grad is not None]
        if not parameters:
            return torch.tensor(0.0)
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
            return norm.reshape(1)


class FusedRMSNorm(torch.autograd.Function):
    """Root-mean-square norm after Zhang and Sennrich, 2019: ``FusedRMSNorm.apply(x, weight, eps)``.

    ``x`` is (..., size), ``weight`` (size,) of the same type; the result is like ``x``. Computes in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight.

        Raises:
            RuntimeError: the types of ``x`` and ``weight`` differ.
        """
        if x.dtype != weight.dtype:
            raise RuntimeError(f"FusedRMSNorm: x is {x.dtype} and weight is {weight.dtype}; they must be equal")
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            ctx.save_for_backward(x, weight, scale)
            return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, scale = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            wide, normed = gradient.float(), x.float() * scale
            for_weight = (wide * normed).sum(list(range(wide.dim() - 1)))
            scaled = wide * weight.float()
            for_x = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
            return for_x.to(x.dtype), for_weight.to(weight.dtype), None
