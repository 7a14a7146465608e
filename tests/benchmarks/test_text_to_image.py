"""All sides learn from the same rows, and draw the same prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import text_to_image
from benchmarks.contests import Settings, compare


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("contest", text_to_image.CONTESTS, ids=lambda contest: contest.name)
def test_sides_do_the_same(contest: text_to_image.Contest, tmp_path: Path) -> None:
    measured = contest.measure(Settings(tmp_path, rounds=1, small=True))
    assert all(compare(contest, row, measured)["ratio"] > 0 for row in contest.rows)
    counts = measured.facts["samples in a turn"]
    assert len(counts) == 1 + len(contest.rows)
    assert set(map(tuple, counts.values())) == {(4,)}
    assert measured.facts["parameters"]["unet"] > 0
