"""Runs a recipe many times in the same ranks, since starting them takes longer than a run.

``several.py <recipe> plan.json``: the plan is a list of objects with ``flags``, and ``watch``, which counts what a step
asks of the device. The process group is made here, so that a run finds it and leaves it: DeepSpeed keeps groups that it
has made of it.
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

import torch
import torch.distributed as dist

from tests.conftest import load_recipe

SIMULATED = "HPU_SIMULATOR" in os.environ


def join() -> None:
    """Make the default group as another library would."""
    if SIMULATED:
        from tests.core.programs.setting import this_device

        this_device().bridge("distributed.hccl")
    # Far below the patience of the test, which then shows what the ranks said.
    dist.init_process_group("cpu:gloo,hpu:hccl" if SIMULATED else "cpu:gloo", timeout=timedelta(seconds=60))


def snapshot() -> dict[str, list[dict]]:
    """What the simulated device has seen so far; nothing without one."""
    if not SIMULATED:
        return {"graphs": [], "syncs": [], "collectives": []}
    from hpu_simulator import runtime

    return runtime.snapshot()


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Write down, per optimiser step, the graphs and the waits for the simulated device that there have been so far.

    And at last the kinds of collectives, and per backward pass whether the gradient took the memory of the logits.
    """
    from core import losses
    from core.data import Window
    from core.engine import Engine

    step, alone, counts, in_place = Engine.step, losses._is_ours_alone, [], []

    def counting(self: Engine, window: Window) -> None:
        step(self, window)
        seen = snapshot()
        compiled = sum(graph["compiled"] for graph in seen["graphs"])
        counts.append([compiled, sum(sync["count"] for sync in seen["syncs"])])

    def noting(rows: torch.Tensor) -> bool:
        in_place.append(alone(rows))
        return in_place[-1]

    Engine.step, losses._is_ours_alone = counting, noting
    try:
        yield
    finally:
        Engine.step, losses._is_ours_alone = step, alone
        kinds = sorted({(each["op"], each["dtype"]) for each in snapshot()["collectives"]})
        found = {"steps": counts, "collectives": kinds, "in_place": in_place}
        (folder / f"watched-rank{dist.get_rank()}.json").write_text(json.dumps(found))


def main() -> None:
    recipe = load_recipe(sys.argv[1])
    join()
    for run in json.loads(Path(sys.argv[2]).read_text()):
        before, began, flags = dict(os.environ), time.monotonic(), run["flags"]
        folder = Path(flags[flags.index("--output_dir") + 1])
        with watched(folder) if run["watch"] else nullcontext():
            recipe.main(flags)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        gc.collect()  # transformers shards new models for as long as an earlier run's configuration lives
        print(f"{folder.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
