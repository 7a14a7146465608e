"""Start programs on the simulated device: it is chosen when torch is imported, so each needs a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BRIDGE = REPOSITORY / "hpu_simulator" / "bridge"


def environment(mode: str = "lazy", generation: str = "gaudi2", **extra: str) -> dict[str, str]:
    """Variables that turn the simulator on in ``lazy`` or ``eager`` mode, and nothing of the caller's own."""
    ours = ("HPU_SIMULATOR", "PT_HPU_", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    mine = {
        "HPU_SIMULATOR": generation,
        "PT_HPU_LAZY_MODE": str(int(mode == "lazy")),
        "PYTHONPATH": os.pathsep.join([str(BRIDGE), str(REPOSITORY)]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {**kept, **mine, **extra}


def run(
    *command: str | Path, cwd: Path | None = None, timeout: float = 300, **options: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python <command>`` with the simulator on; ``options`` are those of `environment`."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd or REPOSITORY,
        env=environment(**options),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rehearse(folder: Path, code: str, timeout: float = 300, **options: str) -> tuple[str, dict[str, Any]]:
    """Run ``code`` as ``folder/script.py``; returns its output and the report's JSON.

    Raises:
        AssertionError: it failed; the message is what it said.
    """
    script, report = folder / "script.py", folder / "report.json"
    script.write_text(code, encoding="utf-8")
    done = run(script, cwd=folder, timeout=timeout, HPU_SIMULATOR_JSON=str(report), **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads(report.read_text(encoding="utf-8"))
