"""accelerate, unchanged, on the simulated device: the CPU's numbers, on one card and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hpu_simulator import programs

pytestmark = [pytest.mark.compiles, pytest.mark.processes]
SCRIPT = programs.SCRIPTS / "with_accelerate.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")


@pytest.mark.slow
def test_two_processes_train_save_and_resume_as_on_the_cpu(tmp_path: Path) -> None:
    arguments = (SCRIPT, "--folder", "state")
    cpu = programs.on_cpu(tmp_path / "cpu", *programs.TORCHRUN, *arguments)
    launch = (*LAUNCH, "--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no")
    hpu, reports, _ = programs.on_hpu(tmp_path / "hpu", *launch, *arguments)
    assert (cpu["device"], cpu["ranks"]) == ("cpu", 2)
    assert (hpu["device"], hpu["ranks"], hpu["total"], hpu["dtype"]) == ("hpu", 2, 1.0, "torch.float32")
    for name in ("losses", "first", "again"):
        assert hpu[name] == pytest.approx(cpu[name], abs=1e-5)
    assert hpu["first"] == pytest.approx(hpu["again"], abs=1e-6), "the state was not restored"
    assert hpu["losses"] != pytest.approx(hpu["first"], abs=1e-3)
    assert hpu["accuracy"] == pytest.approx(cpu["accuracy"])
    for mine, theirs in zip(hpu["buffers"], cpu["buffers"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-5)
    assert len(reports) == 2
    for report in reports:
        assert report["steps"] == 9
        assert report["phases"]["backward"]["flops"] > 0
        assert {item["op"] for item in report["collectives"]} >= {"allreduce", "broadcast", "allgather"}
        assert all(item.get("supported", True) for item in report["collectives"] if item["dtype"] == "float32")


def test_autocast_casts_as_the_device_does(tmp_path: Path) -> None:
    arguments = (SCRIPT, "--folder", "state", "--mixed_precision", "bf16")
    cpu, hpu, (report,) = programs.on_both(tmp_path, *arguments, mode="eager")
    assert hpu["device"] == "hpu"
    assert hpu["dtype"] == cpu["dtype"] == "torch.bfloat16"
    assert hpu["losses"] == pytest.approx(cpu["losses"], abs=0.02)
    assert hpu["first"] == pytest.approx(hpu["again"], abs=1e-6)
    assert (report["lazy"], report["steps"]) == (False, 18)
