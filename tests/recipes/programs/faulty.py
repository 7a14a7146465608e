"""A recipe with one thing wrong: ``faulty.py <recipe> <fault> <notes> flags...``. It is real, nothing is imitated.

``notes`` is a file that gets a line for what happened: the time of the fault, or each call of the tokenizer.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import exit_with_one_line
from tests.conftest import load_recipe

RANK = int(os.environ["RANK"])
NOTES = Path(sys.argv[3])
GIB = 2**30


def note(text: str) -> None:
    with NOTES.open("a") as file:  # one short write: ranks do not mix
        file.write(f"{text}\n")


def in_call(number: int, recipe: ModuleType, name: str, fault: Callable[[], None], rank: int = 1) -> None:
    """Let ``fault`` happen in a call of a function of the recipe."""
    right, calls = getattr(recipe, name), []

    def wrong(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if rank == RANK and len(calls) == number:
            if rank == 1:
                note(str(time.time()))
            fault()
        return right(*args, **options)

    setattr(recipe, name, wrong)


def raise_it() -> None:
    raise RuntimeError("this rank's own fault")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory() -> None:
    """Ask for more memory than this rank may have."""
    import torch

    if "HPU_SIMULATOR" in os.environ:
        torch.empty(96 * GIB, dtype=torch.uint8, device="hpu")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + GIB, size + GIB))
    torch.empty(2 * GIB, dtype=torch.uint8)


def bad_row() -> None:
    raise ValueError("row 7 cannot be read")


def elsewhere() -> None:
    """As on another machine: what a relative path names is not there."""
    os.chdir("/")


def slow_tokenizer() -> None:
    """Each call of the tokenizer takes long and is written down."""
    from transformers import PreTrainedTokenizerFast

    right = PreTrainedTokenizerFast.__call__

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        note(f"rank {RANK}")
        time.sleep(float(os.environ["TOKENIZER_SECONDS"]))
        return right(self, *args, **options)

    PreTrainedTokenizerFast.__call__ = slow


def main() -> None:
    recipe, fault = load_recipe(sys.argv[1]), sys.argv[2]
    in_step = {"raise": raise_it, "kill": kill, "memory": fill_memory}
    if fault in in_step:
        in_call(3, recipe, "loss_sum", in_step[fault])
    elif fault == "row":
        in_call(3, recipe, "collate", bad_row)
    elif fault == "file":
        in_call(1, recipe, "load_data", elsewhere)
        in_call(1, recipe, "load_data", lambda: time.sleep(600), rank=0)  # it does not notice that it is alone
    elif fault == "slow":
        slow_tokenizer()
    recipe.main(sys.argv[4:])


if __name__ == "__main__":
    exit_with_one_line(main)
