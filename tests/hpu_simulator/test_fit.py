"""The search for the largest batch, on made-up memory curves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hpu_simulator import fit
from hpu_simulator.fit import Found, Trial

LIMIT = 100_000


def curve(peak: Callable[[int], float], fails_from: int | None = None) -> tuple[Callable[[int], Trial], list[int]]:
    """A program whose peak is ``peak(batch)``, and the batches it ran with."""
    ran: list[int] = []

    def measure(batch: int) -> Trial:
        ran.append(batch)
        if fails_from is not None and batch >= fails_from:
            return Trial(batch, failed="ValueError: mine")
        bytes_needed = int(peak(batch))
        if bytes_needed > LIMIT:
            return Trial(batch, where="backward")
        return Trial(batch, True, bytes_needed, {"setup": 1000, "forward": bytes_needed}, steps=3)

    return measure, ran


def find(peak: Callable[[int], float], start: int | None, fails_from: int | None = None) -> tuple[Found, list[int]]:
    measure, ran = curve(peak, fails_from)
    first = Trial(None, True, 1, {"forward": 1}) if start is None else measure(start)
    ran.clear()
    return fit.search(first, measure, LIMIT), ran


@pytest.mark.parametrize("start", [None, 1, 2, 5, 8, 64, 4096])
@pytest.mark.parametrize("row", [9_000, 1_234, 77, 3])
def test_a_linear_curve_takes_few_runs(row: int, start: int | None) -> None:
    largest = (LIMIT - 5_000) // row
    found, ran = find(lambda batch: 5_000 + row * batch, start)
    assert (found.largest, found.smallest, found.stopped) == (largest, largest + 1, None)
    assert len(ran) <= 5
    assert len(set(ran)) == len(ran), "no batch runs twice"


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_was_run_whatever_the_curve(seed: int) -> None:
    """Steps, bends and a share that does not grow: N fits and N + 1 does not, both seen, in at most 12 runs."""
    draw = random.Random(seed)
    base, row, bend, step = (
        draw.randint(0, 60_000),
        draw.randint(1, 3_000),
        draw.choice([0, 0.5, 20]),
        draw.choice([1, 8]),
    )

    def peak(batch: int) -> float:
        rounded = -(-batch // step) * step
        return max(30_000, base + row * rounded + bend * batch**2)

    found, ran = find(peak, draw.choice([None, 1, 3, 16, 500]))
    assert len(ran) <= fit.RUNS
    if found.stopped is None:
        assert found.smallest == found.largest + 1
        assert peak(found.smallest) > LIMIT
        assert found.largest == 0 or peak(found.largest) <= LIMIT
        fitting = {trial.batch for trial in found.trials if trial.fits}
        assert found.largest in fitting | {0}
    else:
        assert "memory is the same" in found.stopped or "runs are the most" in found.stopped


def test_exactly_the_limit_fits() -> None:
    found, _ = find(lambda batch: 10_000 * batch, 1)
    assert found.largest == 10


def test_a_batch_that_does_not_fit_is_searched_below() -> None:
    found, ran = find(lambda batch: 30_000 + 10_000 * batch, 64)
    assert (found.largest, found.smallest) == (7, 8)
    assert max(ran) <= 63


def test_the_phase_that_will_be_the_largest_decides() -> None:
    """Backward grows faster than the forward pass that is above it in small batches."""

    def measure(batch: int) -> Trial:
        ran.append(batch)
        phases = {"forward": 40_000 + 100 * batch, "backward": 1_000 * batch}
        peak = max(phases.values())
        return Trial(batch, True, peak, phases) if peak <= LIMIT else Trial(batch)

    ran: list[int] = []
    found = fit.search(measure(4), measure, LIMIT)
    assert (found.largest, ran) == (100, [4, 8, 100, 101])


def test_none_fits() -> None:
    found, ran = find(lambda batch: 200_000, 16)
    assert (found.largest, found.smallest, ran) == (0, 1, [1])
    assert fit.summary(found, "gaudi2", LIMIT) == ["no batch fits gaudi2: 1 already needs more than its 100.0 kB"]


def test_the_first_run_alone_does_not_fit() -> None:
    found, ran = find(lambda batch: 200_000, 1)
    assert (found.largest, found.smallest, ran) == (0, 1, [])


def test_another_failure_stops_the_search_with_its_message() -> None:
    found, ran = find(lambda batch: 5_000 + 10 * batch, 4, fails_from=100)
    assert ran == [8, 9500]
    assert (found.largest, found.smallest, found.stopped) == (8, None, "ValueError: mine")
    assert fit.summary(found, "gaudi", LIMIT)[-1] == (
        "largest batch: 8 fits gaudi; not searched further: ValueError: mine"
    )


def test_memory_that_does_not_grow_stops_the_search() -> None:
    found, ran = find(lambda batch: 5_000 + 10_000 * min(batch, 3), 4)
    assert ran == [8]
    assert "memory is the same at 4 and 8" in found.stopped


def test_there_is_a_largest_batch_that_is_tried() -> None:
    found, ran = find(lambda batch: 5_000 + batch, 1)
    assert max(ran) == found.largest == fit.LARGEST
    assert str(fit.LARGEST) in found.stopped


def test_the_number_of_runs_is_bounded() -> None:
    """A cliff far below what every line says."""
    found, ran = find(lambda batch: 1_000 + batch if batch < 4_001 else 10**9, 1)
    assert len(ran) == fit.RUNS
    assert found.largest < 4_001 <= found.smallest
    assert "12 runs" in found.stopped


def test_the_summary_has_the_peaks_by_phase_and_the_largest() -> None:
    found, _ = find(lambda batch: 5_000 + 9_000 * batch, 2)
    assert fit.summary(found, "gaudi2", LIMIT) == [
        "peak memory by phase",
        "  phase    batch 2  batch 10",
        "  setup     1.0 kB    1.0 kB",
        "  forward  23.0 kB   95.0 kB",
        "largest batch that fits gaudi2: 10 (peak 95.0 kB of 100.0 kB; 11 would need about 104.0 kB)",
    ]


def test_an_estimate_that_contradicts_the_run_is_not_given() -> None:
    found, _ = find(lambda batch: 1_000 * batch if batch < 50 else 10**9, 10)
    assert found.largest == 49
    assert fit.summary(found, "gaudi2", LIMIT)[-1].endswith("50 does not fit)")
