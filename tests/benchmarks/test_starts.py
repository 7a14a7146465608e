"""Both commands get to their first step on the same data, and both answer ``--help``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import starts
from benchmarks.contests import Settings, compare

CONTESTS = {contest.name: contest for contest in starts.CONTESTS}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(CONTESTS))
def test_both_sides_start(name: str, tmp_path: Path) -> None:
    contest = CONTESTS[name]
    found = contest.measure(Settings(tmp_path, rounds=1, small=True))
    assert compare(contest, contest.rows[0], found)["rounds"] == 1
    assert all(value > 0 for values in found.values.values() for value in values)
    if name == "first_step":
        assert found.facts["train.jsonl"] > 10_000
