"""Runs on a real small file system that gets full, or with files that cannot grow: how they stop, go on, and resume."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from core import checkpoint, errors
from core.errors import exit_with_one_line
from core.records import read_csv
from tests.core.ranks import results, start_ranks
from tests.core.test_tracking import events

STEPS = 6
FLAGS = "--use_cpu --disable_tqdm --report_to none --block_size 16 --do_train --do_eval --eval_strategy steps"
FLAGS += f" --max_steps {STEPS} --eval_steps 1 --logging_steps 1 --save_steps 2 --learning_rate 0.01"
FLAGS += " --per_device_train_batch_size 4"
GO_ON = ["--on_save_error", "continue"]


class Disk:
    """A file system of 4 MB, and what fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.filler = folder, folder / "run", folder / "filler"

    def fill(self, spare: int = 0) -> None:
        """Fill it to the last byte, or leave ``spare`` bytes."""
        with open(self.filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(os.path.getsize(self.filler) - spare)

    def make_room(self) -> None:
        self.filler.unlink()

    def limit(self) -> None:
        """No file may get as large as those of a checkpoint."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def unlimit(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    made = Disk(place)
    try:
        yield made
    finally:
        made.unlimit()
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a run that failed may still have a file open


class Recipe:
    """The recipe as a program, with something that happens before an evaluation: that of a step, or the last one."""

    def __init__(self, module: ModuleType, flags: list[str], patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.module, self.flags, self.patch, self.capsys = module, flags, patch, capsys

    def __call__(self, folder: Path, *flags: str, events: dict[int, Callable[[], None]] | None = None) -> int:
        """Return the exit code; ``err`` and ``out`` are what it said."""
        evaluate, calls = self.module.evaluate, 0

        def watched(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (events or {}):
                settled(folder)
                events[calls]()
            return evaluate(*args)

        self.capsys.readouterr()
        errors._warned.clear()
        argv, code = [*self.flags, "--output_dir", str(folder), *flags], 0
        with self.patch.context() as patch:
            patch.setattr(self.module, "evaluate", watched)
            try:
                exit_with_one_line(lambda: self.module.main(argv), preemptible=True)
            except SystemExit as stop:
                code = stop.code
        self.out, self.err = self.capsys.readouterr()
        return code


def settled(folder: Path) -> None:
    """Wait until no checkpoint is being written."""
    until = time.monotonic() + 20
    while list(folder.glob(".checkpoint-*")) and time.monotonic() < until:
        time.sleep(0.01)


@pytest.fixture
def recipe(
    language_modeling: ModuleType,
    tiny_gpt2: Path,
    text_files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> Recipe:
    data = [word for name, path in text_files.items() if "test" not in name for word in (name, path)]
    return Recipe(
        language_modeling, ["--model_name_or_path", str(tiny_gpt2), *data, *FLAGS.split()], monkeypatch, capsys
    )


@pytest.fixture(scope="module")
def kept() -> dict[str, bytes]:
    return {}


@pytest.fixture
def weights(recipe: Recipe, kept: dict[str, bytes], tmp_path: Path) -> bytes:
    """The final weights of a run that had room."""
    if not kept:
        assert recipe(tmp_path / "whole") == 0
        kept["weights"] = (tmp_path / "whole" / "model.safetensors").read_bytes()
    return kept["weights"]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints, all complete; there is nothing that is not one."""
    found = checkpoint.all_steps(folder)
    assert [checkpoint.problem(path) for _, path in found] == [None] * len(found)
    assert list(folder.glob(".checkpoint-*")) == []
    return sorted(step for step, _ in found)


def records(folder: Path) -> list[dict[str, str]]:
    """All rows of the log, which is whole for every reader."""
    path = folder / "logs" / "metrics.csv"
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert all(len(row) == len(header) for row in rows)
    assert len(read_csv(path)) == len(rows)
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []
    return read_csv(path)


def warned(caplog: pytest.LogCaptureFixture, pattern: str) -> int:
    return sum(bool(re.search(pattern, message)) for message in caplog.messages)


WAYS = {"full": ("fill", "make_room", "No space left on device"), "limit": ("limit", "unlimit", "File too large")}


@pytest.mark.parametrize("way", ["full", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_checkpoint_that_cannot_be_written_stops_the_run_which_goes_on_later(
    disk: Disk, recipe: Recipe, weights: bytes, way: str
) -> None:
    full, room, reason = WAYS[way]
    code = recipe(disk.run, events={4: lambda: getattr(disk, full)(*([60_000] if way == "full" else []))})
    getattr(disk, room)()
    (line,) = recipe.err.strip().splitlines()
    assert code == 2
    assert re.match(rf"error: .*checkpoint-4.* cannot be written: .*{reason}", line)
    assert checkpoints(disk.run) == [2]
    assert not (disk.run / "model.safetensors").exists()
    assert recipe(disk.run, "--resume_from_checkpoint", "auto") == 0
    assert "checkpoint-2 at step 2" in recipe.out
    assert (disk.run / "model.safetensors").read_bytes() == weights
    assert checkpoints(disk.run) == [2, 4, 6]


@pytest.mark.parametrize("way", ["full", pytest.param("limit", marks=pytest.mark.slow)])
def test_with_continue_a_run_goes_on_and_saves_again_when_there_is_room(
    disk: Disk, recipe: Recipe, weights: bytes, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    full, room, reason = WAYS[way]
    fill = lambda: getattr(disk, full)(*([60_000] if way == "full" else []))  # noqa: E731
    code = recipe(disk.run, *GO_ON, events={4: fill, 6: getattr(disk, room)})
    assert (code, recipe.err) == (0, "")
    assert warned(caplog, rf"checkpoint-4 cannot be written: .*{reason}") == 1
    assert warned(caplog, "cannot be written") == 1
    assert checkpoints(disk.run) == [2, 6]
    assert (disk.run / "model.safetensors").read_bytes() == weights
    assert len(records(disk.run)) == 2 * STEPS


@pytest.mark.slow
def test_a_log_that_cannot_be_written_stops_the_run(disk: Disk, recipe: Recipe, weights: bytes) -> None:
    """The first evaluation has new columns: the file is written anew."""
    assert recipe(disk.run, events={1: disk.fill}) == 2
    (line,) = recipe.err.strip().splitlines()
    assert re.match(r"error: .*logs/metrics\.csv cannot be written: No space left on device; make room or", line)
    assert line.endswith("or give another --logging_dir, or --on_save_error continue")
    disk.make_room()
    assert [row["step"] for row in records(disk.run)] == ["1"]
    assert recipe(disk.run, "--resume_from_checkpoint", "auto") == 0  # from the beginning: nothing was saved
    assert (disk.run / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_with_continue_a_log_loses_what_had_no_room(
    disk: Disk, recipe: Recipe, weights: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert recipe(disk.run, *GO_ON, events={1: disk.fill, 4: disk.make_room}) == 0
    assert warned(caplog, r"metrics\.csv cannot be written: No space .*; the run goes on without it") == 1
    assert checkpoints(disk.run) == [4, 6]
    evaluated = [row["step"] for row in records(disk.run) if row["eval_loss"]]
    assert evaluated == ["4", "5", "6"]
    assert (disk.run / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_results_that_cannot_be_written_cost_no_trained_model(
    disk: Disk, recipe: Recipe, weights: bytes, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full when the last evaluation has its metrics, which are still printed."""
    code = recipe(disk.run, "--on_save_error", policy, events={STEPS + 1: disk.fill})
    reason = r"all_results\.json cannot be written: No space left on device"
    assert code == (2 if policy == "stop" else 0)
    assert bool(re.match(f"error: .*{reason}", recipe.err)) == (policy == "stop")
    assert warned(caplog, reason) == (policy == "continue")
    assert "eval_perplexity" in recipe.out
    assert (disk.run / "model.safetensors").read_bytes() == weights
    assert "train_loss" in json.loads((disk.run / "all_results.json").read_text())
    disk.make_room()
    assert checkpoints(disk.run) == [2, 4, 6]


def test_a_final_model_that_cannot_be_written_is_an_error_after_the_results(
    disk: Disk, recipe: Recipe, weights: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    code = recipe(disk.run, *GO_ON, events={STEPS: disk.fill})
    (line,) = recipe.err.strip().splitlines()
    assert code == 2
    assert re.match("error: .*the model cannot be written: .*No space left on device", line)
    assert "eval_perplexity" in recipe.out
    assert not list(disk.run.glob("*config.json"))  # of a model without weights
    assert warned(caplog, "checkpoint-6 cannot be written") == 1
    disk.make_room()
    assert checkpoints(disk.run) == [2, 4]
    assert recipe(disk.run, "--resume_from_checkpoint", "auto") == 0
    assert (disk.run / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks_stop_and_go_on_alike(tmp_path: Path) -> None:
    """Only rank 0 writes, and only its files cannot grow."""
    ranks = results(start_ranks(2, "lacking_room", str(tmp_path)))
    for one in ranks:
        kind, text = one["checkpoint stop"]["ended"]
        assert (kind, one["checkpoint stop"]["saved"]) == ("UserError", [2])
        assert re.search("checkpoint-4 cannot be written: .*File too large", text)
        kind, text = one["log stop"]["ended"]
        assert (kind, one["log stop"]["logged"]) == ("UserError", [1, 2])
        assert re.search(r"metrics\.csv cannot be written: File too large.*--on_save_error continue", text)
        assert one["checkpoint continue"]["ended"] == one["log continue"]["ended"] == ["", "6"]
        assert one["checkpoint continue"]["saved"] == [6, 2]
        assert one["log continue"]["logged"] == [1, 2, 5, 6]
        assert [found["hidden"] for found in one.values()] == [[]] * 4
    for what in ("checkpoint", "log"):
        assert [len(one[f"{what} continue"]["warned"]) for one in ranks] == [1, 0]


@pytest.mark.slow
def test_a_run_starts_though_the_disk_of_its_logs_is_full(
    disk: Disk, recipe: Recipe, weights: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = ["--logging_dir", str(disk.run / "logs"), "--report_to", "tensorboard"]
    disk.fill()
    assert recipe(tmp_path / "stops", *logs) == 2
    (line,) = recipe.err.strip().splitlines()
    assert re.match("error: .*No space left on device", line)
    assert recipe(tmp_path / "goes on", *logs, *GO_ON, events={3: disk.make_room}) == 0
    assert recipe.err == ""
    assert warned(caplog, "No space left on device.*; the run goes on without it") in (1, 2)  # of one folder, or two
    assert (tmp_path / "goes on" / "model.safetensors").read_bytes() == weights
    assert [row["step"] for row in records(disk.run)] == [str(step) for step in (3, 4, 4, 5, 5, 6, 6)]
    assert events(disk.run / "logs" / "goes on")["eval_loss"] == [3, 4, 5, 6]
