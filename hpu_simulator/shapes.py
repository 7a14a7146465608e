"""What `shapes` mode changes on the host: weights are neither drawn nor loaded, since no value is ever computed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hpu_simulator.settings import LARGE


def start() -> None:
    """Skip filling large host tensors, whose memory is then never taken; neither read nor write the weights' bytes."""
    import torch._meta_registrations  # the shape functions that are written in Python

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, _skipping(getattr(torch.Tensor, name)))
    torch.Tensor.clone = _clone(torch.Tensor.clone)
    for name in ("randn", "rand"):
        setattr(torch, name, _drawing(getattr(torch, name)))
    for name in ("trunc_normal_", "orthogonal_"):  # several operators each
        setattr(torch.nn.init, name, _skipping(getattr(torch.nn.init, name)))
    torch._tensor_str._tensor_str = _printed(torch._tensor_str._tensor_str)
    actions = {
        "transformers.modeling_utils": _without_weights_transformers,
        "diffusers.models.modeling_utils": _without_weights_diffusers,
        "safetensors.torch": _without_bytes,
    }
    for name in actions.keys() & sys.modules.keys():
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(actions))


def _skipping(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(fill)
    def fill_small(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return tensor if _needs_no_values(tensor) else fill(tensor, *args, **options)

    return fill_small


def _drawing(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(draw)
    def draw_small(*size: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        empty = torch.empty(*size, **options)  # takes no memory before it is written
        return empty if _needs_no_values(empty) else draw(*size, generator=generator, **options)

    return draw_small


def _clone(clone: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(clone)
    def clone_small(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        bare = _needs_no_values(tensor) and not tensor.requires_grad
        return torch.empty_like(tensor, **options) if bare else clone(tensor, **options)

    return clone_small


def _printed(text: Callable[..., str]) -> Callable[..., str]:
    """A tensor is printed from the host: which digits it needs is found out by masks."""

    @wraps(text)
    def text_on_host(tensor: torch.Tensor, *args: Any, **options: Any) -> str:
        return text(tensor.detach().to("cpu") if tensor.device.type == "hpu" else tensor, *args, **options)

    return text_on_host


def _needs_no_values(tensor: torch.Tensor) -> bool:
    """Weights, gradients and moments on the host: their memory is never taken while nothing is written there."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.numel() >= LARGE


class _AfterImport:
    """Calls a function on a module once it is imported, and imports nothing itself."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                action(module)

            spec.loader.exec_module = run_and_change
        return spec


def _without_weights_transformers(module: ModuleType) -> None:
    """``from_pretrained`` reads the configuration (from a hub or a folder) and no weights."""
    ordinary = module.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: type, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        from transformers import GenerationConfig, PretrainedConfig

        hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")
        given = {key: options[key] for key in hub if options.get(key) is not None}
        unknown = {"quantization_config", "gguf_file", "state_dict", "tp_plan", "device_mesh"} & set(options)
        if unknown:  # the ordinary way knows what these mean
            return ordinary(cls, name, *args, config=config, **options)
        if not isinstance(config, PretrainedConfig):
            rest = {key: value for key, value in options.items() if key not in NOT_OF_THE_CONFIGURATION}
            config = cls.config_class.from_pretrained(config or name, **{**rest, **given})
        choice = options.get("attn_implementation")
        dtype = options.get("dtype", options.get("torch_dtype"))
        dtype = config.dtype if dtype in (None, "auto") else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        model = cls._from_config(
            config, **({"attn_implementation": choice} if choice else {}), **({"dtype": dtype} if dtype else {})
        )
        if model.can_generate():
            with suppress(OSError):  # many models have none
                model.generation_config = GenerationConfig.from_pretrained(name, **given)
        return model.eval()

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


NOT_OF_THE_CONFIGURATION = frozenset(
    "attn_implementation dtype torch_dtype device_map low_cpu_mem_usage use_safetensors variant weights_only "
    "ignore_mismatched_sizes output_loading_info key_mapping max_memory offload_folder offload_state_dict "
    "offload_buffers use_kernels from_tf from_flax adapter_kwargs".split()
)


def _without_weights_diffusers(module: ModuleType) -> None:
    """The same for diffusers: the configuration makes the model."""

    def from_pretrained(cls: type, name: Any, **options: Any) -> Any:
        hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
        given = {key: options[key] for key in hub if options.get(key) is not None}
        config, rest = cls.load_config(name, return_unused_kwargs=True, **given)
        model = cls.from_config(config, **rest)
        dtype = options.get("torch_dtype")
        return (model.to(dtype) if isinstance(dtype, torch.dtype) else model).eval()

    module.ModelMixin.from_pretrained = classmethod(from_pretrained)


def _without_bytes(module: ModuleType) -> None:
    """``save_file`` writes the header, and a hole in place of the tensors: a file of any size that takes no disk."""
    names = {dtype: name for name, dtype in module._TYPES.items()}

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(filename, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + end)

    module.save_file = save_file
