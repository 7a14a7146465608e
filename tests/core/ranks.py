"""Start a program on several ranks: real processes, each with the launcher's environment; none is left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.conftest import REPOSITORY
from tests.hpu_simulator.simulator import environment

PROGRAMS = Path(__file__).parent / "programs"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(
    size: int,
    program: str,
    *arguments: str,
    only: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    mode: str | None = None,
    master: str = "127.0.0.1",
    timeout: float = 120,
    **variables: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``programs/<program>.py`` on ``size`` ranks and return how each ended, by rank.

    Args:
        only: the ranks that are started; the others never come.
        prefixes: a command for each rank that its own is started through, such as ``ip netns exec``.
        mode: ``lazy`` or ``eager`` on the simulated device; the CPU without it.
    """
    started, said, files = [], [], ExitStack()
    common = environment(mode) if mode else {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(size), "MASTER_ADDR": master, "MASTER_PORT": str(free_port()), **variables}
    try:
        for rank in range(size) if only is None else only:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [
                *(prefixes[rank] if prefixes else ()),
                sys.executable,
                str(PROGRAMS / f"{program}.py"),
                *arguments,
            ]
            # Files, not pipes: a rank that has filled a pipe waits, and all others for it.
            out, err = both = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115 - read after the rank's end
            said.append([files.enter_context(file) for file in both])
            started.append(subprocess.Popen(command, env={**common, **own}, cwd=REPOSITORY, stdout=out, stderr=err))
        until = time.monotonic() + timeout
        for one in started:
            one.wait(timeout=max(until - time.monotonic(), 0.1))
        texts = [[file.seek(0) or file.read() for file in both] for both in said]
    finally:
        for one in started:
            one.kill()
            one.wait()
        files.close()
    pairs = zip(started, texts, strict=True)
    return [subprocess.CompletedProcess(one.args, one.returncode, *both) for one, both in pairs]


def results(ended: list[subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """The JSON that every rank printed last.

    Raises:
        AssertionError: a rank failed; the message is what it said.
    """
    for one in ended:
        assert one.returncode == 0, one.stderr[-4000:]
    return [json.loads(one.stdout.strip().splitlines()[-1]) for one in ended]
