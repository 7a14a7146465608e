"""Our side of a contest: a recipe as its command starts it, whose epochs are the turns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.contests import Settings
from benchmarks.turns import REPOSITORY, Turns

FOREVER = 100_000  # epochs: the conductor ends the run


def load_recipe(task: str) -> ModuleType:
    """A recipe's ``run.py``, as a module."""
    path = REPOSITORY / "recipes" / task / "run.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{task}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def common_flags(settings: Settings, folder: Path) -> list[str]:
    """Flags of any measured run: nothing is written while it trains."""
    flags = ["--output_dir", str(folder), "--save_strategy", "no", "--report_to", "none", "--disable_tqdm"]
    return flags + (["--use_cpu"] if settings.device == "cpu" else [])


def train_in_turns(task: str, flags: Sequence[Any], settings: Settings, turns: Turns) -> None:
    """Train with a recipe; a turn is an epoch. Counts rows, real tokens and steps.

    ``flops`` are the model's in the first epoch, None if unknown: another epoch has the same rows, and other padding.
    """
    recipe = load_recipe(task)
    import core.engine
    from core.engine import Engine

    step, counts = Engine.step, {"samples": 0, "tokens": 0, "steps": 0}
    flops: list[float | None] = []  # of the steps of the first epoch; where a peak is unknown an engine counts none
    core.engine.peak_flops = lambda *_: 1.0

    def counted(self: Engine, window: Any) -> bool:
        moved = step(self, window)
        counts["samples"] += window.rows
        counts["tokens"] += window.tokens
        counts["steps"] += 1
        if self._countable:
            flops.append(self._flops)
        if window.last_in_epoch:
            self.device.synchronize()
            self._countable = False  # the warm-up is over: counting takes time
            turns.over(**counts, flops=None if None in flops else sum(flops))
            counts.update(samples=0, tokens=0, steps=0)
        return moved

    Engine.step = counted
    flags = [*flags, "--do_train", "--num_train_epochs", FOREVER, *common_flags(settings, settings.folder / "run")]
    recipe.main([str(flag) for flag in flags])
