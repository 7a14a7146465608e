"""What a benchmark is: sides that do the same work in turn, and rows that compare ours with each of the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "ours"


class Impossible(Exception):  # noqa: N818, it is what it says
    """What a contest's ``measure`` raises where a peer cannot be run on this machine; the message says why."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        folder: an empty folder of this contest's own, removed afterwards.
        rounds: turns of each side that count; the warm-up comes before.
        device: "cpu", or "accelerator": whatever torch finds there.
        small: a few rows and tiny models, to see that everything runs; its figures mean nothing.
    """

    folder: Path
    rounds: int = 5
    device: str = "cpu"
    small: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: ours beside one peer.

    Attributes:
        what: what is measured, e.g. "summarization, fine-tuning".
        side: the peer's side in the contest.
        peer: the peer in words.
        target: the ratio ours / theirs that we want: at least it, or ``at_most`` it.
    """

    what: str
    side: str
    peer: str
    target: float
    at_most: bool = False


@dataclass
class Measured:
    """What a contest found.

    Attributes:
        values: by side, one figure a round, in the contest's unit.
        facts: model, data, batch, precision: what a reader needs to judge the figures.
        flops_per_second: by round, model FLOPs of our side per second, where they are known.
    """

    values: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)
    flops_per_second: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Contest:
    """Sides that are measured alternately.

    Attributes:
        name: for ``--only``.
        unit: of the figures.
        rows: what is compared.
        measure: does it.
        devices: where it makes sense: figures of memory and starts are the host's own.
    """

    name: str
    unit: str
    rows: Sequence[Row]
    measure: Callable[[Settings], Measured]
    devices: Sequence[str] = ("cpu", "accelerator")


def compare(contest: Contest, row: Row, measured: Measured) -> dict[str, Any]:
    """One row's result: medians of both sides, and median, quartiles and extremes of the ratios round by round."""
    ours, theirs = measured.values[OURS], measured.values[row.side]
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    middle = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [middle] * 3
    return {
        "contest": contest.name,
        "what": row.what,
        "peer": row.peer,
        "unit": contest.unit,
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": middle,
        "quartiles": [quartiles[0], quartiles[2]],
        "range": [ratios[0], ratios[-1]],
        "rounds": len(ratios),
        "target": row.target,
        "at_most": row.at_most,
        "reached": middle <= row.target if row.at_most else middle >= row.target,
    }
