"""One rank of many, rehearsed without the others: its process group meets nobody, and every collective ends at once.

The others are taken to have this rank's values: a sum over 8 ranks is 8 times its own, what is gathered is its own 8
times, a broadcast changes nothing. For tensors of the device (``hccl``) and of the host (``gloo``); only in `shapes`
mode, where a rank's memory is asked for and no result.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

LONE_STORE = "a rank that is rehearsed alone (--mode shapes) waits for the key {!r}, which another one would have set"


def start(make_backend: Callable[[str, int, int], Any]) -> None:
    """Replace the store in which ranks meet, and gloo between them.

    Args:
        make_backend: returns torch's backend of that name, for that rank of that many.
    """
    _Gloo.make_backend = staticmethod(make_backend)
    dist.TCPStore = sys.modules["torch.distributed.rendezvous"].TCPStore = Store
    distributed_c10d.ProcessGroupGloo = Gloo
    _distributed_c10d.Backend.options = property(lambda _: SimpleNamespace())  # torch notes the group there
    distributed_c10d._store_based_barrier = lambda *_, **__: None


class Store(dist.Store):
    """Stands for `torch.distributed.TCPStore`: holds what this rank sets, and never waits.

    Whatever it was made with is ignored, but for the names of the host and port.
    """

    kept: ClassVar[list[Store]] = []  # torch keeps its own half of a store only, which asks this half

    def __init__(self, host_name: str = "localhost", port: int = 0, *_: Any, **__: Any) -> None:
        super().__init__()
        self.kept.append(self)
        self.host, self.port = host_name, port
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value: another rank's is this one's, where they differ by a last number, as in ``address/3``.

        Raises:
            RuntimeError: this rank has set neither.
        """
        own = re.sub(r"\d+(?=\D*$)", os.environ.get("RANK", "0"), key)
        found = self.held.get(key, self.held.get(own))
        if found is None:
            raise RuntimeError(LONE_STORE.format(key))
        return found

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self.held.get(key, b"") == expected:
            self.set(key, desired)
        return self.held.get(key, expected)

    def add(self, key: str, amount: int) -> int:
        total = int(self.held.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        """Whether all are there: the others' always are."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once: the others are always there."""

    def delete_key(self, key: str) -> bool:
        return self.held.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.held)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""


class _Gloo(type):
    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None) -> Any:
        return cls.make_backend("gloo", rank, size)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _distributed_c10d.Backend) and instance.name() == "gloo"


class Gloo(metaclass=_Gloo):
    """Stands for `torch.distributed.ProcessGroupGloo`."""
