"""transformers' own Trainer, unchanged, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hpu_simulator import programs

pytestmark = pytest.mark.compiles


def test_the_trainer_trains_evaluates_saves_and_resumes_as_on_the_cpu(tmp_path: Path) -> None:
    cpu, hpu, (report,) = programs.on_both(tmp_path, programs.SCRIPTS / "with_trainer.py", "--folder", "out")
    assert (cpu["device"], hpu["device"], hpu["weights on"]) == ("cpu", "hpu", "hpu")
    for name in ("losses", "resumed"):
        assert len(hpu[name]) == 6
        for mine, theirs in zip(hpu[name], cpu[name], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    assert hpu["resumed"] == hpu["losses"], "the second half was trained again, from the checkpoint"
    assert hpu["evaluated"] == pytest.approx(cpu["evaluated"], abs=1e-5)
    assert hpu["saved"] == pytest.approx(cpu["saved"], abs=1e-2)
    assert report["steps"] == 6 + 3
    assert {"forward", "backward", "optimizer", "inference"} <= report["phases"].keys()
    assert report["out_of_int32"] == []
