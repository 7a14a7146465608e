"""Runs that are killed at any moment, above all while they save, end as one that was not; damaged checkpoints."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from core import checkpoint, errors
from tests.conftest import REPOSITORY

COMMON = "--use_cpu --disable_tqdm --do_train --do_eval --eval_strategy steps --logging_steps 1 --learning_rate 0.01"
FLAGS = {
    "summarization": "--max_steps 8 --save_steps 1 --eval_steps 3 --per_device_train_batch_size 4"
    " --dataloader_num_workers 2 --report_to tensorboard --predict_with_generate --num_beams 1",
    "language_modeling": "--max_steps 10 --save_steps 2 --eval_steps 4 --per_device_train_batch_size 4"
    " --gradient_accumulation_steps 2 --block_size 16 --save_total_limit 2 --report_to none",
    "image_classification": "--max_steps 8 --save_steps 1 --eval_steps 4 --per_device_train_batch_size 4"
    " --dataloader_num_workers 2 --save_total_limit 3 --report_to none",
    "text_to_image": "--max_steps 6 --save_steps 1 --eval_steps 2 --per_device_train_batch_size 4"
    " --use_ema --ema_decay 0.9 --cache_latents --report_to none",
}
MODELS = {
    "summarization": ("tiny_t5", "pair_files"),
    "language_modeling": ("tiny_gpt2", "text_files"),
    "image_classification": ("tiny_vit", "picture_folders"),
    "text_to_image": ("tiny_sd", "captioned_folders"),
}
# Of 13 kills, 9 while a checkpoint or the final model is written.
EACH = ["begin"] * 4 + ["marker"] * 2 + ["rename"] * 2 + ["model"] + ["log"] + ["time"] * 3
OF_TIME = re.compile(r"second|runtime|mfu|wait|memory|^run$")


def flags(request: pytest.FixtureRequest, recipe: str) -> list[str]:
    model, data = map(request.getfixturevalue, MODELS[recipe])
    named = [word for name, path in data.items() if "test" not in name for word in (name, path)]
    return ["--model_name_or_path", str(model), *named, *COMMON.split(), *FLAGS[recipe].split()]


def killed(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `tests.forks` found, in a process without other threads: see there."""
    plan, found = folder / "plan.json", folder / "found.json"
    plan.write_text(json.dumps(cases))
    # Without these, numpy and pyarrow start threads, which a fork would not have.
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    command = [sys.executable, "-m", "tests.forks", str(plan), str(found)]
    ended = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **quiet}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(found.read_text())


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of tensors that a run ends with, and those of its newest checkpoint, by their names."""
    newest = checkpoint.all_steps(folder)[0][1]
    files = [path for path in folder.rglob("*.safetensors") if "checkpoint" not in path.relative_to(folder).parts[0]]
    return {str(path.relative_to(folder)): path.read_bytes() for path in [*files, *newest.rglob("*.safetensors")]}


def numbers(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Results and log records, without what depends on time."""
    results = json.loads((folder / "all_results.json").read_text())
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        [{key: value for key, value in row.items() if not OF_TIME.search(key)} for row in some]
        for some in ([results], rows)
    )


def check(found: dict[str, Any], folder: Path) -> None:
    assert found["wrong"] == []
    assert found["alive"] == [], "a worker outlives the run that was killed"
    assert found["missing"] == [], "kills that came too late"
    whole = folder / "whole"
    expected, results = tensors(whole), numbers(whole)
    assert expected
    for at in range(found["folders"]):
        one = folder / f"killed-{at}"
        assert tensors(one).keys() == expected.keys()
        assert [name for name, content in tensors(one).items() if content != expected[name]] == [], one.name
        assert numbers(one) == results
        hidden = {path.name for place in (one, one / "logs") for path in place.glob(".*")}
        assert hidden <= {".lock"}, "rests of what was being written"


@pytest.mark.processes
def test_a_run_that_is_killed_goes_on_bit_for_bit(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    recipe, kinds = "language_modeling", ["begin", "begin", "marker", "rename", "model", "time"]
    plan = {"recipe": recipe, "argv": flags(request, recipe), "folder": str(tmp_path / "runs"), "seed": 1}
    (found,) = killed([plan | {"kinds": kinds, "at_once": 6, "furthest": 1}], tmp_path)
    check(found, tmp_path / "runs")
    assert sorted(found["kills"]) == sorted(kinds)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("recipe", FLAGS)
def test_runs_that_are_killed_at_random_go_on_bit_for_bit(
    request: pytest.FixtureRequest, recipe: str, tmp_path: Path
) -> None:
    """13 kills of each recipe, 52 in all."""
    plan = {"recipe": recipe, "argv": flags(request, recipe), "folder": str(tmp_path / "runs"), "seed": len(recipe)}
    (found,) = killed([plan | {"kinds": EACH, "at_once": 4, "furthest": 3}], tmp_path)
    print(f"{recipe}: {found['folders']} runs, killed at {' '.join(found['kills'])}")
    check(found, tmp_path / "runs")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def saved(request: pytest.FixtureRequest, language_modeling: ModuleType, tmp_path: Path) -> tuple[list[str], Path]:
    """The flags of a run, and its folder with two checkpoints."""
    argv = [*flags(request, "language_modeling"), "--max_steps", "4", "--output_dir", str(tmp_path / "run")]
    language_modeling.main(argv)
    return argv, tmp_path / "run"


def test_a_checkpoint_with_a_damaged_file_is_left_out(
    saved: tuple[list[str], Path],
    language_modeling: ModuleType,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file of the newest checkpoint, cut, altered in one bit, or removed; the last through the recipe."""
    (argv, folder), before = saved, tensors(saved[1])
    newest, previous = (path for _, path in checkpoint.all_steps(folder))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) >= 6
    damages: tuple[Callable[[Path], None], ...] = (truncate, flip, Path.unlink)
    for path in files:
        content = path.read_bytes()
        for damage in damages:
            monkeypatch.setattr(errors, "_warned", set())
            caplog.clear()
            damage(path)
            assert checkpoint.find("auto", folder) == previous, f"{path.name}: {damage}"
            (warning,) = caplog.messages
            name = (
                path.name if damage is not flip or path.name != checkpoint.MARKER else str(newest)
            )  # that lists files
            assert re.search(rf"^checkpoint skipped: .*{re.escape(name)}", warning)
            path.write_bytes(content)
    assert checkpoint.find("auto", folder) == newest
    flip(newest / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        language_modeling.main([*argv, "--resume_from_checkpoint", "auto"])
    assert any("model.safetensors was truncated or altered" in message for message in caplog.messages)
    assert tensors(folder) == before
    assert checkpoint.problem(newest) is None
