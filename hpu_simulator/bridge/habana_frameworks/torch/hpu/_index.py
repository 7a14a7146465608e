"""Which device an argument means."""

from __future__ import annotations

import torch

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)
Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """Return the index of a device: of the current one where none is said.

    Raises:
        ValueError: it is a device of another kind.
    """
    if isinstance(device, int):
        return device
    found = torch.device("hpu" if device is None else device)
    if found.type != "hpu":
        raise ValueError(f"expected a device of type hpu, got {found}")
    return runtime.current_device() if found.index is None else found.index
