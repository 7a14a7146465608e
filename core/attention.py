"""Attention: Habana's FusedSDPA where it exists, torch's SDPA elsewhere, under one name in transformers' registries."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.dropout import attend as attend_on_host
from core.dropout import draws_here, is_short
from core.errors import UserError, warn_once

FUSED = "gaudi_fused_sdpa"
OPTIONS = (
    "flash_attention_recompute",
    "flash_attention_fast_softmax",
    "flash_attention_causal_mask",
    "attn_softmax_bf16",
)


def choose(args: Namespace, device: Any) -> str:
    """Return the ``attn_implementation`` for ``from_pretrained``: "gaudi_fused_sdpa", "sdpa" or "eager".

    Raises:
        UserError: ``--use_flash_attention`` beside another ``--attn_implementation``.
    """
    asked = args.attn_implementation
    if args.use_flash_attention and asked not in (None, FUSED):
        raise UserError(f"--use_flash_attention means --attn_implementation {FUSED}, but {asked} is given; mend one")
    if args.use_flash_attention:
        asked = FUSED
    if asked == FUSED and not device.has_fused_attention:
        flag = "--use_flash_attention" if args.use_flash_attention else f"--attn_implementation {FUSED}"
        warn_once(f"{flag}: {device.name} has no fused attention; torch's sdpa is used")
        asked = "sdpa"
    choice = asked or (FUSED if device.has_fused_attention else "sdpa")
    for name in OPTIONS:
        if getattr(args, name) and choice != FUSED:
            warn_once(f"--{name} has no effect: it is an option of fused attention, and this run uses {choice}")
    return choice


def supported(model_class: type, choice: str, config: Any = None) -> str:
    """Return ``choice``, or the next best one that the model has, with one warning.

    Args:
        model_class: a model class of transformers, or an Auto class.
        config: the model's configuration; needed to see through an Auto class, without it ``choice`` is trusted.
    """
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None:
        found = mapping.get(type(config), None)
        model_class = found[0] if isinstance(found, tuple | list) else found
    if model_class is None or choice == "eager":
        return choice
    if not getattr(model_class, "_supports_sdpa", False):
        best = "eager"
    elif choice == FUSED and not model_class._can_set_attn_implementation():  # it does not ask the registry
        best = "sdpa"
    else:
        return choice
    warn_once(f"--attn_implementation {choice}: {model_class.__name__} does not have it; {best} is used")
    return best


def register(device: Any, args: Namespace) -> None:
    """Make "gaudi_fused_sdpa" known to transformers: FusedSDPA with the options in ``args``, or torch's SDPA.

    Also sets whether torch's math attention may reduce in bf16 (``--sdp_on_bf16``), and lets models that
    `core.dropout.place` has marked draw the masks of "sdpa" as bytes. The last call counts.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    allow_bf16 = getattr(torch._C, "_set_math_sdp_allow_fp16_bf16_reduction", None)
    if allow_bf16 is not None:
        allow_bf16(bool(args.sdp_on_bf16))
    elif args.sdp_on_bf16:
        warn_once("--sdp_on_bf16 has no effect: this torch has no such setting")
    on_host = not device.has_fused_attention and device.draws_masks_on_host
    sdpa = _with_byte_masks(sdpa_attention_forward) if on_host else sdpa_attention_forward
    AttentionInterface.register("sdpa", sdpa)
    if device.has_fused_attention:
        kernel = device.bridge("hpex.kernels").FusedSDPA
        AttentionInterface.register(FUSED, _fused_attention(kernel, args))
        AttentionMaskInterface.register(FUSED, _static_mask(bool(args.flash_attention_causal_mask)))
    else:
        AttentionInterface.register(FUSED, sdpa)
        AttentionMaskInterface.register(FUSED, sdpa_mask)


def _with_byte_masks(plain: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return ``plain``, transformers' attention by SDPA, with another way for weights that are dropped on the host.

    There torch's SDPA with dropout goes through fp32, and draws each weight's number by itself.
    """

    @functools.wraps(plain)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,  # of transformers' interface
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        own = draws_here(module, query, dropout) if dropout > 0 else is_short(module, query, key)
        own = own and query.shape[0] == key.shape[0]
        learned = attention_mask is not None and attention_mask.requires_grad
        if not own or learned or any(options.get(name) for name in ("softcap", "output_attentions")):
            arguments = (attention_mask, dropout, scaling, is_causal, position_bias)
            return plain(module, query, key, value, *arguments, **options)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and causal and query.shape[2] > 1:
            shape = (1, 1, query.shape[2], key.shape[2])
            attention_mask = torch.ones(shape, dtype=torch.bool).tril()
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend_on_host(query, key, value, attention_mask, position_bias, scale, dropout)
        return out.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def one_document_a_row() -> Iterator[None]:
    """In this block transformers takes each row for one document, unless a mask says otherwise.

    Else it looks at the positions for several, in each causal forward pass without a mask: the host waits for the
    device, and the graph is cut in two.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    look = getattr(masking_utils, name, None)
    if look is None:
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, look)


def _static_mask(kernel_makes_causal: bool) -> Callable[..., torch.Tensor | None]:
    """Return transformers' mask function, without its look at the mask's values.

    It leaves the mask out when nothing is padded: a host sync in every forward pass, and two graphs instead of one.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    checked = False

    def make(*positions: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
        nonlocal checked
        plain = options.get("allow_is_causal_skip") and options.get("mask_function") is causal_mask_function
        if kernel_makes_causal and plain and 1 < options["q_length"] == options["kv_length"]:
            if attention_mask is not None and not checked:  # once: it waits for the device
                checked = True
                if bool((attention_mask[:, 1:].bool() & ~attention_mask[:, :-1].bool()).any()):
                    raise UserError("--flash_attention_causal_mask needs padding on the right; this run pads elsewhere")
            return None  # padding on the right is in the future of every real position
        for skip in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
            options[skip] = options.get(skip, False) and attention_mask is None
        return sdpa_mask(*positions, attention_mask=attention_mask, **options)

    return make


def _fused_attention(kernel: Any, args: Namespace) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """From (batch, heads, length, size) to (batch, query length, heads, size)."""
        if softcap is not None:
            raise UserError(f"{FUSED} cannot cap attention scores as this model does; use --attn_implementation eager")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and query.shape[2] > 1  # one query, as in generation, sees every key
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # not every release of the kernel takes fewer key than query heads
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mask = _additive_mask(attention_mask, position_bias, causal, query, key)
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            _say("fused attention gives a learned attention bias no gradient: those layers train with plain attention")
            out = _plain_attention(query, key, value, mask, dropout, scale)
        else:
            out = _call_kernel(kernel, args, query, key, value, mask, dropout, causal and mask is None, scale)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _call_kernel(
    kernel: Any,
    args: Namespace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    softmax = "fast" if args.flash_attention_fast_softmax else "None"
    recompute = bool(args.flash_attention_recompute)
    if softmax == "fast" and recompute and not causal and query.requires_grad and torch.is_grad_enabled():
        _say("--flash_attention_fast_softmax: with --flash_attention_recompute the kernel trains causal layers only so")
        softmax = "None"
    result_type = query.dtype
    if args.attn_softmax_bf16:
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(query.dtype).clamp(min=torch.finfo(query.dtype).min)  # rounding may have made it -inf
    return kernel.apply(query, key, value, mask, dropout, causal, scale, softmax, recompute).to(result_type)


def _additive_mask(
    mask: torch.Tensor | None, bias: torch.Tensor | None, causal: bool, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Join mask (True: attend, or additive) and bias to one additive mask (batch or 1, heads or 1, query, key)."""
    if mask is None and bias is None:
        return None
    if mask is None and causal:
        shape = (1, 1, query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return mask if bias is None else mask + bias
    kept = query.new_zeros(()) if bias is None else bias
    return torch.where(mask, kept, torch.finfo(query.dtype).min)


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, dropout: float, scale: float
) -> torch.Tensor:
    weights = torch.softmax(query @ key.transpose(-1, -2) * scale + mask, dim=-1)
    weights = torch.nn.functional.dropout(weights.to(value.dtype), p=dropout)
    return weights @ value


def _say(message: str) -> None:
    if not torch.compiler.is_compiling():  # logging would break the graph
        warn_once(message)
