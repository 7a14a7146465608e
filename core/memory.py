"""Device memory: in use, peak and pool, of the run and of each phase; the host's. GB is 1e9 bytes everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.cards import ROOT, read

GB = 1e9  # what the unit says; tools that divide by 2**30 show numbers 7 % smaller
DIGITS = 3  # one MB: with two decimals a small model's memory would read 0.0


class MemoryTracker:
    """Reads the device's memory counters, and keeps peaks although each phase starts a new one.

    The numbers are this process's and of its device. The allocator of a Gaudi reserves nearly all memory at the start:
    that is ``total_memory_available``, the pool; what a run needs is ``max_memory_allocated``.

    Args:
        device: has ``memory_stats()`` (bytes, keys may be missing) and ``reset_peak_memory_stats()``.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._run_peak: int | None = None
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []

    def record(self) -> dict[str, float | None]:
        """Return what a log record shows, in GB with three decimals; None where the device does not say.

        Returns:
            ``memory_allocated (GB)`` now, ``max_memory_allocated (GB)`` of the whole run, ``total_memory_available
            (GB)`` on the device.
        """
        stats = self._read()
        return {
            "memory_allocated (GB)": _gigabytes(stats.get("InUse")),
            "max_memory_allocated (GB)": _gigabytes(self._run_peak),
            "total_memory_available (GB)": _gigabytes(stats.get("Limit") or None),
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the peak of this block as that of phase ``name``, the maximum if the phase comes again.

        Phases nest; the peak of an outer one includes its inner ones.
        """
        self._read()
        self.device.reset_peak_memory_stats()
        self._open.append(name)
        try:
            yield
        finally:
            self._read()
            self._open.pop()

    def peaks(self) -> dict[str, float]:
        """Return the peak of each phase so far in GB, in the order in which they first came."""
        if self._open:
            self._read()
        return {name: round(peak / GB, DIGITS) for name, peak in self._peaks.items()}

    def _read(self) -> dict[str, int]:
        """Read the counters, and give the peak since the last reset to the run and to every open phase."""
        stats = self.device.memory_stats()
        peak = stats.get("MaxInUse")
        if peak is not None:
            self._run_peak = max(peak, self._run_peak or 0)
            for name in self._open:
                self._peaks[name] = max(peak, self._peaks.get(name, 0))
        return stats


def _gigabytes(count: int | None) -> float | None:
    return None if count is None else round(count / GB, DIGITS)


def group_limit(root: Path, version2: str, version1: str) -> str:
    """Return a limit that the control group of this process sets; empty if there is none."""
    own = re.search(r"^0::/(.*)$", read(root / "proc/self/cgroup"), re.MULTILINE)
    groups = root / "sys/fs/cgroup"
    folders = [groups / own[1], *(groups / own[1]).parents] if own else [groups]
    said = [read(folder / version2) for folder in folders if folder.is_relative_to(groups)] + [read(groups / version1)]
    return next((text for text in said if text[:1].isdigit()), "")


def free_host_memory() -> int:
    """Bytes of the host's memory that this process can still get: of the machine's, and of its control group's."""
    import psutil

    files = ("memory.max", "memory/memory.limit_in_bytes"), ("memory.current", "memory/memory.usage_in_bytes")
    free, (limit, used) = psutil.virtual_memory().available, [group_limit(ROOT, *names) for names in files]
    return min(free, max(int(limit) - int(used), 0)) if limit and used else free
