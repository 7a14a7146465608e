"""Dropout whose masks the host draws as bytes: eight elements to a random word, each compared with a threshold.

torch draws one number of double precision for each element, which on a CPU can take a quarter of a training step.

A call drops one of the two multiples of 1/256 (of 1/65536 where they are more than `COARSE` off) that a share p lies
between, chosen by lot so that the share of all calls is p. What is kept is scaled by the inverse of the share that this
call keeps: each call's expectation is exact. Every random bit comes from torch's default generator: seeds, checkpoints
and recomputed activations give the same masks bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

COARSE = 0.1  # of the share that is dropped or of the one that is kept, whichever is smaller
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SHORT, KEPT = 512 * 512, 2**24  # weights of a head, and of all, up to which they are made at once: 32 MiB
MARK = "draws_masks_on_host"


@functools.cache
def steps(p: float) -> tuple[int, int, float]:
    """Return bits per element, how many of their values at least drop it, and how often one more does.

    Bits are 0 where even 16 of them are too coarse.
    """
    for bits in (8, 16):
        values = 2**bits
        rest, least = math.modf(p * values)
        off = max(rest, 1 - rest) / values if rest else 0.0
        if 0 < least < values - (rest > 0) and off <= COARSE * min(p, 1 - p):
            return bits, int(least), rest
    return 0, 0, 0.0


def draw(shape: Sequence[int], p: float) -> tuple[torch.Tensor, float]:
    """Draw a mask of 1 (kept) and 0 (dropped) in uint8, and return it with the scale of what is kept.

    Args:
        p: a share for which `steps` has bits.
    """
    bits, dropping, rest = steps(p)
    number = math.prod(shape)
    words = torch.empty(-(-number * bits // 64) + 1, dtype=torch.int64)
    words.random_(-(2**63), None)  # without limits random_ leaves the sign bit, and so every eighth byte's first, zero
    dropping += words[-1].item() / 2**64 + 0.5 < rest
    if bits == 8:
        keep = words.view(torch.uint8)[:number].ge_(dropping)
    else:
        keep = words.view(torch.int16)[:number].ge_(dropping - 2**15).to(torch.uint8)
    return keep.view(shape), 2**bits / (2**bits - dropping)


def fits(input: torch.Tensor, p: float) -> bool:
    """Whether masks of bytes are for this tensor: on the host, a plain floating one, and not in a compiled graph."""
    if torch.compiler.is_compiling() or type(input) not in (torch.Tensor, nn.Parameter):
        return False
    return input.is_cpu and input.dtype in DTYPES and 0 < p < 1 and steps(p)[0] > 0


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As `torch.nn.functional.dropout`, which does what does not fit."""
    if not training or inplace or not fits(input, p):
        return functional.dropout(input, p, training, inplace)
    return _Dropout.apply(input, *draw(input.shape, p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        # In one pass, which multiplies in fp32 and rounds once: the scale itself, in bf16, would be 0.2 % off.
        return torch.addcmul(input.new_zeros(()), input, keep.to(input.dtype), value=scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _Dropout.apply(gradient, keep, ctx.scale), None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    p: float,
) -> torch.Tensor:
    """Attention with dropped weights, in the dtype of its arguments, or autocast's; a softmax sums in fp32.

    Args:
        query, key, value: (batch, heads, length, size), with as many heads each.
        mask: True where a key is attended to, or additive and without a gradient; it broadcasts to (batch, heads,
            query length, key length). A query that no key is left for attends to all alike.
        bias: additive, may be learned; broadcasts alike.
        scale: of the scores, before mask and bias.
        p: share of the weights that is dropped: 0, or one for which `steps` has bits.

    Returns:
        (batch, heads, query length, size).
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = _additive(mask, query.dtype)
    bias = None if bias is None else bias.to(query.dtype)
    keep, of_kept = draw((*query.shape[:3], key.shape[2]), p) if p else (None, 1.0)
    return _Attention.apply(query, key, value, mask, bias, scale, keep, of_kept)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    least = torch.finfo(dtype).min
    if mask.dtype == torch.bool:  # by way of bytes: filling where a mask is set takes ten times as long
        return mask.view(torch.uint8).to(dtype).sub_(1).mul_(-least)
    return mask.to(dtype).clamp(min=least)  # rounding may have made it -inf


class _Attention(Function):
    """The weights are kept for the backward pass in the dtype of the arguments, the mask in bytes."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        scale: float,
        keep: torch.Tensor | None,
        of_kept: float,
    ) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            scores = (query if scale == 1 else query * scale) @ key.transpose(-1, -2)
            for term in (bias, mask):
                if term is not None:
                    scores += term
            weights = torch.softmax(scores, dim=-1)
            dropped = weights if keep is None else torch.mul(weights, keep.to(weights.dtype), out=scores)
            out = dropped @ value if keep is None else (dropped @ value).mul_(of_kept)
        ctx.save_for_backward(query, key, value, weights, keep)
        ctx.scale, ctx.of_kept, ctx.bias_shape = scale, of_kept, None if bias is None else bias.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, weights, keep = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            kept = weights
            if keep is not None:
                gradient, kept = gradient * ctx.of_kept, keep.to(weights.dtype)
            of_weights = gradient @ value.transpose(-1, -2)
            if keep is not None:
                of_weights, kept = of_weights.mul_(kept), kept.mul_(weights)
            of_value = kept.transpose(-1, -2) @ gradient
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_bias = of_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[4] else None
            of_query, of_key = of_scores @ key, of_scores.transpose(-1, -2) @ query
            if ctx.scale != 1:
                of_query, of_key = of_query.mul_(ctx.scale), of_key.mul_(ctx.scale)
        return of_query, of_key, of_value, None, of_bias, None, None, None


def place(model: nn.Module, device: Any) -> None:
    """Let a model's dropout draw masks of bytes, where the device draws them on the host.

    Each module decides for itself, whoever calls it: what is recomputed in a backward pass draws alike. Names and
    state stay as they are, and the classes' names. `core.attention.register` heeds the mark.
    """
    if not device.draws_masks_on_host:
        return
    for module in model.modules():
        setattr(module, MARK, True)
        if type(module) is nn.Dropout:
            module.__class__ = _Module
        elif _calls_dropout(module) and not hasattr(type(module), "plain_forward"):
            module.__class__ = _with_dropout(type(module))


def is_short(module: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a placed module's attention without dropout is faster by `attend`, which keeps the weights.

    So it is in bf16, whose backward pass torch's SDPA does in small parts on a CPU, up to some hundred positions.
    """
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    fits_here = getattr(module, MARK, False) and query.is_cpu and not torch.compiler.is_compiling()
    rows, heads, length, _ = query.shape
    short = length * key.shape[2] <= SHORT and rows * heads * length * key.shape[2] <= KEPT
    return fits_here and short and (autocast or query.dtype == torch.bfloat16) and torch.is_grad_enabled()


def draws_here(module: Any, input: torch.Tensor, p: float) -> bool:
    """Whether a placed module's dropout of this tensor, which is like that of ``p``, is ours."""
    return getattr(module, MARK, False) and fits(input, p)


class _Module(nn.Dropout):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout(input, self.p, self.training, self.inplace)


_Module.__name__ = _Module.__qualname__ = nn.Dropout.__name__  # where a model is printed


class _Functional(TorchFunctionMode):
    """Calls `dropout` wherever torch's function is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (dropout if func is functional.dropout else func)(*args, **(kwargs or {}))


_within = threading.local()


@functools.cache
def _with_dropout(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with a forward pass in which torch's function is `dropout`."""

    @functools.wraps(kind.forward)  # callers look at what it takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training or getattr(_within, "mode", None):
            return kind.forward(self, *args, **kwargs)
        with _Functional() as _within.mode:
            try:
                return kind.forward(self, *args, **kwargs)
            finally:
                _within.mode = None

    own = {"forward": forward, "plain_forward": kind.forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def _calls_dropout(module: nn.Module) -> bool:
    """Whether the module's own code calls torch's function, itself or by a function of its file."""
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    return any(_function_calls(function) for function in _functions(type(module), eager))


@functools.cache
def _functions(kind: type, eager: bool) -> list[FunctionType]:
    """The class's methods and the functions that they name; plain attention only where it is the chosen one."""
    classes = [
        base for base in kind.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")
    ]
    values = [inspect.unwrap(value) for base in classes for value in vars(base).values() if callable(value)]
    methods = [value for value in values if isinstance(value, FunctionType)]
    named = [(name, method.__globals__.get(name)) for method in methods for name in method.__code__.co_names]
    skipped = () if eager else ("eager_attention_forward",)
    return methods + [value for name, value in named if isinstance(value, FunctionType) and name not in skipped]


def _function_calls(function: Callable[..., Any]) -> bool:
    names = function.__code__.co_names
    known = [function.__globals__.get(name) for name in names]
    return "dropout" in names and (
        "functional" in names or any(value is functional or value is functional.dropout for value in known)
    )
