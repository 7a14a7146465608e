"""A diffusers pipeline, unchanged, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hpu_simulator import programs

pytestmark = pytest.mark.compiles


def test_a_pipeline_generates_and_its_unet_trains_as_on_the_cpu(tmp_path: Path) -> None:
    cpu, hpu, (report,) = programs.on_both(tmp_path, programs.SCRIPTS / "with_diffusers.py", "--folder", ".")
    assert (cpu["device"], hpu["device"], hpu["shape"]) == ("cpu", "hpu", [2, 16, 16, 3])
    assert hpu["spread"] > 0.1
    assert hpu["images"] == pytest.approx(cpu["images"], abs=1e-5)
    assert hpu["losses"] == pytest.approx(cpu["losses"], abs=1e-5)
    assert report["steps"] == 3
    convolutions = report["ops"]["aten::convolution_overrideable"]
    assert convolutions["count"] > 100
    assert convolutions["flops"] > 0
    assert report["ops"]["aten::bmm"]["flops"] > 0
