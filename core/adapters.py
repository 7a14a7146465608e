"""Low-rank adapters: a frozen model's linear layers, each with two small trained matrices beside it.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Layers and files are those of peft, put
into the model in place, so that it keeps its class. Files hold the adapter alone, or the plain model with it merged in.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import UserError, did_you_mean, read_json_object, warn_once
from core.files import share

NAME = "default"  # peft's own; part of the parameters' names in the model, not in the file
PREFIX = "base_model.model."  # of the names in peft's file
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def add_lora(model: nn.Module, rank: int, alpha: float, dropout: float, targets: list[str] | None, seed: int) -> None:
    """Freeze a model, and add trained matrices A (rank, in) and B (out, rank), in fp32, to its linear layers.

    A layer's output becomes ``W x + alpha / rank * B A dropout(x)``. B begins as zeros: the model is unchanged.

    Args:
        model: on the host or in its place, whole or in shares.
        dropout: probability, of what the adapters see of a layer's input.
        targets: last parts of the layers' names, such as ``q_proj``; None for those that peft names for this kind of
            model.
        seed: of A, which becomes the same whatever was drawn before, on every rank.

    Raises:
        UserError: peft is not installed, a number is out of range, or a target is no linear layer of this model.
    """
    for name, value, fits, needed in (
        ("rank", rank, rank >= 1, "1 or more"),
        ("alpha", alpha, 0 < alpha < math.inf, "a positive number"),
        ("dropout", dropout, 0 <= dropout < 1, "0 or more, below 1"),
    ):
        if not fits:
            raise UserError(f"LoRA's {name} is {value}; it must be {needed}")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"LoRA needs peft: pip install -U peft ({error})") from None
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_targets(model, targets),
        base_model_name_or_path=_name_of(model),
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # found out for each layer
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    for parameter in in_file(model).values():
        parameter.data = parameter.data.float()  # peft gives it the frozen weight's dtype


def _name_of(model: nn.Module) -> str | None:
    """Where a model of transformers or diffusers was loaded from."""
    config = getattr(model, "config", None)
    name = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None)
    return str(name) if name else None  # diffusers keeps a Path as it is


def _targets(model: nn.Module, asked: list[str] | None) -> list[str]:
    """The layers to adapt, checked."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN
    from transformers.pytorch_utils import Conv1D

    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    short = sorted({_short(name) for name in layers})
    kind = getattr(getattr(model, "config", None), "model_type", None)
    default = KNOWN.get(kind, [])
    if isinstance(default, str):  # a pattern
        default = [name for name in layers if re.fullmatch(default, name)]
    targets = asked or [target for target in default if any(_ends(name, target) for name in layers)]
    if not targets:
        what = kind or type(model).__name__
        raise UserError(f"LoRA: peft names no layers of {what}; name some of these: {', '.join(short)}")
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for target in targets:
        found = [name for name, _ in model.named_modules() if _ends(name, target)]
        if not found or any(name not in layers for name in found):
            hint = did_you_mean(target, short)
            raise UserError(f"LoRA: no linear layer is named {target!r}{hint}; there are: {', '.join(short)}")
        tied = [owners[id(layers[name].weight)] for name in found if len(owners[id(layers[name].weight)]) > 1]
        if tied:
            raise UserError(f"LoRA: {target} cannot be adapted, {' and '.join(tied[0])} share one weight; leave it out")
    return targets


def _ends(name: str, target: str) -> bool:
    """Whether a module's name ends with these parts, as peft compares them."""
    return f".{name}".endswith(f".{target}")


def _short(name: str) -> str:
    """A layer's name within its block: the last part, and one more if that is a number."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_lora` has been here."""
    return NAME in (getattr(model, "peft_config", None) or ())


def names(model: nn.Module) -> list[str]:
    """The adapters' parameters, all that is trained, by their names in the model."""
    return [name for name, _ in model.named_parameters() if file_name(name) != name]


def in_file(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by their names in peft's file."""
    named = dict(model.named_parameters())
    return {file_name(name): named[name] for name in names(model)}


def file_name(name: str) -> str:
    """A parameter's name in peft's file; the name itself for what is not of an adapter."""
    for part in ("lora_A", "lora_B"):
        layer, found, end = name.rpartition(f".{part}.{NAME}.")
        if found:
            return f"{PREFIX}{layer}.{part}.{end}"
    return name


def save(model: nn.Module, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter alone, as ``peft.PeftModel.from_pretrained(base, folder)`` loads it, and `for_pipelines`.

    Args:
        weights: the adapters' parameters by their names in the model, where it holds shares of them only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(model.named_parameters()) if weights is None else weights
    tensors = {file_name(name): given[name].detach().cpu().contiguous() for name in names(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode = True  # as peft writes it: to be loaded, not trained
    config.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config.save_pretrained(folder)
    for_pipelines(tensors, folder)
    share(folder, folder.glob("*.safetensors"))


def for_pipelines(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write an adapter of diffusers' UNet a second time, as ``pipeline.load_lora_weights(folder)`` loads it.

    Args:
        tensors: those of peft's file.
        folder: holds the adapter's configuration already; of another model's adapter nothing is written.
    """
    config = read_json_object(folder / CONFIG, "adapter")
    of = config.get("auto_mapping")
    library, kind = (of.get(name) if isinstance(of, dict) else None for name in ("parent_library", "base_model_class"))
    if not (str(library).startswith("diffusers.") and str(kind).startswith("UNet")):
        return
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    layers = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    StableDiffusionLoraLoaderMixin.save_lora_weights(folder, layers, unet_lora_adapter_metadata=config)


def check(model: nn.Module, folder: Path) -> None:
    """Refuse a checkpoint that was made with adapters for a model without, the reverse, and other adapters.

    Raises:
        UserError: says which.
    """
    saved = (folder / CONFIG).is_file()
    if saved and not has_adapters(model):
        raise UserError(
            f"{folder} holds a LoRA adapter, not a whole model; give the LoRA flags of the run that made it"
        )
    if not saved and has_adapters(model):
        raise UserError(f"{folder} holds a whole model, not a LoRA adapter; leave out the LoRA flags, or start anew")
    if not saved:
        return
    there, here = read_json_object(folder / CONFIG, "checkpoint"), model.peft_config[NAME]
    for key, what in {"r": "rank", "lora_alpha": "alpha"}.items():
        if there.get(key) != getattr(here, key):
            raise UserError(
                f"{folder} was made with LoRA's {what} {there.get(key)}, not {getattr(here, key)}; give that one"
            )
    base = there.get("base_model_name_or_path")
    if base != here.base_model_name_or_path:
        was, now = (name or "one built for it" for name in (base, here.base_model_name_or_path))
        warn_once(f"{folder} was trained on the model {was}; this one is {now}")


def merged(model: nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The plain model's weights under its own names, on the host where an adapter was merged in: ``W + scale * B A``.

    Computed in fp32 and rounded once, to the dtype of the frozen weight. The model stays as it is; beside it, and the
    weights, there are new adapted ones only.

    Args:
        weights: all of them by their names in the model, where it holds shares of them only.
    """
    given = model.state_dict() if weights is None else weights
    own, plain = set(names(model)), {}
    for name, tensor in given.items():
        if name in own:
            continue
        layer, adapted, end = name.rpartition(".base_layer.")
        tensor = _merge(model.get_submodule(layer), layer, given) if adapted and end == "weight" else tensor
        plain[f"{layer}.{end}" if adapted else name] = tensor
    return plain


def _merge(module: Any, layer: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One layer's weight (out, in), or (in, out) where its module stores it so, with its adapter in it."""
    ends = ("base_layer.weight", f"lora_B.{NAME}.weight", f"lora_A.{NAME}.weight")
    frozen, b, a = (weights[f"{layer}.{end}"].detach().cpu() for end in ends)
    change = module.scaling[NAME] * (b.float() @ a.float())
    return (frozen.float() + (change.T if module.fan_in_fan_out else change)).to(frozen.dtype)
