"""One process that has imported everything forks a child for each run of a recipe, kills it, and looks at what it left.

As a program: ``python -m tests.forks PLAN FOUND`` does what a plan (JSON) says, and writes what it found (JSON).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# What runs import, so that their children need not.
IMPORTED = (
    "core.engine", "core.model_card", "datasets", "deepspeed", "matplotlib.backends.backend_agg", "peft",
    "torch.utils.tensorboard",
)  # fmt: skip
MODELS = {
    "summarization": ("transformers.models.t5.modeling_t5",),
    "language_modeling": ("transformers.models.gpt2.modeling_gpt2",),
    "image_classification": ("transformers.models.vit.modeling_vit",),
    "text_to_image": ("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",),
}
FINAL = ("model.safetensors", "unet/diffusion_pytorch_model.safetensors")


class Child:
    """A recipe's ``main`` in a process of its own, which leads a group: its workers are in it."""

    def __init__(self, main: Callable[[list[str]], Any], argv: list[str], said: Path) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of its parent's threads"
        self.began, self.said, self.code = time.monotonic(), said, None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(main, argv)
        os.setpgid(self.pid, self.pid)

    def _run(self, main: Callable[[list[str]], Any], argv: list[str]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            file = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            from core.errors import exit_with_one_line

            exit_with_one_line(lambda: main(argv), preemptible=True)
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
        finally:
            for thread in threading.enumerate():  # as the interpreter's end does
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(0.001)

    def wait(self) -> float:
        """Seconds from its start to its end."""
        while not self.ended():
            time.sleep(0.005)
        return time.monotonic() - self.began


def seen(folder: Path, kind: str) -> Iterator[str]:
    """What there is in a run's folder that a kill of this kind waits for, by names that differ each time."""
    try:
        names = os.listdir(folder)
        if kind == "begin":
            yield from (name for name in names if name.startswith(".checkpoint-"))
        elif kind == "marker":
            yield from (n for n in names if n.startswith(".checkpoint-") and (folder / n / "checkpoint.json").exists())
        elif kind == "rename":
            yield from (name for name in names if name.startswith("checkpoint-"))
        elif kind == "model":
            yield from (f"{path}{path.stat().st_mtime_ns}" for path in map(folder.joinpath, FINAL) if path.exists())
        elif kind == "log":
            logs = os.listdir(folder / "logs")
            yield from (name for name in logs if name.startswith("."))
            yield f"{(folder / 'logs' / 'metrics.csv').stat().st_size}"
    except OSError:  # not there yet, or no more
        return


def strike(child: Child, folder: Path, kind: str, number: int, delay: float) -> bool:
    """Kill a child ``delay`` seconds after its ``number``-th event of a kind; false if it has ended before."""
    until = child.began + delay if kind == "time" else None
    known = set(seen(folder, kind))
    while not child.ended():
        if until is None:
            new = set(seen(folder, kind)) - known
            known |= new
            number -= len(new)
            if new and number <= 0:
                until = time.monotonic() + delay
        if until is not None and time.monotonic() >= until:
            child.kill()
            return child.code == -signal.SIGKILL
        time.sleep(0.0003)
    return False


def draw(kinds: list[str], seconds: float, rng: random.Random, furthest: int) -> list[tuple[str, int, float]]:
    """A kill of each kind, in random order: kind, number of the event, and seconds after it."""
    longest = {"time": seconds, "begin": 0.02, "marker": 0.004, "rename": 0.004, "model": 0.02, "log": 0.005}
    drawn = [
        (kind, rng.randint(1, furthest) if kind != "model" else 1, rng.uniform(0, longest[kind])) for kind in kinds
    ]
    rng.shuffle(drawn)
    return sorted(drawn, key=lambda one: one[0] == "model")  # after the last model there is nothing to save


def chain(main: Callable, argv: list[str], folder: Path, kills: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Start a run, kill it, look at its checkpoints, start it again; at last let it come to its end."""
    from core import checkpoint

    found: dict[str, Any] = {"kills": [], "wrong": [], "groups": []}
    argv, newest = [*argv, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"], 0
    for kind, number, delay in [*kills, ("end", 0, 0.0)]:
        child = Child(main, argv, folder.with_suffix(".txt"))
        found["groups"].append(child.pid)
        if kind == "end":
            child.wait()
        elif strike(child, folder, kind, number, delay):
            found["kills"].append(kind)
        where = f"{folder.name}, {kind} {number} + {delay:.4f} s"
        steps = checkpoint.all_steps(folder)
        found["wrong"] += [f"{where}: {reason}" for _, path in steps if (reason := checkpoint.problem(path))]
        if max((step for step, _ in steps), default=0) < newest:
            found["wrong"].append(f"{where}: checkpoint-{newest} is no more")
        newest = max((step for step, _ in steps), default=0)
        if child.code != -signal.SIGKILL:
            break
    if child.code:
        found["wrong"].append(f"{where}: ended with {child.code}: {child.said.read_text()[-4000:]}")
    return found


def case(
    recipe: str, argv: list[str], folder: Path, kinds: list[str], seed: int, at_once: int, furthest: int
) -> dict[str, Any]:
    """An uninterrupted run into ``folder / "whole"``, and others that are killed, until there was a kill of each kind.

    Args:
        at_once: kills of one run.
        furthest: the number of the event in a process, such as its second save, that a kill waits for at most.
    """
    rng, main, chains, left = random.Random(seed), load(recipe).main, [], list(kinds)
    folder.mkdir(parents=True)
    whole = Child(main, [*argv, "--output_dir", str(folder / "whole")], folder / "whole.txt")
    seconds = whole.wait()
    assert whole.code == 0, (folder / "whole.txt").read_text()[-4000:]
    rng.shuffle(left)
    while left and len(chains) < 3 * len(kinds):
        one = chain(main, argv, folder / f"killed-{len(chains)}", draw(left[:at_once], seconds, rng, furthest))
        for kind in one["kills"]:
            left.remove(kind)
        left = left[at_once:] + left[:at_once]  # one that came too late is tried again
        chains.append(one)
    found = {key: [item for one in chains for item in one[key]] for key in chains[0]}
    return found | {"missing": left, "folders": len(chains), "seconds": seconds}


def load(recipe: str) -> ModuleType:
    from tests.conftest import load_recipe

    return load_recipe(recipe)


def still_alive(groups: list[int], patience: float = 10.0) -> list[int]:
    """Groups of which a process has not ended by itself; it is killed."""
    until = time.monotonic() + patience
    while (alive := [group for group in groups if _lives(group)]) and time.monotonic() < until:
        time.sleep(0.05)
    for group in alive:
        os.killpg(group, signal.SIGKILL)
    return alive


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main(plan: Path, found: Path) -> None:
    import torch

    torch.set_num_threads(1)
    cases = json.loads(plan.read_text())
    for module in (*IMPORTED, *(module for one in cases for module in MODELS[one["recipe"]])):
        importlib.import_module(module)
    results = [case(**one | {"folder": Path(one["folder"])}) for one in cases]
    for one in results:
        one["alive"] = still_alive(one.pop("groups"))
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
