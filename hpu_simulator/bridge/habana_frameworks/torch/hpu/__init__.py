"""``torch.hpu``: devices, memory, random numbers, streams, graphs and metrics of the simulated card."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch.hpu import graphs, memory, metrics, random, streams
from habana_frameworks.torch.hpu._index import Device, index_of
from habana_frameworks.torch.hpu.graphs import (
    CachedParams,
    HPUGraph,
    ModuleCacher,
    copy_to,
    graph,
    input_hash,
    make_graphed_callables,
    wrap_in_hpu_graph,
    wrap_in_hpu_graph_func,
)
from habana_frameworks.torch.hpu.memory import (
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from habana_frameworks.torch.hpu.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from habana_frameworks.torch.hpu.streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "CachedParams",
    "Event",
    "HPUGraph",
    "ModuleCacher",
    "Stream",
    "copy_to",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "disable_dynamic_shape",
    "enable_dynamic_shape",
    "get_amp_supported_dtype",
    "get_autocast_hpu_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "graph",
    "graphs",
    "init",
    "initial_seed",
    "input_hash",
    "is_autocast_hpu_enabled",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "metrics",
    "random",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_autocast_hpu_dtype",
    "set_autocast_hpu_enabled",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "streams",
    "synchronize",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
]
__getattr__ = _lacking.attribute(__name__)

_initialized = True  # torch's activation checkpointing keeps the device's random state only where it finds this


@dataclass(frozen=True)
class _Properties:
    """What the simulator knows of a card.

    Attributes:
        name: as `get_device_name` returns it.
        total_memory: bytes.
    """

    name: str
    total_memory: int


class device:  # noqa: N801
    """Context manager: makes a device the current one, and the one before it afterwards. None changes nothing."""

    def __init__(self, device: Device) -> None:
        self.index = None if device is None else index_of(device)
        self.before = 0

    def __enter__(self) -> None:
        self.before = runtime.current_device()
        if self.index is not None:
            runtime.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        runtime.set_device(self.before)


def init() -> None:
    """Start the device. It runs since this module was imported."""


_lazy_init = init


def is_initialized() -> bool:
    """Whether the device runs: always."""
    return True


def is_available() -> bool:
    """Whether there is a card."""
    return runtime.device_count() > 0


def device_count() -> int:
    """Number of cards."""
    return runtime.device_count()


def current_device() -> int:
    """Index of the card that ``torch.device("hpu")`` means."""
    return runtime.current_device()


def set_device(device: Device) -> None:
    """Change what `current_device` returns."""
    runtime.set_device(index_of(device))


def synchronize(device: Device = None) -> None:
    """End the lazy graph and wait until all work is done."""
    runtime.synchronize(index_of(device))


def get_device_name(device: Device = None) -> str:
    """Return GAUDI, GAUDI2 or GAUDI3."""
    return runtime.settings.generation.name.upper()


def get_device_properties(device: Device = None) -> _Properties:
    """Return the card's name and memory."""
    return _Properties(get_device_name(device), memory_stats(device)["Limit"])


def is_bf16_supported() -> bool:
    """Whether bf16 exists: on every generation."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that autocast can compute in; the first generation has no fp16."""
    return [torch.bfloat16] if runtime.settings.generation.name == "gaudi" else [torch.bfloat16, torch.float16]


def is_autocast_hpu_enabled() -> bool:
    """Whether this code runs under ``torch.autocast("hpu")``."""
    return torch.is_autocast_enabled("hpu")


def set_autocast_hpu_enabled(enabled: bool) -> None:
    """Switch autocast on or off in this thread."""
    torch.set_autocast_enabled("hpu", enabled)


def get_autocast_hpu_dtype() -> torch.dtype:
    """Type that autocast computes in."""
    return torch.get_autocast_dtype("hpu")


def set_autocast_hpu_dtype(dtype: torch.dtype) -> None:
    """Set the type that autocast computes in."""
    torch.set_autocast_dtype("hpu", dtype)


def enable_dynamic_shape() -> None:
    """Warn: the simulator counts a graph per shape, as with dynamic shapes disabled, which is the most there can be."""
    warnings.warn("the HPU simulator counts graphs as if dynamic shapes stayed disabled", stacklevel=2)


def disable_dynamic_shape() -> None:
    """Count a graph per shape, as the simulator always does."""


def _is_in_bad_fork() -> bool:
    """Whether the device cannot be used after a fork: the simulated one can."""
    return False
