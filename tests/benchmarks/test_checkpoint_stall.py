"""Training hardly stands still for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint_stall


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
