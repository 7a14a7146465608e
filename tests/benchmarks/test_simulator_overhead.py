"""The benchmark runs, alternates, and reports the ratio of what it measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.compiles
def test_it_measures_both_and_reports_the_median(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.simulator_overhead", "--rounds", "1", "--steps", "16"]
    done = subprocess.run([*command, "--output", str(figures)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    cpu, hpu = found["seconds"]["cpu"], found["seconds"]["hpu"]
    assert found["ratios"] == [hpu[0] / cpu[0]]
    assert found["median"] == statistics.median(found["ratios"])
    assert f"median {found['median']:.2f}" in done.stdout
    assert min(cpu + hpu) > 0.001
