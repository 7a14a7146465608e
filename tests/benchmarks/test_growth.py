"""Exponents and verdicts are right for curves whose growth is known, and every curve can be measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import growth

SIZES = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_larger_half(power: float) -> None:
    """A constant cost hides growth in the smaller half; points may come in any order."""
    found = growth.exponent(SIZES[::-1], [(1.0 if size < 8 else 7.0 * size**power) for size in SIZES[::-1]])
    assert found == pytest.approx(power)


def test_a_curve_of_two_points_has_an_exponent() -> None:
    assert growth.exponent([1, 2], [3, 12]) == pytest.approx(2)


def test_what_grows_with_its_work_is_not_too_fast() -> None:
    linear, quadratic = list(SIZES), [size**2 for size in SIZES]
    assert growth.judge(SIZES, [5 + size for size in SIZES], linear)["grows_faster"] is False
    assert growth.judge(SIZES, quadratic, quadratic)["grows_faster"] is False
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(SIZES))
    assert growth.judge(SIZES, linear * noise, linear)["grows_faster"] is False


def test_what_outgrows_its_work_is_too_fast() -> None:
    found = growth.judge(SIZES, [100 + size**2 for size in SIZES], SIZES)
    assert found["grows_faster"] is True
    assert found["exponent"] > found["work_exponent"] + growth.TOLERANCE
    assert growth.judge(SIZES, SIZES, [1] * len(SIZES))["grows_faster"] is True


def test_a_point_that_was_left_out_is_kept_and_not_fitted() -> None:
    curve = next(one for one in growth.curves(small=True) if one.name.startswith("rows"))
    measured = {"step_seconds": 0.1, "parameters": 10, "flops": 10}
    points = [
        growth.BASE | measured | {"rows": rows, "peak_bytes": 1000 + 5 * rows, "start_seconds": float(rows)}
        for rows in (100, 300, 1000)
    ]
    entry = growth.describe(curve, [*points, growth.BASE | {"rows": 3000, "left_out": "too long"}])
    assert len(entry["points"]) == 4
    assert entry["measures"]["start_seconds"]["x"] == [100, 300, 1000]
    assert entry["measures"]["start_seconds"]["exponent"] == pytest.approx(1)
    assert entry["bytes_per_row"] == 5


def test_an_arrow_file_has_the_rows_asked_for(tmp_path: Path) -> None:
    from datasets import Dataset

    growth.write_rows(tmp_path / "rows.arrow", 250)
    lengths = [len(row) for row in Dataset.from_file(str(tmp_path / "rows.arrow"))["input_ids"]]
    assert len(lengths) == 250
    assert (min(lengths), max(lengths)) == (4, 12)


@pytest.mark.slow
@pytest.mark.processes
def test_every_curve_is_measured_and_drawn(tmp_path: Path) -> None:
    assert growth.main(["--small", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "growth.json").read_text(encoding="utf-8"))
    assert list(found) == [curve.name for curve in growth.curves(small=True)]
    assert len(found) == 8
    for curve, entry in found.items():
        assert set(entry["measures"]) == set(growth.MEASURES)
        for one in entry["measures"].values():
            assert math.isfinite(one["exponent"])
            assert math.isfinite(one["work_exponent"])
            assert min(one["y"]) > 0
        assert ("bytes_per_row" in entry) == curve.startswith("rows")
    assert {path.name for path in tmp_path.iterdir()} == {"growth.json", "growth.png"}
    assert (tmp_path / "growth.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
