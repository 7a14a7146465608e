"""A signal at any moment: one complete checkpoint, exit code 75, and a resume that ends as if it had not come."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import checkpoint
from tests.conftest import REPOSITORY
from tests.signalled import Runs

pytestmark = pytest.mark.processes
FLAGS = """
    --do_train --do_eval --predict_with_generate false --per_device_train_batch_size 4 --per_device_eval_batch_size 4
    --max_source_length 32 --max_target_length 8 --max_steps 6 --logging_steps 1 --learning_rate 1e-2
    --optim adamw_torch --optim_args= --eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2
    --load_best_model_at_end --report_to none --disable_tqdm
"""
# Where a signal comes, and the newest checkpoint that there may be then.
MOMENTS = {
    "loading data": ("summarization/run.py:load_data", 1, {None}),
    "loading the model": ("summarization/run.py:build_model", 1, {None}),
    "first step": ("core/engine.py:backward", 1, {1}),
    "step": ("core/engine.py:backward", 3, {3}),
    "evaluation": ("core/evaluation.py:evaluate", 1, {2}),
    "save": ("core/background.py:_write", 1, {2, 3}),
    "last step": ("core/engine.py:backward", 6, {6}),
    "final evaluation": ("core/evaluation.py:evaluate", 4, {6}),
}
QUICK = [("SIGUSR1", "loading the model"), ("SIGUSR1", "evaluation"), ("SIGTERM", "save")]


UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    started = Runs()
    yield started
    started.close()


@pytest.fixture(scope="module")
def flags(tiny_t5: Path, pair_files: dict[str, str]) -> list[str]:
    return [
        *FLAGS.split(),
        "--model_name_or_path",
        str(tiny_t5),
        *(word for pair in pair_files.items() for word in pair),
    ]


@pytest.fixture(scope="module")
def straight(runs: Runs, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no signal disturbs. It is the first, in which everything is imported."""
    folder = tmp_path_factory.mktemp("straight")
    assert runs.run("summarization", [*flags, "--output_dir", str(folder)], folder / "said") == [0]
    return folder


def records(folder: Path) -> list[tuple[str, ...]]:
    """What ``metrics.csv`` says that does not depend on time."""
    with (folder / "logs" / "metrics.csv").open() as file:
        return [
            tuple(row[name] for name in ("step", "loss", "learning_rate", "grad_norm", "epoch", "eval_loss"))
            for row in csv.DictReader(file)
        ]


def best(said: Path) -> list[str]:
    """What a run says of its best step."""
    return re.findall(r"the weights are those of \S+(/checkpoint-\d+: .+)", said.read_text())


def assert_same(folder: Path, straight: Path, weights: str = "model.safetensors") -> None:
    assert (folder / weights).read_bytes() == (straight / weights).read_bytes()
    assert records(folder) == records(straight)
    assert best(folder / "said again") == best(straight / "said")
    results = [json.loads((of / "all_results.json").read_text()) for of in (folder, straight)]
    for name in ("train_loss", "eval_loss", "train_steps", "epoch"):
        assert results[0][name] == results[1][name], name


def assert_safe(folder: Path, said: str, newest: set[int | None], name: str) -> None:
    """Every checkpoint is complete, nothing half is left, and one line, the last one, tells how long it took."""
    found = dict(checkpoint.all_steps(folder))
    assert max(found, default=None) in newest, said
    assert not list(filter(None, map(checkpoint.problem, found.values())))
    assert not list(folder.glob(".checkpoint-*"))
    (line,) = (line for line in said.splitlines() if "stopped by " in line)
    assert said.endswith(line + "\n")
    assert f"stopped by {name}: " in line
    assert "Traceback" not in said
    match = re.search(r"checkpoint-(\d+) is complete, (\d+\.\d) s after the signal", line)
    if not match:
        assert "training had not begun" in line if newest == {None} else "evaluation" in line


def check(
    runs: Runs, argv: list[str], straight: Path, folder: Path, plan: list[list[Any]], newest: set, **options: Any
) -> None:
    """Stop a run by the signals of a plan, go on, and compare with the straight one."""
    world, recipe = options.get("world", 1), options.get("recipe", "summarization")
    codes = runs.run(recipe, [*argv, "--output_dir", str(folder)], folder / "said", plan, world)
    said = (folder / "said").read_text()
    assert codes == [75] * world, said
    assert_safe(folder, said, newest, options.get("name", plan[0][3]))
    again = [*argv, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
    assert runs.run(recipe, again, folder / "said again", None, world) == [0] * world
    assert_same(folder, straight, options.get("weights", "model.safetensors"))


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        pytest.param(name, moment, marks=[] if (name, moment) in QUICK else pytest.mark.slow)
        for name in ("SIGTERM", "SIGUSR1")
        for moment in MOMENTS
    ],
)
def test_a_signal_at_any_moment(runs, flags, straight, tmp_path, name, moment):
    function, count, newest = MOMENTS[moment]
    check(runs, flags, straight, tmp_path, [[0, function, count, name, "self"]], newest)


def test_a_signal_when_all_results_are_written_changes_nothing(runs, flags, straight, tmp_path):
    argv = [*flags, "--max_steps", "2", "--output_dir", str(tmp_path)]
    plan = [[0, "core/run.py:close", 1, "SIGTERM", "self"]]
    assert runs.run("summarization", argv, tmp_path / "said", plan) == [0]


def test_signals_to_all_processes_of_a_run_with_workers_twice(runs, flags, straight, tmp_path):
    """While a batch is made, and while the checkpoint is written."""
    plan = [[0, "core/engine.py:backward", 3, "SIGUSR1", "run"], [0, "core/background.py:_write", 2, "SIGTERM", "run"]]
    check(runs, [*flags, "--dataloader_num_workers", "2"], straight, tmp_path, plan, {3})


ELSEWHERE = "a signal to another process"  # what rank 0 says of one that it did not get


@pytest.fixture(scope="module")
def on_two(runs: Runs, straight: Path, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The straight run on two ranks."""
    folder = tmp_path_factory.mktemp("on_two")
    argv = [*flags, "--per_device_train_batch_size", "2", "--output_dir", str(folder)]
    assert runs.run("summarization", argv, folder / "said", None, 2) == [0, 0]
    return folder


def test_a_signal_to_one_rank_ends_both(runs, flags, on_two, tmp_path):
    argv = [*flags, "--per_device_train_batch_size", "2"]
    check(
        runs,
        argv,
        on_two,
        tmp_path,
        [[1, "core/engine.py:backward", 3, "SIGUSR1", "self"]],
        {3},
        world=2,
        name=ELSEWHERE,
    )


@pytest.mark.slow
def test_a_signal_to_one_rank_under_deepspeed(runs, flags, straight, tmp_path):
    argv = [*flags, "--per_device_train_batch_size", "2", "--deepspeed", "deepspeed_configs/zero2.json"]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert runs.run("summarization", [*argv, "--output_dir", str(whole)], whole / "said", None, 2) == [0, 0]
    plan, folder = [[1, "core/engine.py:backward", 3, "SIGTERM", "self"]], tmp_path / "cut"
    folder.mkdir()
    check(runs, argv, whole, folder, plan, {3}, world=2, name=ELSEWHERE)


PLANS = {
    "rank 0": [[0, "core/engine.py:backward", 3, "SIGTERM", "self"]],
    "rank 1": [[1, "core/engine.py:backward", 3, "SIGUSR1", "self"]],
    "launcher": [[0, "core/engine.py:backward", 3, "SIGTERM", "launcher"]],
    "launcher, SIGUSR1": [[0, "core/engine.py:backward", 3, "SIGUSR1", "launcher"]],
    "job, twice": [
        [0, "core/engine.py:backward", 3, "SIGTERM", "job"],
        [0, "core/background.py:_write", 2, "SIGTERM", "job"],
    ],
    "launcher, loading": [[0, "summarization/run.py:load_data", 1, "SIGTERM", "launcher"]],
    "rank 1, loading": [[1, "summarization/run.py:load_data", 1, "SIGTERM", "self"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("whom", PLANS)
def test_a_signal_to_a_launchers_job(runs, flags, on_two, tmp_path, whom):
    plan = PLANS[whom]
    argv = [*flags, "--per_device_train_batch_size", "2", "--dataloader_num_workers", "1", "--output_dir", tmp_path]
    command = [sys.executable, *(str(REPOSITORY / name) for name in ("gaudi_spawn.py", "tests/signalled.py"))]
    command[2:2] = ["--world_size", "2"]
    done = subprocess.run([*command, json.dumps(plan), "summarization", *argv], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 75, said
    assert "failed first" not in said
    assert_safe(tmp_path, said, {None} if "loading" in whom else {3}, ELSEWHERE if whom == "rank 1" else plan[0][3])
    again = [*argv[:-1], str(tmp_path), "--resume_from_checkpoint", "auto"]
    assert runs.run("summarization", again, tmp_path / "said again", None, 2) == [0, 0]
    assert_same(tmp_path, on_two)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step", "evaluation", "save"])
def test_averaged_weights_of_a_pipeline_trained_with_workers(runs, tiny_sd, captioned_folders, tmp_path, moment):
    argv = f"""--model_name_or_path {tiny_sd} --do_train --do_eval --resolution 16 --use_ema --ema_decay 0.6
        --max_steps 6 --per_device_train_batch_size 4 --logging_steps 1 --learning_rate 1e-3 --save_strategy steps
        --save_steps 2 --eval_strategy steps --eval_steps 2 --dataloader_num_workers 2 --disable_tqdm --report_to none
        """.split()
    argv += [word for pair in captioned_folders.items() for word in pair]
    whole, folder = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    folder.mkdir()
    assert runs.run("text_to_image", [*argv, "--output_dir", str(whole)], whole / "said") == [0]
    function, count, newest = MOMENTS[moment]
    plan, more = [[0, function, count, "SIGTERM", "run"]], {"recipe": "text_to_image", "weights": UNET}
    check(runs, argv, whole, folder, plan, newest, **more)
