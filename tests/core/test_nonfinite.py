"""Steps whose loss or gradient is not finite: named, stopped or left out, and nothing is poisoned."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core import nonfinite
from core.data import BatchLoader, Window
from core.device import Device
from core.engine import Engine
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.nonfinite import IN_A_ROW, UNREAD, Losses
from core.run import Run
from tests.core.toy import Model, arguments, loader_of, loss_sum, run, weights


def test_a_loss_that_is_not_a_number_stops_the_run_and_saves_nothing(tmp_path: Path) -> None:
    flags = ["--optim", "sgd", "--learning_rate", "1e30", "--max_grad_norm", "0", "--lr_scheduler_type", "constant"]
    with pytest.raises(UserError, match=r"the (loss|gradients' norm) became (nan|inf) in step \d+ \(") as caught:
        run(tmp_path / "run", *flags, "--max_steps", "6", "--save_steps", "5", "--logging_steps", "100")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    advice = "lower --learning_rate, set --max_grad_norm, or leave such steps out with --on_nonfinite skip"
    assert str(caught.value).endswith(f"; nothing was saved after it; {advice}")


@pytest.mark.parametrize("at", [1, 3])
def test_the_rows_of_a_loss_that_is_not_a_number_are_named(tmp_path: Path, at: int) -> None:
    """What the rate has nothing to do with at the first step; a run without a checkpoint has none to go on from."""
    seen: list[list[int]] = []

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_sum(model, batch) * (float("inf") if len(seen) == at else 1.0)

    def loader(*given: Any, **options: Any) -> BatchLoader:
        made = loader_of(*given, **options)
        windows = made.windows
        made.windows = lambda *at: (seen.append(window.row_ids) or window for window in windows(*at))
        return made

    flags = ["--max_steps", "6", "--logging_steps", "100", "--per_device_train_batch_size", "20"]
    with pytest.raises(UserError, match="the loss became inf in step") as caught:
        run(tmp_path / "run", *flags, "--save_steps", "2", loss=loss, make_loader=loader)
    message, rows = str(caught.value), seen[-1]
    shown = f"{', '.join(map(str, rows[:16]))}, ..."
    assert f"in step {at} (" in message
    assert f"; its rows, from 0: {shown}; all in nonfinite.jsonl); nothing was saved after it; " in message
    saved = json.loads((tmp_path / "run" / "nonfinite.jsonl").read_text())
    assert saved == {"step": at, "epoch": (at - 1) // 2, "what": "the loss became inf", "rows": rows}
    if at == 1:
        assert message.endswith("mend the model or the rows")
    else:
        assert message.endswith("with --on_nonfinite skip; go on with --resume_from_checkpoint auto")


def at_steps(*bad: int, rank_of: int = 0) -> Callable[..., torch.Tensor]:
    """A loss that is no number in these steps of one micro-batch each."""
    calls = 0

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss_sum(model, batch) * (math.nan if calls in bad else 1.0)

    return loss


FLAGS = ["--max_steps", "8", "--save_steps", "4", "--learning_rate", "0.01", "--lr_scheduler_type", "constant"]


def test_a_step_that_is_left_out_leaves_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, records and the mean loss are those of a run in which its rows bear no loss."""
    skip = [*FLAGS, "--on_nonfinite", "skip", "--logging_steps", "3"]
    engine, model, steps = run(tmp_path / "skip", *skip, loss=at_steps(2, 3))
    assert engine.losses.skipped == 2
    assert caplog.text.count(": skipped") == 2

    def without(*given: Any, **options: Any) -> BatchLoader:
        loader = loader_of(*given, **options)
        windows = loader.windows
        left_out = {2, 3}

        def some(epoch: int = 0, start: int = 0) -> Any:
            for number, window in enumerate(windows(epoch, start), start=1):
                yield (
                    Window([], 0, 0, 0, window.row_ids, window.last_in_epoch)
                    if number + 4 * epoch in left_out
                    else window
                )

        loader.windows = some
        return loader

    other, plain, _ = run(tmp_path / "plain", *FLAGS, "--logging_steps", "3", make_loader=without)
    assert torch.equal(weights(model), weights(plain))
    logs = [list(csv.DictReader((tmp_path / name / "logs" / "metrics.csv").open())) for name in ("skip", "plain")]
    assert [row["loss"] for row in logs[0]] == [row["loss"] for row in logs[1]]
    metrics = engine.finish_training()
    assert metrics["train_skipped_steps"] == 2
    assert metrics["train_loss"] == other.finish_training()["train_loss"]
    lines = [json.loads(line) for line in (tmp_path / "skip" / "nonfinite.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rows"]) for line in lines] == [
        (step, rows) for step in (2, 3) for rows in [lines[step - 2]["rows"]]
    ]
    assert [sorted(line["rows"]) for line in lines] == [steps[1][0], steps[2][0]]


def test_a_resumed_run_knows_what_was_left_out(tmp_path: Path) -> None:
    flags = [*FLAGS, "--on_nonfinite", "skip"]
    _, straight, _ = run(tmp_path / "straight", *flags, loss=at_steps(2, 6))
    run(tmp_path / "cut", *flags, loss=at_steps(2), stop=4)
    engine, model, _ = run(tmp_path / "cut", *flags, "--resume_from_checkpoint", "auto", loss=at_steps(2))
    assert engine.losses.skipped == 2
    assert torch.equal(weights(model), weights(straight))


def test_a_run_that_only_leaves_out_is_stopped(tmp_path: Path) -> None:
    flags = ["--max_steps", "40", "--on_nonfinite", "skip", "--per_device_train_batch_size", "2"]
    with pytest.raises(UserError, match=f"in step {IN_A_ROW + 2} .*, as in the {IN_A_ROW - 1} before it"):
        run(tmp_path, *flags, loss=at_steps(*range(3, 40)))


def test_the_best_step_is_none_after_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    """An evaluation is no way past it."""
    flags = ["--max_steps", "3", "--save_strategy", "no"]
    with pytest.raises(UserError, match="in step 2 "):
        run(tmp_path, *flags, loss=at_steps(2), each=lambda engine: engine.evaluate(lambda: {"eval_loss": 1.0}))


class Queue(Device):
    """A CPU that says of itself what a card does: calls return before the work is done."""

    queues_work = True


def test_a_device_that_queues_work_is_read_once_in_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Queue("cpu", "cpu", "eager", torch.device("cpu"))
    args, reads = arguments(tmp_path, "--on_nonfinite", "skip"), 0
    losses = Losses(args, device, tmp_path, "a run", lambda step: "mend it")
    read = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal reads
        reads += tensor.shape == (UNREAD, 2)  # not the texts that ranks exchange
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for name in ("item", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: pytest.fail("the host waited in a step"))
    scale = torch.tensor(0.5)
    for step in range(1, 2 * UNREAD + 2):
        bad = step in (UNREAD, UNREAD + 1)
        losses.add(torch.tensor(math.inf if bad else 2.0), scale)
        losses.step(step, 0, Window([], 4, 4, 3, [step], False), torch.tensor(math.nan if bad else 1.0))
    assert reads == 2
    monkeypatch.undo()
    assert losses.total() == 2.0 * (2 * UNREAD - 1)
    assert losses.targets == 3 * (2 * UNREAD - 1)
    lines = [json.loads(line) for line in (tmp_path / nonfinite.FILE).read_text().splitlines()]
    assert [line["rows"] for line in lines] == [[UNREAD], [UNREAD + 1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_makes_all_its_gradients_so(tmp_path: Path, value: float) -> None:
    """Even where its own gradient is a number, as that of an infinite constant is."""
    device = Device("cpu", "cpu", "eager", torch.device("cpu"))
    losses = Losses(arguments(tmp_path), device, tmp_path, "", lambda step: "")
    weight, scale = torch.ones(3, requires_grad=True), torch.tensor(0.25)
    (loss := weight.sum() + value).backward(losses.add(loss, scale))
    assert not torch.isfinite(weight.grad).any()
    weight.grad = None
    (loss := weight.sum() + 1.0).backward(losses.add(loss, scale))
    assert weight.grad.tolist() == [0.25] * 3


def test_rows_that_cannot_be_saved_are_no_reason_to_hide_the_error(tmp_path: Path) -> None:

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        (tmp_path / nonfinite.FILE).mkdir()
        return loss_sum(model, batch) * math.nan

    with pytest.raises(UserError, match=r"in step 1 \(.*its rows, from 0: [\d, ]+\)"):
        run(tmp_path, "--max_steps", "2", "--per_device_train_batch_size", "4", loss=loss)


def test_a_record_of_skipped_steps_alone_has_no_loss(tmp_path: Path) -> None:
    run(tmp_path, "--max_steps", "3", "--logging_steps", "1", "--on_nonfinite", "skip", loss=at_steps(2))
    rows = list(csv.DictReader((tmp_path / "logs" / "metrics.csv").open()))
    assert [bool(row["loss"]) for row in rows] == [True, False, True]


def test_averages_do_not_take_in_what_was_left_out(tmp_path: Path) -> None:
    args = arguments(tmp_path, "--max_steps", "3", "--on_nonfinite", "skip", "--save_strategy", "no")
    engine, losses = Engine(Run(args, GaudiConfig(), "toy"), Model(), loader_of(args)), at_steps(2)
    moved = []
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(losses(engine.model, batch))
        moved.append(engine.step(window))
    assert moved == [True, False, True]
