"""The variable in the environment, for programs that start others; ranks report each for itself, and one prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hpu_simulator import programs, simulator

pytestmark = [pytest.mark.compiles, pytest.mark.processes]
SCRIPT = programs.SCRIPTS / "with_two.py"
HEAD = "HPU simulator: gaudi3, lazy mode"


def launched(folder: Path, python: str | Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HPU_SIMULATOR", "PT_HPU_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PT_HPU_LAZY_MODE": "1"} | variables
    command = [python, *words, *programs.TORCHRUN, SCRIPT]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert programs.said(done.stdout) == {"total": [3.0] * 3, "name": "GAUDI3", "lazy": "1"}
    return done


def check_reports(folder: Path) -> None:
    assert sorted(file.name for file in folder.glob("*report*")) == ["report-rank0.json", "report-rank1.json"]
    for file in folder.glob("report*"):
        report = json.loads(file.read_text())
        (collective,) = report["collectives"]
        assert (collective["op"], collective["count"], collective["bytes"]) == ("allreduce", 1, 12)
        assert collective["line"].endswith("with_two.py:12")


def test_the_variable_starts_it_where_it_is_installed_and_only_there(tmp_path: Path) -> None:
    python = programs.installed(tmp_path / "venv")
    report = str(tmp_path / "report.json")
    done = launched(tmp_path, python, HPU_SIMULATOR="gaudi3", HPU_SIMULATOR_JSON=report)
    assert done.stderr.count(HEAD) == 1, "the launcher and rank 1 print nothing"
    check_reports(tmp_path)
    has = "import torch; print(hasattr(torch, 'hpu') and torch.hpu.is_available())"
    off = simulator.environment()
    for name in ("HPU_SIMULATOR", "PYTHONPATH"):
        del off[name]
    alone = subprocess.run([python, "-c", has], cwd=tmp_path, env=off, capture_output=True, text=True, timeout=100)
    assert alone.stdout == "False\n", alone.stderr
    gone = [python, "-m", "hpu_simulator", "--uninstall"]
    subprocess.run(gone, cwd=simulator.REPOSITORY, check=True, capture_output=True, timeout=100)
    on = off | {"HPU_SIMULATOR": "gaudi3"}
    alone = subprocess.run([python, "-c", has], cwd=tmp_path, env=on, capture_output=True, text=True, timeout=100)
    assert alone.stdout == "False\n", alone.stderr


def test_the_command_starts_launchers_too(tmp_path: Path) -> None:
    options = ("-m", "hpu_simulator", "--generation", "gaudi3", "--json", "report.json")
    done = launched(tmp_path, sys.executable, *options, PYTHONPATH=str(simulator.REPOSITORY))
    assert done.stderr.count(HEAD) == 1
    check_reports(tmp_path)
