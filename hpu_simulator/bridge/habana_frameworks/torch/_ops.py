"""Operators of the bridge's own that other people's code calls by name: ``torch.ops.hpu``.

DeepSpeed's HPU Adam calls ``optimizer_adamw``, with one argument more in eager mode than in lazy mode.
"""

from __future__ import annotations

import torch

_LISTS = "Tensor[] gradients, Tensor(a!)[] weights, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq"
_NUMBERS = "Tensor neg_step, float beta1, float beta2, float epsilon"
_SCHEMAS = {
    True: f"optimizer_adamw({_LISTS}, {_NUMBERS}, float modified_wd) -> ()",
    False: f"optimizer_adamw({_LISTS}, {_NUMBERS}, Tensor modified_wd, bool has_weight_decay) -> ()",
}
_library: list[torch.library.Library] = []  # an operator lives as long as its library


def register(lazy: bool) -> None:
    """Define the operators, with the arguments that they have in this mode."""
    library = torch.library.Library("hpu", "FRAGMENT")
    library.define(_SCHEMAS[lazy])
    library.impl("optimizer_adamw", optimizer_adamw, "CompositeExplicitAutograd")
    _library.append(library)


@torch.no_grad()
def optimizer_adamw(
    gradients: list[torch.Tensor],
    weights: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    neg_step: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    modified_wd: torch.Tensor | float,
    has_weight_decay: bool | None = None,
) -> None:
    """Update ``weights`` and both moments in place; one temporary of one weight's size at a time.

    Adam after Kingma and Ba, 2015, section 2, the variant that puts both bias corrections into the step size, so that
    epsilon is added to the uncorrected root; decay before the step, as in Loshchilov and Hutter, 2019.

    Args:
        gradients, weights, exp_avg, exp_avg_sq: one tensor per parameter, of equal shapes.
        neg_step: minus the step size, with both bias corrections in it; one element.
        beta1, beta2, epsilon: Adam's.
        modified_wd: 1 - learning rate * weight decay; one element, or a number.
        has_weight_decay: False leaves the decay out; None: decide by ``modified_wd``, a number.
    """
    if has_weight_decay is None:
        has_weight_decay = modified_wd != 1.0
    neg_step = neg_step.reshape(())
    if isinstance(modified_wd, torch.Tensor):
        modified_wd = modified_wd.reshape(())
    for gradient, weight, mean, square in zip(gradients, weights, exp_avg, exp_avg_sq, strict=True):
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = square.sqrt().add_(epsilon)
        torch.div(mean, update, out=update)
        if has_weight_decay:
            weight.mul_(modified_wd)
        weight.add_(update.mul_(neg_step))
