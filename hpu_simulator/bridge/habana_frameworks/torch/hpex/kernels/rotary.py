"""RotaryPosEmbeddingHelperV2."""

from __future__ import annotations

from typing import Any

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    """Rotary embedding in halves, after Su et al., 2021: ``apply(x, cos, sin, position_ids)``.

    ``x`` is (batch, heads, length, size), the tables (1, 1, positions, size) or (positions, size), ``position_ids``
    (batch or 1, length). Only ``x`` gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return x * cos + (-second half, first half of x) * sin, with the tables' rows at ``position_ids``."""
        cos, sin = (table.reshape(table.shape[-2:])[position_ids].unsqueeze(1) for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of ``x``: turned back."""
        cos, sin = ctx.saved_tensors
        first, second = (gradient * sin).chunk(2, dim=-1)
        return (gradient * cos + torch.cat((second, -first), dim=-1)).to(gradient.dtype), None, None, None
