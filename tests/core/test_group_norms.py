"""What DeepSpeed writes for a norm that is not finite shows, in its versions of today and before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from core.errors import UserError
from core.group_norms import GroupNorms


class Before019:
    """As DeepSpeed computes a global norm before 0.19: -1 for a group that is not finite; a float if offloaded."""

    def __init__(self, offload: bool) -> None:
        self.offload, self._global_grad_norm = offload, 0.0

    def get_grad_norm_direct(self, gradients: list[torch.Tensor], params: Any = None) -> torch.Tensor:
        norm = torch.nn.utils.get_total_norm(gradients)
        return torch.where(norm.isfinite(), norm, -1.0)

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[torch.Tensor]) -> float:
        return Before019.get_grad_norm_direct(self, params).item()

    def step(self, groups: list[list[torch.Tensor]]) -> None:
        compute = self.complete_grad_norm_calculation_for_cpu_offload if self.offload else self.get_grad_norm_direct
        self._global_grad_norm = torch.stack([torch.as_tensor(compute(group)) for group in groups]).norm()


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_that_is_not_finite_makes_the_norm_no_number(offload: bool) -> None:
    zero = Before019(offload)
    norms = GroupNorms(zero)
    for bad, expected in ((None, 5.0), (math.nan, math.nan), (-math.inf, math.nan), (None, 5.0)):
        norms.forget()
        zero.step([[torch.tensor([3.0])], [torch.tensor([4.0 if bad is None else bad])]])
        assert norms.whole().item() == pytest.approx(expected, nan_ok=True)
        assert math.isfinite(zero._global_grad_norm)  # which is why it is not enough


@pytest.mark.parametrize(("given", "expected"), [(2.0, 2.0), (math.inf, math.nan), (-1.0, math.nan)])
def test_one_that_has_no_groups_tells_its_global_norm(given: float, expected: float) -> None:
    class Alone:
        _global_grad_norm = given

    assert GroupNorms(Alone()).whole().item() == pytest.approx(expected, nan_ok=True)


def test_a_norm_that_is_turned_off_is_refused() -> None:
    class Off:
        _global_grad_norm = None

    with pytest.raises(UserError, match="compute_grad_norm is false; take it out"):
        GroupNorms(Off()).whole()
