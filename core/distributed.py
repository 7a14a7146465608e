"""Ranks and exact sums over them. One process today: the seam where process groups come in."""

from __future__ import annotations

import os

from core.errors import UserError


def rank() -> int:
    """This process's number among all, from the launcher's environment."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """Number of processes of the run, from the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def require_single_process() -> None:
    """Refuse a launch on several devices, which this release does not train on.

    Raises:
        UserError: the launcher's environment says that there is more than one process.
    """
    if world_size() > 1:
        raise UserError(f"WORLD_SIZE is {world_size()}, but this release trains on one device; start run.py directly")


def sum_over_ranks(values: list[float]) -> list[float]:
    """Sum each number over all ranks, in float64; with one process the numbers themselves."""
    require_single_process()
    return [float(value) for value in values]
