"""Memory of a card, in bytes. A Gaudi's allocator takes all memory at its start: what it reserves is the limit."""

from __future__ import annotations

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch.hpu._index import Device, index_of

__getattr__ = _lacking.attribute(__name__)


def memory_stats(device: Device = None) -> dict[str, int]:
    """Return the allocator's counters: Limit, InUse and MaxInUse in bytes, and numbers of allocations and frees."""
    return runtime.memory_stats(index_of(device))


def memory_allocated(device: Device = None) -> int:
    """Bytes in use."""
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Device = None) -> int:
    """Most bytes in use at once since the start or the last `reset_peak_memory_stats`."""
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator holds: all of the card's."""
    return memory_stats(device)["Limit"]


max_memory_reserved = memory_reserved
memory_cached = memory_reserved
max_memory_cached = memory_reserved


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return (free bytes, all bytes)."""
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def memory_summary(device: Device = None) -> str:
    """Return the counters as lines ``name: value`` under three lines of heading."""
    lines = [f"{name + ':':<20}{value:>20}" for name, value in memory_stats(device).items()]
    rule = "=" * 40
    return "\n".join([rule, f"{'Memory of hpu:' + str(index_of(device)):^40}", rule, *lines])


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let the peak start again from what is in use."""
    runtime.reset_peak_memory_stats(index_of(device))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Let the numbers of allocations and frees start again from 0."""
    runtime.reset_accumulated_memory_stats(index_of(device))
