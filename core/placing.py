"""A pipeline of diffusers on the device: fused attention, step boundaries, recorded graphs.

diffusers knows nothing of these. They are put around the models that are called at each step, while images are drawn
(`ready`), and into their attention (`place`); the models themselves stay as they are. On a CPU, attention over few
tokens takes a shorter way in bf16 (`attend_to_few`).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from core import attention, graphs
from core.device import Device
from core.dropout import SHORT
from core.dropout import attend as attend_on_host
from core.errors import warn_once
from core.pipelines import DENOISERS, denoiser

STEPPED = (*DENOISERS, "controlnet")  # what a pipeline calls at each step


def place(pipe: Any, args: Namespace, device: Device) -> None:
    """Put all models on the device, with the attention that it is best at, to be evaluated.

    In a run that trains the denoiser's parameters have gradients; no others do.
    """
    attention.register(device, args)
    for part in pipe.components.values():
        if not isinstance(part, nn.Module):
            continue
        part.eval()
        part.requires_grad_(args.do_train and part is denoiser(pipe))  # peft freezes what it merges adapters into
        # Not by pipe.to, which sets variables of the bridge when it has read them already.
        if not any(hasattr(parameter, "ds_id") for parameter in part.parameters()):  # else it was built in its place
            part.to(device.torch_device)
            if hasattr(part, "tie_weights"):
                part.tie_weights()  # moving to a device may have made copies
    for name in STEPPED:
        if isinstance(getattr(pipe, name, None), nn.Module):
            on_host = not (device.queues_work or device.compiles or args.attn_implementation)
            _set_attention(getattr(pipe, name), attention.choose(args, device), on_host)


class _Attention(TorchFunctionMode):
    """Calls another function wherever torch's attention is called: processors differ, and all of them call that."""

    def __init__(self, attend: Callable[..., tuple[torch.Tensor, Any]]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        found, _ = self.attend(None, query, key, value, attn_mask, dropout_p, scale, is_causal)
        return found.transpose(1, 2)  # as torch's: (batch, heads, length, size)


def attend_to_few(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, None]:
    """Attention in bf16 over few tokens by two plain products, whose scores are bf16, too; else torch's.

    On a CPU torch's kernel takes up to three times as long for these, forth and back.

    Args:
        query, key, value: (batch, heads, length, size).

    Returns:
        (batch, length, heads, size), and None in place of the weights.
    """
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    few = query.shape[2] * key.shape[2] <= SHORT and query.shape[1] == key.shape[1]
    if not (query.is_cpu and low == torch.bfloat16 and few) or mask is not None or dropout or causal:
        gqa = query.shape[1] != key.shape[1]
        options = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": gqa}
        return functional.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend_on_host(query, key, value, None, None, scale, p=0.0).transpose(1, 2), None


def _set_attention(model: nn.Module, choice: str, on_host: bool = False) -> None:
    """Let the attention of a model of diffusers be the chosen one; its processors keep their classes' names and kinds.

    ``on_host``: the CPU computes, and no way was asked for.

    A processor heeds the choice by itself, so that what is recomputed in a backward pass does, too.
    """
    from transformers import AttentionInterface

    if choice == "eager" and hasattr(model, "set_default_attn_processor"):
        model.set_default_attn_processor()
    elif choice == "eager":
        warn_once(f"--attn_implementation eager: {type(model).__name__} does not have it; sdpa is used")
    if choice != attention.FUSED and not on_host:
        return
    attend = attend_to_few if on_host else AttentionInterface()[choice]
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and not hasattr(processor, "attend"):
            processor.__class__ = _with_attention(type(processor))
            processor.attend = attend


@functools.cache
def _with_attention(kind: type) -> type:
    @functools.wraps(kind.__call__)  # diffusers look at what it takes
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Attention(self.attend):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@contextmanager
def ready(pipe: Any, args: Namespace, device: Device) -> Iterator[None]:
    """In this block the pipeline draws: its models are evaluated, each call a graph of its own, or a recorded one.

    The models themselves are left as they were; recorded graphs are gone with the block.
    """
    were: dict[str, tuple[nn.Module, bool, Any]] = {}
    try:
        for name in STEPPED:
            model = getattr(pipe, name, None)
            if isinstance(model, nn.Module):
                # A forward that the run has recorded cannot be recorded in another: it waits until afterwards.
                were[name] = (model, model.training, model.__dict__.pop("forward", None))
                # Past diffusers' own __setattr__, which would write another class into model_index.json.
                object.__setattr__(pipe, name, _Stepped(model.eval(), args, device))
        yield
    finally:
        for name, (model, training, forward) in were.items():
            object.__setattr__(pipe, name, model.train(training))
            if forward is not None:
                model.forward = forward


class _Stepped:
    """What stands for a model in its pipeline: a call moves its inputs to the device, and its outputs last.

    Not a module, though it shows the model's class and attributes: what it stands for stays unchanged.
    """

    def __init__(self, model: nn.Module, args: Namespace, device: Device) -> None:
        self._model, self._device, self._dtype = model, device, model.dtype
        self._replays = args.use_hpu_graphs_for_inference and (device.has_hpu_graphs or device.has_cuda_graphs)
        self._run = graphs.cache_inference_graphs(_Recorded(model), args, device) if self._replays else model
        if device.mode == "compile" and model._compiled_call_impl is None:
            graphs.compile_in_place(model, args, device)

    __class__ = property(lambda self: type(self._model))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._device.step_boundary()  # what the scheduler does is a graph of its own
        args, kwargs = self._device.move((args, kwargs))  # the timestep, and scales that are tensors
        found = tree_map(self._lasting, self._run(*args, **kwargs))
        self._device.step_boundary()
        return found

    def _lasting(self, leaf: Any) -> Any:
        """An output in the parameters' dtype, whatever autocast made of it; a replay writes over the last one's."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = leaf.to(self._dtype) if leaf.is_floating_point() else leaf
        return found.clone() if self._replays and found is leaf else found


class _Recorded(nn.Module):
    """A model as what is recorded: with a forward of its own to be replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)
