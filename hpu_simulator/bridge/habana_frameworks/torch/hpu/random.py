"""Random numbers of the cards: seeds and states of their generators."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch.hpu._index import Device, index_of

__getattr__ = _lacking.attribute(__name__)
default_generators = tuple(runtime.default_generator(index) for index in range(runtime.device_count()))


def get_rng_state(device: Device = "hpu") -> torch.Tensor:
    """Return the state of a card's generator, a uint8 tensor on the host."""
    return default_generators[index_of(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all cards' generators."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Device = "hpu") -> None:
    """Set the state of a card's generator to what `get_rng_state` returned."""
    default_generators[index_of(device)].set_state(new_state.cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all cards' generators."""
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state.cpu())


def manual_seed(seed: int) -> None:
    """Seed the current card's generator."""
    default_generators[runtime.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all cards."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current card's generator with a number that differs each time."""
    default_generators[runtime.current_device()].seed()


def seed_all() -> None:
    """Seed all cards' generators with one number that differs each time."""
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    """Return the seed of the current card's generator."""
    return default_generators[runtime.current_device()].initial_seed()
