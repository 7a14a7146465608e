"""The largest batch that fits: the program is run again with other batch sizes, counted and not computed.

Memory is nearly linear in the batch, so two sizes give a guess for a third; what is reported was run: N fits and
N + 1 does not. Where memory is not linear the interval is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpu_simulator.units import gigabytes, table

RUNS = 12  # of the program, in a search
LARGEST = 65536


@dataclass(frozen=True)
class Trial:
    """What one run showed.

    Attributes:
        batch: the size it ran with; None if the first run took a default that the command does not name.
        fits: it ended, and no allocation passed the limit.
        peak: bytes, the largest over ranks.
        phases: peak bytes by phase.
        steps: optimiser steps.
        failed: why it says nothing (another error than out of memory), in one line.
        where: the phase that ran out of memory.
    """

    batch: int | None
    fits: bool = False
    peak: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    failed: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class Found:
    """The end of a search: ``largest`` fits (0: none does); ``smallest`` above it does not (None: not known)."""

    trials: list[Trial]
    largest: int
    smallest: int | None
    stopped: str | None = None


def search(first: Trial, measure: Callable[[int], Trial], limit: int) -> Found:
    """Find N that fits while N + 1 does not, in at most `RUNS` measurements.

    Args:
        first: a run that is there already; without a batch it only says what a run is like.
        measure: runs with that batch.
        limit: bytes that fit.
    """
    trials = [first] if first.batch else [measure(1)]
    runs, guesses = len(trials) - bool(first.batch), 0
    while True:
        fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.batch)
        low = fitting[-1].batch if fitting else 0
        over = [trial.batch for trial in trials if not (trial.fits or trial.failed) and trial.batch > low]
        high = min(over, default=None)
        stopped = trials[-1].failed
        if high == low + 1:
            return Found(trials, low, high)
        if len(fitting) > 1 and fitting[-1].phases == fitting[-2].phases:
            stopped = (
                f"memory is the same at {fitting[-2].batch} and {low} (does the flag reach the data, are there rows?)"
            )
        elif low >= LARGEST:
            stopped = f"{LARGEST} is the largest that is tried"
        elif runs >= RUNS:
            stopped = stopped or f"{RUNS} runs are the most in a search"
        if stopped:
            return Found(trials, low, high, stopped)
        guesses += high is not None and len(fitting) > 1
        trials.append(measure(_next(fitting, high, limit, guesses % 3 == 0)))
        runs += 1


def _next(fitting: list[Trial], high: int | None, limit: int, halve: bool) -> int:
    """The batch to try: from the line through the two largest that fit.

    The interval is halved where the line points outside of it, and where ``halve`` says so (a line that is always a
    little off would creep).
    """
    if not fitting:
        return 1
    low, most = fitting[-1].batch, (high or LARGEST + 1) - 1
    if len(fitting) == 1:
        return 2 * low if 2 * low <= most else low // 2  # the second point of the line
    guess = _last_fitting(fitting[-2], fitting[-1], limit)
    if high and (halve or guess > most):
        guess = (low + most + 1) // 2
    return min(max(guess, low + 1), most)


def _lines(one: Trial, two: Trial) -> Iterable[tuple[float, float]]:
    """Bytes per row, and bytes at ``two``, of each phase that grows with the batch."""
    for phase in one.phases.keys() & two.phases.keys():
        slope = (two.phases[phase] - one.phases[phase]) / (two.batch - one.batch)
        if slope > 0:
            yield slope, two.phases[phase]


def _last_fitting(one: Trial, two: Trial, limit: int) -> int:
    """The largest batch at which no phase's line is above the limit; twice the larger one if no phase grows."""
    rows = [int((limit - peak) // slope) for slope, peak in _lines(one, two)]
    return two.batch + min(rows, default=two.batch)


def summary(found: Found, name: str, limit: int) -> list[str]:
    """Return the lines that end the command: peaks by phase, and the largest batch."""
    fitting = sorted((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
    lines = []
    if fitting:
        shown = [fitting[0], fitting[-1]] if len(fitting) > 1 else fitting
        phases = list(dict.fromkeys(phase for trial in shown for phase in trial.phases))
        rows = [(phase, *(gigabytes(trial.phases.get(phase)) for trial in shown)) for phase in phases]
        lines += ["peak memory by phase", *table(("phase", *(f"batch {trial.batch}" for trial in shown)), rows)]
    if found.stopped:
        known = f"{found.largest} fits {name}" if found.largest else f"none is known to fit {name}"
        above = f", {found.smallest} does not" if found.smallest else ""
        return [*lines, f"largest batch: {known}{above}; not searched further: {found.stopped}"]
    if not found.largest:
        return [*lines, f"no batch fits {name}: 1 already needs more than its {gigabytes(limit)}"]
    needs = f"{found.smallest} does not fit"
    if len(fitting) > 1:
        rows = found.smallest - found.largest
        needed = max((peak + rows * slope for slope, peak in _lines(*fitting[-2:])), default=0)
        needs = f"{found.smallest} would need about {gigabytes(needed)}" if needed > limit else needs
    peak = gigabytes(fitting[-1].peak)
    return [*lines, f"largest batch that fits {name}: {found.largest} (peak {peak} of {gigabytes(limit)}; {needs})"]
