"""The benchmark runs all variants in turn and reports their ratios to DDP."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gradient_reduction
from benchmarks.contests import OURS, Settings
from tests.conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.processes
def test_it_measures_all_variants_and_reports_their_medians(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gradient_reduction", "--rounds", "3", "--width", "16"]
    done = subprocess.run([*command, "--output", str(figures)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    base = found["seconds"]["DDP, buckets of 25 MiB"]
    assert set(found["seconds"]) == set(found["ratios"])
    assert len(found["seconds"]) == 7
    for name, own in found["seconds"].items():
        assert found["ratios"][name] == [a / b for a, b in zip(own, base, strict=True)]
        line = next(line for line in done.stdout.splitlines() if line.startswith(name + "  "))
        assert f" {statistics.median(found['ratios'][name]):.2f} (" in line
        assert len(own) == 3
        assert min(own) > 1e-4


@pytest.mark.slow
@pytest.mark.processes
def test_the_contest_compares_what_a_recipe_takes_with_ddp(tmp_path: Path) -> None:
    """A figure a round for each side."""
    (contest,) = gradient_reduction.CONTESTS
    measured = contest.measure(Settings(tmp_path, rounds=2, small=True))
    assert {side: len(values) for side, values in measured.values.items()} == {OURS: 2, contest.rows[0].side: 2}
    assert min(measured.values[OURS] + measured.values["ddp"]) > 1e-4
    assert measured.facts["processes"] == 2
