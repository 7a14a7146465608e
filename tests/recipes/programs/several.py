"""Runs the recipe many times in the same ranks, since starting them takes longer than a run: ``several.py plan.json``.

The plan is a list of objects: ``flags``, and ``watch``, which counts what a step asks of the simulated device. The
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


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Write down, per optimiser step, the graphs and the waits for the device that there have been so far.

    And at last the kinds of collectives.
    """
    from core.data import Window
    from core.engine import Engine
    from hpu_simulator import runtime

    step, counts = Engine.step, []

    def counting(self: Engine, window: Window) -> None:
        step(self, window)
        seen = runtime.snapshot()
        compiled = sum(graph["compiled"] for graph in seen["graphs"])
        counts.append([compiled, sum(sync["count"] for sync in seen["syncs"])])

    Engine.step = counting
    try:
        yield
    finally:
        Engine.step = step
        kinds = sorted({(each["op"], each["dtype"]) for each in runtime.snapshot()["collectives"]})
        found = {"steps": counts, "collectives": kinds}
        (folder / f"watched-rank{dist.get_rank()}.json").write_text(json.dumps(found))


def main() -> None:
    recipe = load_recipe("summarization")
    join()
    for run in json.loads(Path(sys.argv[1]).read_text()):
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
