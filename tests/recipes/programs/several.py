"""Runs a recipe many times in the same ranks, since starting them takes longer than a run.

``several.py <recipe> plan.json``: the plan is a list of objects with ``flags``; ``watch``, which counts what steps and
evaluations ask of the device, and notes files; and ``fails``, of a run that must raise a `UserError` on each rank. The
process group is made here, so that a run finds it and leaves it: DeepSpeed keeps groups that it has made of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.conftest import load_recipe

SIMULATED = "HPU_SIMULATOR" in os.environ
PUT_IN_PLACE: list[str] = []  # names of the files that this process wrote whole, beside their place, and put there


def note_files(event: str, arguments: tuple) -> None:
    """An audit hook: Python calls it of every file that is renamed, among others."""
    if event == "os.rename":
        PUT_IN_PLACE.append(Path(arguments[1]).name)


def join() -> None:
    """Make the default group as another library would."""
    if SIMULATED:
        from tests.core.programs.setting import this_device

        this_device().bridge("distributed.hccl")
    # Far below the patience of the test, which then shows what the ranks said.
    dist.init_process_group("cpu:gloo,hpu:hccl" if SIMULATED else "cpu:gloo", timeout=timedelta(seconds=60))


def snapshot() -> dict[str, Any]:
    """What the simulated device has seen so far; nothing without one."""
    if not SIMULATED:
        return {"graphs": [], "syncs": [], "collectives": [], "copies": {"to_device": {"bytes": 0}}}
    from hpu_simulator import runtime

    return runtime.snapshot()


def waits() -> int:
    """How often the host has waited for the simulated device so far."""
    return sum(sync["count"] for sync in snapshot()["syncs"])


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Write down, per optimiser step, what there has been so far: graphs, waits for the simulated device, bytes to it.

    Also the waits in each evaluation, and its batches; and at last the kinds of collectives, the files that were put in
    place, and per backward pass whether the gradient took the memory of the logits.
    """
    from core import losses
    from core.data import Window
    from core.engine import Engine
    from core.run import Run

    step, alone, evaluate, counts, in_place = Engine.step, losses._is_ours_alone, Run.evaluate, [], []
    copied, evaluations = [], []
    PUT_IN_PLACE.clear()

    def counting(self: Engine, window: Window) -> bool:
        moved = step(self, window)
        seen = snapshot()
        compiled = sum(graph["compiled"] for graph in seen["graphs"])
        counts.append([compiled, sum(sync["count"] for sync in seen["syncs"])])
        copied.append(seen["copies"]["to_device"]["bytes"])
        return moved

    def evaluating(self: Run, loader: Any, *arguments: Any) -> Any:
        before = waits()
        found = evaluate(self, loader, *arguments)
        evaluations.append([loader.windows_per_epoch, waits() - before])
        return found

    def noting(rows: torch.Tensor) -> bool:
        in_place.append(alone(rows))
        return in_place[-1]

    Engine.step, losses._is_ours_alone, Run.evaluate = counting, noting, evaluating
    try:
        yield
    finally:
        Engine.step, losses._is_ours_alone, Run.evaluate = step, alone, evaluate
        kinds = sorted({(each["op"], each["dtype"]) for each in snapshot()["collectives"]})
        found = {"steps": counts, "collectives": kinds, "in_place": in_place, "copied": copied}
        found |= {"evaluations": evaluations, "files": PUT_IN_PLACE}
        (folder / f"watched-rank{dist.get_rank()}.json").write_text(json.dumps(found))


@contextmanager
def failing(folder: Path) -> Iterator[None]:
    """Write down of what error this rank's run ended."""
    from core.errors import UserError

    try:
        yield
    except UserError as error:
        (folder / f"error-rank{dist.get_rank()}.txt").write_text(str(error))
    else:
        raise AssertionError(f"{folder.name} did not fail")


def main() -> None:
    recipe = load_recipe(sys.argv[1])
    sys.addaudithook(note_files)
    join()
    for run in json.loads(Path(sys.argv[2]).read_text()):
        before, began, flags = dict(os.environ), time.monotonic(), run["flags"]
        folder = Path(flags[flags.index("--output_dir") + 1])
        with watched(folder) if run["watch"] else nullcontext(), failing(folder) if run["fails"] else nullcontext():
            recipe.main(flags)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        gc.collect()  # transformers shards new models for as long as an earlier run's configuration lives
        print(f"{folder.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
