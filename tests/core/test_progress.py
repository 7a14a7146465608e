"""What is due after a step, the banner, and checkpoints of other versions."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from core import progress
from core.buckets import make_buckets
from core.data import BatchLoader
from core.engine import Engine
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core.toy import Model, Rows, arguments, loader_of, run, weights


def test_banner_states_batch_steps_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", "--max_steps", "1", "--gradient_accumulation_steps", "2", "--learning_rate", "0.003")
    shown = capsys.readouterr().out
    for text in ("16 rows (8 x 2 x 1)", "1 (2 an epoch)", "learning rate 0.003", "eager", "fp32"):
        assert text in shown


@pytest.mark.parametrize(
    ("flags", "steps", "epochs", "expected"),
    [
        (["--max_steps", "7"], 3, 1, [3, 6, 7]),
        (["--num_train_epochs", "3"], None, 1, [4, 8, 12]),
        (["--num_train_epochs", "5"], None, 2, [8, 16, 20]),
        (["--max_steps", "2"], None, 1, [2]),
    ],
)
def test_images_are_due_by_steps_or_epochs_and_at_the_end(
    tmp_path: Path, flags: list[str], steps: int | None, epochs: int, expected: list[int]
) -> None:
    """Four steps in an epoch."""
    due: dict[str, list[int]] = {}
    for prompt in ("a digit", None):
        found = due.setdefault(prompt, [])
        about = {"validation_prompt": prompt, "validation_steps": steps, "validation_epochs": epochs}
        each = lambda engine, found=found: found.append(engine.step_count) if engine.due("images") else None  # noqa: E731
        given = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--save_strategy", "no"]
        run(tmp_path / str(prompt), *given, *flags, changed=about, each=each)
    assert due == {"a digit": expected, None: []}


@pytest.mark.parametrize(
    ("flags", "eval_at", "save_at"),
    [
        ([], [], [7]),
        (["--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "2"], [3, 6, 7], [2, 4, 6, 7]),
        (["--eval_strategy", "epoch", "--save_strategy", "epoch", "--eval_delay", "1.5"], [7], [4, 7]),
        (["--save_strategy", "no"], [], []),
    ],
)
def test_evaluations_and_checkpoints_are_due(
    tmp_path: Path, flags: list[str], eval_at: list[int], save_at: list[int]
) -> None:
    """Seven steps, four in an epoch."""
    found: dict[str, list[int]] = {"eval": [], "save": []}

    def each(engine: Engine) -> None:
        for what, steps in found.items():
            steps += [engine.step_count] * engine.due(what)

    run(tmp_path, "--max_steps", "7", *flags, each=each)
    assert found == {"eval": eval_at, "save": save_at}


def test_a_checkpoint_without_what_is_newer_is_read(tmp_path: Path) -> None:
    """One of an earlier version says nothing of what was left undone, or left out."""
    run(tmp_path, "--max_steps", "4", "--save_steps", "2")
    state = tmp_path / "checkpoint-2" / "state.json"
    content = json.loads(state.read_text())
    assert (content.pop("left"), content.pop("skipped_steps")) == ([], 0)
    state.write_text(json.dumps(content))
    args = arguments(tmp_path / "again", "--max_steps", "4")
    engine = Engine(Run(args, GaudiConfig(), "toy"), Model(), loader_of(args))
    progress.load(engine, tmp_path / "checkpoint-2")
    assert (engine.step_count, engine.left, engine.losses.skipped) == (2, [], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"order": 3}, {"since_record": None}, {"step_count": None, "training": []}, {"order": None},
        {"training": {"optimizer": "adamw"}}, {"since_record": {"loss": 1.0}},
    ],
    ids=["order", "record", "training", "no order", "schedule", "loss"],
)  # fmt: skip
def test_a_state_of_another_form_is_one_error(tmp_path: Path, change: dict[str, object]) -> None:
    run(tmp_path, "--max_steps", "2", "--save_steps", "2")
    state = tmp_path / "checkpoint-2" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | change))
    args = arguments(tmp_path / "again", "--max_steps", "4")
    engine = Engine(Run(args, GaudiConfig(), "toy"), Model(), loader_of(args))
    with pytest.raises(UserError, match="is not what a run writes"):
        progress.load(engine, tmp_path / "checkpoint-2")


def test_what_was_left_is_done_only_where_todays_flags_ask_for_it(tmp_path: Path) -> None:
    run(tmp_path, "--max_steps", "2", "--save_steps", "2")
    state = tmp_path / "checkpoint-2" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"left": ["eval", "images"]}))
    for strategy, left in (("no", []), ("steps", ["eval"])):
        args = arguments(tmp_path / strategy, "--max_steps", "4", "--eval_strategy", strategy)
        engine = Engine(Run(args, GaudiConfig(), "toy"), Model(), loader_of(args))
        progress.load(engine, tmp_path / "checkpoint-2")
        assert engine.left == left


def test_an_older_checkpoints_order_of_rows_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of before windows held rows of like lengths: what it noted of its order lacks that."""
    lengths = [(1 + (row * 37) % 30, 1 + (row * 3) % 8) for row in range(60)]

    def loader(args: Namespace, old: bool) -> BatchLoader:
        shapes = make_buckets(lengths, (30, 8), 2)
        made = BatchLoader(range(60), Rows(lengths), lengths, shapes, args.per_device_train_batch_size, seed=args.seed)
        if old:
            made.follow({})
        return made

    flags = ["--max_steps", "40", "--save_steps", "10", "--learning_rate", "0.01", "--per_device_train_batch_size", "2"]
    _, straight, steps = run(tmp_path / "old", *flags, make_loader=lambda args, *_: loader(args, True))
    _, _, others = run(tmp_path / "new", *flags, make_loader=lambda args, *_: loader(args, False))
    assert [ids for ids, *_ in others] != [ids for ids, *_ in steps]
    capsys.readouterr()
    for saved, told in (("old", True), ("new", False)):
        again = [*flags, "--resume_from_checkpoint", str(tmp_path / saved / "checkpoint-10")]
        folder = tmp_path / f"{saved} again"
        engine, model, rest = run(folder, *again, make_loader=lambda args, *_: loader(args, False))
        assert rest == (steps if told else others)[10:]
        assert ("of any rows of a bucket" in capsys.readouterr().out) is told
        assert ("grouped" in engine.loader.order()) is not told
        if told:
            assert torch.equal(weights(model), weights(straight))
