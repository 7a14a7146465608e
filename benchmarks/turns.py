"""Two programs or more that take turns: one works, the others are stopped, so that what disturbs one disturbs all.

Each side is a process of its own that is set up once. It calls `Turns.over` at the end of each turn, which reports what
was done in it and waits. While it waits its whole process group is stopped by a signal: loader processes that read
ahead cannot use another side's time.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contests import Settings

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE = 900  # seconds that a turn may take, the first with all that is loaded


class Turns:
    """A side's end of the line.

    Args:
        reports, orders: file descriptors: turns are reported to the first, the second says when to go on.
    """

    def __init__(self, reports: int, orders: int) -> None:
        self._reports, self._orders = reports, orders
        self._began = time.perf_counter()

    def over(self, **counts: float) -> None:
        """End a turn: report its seconds and what was done in it, and wait for the next. Ends the process at last.

        The first turn is the warm-up; it began when the process did.
        """
        report = {"seconds": time.perf_counter() - self._began, **counts}
        os.write(self._reports, (json.dumps(report) + "\n").encode())
        if os.read(self._orders, 1) != b"g":
            os._exit(0)  # nothing of it is wanted any more, also not what a trainer writes at its end
        self._began = time.perf_counter()


@dataclass
class _Side:
    name: str
    process: subprocess.Popen
    reports: int
    orders: int
    log: Path

    def wait(self) -> dict[str, float]:
        """The report of the turn at hand."""
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self.reports], [], [], PATIENCE)
            part = os.read(self.reports, 65536) if ready else b""
            if not part:
                how = "ended" if ready else f"took more than {PATIENCE} s"
                raise RuntimeError(f"the side {self.name} {how}:\n{self.log.read_text(errors='replace')[-3000:]}")
            text += part
        return json.loads(text)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


@contextmanager
def _started(module: str, name: str, settings: Settings, environ: dict[str, str]) -> Iterator[_Side]:
    """A side, with its two lines; in the end nothing of its process group is left."""
    reports, reporting = os.pipe()
    obeying, orders = os.pipe()
    folder = settings.folder / name
    folder.mkdir()
    log = folder / "output.txt"
    options = asdict(settings) | {"folder": str(folder)}
    words = [sys.executable, "-m", "benchmarks.turns", module, name, json.dumps(options), str(reporting), str(obeying)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=REPOSITORY,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(reporting, obeying),
            start_new_session=True,
        )
    os.close(reporting)
    os.close(obeying)
    try:
        yield _Side(name, process, reports, orders, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reports)
        os.close(orders)


def take_turns(
    module: str, sides: Sequence[str], settings: Settings, environ: dict[str, str] | None = None
) -> dict[str, list[dict[str, float]]]:
    """Run sides alternately, A B A B ..., and return each one's reports, one a round, the warm-up left out.

    Args:
        module: has ``SIDES``, functions by name, which get `Settings` (with a folder of the side's own) and `Turns`.
        environ: variables set for all sides.

    Raises:
        RuntimeError: a side ended, or took more than 15 minutes for a turn; with the end of its output.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with ExitStack() as stack:
        running = []
        for name in sides:  # one after the other: each warms up alone
            side = stack.enter_context(_started(module, name, settings, environ or {}))
            side.wait()
            side.signal(signal.SIGSTOP)
            running.append(side)
        for _ in range(settings.rounds):
            for side in running:
                side.signal(signal.SIGCONT)
                os.write(side.orders, b"g")
                found[side.name].append(side.wait())
                side.signal(signal.SIGSTOP)
    return found


def rates(reports: dict[str, list[dict[str, float]]], count: str) -> dict[str, list[float]]:
    """By side, what was done per second in each round."""
    return {side: [each[count] / each["seconds"] for each in own] for side, own in reports.items()}


@dataclass
class Finished:
    """A command that ended: its seconds, its output, and the peak of its resident memory in bytes if asked for."""

    seconds: float
    output: str
    peak_bytes: int | None = None


# A process begins with the peak of the one that starts it: a small one has to stand between.
BETWEEN = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def run_command(
    words: Sequence[Any], environ: dict[str, str] | None = None, until: str | None = None, memory: bool = False
) -> Finished:
    """Run a command to its end, or until a line of its output holds ``until``; then it is killed.

    Args:
        memory: measure the peak of a command that runs to its end (or that of a process of its own, if greater).

    Raises:
        RuntimeError: it failed, or ended without that line; with the end of its output.
    """
    began, lines = time.perf_counter(), []
    words = [*([sys.executable, "-c", BETWEEN] if memory else []), *map(str, words)]
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    met = False
    for line in process.stdout:
        lines.append(line)
        if until is not None and until in line:
            met = True
            break
    seconds = time.perf_counter() - began
    if met:
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    process.stdout.close()
    if not met:
        seconds = time.perf_counter() - began
    if met == (until is None) or (not met and code):
        raise RuntimeError(f"{' '.join(words)}: exit code {code}\n{''.join(lines)[-3000:]}")
    peak = int(lines.pop().split()[1]) * 1024 if memory and not met else None
    return Finished(seconds, "".join(lines), peak)


def main(argv: list[str]) -> None:
    """Be a side: ``module name settings reports orders``."""
    module, name, options, reports, orders = argv
    with suppress(OSError, AttributeError):  # Linux: 1 is PR_SET_PDEATHSIG; a conductor that is killed leaves no side
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    settings = json.loads(options)
    settings = Settings(**settings | {"folder": Path(settings["folder"])})
    importlib.import_module(module).SIDES[name](settings, Turns(int(reports), int(orders)))
    raise SystemExit(f"the side {name} of {module} ended before its turns did")


if __name__ == "__main__":
    main(sys.argv[1:])
