"""Faster forms of layers on a CPU: what a layer computes in many passes over its input is done in few.

A layer is known by what it computes, not by its name: it is tried once, on numbers that tell such layers apart. Names,
state and the classes' names stay as they are, so a saved model is the plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Compute = Callable[[torch.Tensor], torch.Tensor]

ALIKE = 2e-6  # of the greatest value: how much two orders of the same fp32 arithmetic may differ
PLAIN = "plain_computation"  # a replaced class's attribute: its own forward pass
ACTIVATIONS: dict[str, Compute] = {
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def place(model: nn.Module, device: Any) -> int:
    """Give the layers of a model that are known here their faster form; returns how many.

    On a host that computes at once only: elsewhere a compiler, or the device's own kernels, join what belongs together.
    """
    if device.compiles or device.queues_work:
        return 0
    found = 0
    for module in model.modules():
        forward = None if hasattr(type(module), PLAIN) else _faster(module)
        if forward is not None:
            module.__class__ = _with(type(module), *forward)
            found += 1
    return found


@torch.no_grad()
def _faster(module: nn.Module) -> tuple[str, float | None] | None:
    """The name of the form that computes the same as a module, with its epsilon; None for an unknown one."""
    parameters = dict(module.named_parameters())
    if type(module).__module__.startswith("torch.") or any(True for _ in module.children()) or _is_hooked(module):
        return None
    if any(True for _ in module.buffers()) or any(one.device.type != "cpu" for one in parameters.values()):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            if not parameters:
                return _activation(module)
            epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            named = [*parameters] == ["weight"] and isinstance(epsilon, float) and not hasattr(module.weight, "ds_id")
            return ("rms_norm", epsilon) if named and _is_rms_norm(module, epsilon) else None
    except Exception:  # whatever a module of any kind says to an input that is not its own
        return None


def _is_hooked(module: nn.Module) -> bool:
    """Whether something else acts on each call: then it is more than its class."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _activation(module: nn.Module) -> tuple[str, None] | None:
    probe = torch.cat([torch.linspace(-20, 20, 254), torch.tensor([-1e6, 1e6])]).view(2, 128)
    given = probe.clone()
    with _Operations() as operations:
        computed = module(given)
    if operations.count <= 1:
        return None
    return next(((name, None) for name, one in ACTIVATIONS.items() if _same(computed, one(probe))), None)


def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    weight = module.weight
    if weight.dtype != torch.float32 or weight.dim() != 1 or not weight.any():  # zeros would tell nothing
        return False
    wave = torch.linspace(0, 3 * weight.numel(), 3 * weight.numel()).sin() + 0.5  # its mean is not zero
    sizes = torch.tensor([1.0, 0.1, 30.0]) * torch.tensor([1.0, epsilon**0.5, 1.0])  # epsilon shows in the second
    rows = wave.view(3, -1) * sizes.unsqueeze(1)
    return _same(module(rows.clone()), rms_norm(rows, weight, epsilon))


def _same(found: Any, wanted: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    scale = wanted.abs().amax(-1, keepdim=True) if wanted.shape[0] == 3 else wanted.abs().clamp(min=1)
    return bool(((found - wanted).abs() <= ALIKE * scale).all())


@functools.cache
def _with(kind: type[nn.Module], form: str, epsilon: float | None) -> type[nn.Module]:
    """The class with a forward pass in the faster ``form``, for the inputs that it is for."""

    @functools.wraps(kind.forward)  # callers look at what it takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        alone = len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and type(args[0]) is torch.Tensor
        if not alone or not args[0].is_cpu or not args[0].is_floating_point():
            return kind.forward(self, *args, **kwargs)
        if form in ACTIVATIONS:
            return ACTIVATIONS[form](args[0])
        both = args[0].dtype == self.weight.dtype == torch.float32
        return rms_norm(args[0], self.weight, epsilon) if both else kind.forward(self, *args)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, PLAIN: kind.forward, **names})


def rms_norm(input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide the last axis by its root mean square, and multiply by ``weight``; in fp32, under autocast too.

    Args:
        input: (..., size), fp32.
        weight: (size,), fp32.
        epsilon: is added to the mean square.
    """
    return _RmsNorm.apply(input, weight, epsilon)


class _RmsNorm(Function):
    """Three passes forward and six backward; what is kept is the input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            norm = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
            inverse = norm.square_().div_(input.shape[-1]).add_(epsilon).rsqrt_()
            ctx.save_for_backward(input, weight, inverse)
            ctx.epsilon = epsilon
            return torch.mul(input, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        input, weight, inverse = ctx.saved_tensors
        size, needed = input.shape[-1], ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # somebody derives twice
            value = input * (input.square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt() * weight
            leaves = [one for one, is_needed in zip((input, weight), needed, strict=True) if is_needed]
            found = iter(torch.autograd.grad(value, leaves, gradient, create_graph=True))
            return *(next(found) if is_needed else None for is_needed in needed), None
        with torch.autocast("cpu", enabled=False):
            product, column = (gradient * input).reshape(-1, size), inverse.reshape(-1)
            of_weight = product.t().mv(column) if needed[1] else None
            if not needed[0]:
                return None, of_weight, None
            share = product.mv(weight).mul_(column.pow(3)).div_(-size).view(inverse.shape)
            of_input = torch.mul(gradient, weight).mul_(inverse).addcmul_(input, share)
        return of_input, of_weight, None
