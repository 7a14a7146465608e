"""Run the programs of ``scripts`` on the simulated device and on the CPU, and read what they found."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.hpu_simulator import simulator

SCRIPTS = Path(__file__).with_name("scripts")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
Found = dict[str, Any]


def said(output: str) -> Found:
    """Return the JSON object that a program printed, of several ranks the one that ended last."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def on_cpu(folder: Path, *command: str | Path) -> Found:
    """Run ``python <command>`` in ``folder`` without the simulator; returns what it printed."""
    environ = simulator.environment(ACCELERATE_USE_CPU="true")  # several processes on a CPU have to be asked for
    for name in ("HPU_SIMULATOR", "PYTHONPATH", "PT_HPU_LAZY_MODE"):
        del environ[name]
    folder.mkdir(exist_ok=True)
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return said(done.stdout)


def on_hpu(folder: Path, *command: str | Path, **options: str) -> tuple[Found, list[Found], str]:
    """Run it with the simulator; returns what it printed, each rank's report, and its stderr."""
    folder.mkdir(exist_ok=True)
    done = simulator.run(*command, cwd=folder, HPU_SIMULATOR_JSON=str(folder / "report.json"), **options)
    assert done.returncode == 0, done.stderr[-6000:]
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("report*.json"))]
    return said(done.stdout), reports, done.stderr


def on_both(folder: Path, *command: str | Path, **options: str) -> tuple[Found, Found, list[Found]]:
    """Run it on both at the same time, each in a folder of its own; returns the CPU's, the device's, the reports."""
    with ThreadPoolExecutor() as pool:
        cpu = pool.submit(on_cpu, folder / "cpu", *command)
        hpu = pool.submit(on_hpu, folder / "hpu", *command, **options)
        return cpu.result(), *hpu.result()[:2]


def installed(folder: Path) -> Path:
    """Make an environment with this one's packages and the simulator installed in it; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = [python, "-m", "hpu_simulator", "--install"]
    done = subprocess.run(command, cwd=simulator.REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stdout
    return python
