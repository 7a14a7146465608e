"""FusedSDPA."""

from __future__ import annotations

from typing import Any

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)

SOFTMAX_MODES = ("None", "fast")
PADDING_SIDES = ("None", "left", "right")


class FusedSDPA(torch.autograd.Function):
    """Scaled dot-product attention; torch's `scaled_dot_product_attention`, but ``attn_mask`` never gets a gradient.

    ``FusedSDPA.apply(query, key, value, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode,
    valid_sequence_lengths, padding_side)``, by position. Without ``recompute_mode`` the attention weights are kept for
    the backward pass, with it they are computed again. A dropout mask is kept in both: a recorded graph that computes
    again has to drop the same weights.

    Shapes: query (batch, heads, length, size), key and value (batch, key heads, key length, size), where key heads
    divides heads; mask additive or bool (True: attend), broadcast to (batch, heads, length, key length);
    valid_sequence_lengths (batch,): how many keys, from the side that is not padded, are attended.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool = False,
        valid_sequence_lengths: torch.Tensor | None = None,
        padding_side: str = "None",
    ) -> torch.Tensor:
        """Return the attended values, (batch, heads, length, size).

        Raises:
            ValueError: an unknown ``softmax_mode`` or ``padding_side``, or lengths without a side.
            RuntimeError: types differ; a mask beside ``is_causal``; heads that key heads does not divide; fast softmax
                with ``recompute_mode`` in training without ``is_causal``.
        """
        _check(query, key, value, attn_mask, is_causal, softmax_mode, valid_sequence_lengths, padding_side)
        trains = any(ctx.needs_input_grad[:3])
        if trains and softmax_mode == "fast" and recompute_mode and not is_causal:
            raise RuntimeError("FusedSDPA: fast softmax with recompute_mode trains with is_causal only")
        ctx.scale = query.shape[-1] ** -0.5 if scale is None else scale
        ctx.keep, ctx.is_causal, ctx.padding_side = 1 - dropout_p, is_causal, padding_side
        with torch.autocast(query.device.type, enabled=False):
            masks = (attn_mask, valid_sequence_lengths)
            weights = _weights(query, key, ctx.scale, is_causal, padding_side, *masks)
            kept = torch.empty_like(weights, dtype=torch.bool).bernoulli_(ctx.keep) if dropout_p else None
            out = _spread(_drop(weights, kept, ctx.keep), value)
        ctx.save_for_backward(query, key, value, *masks, kept, None if recompute_mode else weights)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, attn_mask, lengths, kept, weights = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            if weights is None:
                weights = _weights(query, key, ctx.scale, ctx.is_causal, ctx.padding_side, attn_mask, lengths)
            gradient = _grouped(gradient, key)
            for_value = _gather(_drop(weights, kept, ctx.keep), gradient)
            for_weights = _drop(gradient @ value.unsqueeze(2).transpose(-1, -2), kept, ctx.keep)
            for_scores = weights * (for_weights - (for_weights * weights).sum(-1, keepdim=True)) * ctx.scale
            for_query = (for_scores @ key.unsqueeze(2)).reshape(query.shape)
            for_key = _gather(for_scores, _grouped(query, key))
        return for_query, for_key, for_value, *[None] * 8


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    softmax_mode: str,
    lengths: torch.Tensor | None,
    padding_side: str,
) -> None:
    if softmax_mode not in SOFTMAX_MODES or padding_side not in PADDING_SIDES:
        raise ValueError(
            f"FusedSDPA: softmax_mode={softmax_mode!r} is not in {SOFTMAX_MODES}, or "
            f"padding_side={padding_side!r} is not in {PADDING_SIDES}"
        )
    if lengths is not None and padding_side == "None":
        raise ValueError("FusedSDPA: valid_sequence_lengths needs a padding_side, left or right")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"FusedSDPA: types differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    if is_causal and attn_mask is not None:
        raise RuntimeError("FusedSDPA: attn_mask has to be None with is_causal")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError(f"FusedSDPA: {key.shape[1]} key heads do not divide {query.shape[1]} query heads")


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """View (batch, heads, ...) as (batch, key heads, queries per key head, ...)."""
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, *tensor.shape[2:])


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    is_causal: bool,
    padding_side: str,
    attn_mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention weights, (batch, key heads, queries per key head, length, key length)."""
    scores = (_grouped(query, key) @ key.unsqueeze(2).transpose(-1, -2)).mul_(scale)
    lowest = torch.finfo(scores.dtype).min
    length, keys = scores.shape[-2:]
    if attn_mask is not None:
        mask = attn_mask.expand(query.shape[0], query.shape[1], length, keys)
        mask = mask.reshape(scores.shape) if attn_mask.dim() == 4 and attn_mask.shape[1] > 1 else mask[:, :1, None]
        scores = scores.masked_fill_(~mask, lowest) if mask.dtype == torch.bool else scores.add_(mask)
    if is_causal:
        past = torch.ones(length, keys, dtype=torch.bool, device=scores.device).tril_()
        scores.masked_fill_(~past, lowest)
    if lengths is not None:
        position = torch.arange(keys, device=scores.device)
        distance = position if padding_side == "right" else keys - 1 - position
        scores.masked_fill_((distance >= lengths[:, None])[:, None, None, None], lowest)
    return torch.softmax(scores, dim=-1)


def _drop(weights: torch.Tensor, kept: torch.Tensor | None, keep: float) -> torch.Tensor:
    return weights if kept is None else weights * kept / keep


def _spread(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Weighted values, (batch, heads, length, size)."""
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _gather(weights: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Sum of the queries' parts per key, (batch, key heads, key length, size)."""
    return (weights.transpose(-1, -2) @ gradient).sum(2)
