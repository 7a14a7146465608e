"""The device is compiled once, whoever asks first and whatever happens to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hpu_simulator import simulator

pytestmark = [pytest.mark.compiles, pytest.mark.processes]
WORKS = "import torch; print(torch.ones(2, device='hpu').sum().item())"


def start(extensions: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKS],
        env=simulator.environment(TORCH_EXTENSIONS_DIR=str(extensions)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and the compilers that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_killed_build_blocks_nobody_and_two_at_once_build_once(tmp_path: Path) -> None:
    killed = start(tmp_path)
    try:
        deadline = time.monotonic() + 100
        while not (halfway := list(tmp_path.glob("*/build-*/build.ninja"))):
            assert killed.poll() is None, killed.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        killed.kill()  # its compilers go on
        killed.wait()
        with (halfway[0].parents[1] / "build.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        stop(killed)
    both = [start(tmp_path), start(tmp_path)]
    try:
        outputs = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            stop(process)
    assert [out for out, _ in outputs] == ["2.0\n"] * 2, outputs
    assert sum(err.count("building the simulated HPU") for _, err in outputs) == 1
    (library,) = tmp_path.glob("*/*.so")
    assert sorted(file.name for file in library.parent.iterdir()) == ["build.lock", library.name], "no leavings"
    again = start(tmp_path)
    out, err = again.communicate(timeout=100)
    assert out == "2.0\n"
    assert "building" not in err


def test_without_a_compiler_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    """In a program that the variable alone puts on the simulator. What is built already needs no compiler."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ninja").symlink_to(shutil.which("ninja") or sys.executable)
    empty = {"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = simulator.run("-c", WORKS, **empty, timeout=100)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "apt-get install g++ ninja-build" in line]
    assert "needs c++;" in line
    assert not (tmp_path / "extensions").exists()
    done = simulator.run("-c", WORKS, PATH=str(tools), timeout=200)
    assert done.stdout == "2.0\n", done.stderr
