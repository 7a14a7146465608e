"""What the tests of recipes over several devices share: many runs in one launch of ranks, and what they have left."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.hpu_simulator.simulator import environment

PROGRAMS = Path(__file__).with_name("programs")
QUIET = ["--disable_tqdm", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "1"]
STRATEGIES = {
    "ddp": [],
    "fast_ddp": ["--distribution_strategy", "fast_ddp"],
    **{name: ["--deepspeed", name] for name in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")},
}
BATCH = {1: (4, 4), 2: (2, 4), 4: (1, 4)}  # rows of a micro-batch, and micro-batches: 16 rows a step at every size


@dataclass
class Ended:
    """A launcher that has ended: what it said, and when."""

    code: int
    out: str
    err: str
    at: float


def launch(
    size: int,
    script: Path,
    *arguments: str | Path,
    mode: str | None = None,
    cwd: Path = REPOSITORY,
    **variables: str,
) -> Ended:
    """Run ``gaudi_spawn.py --world_size <size> <script> ...`` to its end.

    Args:
        mode: ``lazy`` or ``eager`` on the simulated device; the CPU without it.

    Raises:
        AssertionError: it left a process behind, or did not end.
    """
    mark = uuid.uuid4().hex
    common = environment(mode) if mode else {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, REPOSITORY / "gaudi_spawn.py", "--world_size", str(size), script, *arguments]
    own = tempfile.TemporaryDirectory()  # locks of a machine stay in its temporary folder
    process = subprocess.Popen(
        list(map(str, command)),
        env={**common, "LAUNCHED_BY": mark, "TMPDIR": own.name, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    try:
        out, err = process.communicate(timeout=240)
    except BaseException as error:  # an interrupted test leaves nothing behind either
        process.terminate()
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"it did not end: {out[-2000:]}{err[-4000:]}", pytrace=False)
        raise
    ended, left = Ended(process.returncode, out, err, time.time()), with_mark(mark)
    for one in left:
        one.kill()
    own.cleanup()
    assert not left
    return ended


def with_mark(mark: str) -> list[psutil.Process]:
    """The processes that have it in their environment: what a launcher started, wherever it has gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("LAUNCHED_BY") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Ran:
    """What a run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, log = folder, folder / "logs" / "metrics.csv"
        self.log = list(csv.DictReader(log.open())) if log.exists() else []
        self.metrics = json.loads((folder / "all_results.json").read_text())
        texts = folder / "generated_predictions.txt"
        self.texts = texts.read_text().splitlines() if texts.exists() else []

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.log if row.get(name)]

    def figures(self) -> dict[str, float]:
        """Losses and scores: what depends neither on speed nor on the machine."""
        scores = re.compile("(train|eval|predict)_(loss|rouge.*|gen_len|steps|perplexity|.*accuracy|.*_images)")
        return {name: value for name, value in self.metrics.items() if scores.fullmatch(name)}

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


def assert_same(run: Ran, expected: Ran, last: int = 0) -> None:
    """Every number, within 1e-5; of the log only the ``last`` steps, where the first ones are another run's."""
    for name in ("loss", "grad_norm", "learning_rate", "grad_clipped", "epoch"):
        values = run.column(name)[-last:]
        assert values == pytest.approx(expected.column(name)[-last:], abs=1e-5), name
        assert len(values) == (last or len(values)) > 0
    on_the_way = run.column("eval_loss")
    assert on_the_way == pytest.approx(expected.column("eval_loss")[-len(on_the_way) :] if on_the_way else [], abs=1e-5)
    assert run.figures() == pytest.approx(expected.figures(), abs=1e-5)
    assert run.texts == expected.texts
    assert_same_weights(run, expected, 1e-5)


def assert_same_weights(run: Ran, expected: Ran, tolerance: float) -> None:
    mine, theirs = run.weights(), expected.weights()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=tolerance, msg=name)


@contextmanager
def restored_environment() -> Iterator[None]:
    """What outlives a test must not leave its variables to the next."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """One for all workers of the test run: what one of them has made there, the others read."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return factory.mktemp(name)
    shared = factory.getbasetemp().parent / name
    shared.mkdir(exist_ok=True)
    return shared


def without_dropout(model: Path, folder: Path) -> Path:
    """A copy of a saved model: dropout masks are each rank's own."""
    with made_once(folder) as made:
        if not made:
            shutil.copytree(model, folder)
            config = json.loads((model / "config.json").read_text())
            still = {name: 0.0 for name in config if re.search("dropout|pdrop", name) and config[name]}
            (folder / "config.json").write_text(json.dumps({**config, **still}))
    return folder


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether ``folder`` has been made already; if not, the caller makes it, while other workers wait."""
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield done.exists()
        done.touch()


def at_size(size: int) -> list[str]:
    batch, accumulation = map(str, BATCH[size])
    return ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]


class Plan:
    """Runs of a recipe for `programs/several.py`, each in a folder of its own under ``folder``."""

    def __init__(self, recipe: str, folder: Path) -> None:
        self.recipe, self.folder, self.runs = recipe, folder, []

    def add(self, name: str, flags: Sequence[str], watch: bool = False, fails: bool = False) -> None:
        how = {"watch": watch, "fails": fails}
        self.runs.append({"flags": [*flags, "--output_dir", str(self.folder / name)], **how})

    def run(self, size: int, **options: str) -> dict[str, Ran]:
        with made_once(self.folder) as made:
            if not made:
                self.start(size, **options)
        folders = [Path(run["flags"][-1]) for run in self.runs if not run["fails"]]
        return {folder.name: Ran(folder) for folder in folders}

    def start(self, size: int, **options: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # of a worker whose attempt failed
        self.folder.mkdir()
        path = self.folder / "plan.json"
        path.write_text(json.dumps(self.runs))
        ended = launch(size, PROGRAMS / "several.py", self.recipe, path, **options)
        if ended.code:
            pytest.fail(ended.err[-6000:], pytrace=False)
        (self.folder / "out.txt").write_text(ended.out)


def assert_same_losses(run: Ran, expected: Ran) -> None:
    for name in ("loss", "grad_norm", "learning_rate"):
        assert run.column(name) == pytest.approx(expected.column(name), abs=1e-5), name
    assert_same_weights(run, expected, 1e-4)


def assert_steady(run: Ran, rank: int, steps: int) -> None:
    """A watched run's steps on cards build no graph and wait for nothing, but the first ones.

    The first losses are looked at one by one. DDP changes its buckets once: each shape has two epochs to be seen.
    """
    found = json.loads((run.folder / f"watched-rank{rank}.json").read_text())
    graphs, waits = zip(*found["steps"], strict=True)
    assert len(graphs) == steps
    assert waits[0] < waits[2], "the first losses were not read"
    assert set(waits[2:]) == {waits[2]}, waits
    assert len(set(graphs[5:])) == 1, graphs
    assert ["allreduce", "float32"] in found["collectives"]
    assert {dtype for _, dtype in found["collectives"]} <= {"float32", "int32", "int64"}, "HCCL lacks the others"


def own_lines(out: str) -> list[str]:
    """The lines without the launcher's marks, which all of them have.

    Raises:
        AssertionError: a line is torn: it has no mark, or another one inside.
    """
    for line in out.splitlines():
        assert re.match(r"\[rank \d\] ?", line), line
        assert line.count("[rank ") == 1, line
    return [re.sub(r"^\[rank \d\] ?", "", line) for line in out.splitlines()]


def assert_said_once(out: str, size: int) -> None:
    """The run's own lines come from rank 0 alone."""
    lines = own_lines(out)
    for start in (f"device  .* x {size}", "global batch ", "optimiser steps ", "train$", "eval$", "all results: "):
        found = [line for line in lines if re.match(start, line)]
        assert len(found) == 1, (start, out)
    assert not [line for line in out.splitlines() if not line.startswith("[rank 0]")]
