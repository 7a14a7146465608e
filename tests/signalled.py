"""Runs of recipes that get signals at chosen moments: when a function is called for the n-th time.

As a program: ``python tests/signalled.py PLAN RECIPE FLAGS``, one run, also as a rank. Without arguments it forks a
process for each run that it reads from standard input, see `Runs`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

from core.errors import exit_with_one_line  # noqa: E402


def signal_at(plan: list[list[Any]]) -> None:
    """Let this process send signals: (rank, ``folder/file:function``, its how many-th call, signal's name, to whom)."""
    mine = [tuple(one[1:]) for one in plan if one[0] == int(os.environ.get("RANK", 0))]
    functions, calls = {one[0].partition(":")[2] for one in mine}, Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name in functions:
            path = Path(frame.f_code.co_filename)
            name = f"{path.parent.name}/{path.name}:{frame.f_code.co_name}"
            calls[name] += 1
            for sent, target in [one[2:] for one in mine if one[:2] == (name, calls[name])]:
                send(getattr(signal, sent), target)

    if mine:
        threading.setprofile(look)
        sys.setprofile(look)


def send(number: int, target: str) -> None:
    """Send a signal to this process (``self``), to its ``launcher``, or to either and all that it has started.

    As Slurm does the latter (``run``, ``job``), from another process: what a process sends to its workers is its order.
    """
    import psutil

    own = psutil.Process()
    first = own.parent() if target in ("launcher", "job") else own
    others = first.children(recursive=True) if target in ("run", "job") else []
    pids = [str(process.pid) for process in (first, *others)]
    subprocess.run(["sh", "-c", f"kill -{int(number)} {' '.join(pids)}"], start_new_session=True)


def run(plan: list[list[Any]], recipe: str, argv: list[str]) -> None:
    """Run a recipe as a program does."""
    from tests.conftest import load_recipe

    main = load_recipe(recipe).main
    signal_at(plan)
    exit_with_one_line(lambda: main(argv), preemptible=True)


class Runs:
    """A process that has everything imported by a first run, and forks a process for each of the others."""

    def __init__(self) -> None:
        words = [sys.executable, __file__]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, recipe: str, argv: list[str], said: Path, plan: list[list[Any]] | None = None, world: int = 1) -> Any:
        """Run a recipe on so many ranks; return their exit codes. What rank 0 writes goes to the file ``said``."""
        print(json.dumps([recipe, argv, str(said), plan or [], world]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve() -> None:
    """Do the runs that standard input asks for, one after the other."""
    from core.launcher import DistributedRunner
    from tests.conftest import load_recipe

    answers, imported = os.fdopen(os.dup(1), "w"), set()
    os.dup2(2, 1)
    for line in sys.stdin:
        recipe, argv, said, plan, world = json.loads(line)
        if recipe not in imported:
            imported.add(recipe)
            with open(said, "w") as file, redirect_stdout(file), redirect_stderr(file):
                load_recipe(recipe).main(argv)
            codes = [0]
        else:
            port, lock = DistributedRunner().claim_port()
            with lock:
                pids = [fork(recipe, argv, plan, said, rank, world, port) for rank in range(world)]
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), file=answers, flush=True)


def fork(recipe: str, argv: list[str], plan: list[list[Any]], said: str, rank: int, world: int, port: int) -> int:
    """Fork one rank, which leads a group; return its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(said + (f".{rank}" if rank else ""), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if world > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        run(plan, recipe, argv)
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.setprofile(None)
        for thread in threading.enumerate():  # as the interpreter's end does
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
    else:
        serve()
