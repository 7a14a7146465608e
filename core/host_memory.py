"""What a CPU's training step frees is kept for the next step, instead of going back to the system.

A step makes and frees the same large tensors again and again. By default the C library returns large blocks to the
system at once, and every new one is faulted in anew, zeroed, page by page.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

# Of glibc's malloc.h. A block beyond the greatest threshold is always mapped by itself, unless no block may be.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1}
# Where glibc's own choice ends once blocks of this size were freed.
USUAL = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 * 2**20, TRIM_THRESHOLD: 64 * 2**20}

_keeping = False


def keep(device: Any) -> bool:
    """Keep freed memory until `release`; returns whether it is kept.

    Not where tensors live elsewhere, where the C library is not glibc, or where the environment tunes it already.
    """
    global _keeping
    if not device.queues_work and not _is_tuned():
        _keeping = _set(KEPT)
    return _keeping


def release() -> None:
    """Give back what is free, and keep no more; nothing to do if nothing is kept."""
    global _keeping
    if _keeping:
        _set(USUAL)
        ctypes.CDLL(None).malloc_trim(0)
    _keeping = False


def _is_tuned() -> bool:
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    )


def _set(options: dict[int, int]) -> bool:
    try:
        library = ctypes.CDLL(None)
        mallopt, _ = library.mallopt, library.gnu_get_libc_version
    except (AttributeError, OSError, TypeError):  # another C library; no library of that kind
        return False
    done = [mallopt(option, value) for option, value in options.items()]  # all of them, whatever one says
    return all(done)
