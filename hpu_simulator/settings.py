"""What is simulated: the card's generation, the mode, the files to write. Kept in environment variables, so that
programs which start others pass it on. Imports no torch: launchers and the command line read it for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
MODES = ("compute", "shapes")
LARGE = 1 << 16  # shapes mode: elements from which on a host tensor gets no values; below, filling costs nothing
MOST_DEVICES = 127  # torch keeps a device's index in one signed byte
GENERATION, MODE, DEVICES, RANK, JSON, HTML = (
    "HPU_SIMULATOR" + suffix for suffix in ("", "_MODE", "_DEVICES", "_RANK", "_JSON", "_HTML")
)
BRIDGE = Path(__file__).resolve().parent / "bridge"


class SettingsError(ValueError):
    """A setting that does not exist. The message is one line with the valid values."""


@dataclass(frozen=True)
class Generation:
    """One generation of the card.

    Attributes:
        name: as the bridge calls it, e.g. ``gaudi2``.
        memory_bytes: device memory.
        bf16: peak of matrix products in TFLOP/s.
    """

    name: str
    memory_bytes: int
    bf16: float


# Source of the rates: the table of generations in Intel's talk on Gaudi 3 at Hot Chips 2024 ("Peak Compute (BF16)").
# It has no fp32 column, and no other paper of Intel's was found that gives one for all generations.
GENERATIONS = {
    "gaudi": Generation("gaudi", 32 * GIB, bf16=60),
    "gaudi2": Generation("gaudi2", 96 * GIB, bf16=432),
    "gaudi3": Generation("gaudi3", 128 * GIB, bf16=1835),
}


@dataclass(frozen=True)
class Settings:
    """How to simulate.

    Attributes:
        generation: the card.
        mode: "compute" runs every operator for real, "shapes" only counts.
        devices: cards that a process sees.
        json, html: absolute paths of the reports to write at exit, None for none.
        rank: in "shapes" mode with several devices: the one that is rehearsed without the others; else None.
    """

    generation: Generation
    mode: str = "compute"
    devices: int = 1
    json: str | None = None
    html: str | None = None
    rank: int | None = None


def generation(name: str) -> Generation:
    """Return the generation of that name.

    Raises:
        SettingsError: there is none.
    """
    return GENERATIONS[_one_of(GENERATION, name, GENERATIONS)]


def read(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return what the environment asks for, None where it does not ask for the simulator. An empty value is unset.

    Raises:
        SettingsError: a variable has a value that does not exist.
    """
    if not environ.get(GENERATION):
        return None
    mode = _one_of(MODE, environ.get(MODE) or MODES[0], MODES)
    devices = _count(DEVICES, environ.get(DEVICES) or "1")
    return Settings(
        generation(environ[GENERATION]),
        mode,
        devices,
        *((environ.get(name) and str(Path(environ[name]).absolute())) or None for name in (JSON, HTML)),
        rank=_rank(environ, devices) if mode == "shapes" and devices > 1 else None,
    )


def write(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables for this process and those it starts, and put the simulated bridge first on PYTHONPATH."""
    environ |= {GENERATION: settings.generation.name, MODE: settings.mode, DEVICES: str(settings.devices)}
    launch(settings, environ)
    for name, path in ((JSON, settings.json), (HTML, settings.html)):
        environ.pop(name, None)
        if path:
            environ[name] = str(Path(path).absolute())  # a child may have another working folder
    before = environ.get("PYTHONPATH")
    others = [path for path in before.split(os.pathsep) if path != str(BRIDGE)] if before else []
    environ["PYTHONPATH"] = os.pathsep.join([str(BRIDGE), *others])


def launch(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> None:
    """Where one rank is rehearsed alone, set what a launcher would have set for it, and is not set yet."""
    environ.pop(RANK, None)
    if settings.rank is None:
        return
    environ[RANK] = str(settings.rank)
    given = {
        "RANK": settings.rank,
        "LOCAL_RANK": settings.rank % settings.devices,
        "WORLD_SIZE": settings.devices,
        "LOCAL_WORLD_SIZE": settings.devices,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    for name, value in given.items():
        environ[name] = environ.get(name) or str(value)


def _rank(environ: Mapping[str, str], devices: int) -> int:
    """The rank asked for, or that the environment's launcher gave, or 0."""
    name = RANK if environ.get(RANK) else "RANK"
    value, size = environ.get(name) or "0", environ.get("WORLD_SIZE") or str(devices)
    if not all(number.isdecimal() and number.isascii() for number in (value, size)) or int(value) >= int(size):
        raise SettingsError(f"{name}={value!r} is not a rank from 0 to WORLD_SIZE - 1, with a WORLD_SIZE of {size!r}")
    return int(value)


def _one_of(name: str, value: str, valid: Mapping | tuple) -> str:
    if value not in valid:
        raise SettingsError(f"{name}={value!r} is not one of {', '.join(valid)}")
    return value


def _count(name: str, value: str) -> int:
    if not (value.isdecimal() and value.isascii() and 1 <= int(value) <= MOST_DEVICES):
        raise SettingsError(f"{name}={value!r} is not a number of devices from 1 to {MOST_DEVICES}")
    return int(value)
