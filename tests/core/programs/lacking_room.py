"""Rank 0 may not write larger files for two steps: ``lacking_room.py FOLDER``; each rank prints how each run ended."""

from __future__ import annotations

import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any

from core import checkpoint, distributed
from core.engine import Engine
from core.records import read_csv
from tests.core import toy, trials

SIZES = {"checkpoint": 4000, "log": 1}  # bytes that a file may have
HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
heard: list[str] = []


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        heard.append(record.getMessage())


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, HARD))


def go(folder: Path, what: str, policy: str) -> dict[str, Any]:
    """Six steps; while rank 0 goes on after the third and the fourth, its files may not grow."""

    def each(engine: Engine) -> None:
        if distributed.rank() == 0 and engine.step_count in (3, 5):
            engine.writer.join()
            limit(SIZES[what] if engine.step_count == 3 else HARD)

    saves = ["--save_steps", "2"] if what == "checkpoint" else ["--save_strategy", "no"]
    flags = ["--max_steps", "6", "--logging_steps", "1", "--on_save_error", policy, *saves, *trials.window(8)]
    heard.clear()

    def work() -> int:
        engine, *_ = toy.run(folder, *flags, each=each)
        engine.finish_training()
        return engine.step_count

    try:
        ended = trials.outcome(work)
    finally:
        limit(HARD)
    distributed.sum_over_ranks([0.0])
    found = {"ended": ended, "warned": list(heard), "saved": [step for step, _ in checkpoint.all_steps(folder)]}
    found["hidden"] = sorted(path.name for path in folder.rglob(".*") if path.name != ".lock")
    return found | {"logged": [int(row["step"]) for row in read_csv(folder / "logs" / "metrics.csv")]}


logging.getLogger("gaudi_recipes").addHandler(Heard())
results = {}
for what in SIZES:
    for policy in ("stop", "continue"):
        results[f"{what} {policy}"] = go(Path(sys.argv[1], f"{what}_{policy}"), what, policy)
distributed.stop()
print(json.dumps(results))
