"""Data parallelism over ``hccl``: torch's own, and DeepSpeed's HPU accelerator, unchanged, on two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.hpu_simulator import programs, simulator

pytestmark = [pytest.mark.compiles, pytest.mark.processes]
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> programs.Found:
    """What torch's data parallelism finds on the CPU, over gloo."""
    folder = tmp_path_factory.mktemp("cpu")
    return programs.on_cpu(folder, *programs.TORCHRUN, programs.SCRIPTS / "with_ddp.py")


def test_ddp_with_buffers_and_every_collective(tmp_path: Path, on_cpu: programs.Found) -> None:
    hpu, reports, _ = programs.on_hpu(tmp_path, *programs.TORCHRUN, programs.SCRIPTS / "with_ddp.py")
    assert (on_cpu["backend"], hpu["backend"]) == ("gloo", "hccl")
    assert hpu["names"] == ["hpu 0", "hpu 1"]
    assert hpu["losses"] == pytest.approx(on_cpu["losses"], abs=1e-5)
    assert len(hpu["buffers"]) == 2
    for mine, theirs in zip(hpu["buffers"], on_cpu["buffers"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert hpu["part"] == [6, 8, 10], "what the other process sent: its part of the sums"
    assert hpu["swapped"] == [0, 10]
    assert len(reports) == 2
    for report in reports:
        assert report["steps"] == 6
        names = {item["op"] for item in report["collectives"] if item["dtype"] == "float32"}
        assert {"allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"} <= names
        lines = {item["line"].rpartition("/")[2] for item in report["collectives"]}
        assert any(line.startswith("with_ddp.py:") for line in lines)
    sent = [sum(item["count"] for item in report["collectives"] if item["op"] == "send") for report in reports]
    assert sent == [0, 1]


def test_zero_by_its_own_launcher_in_an_environment_with_the_simulator_installed(
    tmp_path: Path, on_cpu: programs.Found
) -> None:
    """The launcher, its children and DeepSpeed find the device by one variable; nothing else is said."""
    python = programs.installed(tmp_path / "venv")
    configs = []
    for stage in STAGES:
        configs.append(tmp_path / f"zero{stage}.json")
        adam = {"type": "AdamW", "params": {"lr": 0.005, "eps": 1e-12, "weight_decay": 0.01}}
        content = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "steps_per_print": 1000,
            "optimizer": adam,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        configs[-1].write_text(json.dumps(content))
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    environ = simulator.environment(
        HPU_SIMULATOR_DEVICES="2", HPU_SIMULATOR_JSON=str(tmp_path / "report.json"), DS_IGNORE_CUDA_DETECTION="TRUE"
    )
    del environ["PYTHONPATH"]
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
    launcher = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    command = [*launcher, programs.SCRIPTS / "with_deepspeed.py", *configs]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = programs.said(done.stdout)
    assert (found["device"], found["backend"]) == ("hpu", "hccl")
    for stage, losses in zip(STAGES, found["losses"], strict=True):
        assert losses == pytest.approx(on_cpu["losses"], abs=1e-5), f"ZeRO-{stage}"
    assert [names[1] for names in found["optimizers"]] == ["FusedAdam"] * len(STAGES)
    assert [names[0] for names in found["optimizers"]] == [
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
    assert done.stderr.count("HPU simulator: gaudi2, lazy mode") == 1, "rank 0 reports"
    for rank in range(2):
        report = json.loads((tmp_path / f"report-rank{rank}.json").read_text())
        assert report["steps"] == 6 * len(STAGES)
        assert report["phases"]["optimizer"]["ops"] > 0
        assert {"allreduce", "allgather"} <= {item["op"] for item in report["collectives"]}
