"""The norm of the gradients under DeepSpeed's ZeRO, such that what is not finite shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from core.errors import UserError


class GroupNorms:
    """Keeps the norm of each group of parameters as DeepSpeed computes it, the same on all ranks.

    DeepSpeed writes -1 for a norm that is not finite, and versions before 0.19 make a global norm of 1 or more of it.

    Args:
        zero: DeepSpeed's optimiser of stage 1, 2 or 3; two of its methods are wrapped.
    """

    def __init__(self, zero: Any) -> None:
        self._zero, self._norms = zero, []
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            if hasattr(zero, name):
                setattr(zero, name, self._noting(getattr(zero, name)))

    def _noting(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def noting(*args: Any, **kwargs: Any) -> Any:
            norm = compute(*args, **kwargs)
            self._norms.append(torch.as_tensor(norm, dtype=torch.float32).reshape(()))
            return norm

        return noting

    def forget(self) -> None:
        """Call before each step."""
        self._norms.clear()

    def whole(self) -> torch.Tensor:
        """The norm over all groups before clipping, a scalar: not a number if one of them is not finite.

        Raises:
            UserError: DeepSpeed's configuration turns it off.
        """
        norms = self._norms or [self._zero._global_grad_norm]
        if norms[0] is None:
            raise UserError("DeepSpeed's compute_grad_norm is false; take it out: what is not finite could not be seen")
        norms = torch.stack([torch.as_tensor(norm) for norm in norms])
        norm = torch.linalg.vector_norm(norms)
        return torch.where((norms >= 0).all() & norm.isfinite(), norm, math.nan)
