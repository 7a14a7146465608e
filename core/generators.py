"""This process's random generators: Python's, NumPy's, torch's and the device's, as JSON and back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from core.device import Device
from core.preemption import Preempted


def as_json(device: Device) -> dict[str, Any]:
    """The state of all of them, as JSON holds it."""
    python, numpy = random.getstate(), np.random.get_state()
    states = {name: bytes(state.tolist()).hex() for name, state in device.rng_state().items()}
    return {
        "device_random": states,
        "python_random": [python[0], list(python[1]), python[2]],
        "numpy_random": [numpy[0], numpy[1].tolist(), *numpy[2:]],
    }


def put_back(device: Device, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Put back what `as_json` returned; ``tensors`` are torch's and the device's states, where they are kept apart."""
    if tensors is None:
        states = {name: bytes.fromhex(text) for name, text in saved["device_random"].items()}
        tensors = {name: torch.tensor(list(state), dtype=torch.uint8) for name, state in states.items()}
    device.set_rng_state(dict(tensors))
    version, words, gauss = saved["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = saved["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def unless_preempted(device: Device) -> Iterator[None]:
    """Put them back if the block is cut off: it will be gone through again, from here."""
    before = device.rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    except Preempted:
        device.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        raise
