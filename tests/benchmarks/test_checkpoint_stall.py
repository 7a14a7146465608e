"""Training hardly stands still for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint_stall
from benchmarks.contests import OURS, Settings


@pytest.mark.slow  # it measures time
def test_a_checkpoint_costs_less_than_a_tenth_of_one_that_is_waited_for(tmp_path: Path) -> None:
    output = tmp_path / "seconds.json"
    table = checkpoint_stall.main(["--rounds", "4", "--folder", str(tmp_path), "--output", str(output)])
    background, waiting, torchs = table.values()
    assert background["ratio"] < 0.1
    assert waiting["ratio"] == 1
    assert torchs["median"] > 0
    assert [len(values) for values in json.loads(output.read_text())["seconds"].values()] == [4, 4, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["seconds.json"]


@pytest.mark.slow
def test_the_contest_has_a_figure_for_each_round(tmp_path: Path) -> None:
    (contest,) = checkpoint_stall.CONTESTS
    measured = contest.measure(Settings(tmp_path, rounds=2, small=True))
    assert {side: len(values) for side, values in measured.values.items()} == {OURS: 2, contest.rows[0].side: 2}
    assert min(measured.values[OURS] + measured.values["torch"]) > 0
    assert measured.facts["parameters"] > 0
