"""Sides for the tests of taking turns: what they do is written to one file, in the order in which it happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.contests import Settings
from benchmarks.turns import Turns


def work(settings: Settings, turns: Turns) -> None:
    """Each turn writes two lines; a child of it writes for ever into a file of its own."""
    name, shared = settings.folder.name, settings.folder.parent
    child = "import sys, time\nwhile True:\n    open(sys.argv[1], 'a').write('x')\n    time.sleep(0.005)"
    own = subprocess.Popen([sys.executable, "-c", child, str(shared / f"{name}.child")])
    (shared / f"{name}.pids").write_text(f"{os.getpid()} {own.pid}")
    for number in range(100):
        for moment in ("begins", "ends"):
            with (shared / "order.txt").open("a") as file:
                file.write(f"{name} {number} {moment}\n")
            time.sleep(0.05)
        turns.over(samples=10 * (number + 1))


def fail(settings: Settings, turns: Turns) -> None:
    """Does one turn, and breaks in the next."""
    turns.over(samples=1)
    print("on its way", Path.cwd())
    raise ValueError("the loader is empty")


SIDES = {"ours": work, "theirs": work, "failing": fail}
