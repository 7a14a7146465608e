"""How numbers and places are written."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from hpu_simulator import units


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (999, "999 B"),
        (4096, "4.1 kB"),
        (20_000_000, "20.0 MB"),
        (60_000_000, "0.1 GB"),
        (96 * 2**30, "103.1 GB"),
        (2_000 * 10**9, "2000.0 GB"),
    ],
)
def test_bytes(count: int | None, written: str) -> None:
    assert units.gigabytes(count) == written


@pytest.mark.parametrize(
    ("count", "steps", "seen", "written"),
    [
        (20, 20, None, "1 per step"),
        (50, 20, 20, "2.5 per step"),
        (50, 20, 2, "50 in 2 of 20 steps"),
        (3, 20, 3, "3 in 20 steps"),
        (3, 20, 1, "3 in 1 of 20 steps"),
        (21, 20, 21, "1.05 per step"),
        (1, 0, 1, "once"),
        (4, None, 1, "4 times"),
    ],
)
def test_rates(count: int, steps: int | None, seen: int | None, written: str) -> None:
    assert units.per_step(count, steps, seen) == written


def test_quantities_and_times() -> None:
    assert [units.quantity(number) for number in (12, 1.5e8, 2.34e14, 9e15)] == ["12 ", "150 M", "234 T", "9 P"]
    assert [units.seconds(number) for number in (2.5, 0.347, 4e-6)] == ["2.5 s", "347 ms", "4 us"]
    assert [units.share(1, 4), units.share(1, None)] == ["25.0%", "n/a"]
    assert [units.plural(1, "copy", "copies"), units.plural(2000, "copy", "copies")] == ["1 copy", "2,000 copies"]


def test_places_are_short_inside_known_folders_only() -> None:
    library = f"{sysconfig.get_path('purelib')}/transformers/trainer.py:7"
    here = f"{Path.cwd()}/train.py:30"
    assert units.short(library) == "transformers/trainer.py:7"
    assert units.short(f"{here} from {library}") == "train.py:30 from transformers/trainer.py:7"
    assert units.short("/elsewhere/train.py:3") == "/elsewhere/train.py:3"
    assert units.short("?") == "?"


def test_a_table_is_aligned_and_no_line_is_longer_than_the_terminal() -> None:
    lines = units.table(("phase", "peak"), [("forward", "9.0 GB"), ("setup", "120.5 GB")])
    assert lines == ["  phase        peak", "  forward    9.0 GB", "  setup    120.5 GB"]
    long = units.table(("line",), [("x" * 300 + "train.py:3",)])
    assert max(map(len, long)) == units.WIDTH
    assert long[1].endswith("train.py:3")
