"""The training mechanics: one definition of the loss at any split, exact resume, honest evaluation."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core import adapters, checkpoint, preemption
from core.buckets import make_buckets
from core.data import IGNORE_INDEX, BatchLoader
from core.device import Device
from core.engine import Engine
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.preemption import Preempted
from core.results import claim_output_dir
from core.run import Run
from tests import fake_bridge
from tests.conftest import REPOSITORY
from tests.core.toy import LENGTHS, Model, Rows, arguments, collate, loader_of, loss_sum, run, weights


@pytest.mark.parametrize("optimizer", [["--optim", "sgd", "--learning_rate", "1"], ["--learning_rate", "0.01"]])
def test_loss_and_weights_do_not_depend_on_the_split_of_a_window(tmp_path: Path, optimizer: list[str]) -> None:
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        split = ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
        folder = tmp_path / f"{batch}"
        engine, model, steps = run(folder, *split, *optimizer, "--max_steps", "5", "--save_strategy", "no")
        results.append((weights(model), [loss for *_, loss in steps], engine.losses.norm))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], rtol=0, atol=1e-6)
        assert other[1] == pytest.approx(results[0][1], abs=1e-6)
        assert other[2] == pytest.approx(results[0][2], abs=1e-5)


def test_the_step_is_the_gradient_of_the_mean_over_all_real_tokens(tmp_path: Path) -> None:
    """Against torch itself: one SGD step on all rows at once, without padding, filler or accumulation."""
    engine, model, steps = run(
        tmp_path / "run", "--optim", "sgd", "--learning_rate", "1", "--max_grad_norm", "0", "--max_steps", "1",
        "--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2", "--lr_scheduler_type", "constant",
    )  # fmt: skip
    torch.manual_seed(42)
    reference = Model()
    total = sum(loss_sum(reference, collate([row], LENGTHS[row])) for row in steps[0][0])
    (total / sum(LENGTHS[row][1] for row in steps[0][0])).backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()]).norm()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= parameter.grad
    torch.testing.assert_close(weights(model), weights(reference), rtol=0, atol=1e-6)
    assert engine.losses.norm == pytest.approx(float(norm), abs=1e-6)


@pytest.mark.parametrize(("rows", "accumulation", "updates"), [(10, 3, 2), (4, 3, 1), (12, 3, 2), (1, 4, 1)])
def test_an_incomplete_window_is_a_step_of_its_own(tmp_path: Path, rows: int, accumulation: int, updates: int) -> None:
    flags = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", str(accumulation)]
    engine, model, steps = run(tmp_path / "run", *flags, "--num_train_epochs", "1", rows=rows)
    assert engine.step_count == len(steps) == updates
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert sorted(row for ids, *_ in steps for row in ids) == list(range(rows))


def test_schedule_steps_are_optimiser_steps(tmp_path: Path) -> None:
    rates = []
    for accumulation in (1, 3):
        flags = ["--gradient_accumulation_steps", str(accumulation), "--max_steps", "6", "--warmup_steps", "2"]
        engine, _, steps = run(tmp_path / str(accumulation), *flags, "--learning_rate", "1e-3")
        rates.append([rate for _, rate, _ in steps])
        assert engine.schedule.get_last_lr()[0] == pytest.approx(0.0)
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0] == pytest.approx([0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adafactor"])
def test_resume_at_every_step_equals_the_straight_run(tmp_path: Path, optimizer: str) -> None:
    """3 epochs of 4 steps with dropout and accumulation; every k, epoch ends (4, 8) included."""
    flags = [
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "3",
        "--save_steps", "1", "--learning_rate", "0.01", "--optim", optimizer, "--logging_steps", "5",
    ]  # fmt: skip
    _, straight, steps = run(tmp_path / "straight", *flags, dropout=0.5)
    assert len(steps) == 12
    log = (tmp_path / "straight" / "logs" / "metrics.csv").read_text().splitlines()
    for k in range(1, 12):
        folder = tmp_path / str(k)
        _, _, first = run(folder, *flags, dropout=0.5, stop=k)
        torch.manual_seed(999)  # a new process starts with other numbers
        engine, model, rest = run(folder, *flags, "--resume_from_checkpoint", "auto", dropout=0.5)
        assert engine.run.resume_from.name == f"checkpoint-{k}"
        assert [ids for ids, *_ in first + rest] == [ids for ids, *_ in steps]
        assert [rate for _, rate, _ in first + rest] == [rate for _, rate, _ in steps]
        assert torch.equal(weights(model), weights(straight))
        again = (folder / "logs" / "metrics.csv").read_text().splitlines()
        assert [line.split(",")[:4] for line in again] == [line.split(",")[:4] for line in log]


def test_resume_with_other_data_or_batch_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "2", "--save_steps", "1")
    with pytest.raises(UserError, match="window 8, not 4"):
        run(tmp_path / "run", "--per_device_train_batch_size", "4", "--resume_from_checkpoint", "auto")
    flags = ["--per_device_train_batch_size", "4", "--resume_from_checkpoint", "auto", "--ignore_data_skip"]
    engine, *_ = run(tmp_path / "run", *flags, "--max_steps", "4")
    assert engine.step_count == 4


def test_rows_without_targets_give_no_nan_and_no_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(
        tmp_path / "run", "--max_steps", "2", "--per_device_train_batch_size", "2", "--save_strategy", "no"
    )
    whole, model = Run(args, GaudiConfig(), "toy"), Model()

    def empty(rows: list[int], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        batch = collate(rows, shape)
        batch["labels"][:] = IGNORE_INDEX
        return batch

    loader = loader_of(args, 4)
    loader.collate = empty
    engine = Engine(whole, model, loader)
    before = weights(model)
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(loss_sum(model, batch))
        engine.step(window)
    assert torch.equal(weights(model), before)
    assert engine.finish_training()["train_loss"] == 0
    assert "nothing was updated" in caplog.text


def test_no_shape_is_met_after_the_first_epoch(tmp_path: Path) -> None:
    engine, *_ = run(tmp_path / "run", "--num_train_epochs", "1", "--per_device_train_batch_size", "4")
    one = len(engine.run.ledger.met["train"])
    engine, *_ = run(tmp_path / "two", "--num_train_epochs", "4", "--per_device_train_batch_size", "4")
    assert len(engine.run.ledger.met["train"]) == one <= 3


LONG = [(1 + (row * 37) % 120, 1 + (row * 3) % 8) for row in range(60)]


def long_loader(args: Namespace, *given: Any) -> BatchLoader:
    """60 rows of 1 to 120 inputs, four declared shapes."""
    options = {"accumulation": args.gradient_accumulation_steps, "seed": args.seed}
    shapes, rows = make_buckets(LONG, (120, 8), 4), Rows(LONG)

    def known(numbers: list[int], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        batch = rows(numbers, shape)
        return batch | {"inputs": batch["inputs"] % 32}

    return BatchLoader(list(range(60)), known, LONG, shapes, args.per_device_train_batch_size, **options)


def attending(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The toy's loss, with products whose cost grows with the square of the inputs' length."""
    inputs = model.embedding(batch["inputs"]) * batch["mask"].unsqueeze(-1)
    scores = inputs @ inputs.transpose(1, 2)
    return loss_sum(model, batch) + 1e-3 * (scores @ inputs).sum()


SHORT = ["--num_train_epochs", "3", "--per_device_train_batch_size", "4", "--learning_rate", "0.01"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trimmed_batch_trains_as_one_of_a_declared_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, accumulation: int
) -> None:
    flags = [*SHORT, "--gradient_accumulation_steps", str(accumulation), "--save_strategy", "no"]
    short, trimmed, steps = run(tmp_path / "short", *flags, loss=attending, make_loader=long_loader)
    monkeypatch.setattr("core.graphs.takes_any_shape", lambda args, device: False)
    whole, plain, expected = run(tmp_path / "whole", *flags, loss=attending, make_loader=long_loader)
    assert (short.trims, whole.trims) == (True, False)
    assert [ids for ids, *_ in steps] == [ids for ids, *_ in expected]
    assert [loss for *_, loss in steps] == pytest.approx([loss for *_, loss in expected], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(weights(trimmed), weights(plain), rtol=0, atol=1e-6)
    assert len(whole.run.ledger.met["train"]) <= 4 < len(short.run.ledger.met["train"])
    sizes = [dict(shape)["inputs"][1] for shape in short.run.ledger.met["train"]]
    assert sizes[0] == max(sizes) == 120  # memory runs out at once or never
    assert "beyond" not in caplog.text


def test_a_trimmed_shape_is_no_cold_step(tmp_path: Path) -> None:
    engine, *_ = run(tmp_path / "run", *SHORT, "--save_strategy", "no", make_loader=long_loader)
    assert engine.throughput._counted["steps"] == engine.step_count - 1
    assert not engine.flops.known  # a CPU's peak is not known


def test_flops_of_trimmed_shapes_are_those_that_counting_each_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.engine.peak_flops", lambda name, precision: 1e12)
    flags, options = [*SHORT, "--save_strategy", "no"], {"loss": attending, "make_loader": long_loader}
    engine, _, steps = run(tmp_path / "run", *flags, **options)
    cold = engine.step_count - engine.throughput._counted["steps"]
    monkeypatch.setattr("core.graphs.interpolated", lambda shape, known: None)
    counted, _, expected = run(tmp_path / "counted", *flags, **options)
    assert engine.flops.known == counted.flops.known
    assert steps == expected
    assert cold < len(engine.flops.known) == counted.step_count - counted.throughput._counted["steps"]


def test_trimmed_runs_resume_exactly(tmp_path: Path) -> None:
    flags = [*SHORT, "--save_steps", "1"]
    _, straight, steps = run(tmp_path / "straight", *flags, dropout=0.5, make_loader=long_loader)
    for k in (1, 14, 15, 22):
        folder = tmp_path / str(k)
        _, _, first = run(folder, *flags, dropout=0.5, stop=k, make_loader=long_loader)
        again = [*flags, "--resume_from_checkpoint", "auto"]
        _, model, rest = run(folder, *again, dropout=0.5, make_loader=long_loader)
        assert first + rest == steps
        assert torch.equal(weights(model), weights(straight))


def test_clipping_limits_the_step_and_zero_switches_it_off(tmp_path: Path) -> None:
    moved = {}
    for limit in ("0.01", "0"):
        flags = ["--optim", "sgd", "--learning_rate", "1", "--max_steps", "1", "--lr_scheduler_type", "constant"]
        engine, model, _ = run(tmp_path / limit, *flags, "--max_grad_norm", limit)
        torch.manual_seed(42)
        moved[limit] = (float((weights(model) - weights(Model())).norm()), engine.losses.norm)
    assert moved["0.01"][0] == pytest.approx(0.01, rel=1e-3)
    assert moved["0"][0] == pytest.approx(moved["0"][1], rel=1e-4)
    assert moved["0.01"][1] == pytest.approx(moved["0"][1])  # the norm that is logged is the one before clipping


def test_an_output_folder_with_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "1")
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match="holds another run"):
        run(tmp_path / "run", "--max_steps", "1")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    engine, *_ = run(tmp_path / "run", "--max_steps", "2", "--overwrite_output_dir")
    assert engine.step_count == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "file")


def test_resuming_wins_over_replacing(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "4", "--save_steps", "2")
    flags = ["--max_steps", "4", "--save_steps", "2", "--overwrite_output_dir", "--resume_from_checkpoint", "auto"]
    engine, *_ = run(tmp_path / "run", *flags)
    assert engine.first_step == 4
    assert engine.finish_training()["train_steps"] == 4  # the first process has not written what it measured
    results = tmp_path / "run" / "train_results.json"
    results.write_text('{"train_steps": 2}')  # of the run before it was made longer
    assert engine.finish_training()["train_steps"] == 4
    results.write_text('{"train_steps": 4}')
    assert engine.finish_training() == {}  # now it has: that stays
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_nothing_is_removed_before_the_run_can_start(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "1")
    Run(arguments(tmp_path / "run", "--overwrite_output_dir"), GaudiConfig(), "toy")
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    stale = tmp_path / "run" / "generated_predictions.txt"
    stale.write_text("of the run before")
    kept = tmp_path / "run" / "notes.txt"
    kept.write_text("the user's own")
    link = tmp_path / "run" / "checkpoint-9"
    link.symlink_to(tmp_path)
    run(tmp_path / "run", "--max_steps", "2", "--save_steps", "2", "--overwrite_output_dir")
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*")) == ["checkpoint-2"]
    assert tmp_path.is_dir()
    assert kept.exists()
    assert not stale.exists()


def test_an_earlier_checkpoint_starts_a_branch_of_its_own(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "6", "--save_steps", "2")
    flags = ["--max_steps", "4", "--save_steps", "2", "--save_total_limit", "1"]
    run(tmp_path / "run", *flags, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2"))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    assert len(list((tmp_path / "run").glob("abandoned-checkpoint-*"))) == 2


def test_a_resumed_run_takes_the_rate_and_length_of_its_flags(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "4", "--save_steps", "2", "--learning_rate", "0.01")
    flags = ["--max_steps", "8", "--learning_rate", "0.02", "--resume_from_checkpoint", "auto"]
    _, _, steps = run(tmp_path / "run", *flags)
    assert [rate for _, rate, _ in steps] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_auto_without_a_folder_takes_the_newest_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, step in (("a", 3), ("b", None)):
        (tmp_path / "runs" / "toy" / name / (f"checkpoint-{step}" if step else "logs")).mkdir(parents=True)
    args = arguments(tmp_path, "--resume_from_checkpoint", "auto")
    args.output_dir = None
    assert claim_output_dir(args, "toy").name == "a"


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    engine, *_ = run(tmp_path / "run", "--max_steps", "1")
    for value in (float("nan"), 3.0, float("nan"), 2.0):
        engine.evaluate(lambda value=value: {"eval_loss": value})
    assert engine.best["value"] == 2.0


@pytest.mark.parametrize("flags", [["--save_strategy", "epoch"], ["--eval_steps", "3", "--save_steps", "5"]])
def test_the_best_step_must_be_one_that_is_saved(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(UserError, match="--load_best_model_at_end needs"):
        run(tmp_path / "run", "--load_best_model_at_end", "--eval_strategy", "steps", *flags)


@pytest.mark.parametrize("entry", [1, {}, {"metric": 3, "value": 1}, {"metric": "a", "value": 1, "device": 4}])
def test_figures_that_cannot_be_compared_are_refused_at_the_start(tmp_path: Path, entry: object) -> None:
    args = arguments(tmp_path / "run")
    args.run_file["published"] = [entry]
    with pytest.raises(UserError, match="'published' needs objects"):
        Run(args, GaudiConfig(), "toy")


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    flags = ["--max_steps", "4", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    args = arguments(tmp_path / "run", *flags, "--load_best_model_at_end", "--save_total_limit", "2")
    model = Model()
    engine = Engine(Run(args, GaudiConfig(), "toy"), model, loader_of(args))
    after = {}
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(loss_sum(model, batch))
        engine.step(window)
        value = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}[engine.step_count]
        engine.evaluate(lambda value=value: {"eval_loss": value})
        engine.save()
        after[engine.step_count] = weights(model).clone()
    assert sorted(path.name for path in engine.run.output_dir.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    engine.finish_training()
    assert torch.equal(weights(model), after[2])
    args.metric_for_best_model = "bleu"
    with pytest.raises(UserError, match="no metric 'eval_bleu'"):
        engine.evaluate(lambda: {"eval_loss": 1.0})


def test_low_precision_parameters_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", "--max_steps", "1", "--save_strategy", "no", model=Model().to(torch.bfloat16).float())
    assert "not fp32" not in caplog.text
    args = arguments(tmp_path / "low", "--max_steps", "1")
    Engine(Run(args, GaudiConfig(), "toy"), Model().to(torch.bfloat16), loader_of(args))
    assert "not fp32" in caplog.text


def test_a_run_of_one_step_has_no_throughput(tmp_path: Path) -> None:
    engine, *_ = run(tmp_path / "run", "--max_steps", "1", "--throughput_warmup_steps", "3")
    metrics = engine.finish_training()
    assert metrics["train_samples_per_second"] is None
    assert math.isfinite(metrics["train_runtime"])


class Slow(list):
    """Rows of which the first of each batch of four takes 30 ms to read."""

    def __init__(self, rows: int) -> None:
        super().__init__(range(rows))
        self.seconds: list[float] = []  # of each batch

    def __getitem__(self, row: int) -> int:
        if row % 4 == 0:
            began = time.perf_counter()
            time.sleep(0.03)
            self.seconds.append(time.perf_counter() - began)
        return super().__getitem__(row)


def slow_loader(slow: Slow, *given: Any, **options: Any) -> BatchLoader:
    loader = loader_of(*given, batch=4, shuffled=False, buckets=1, **options)
    loader.dataset = slow
    return loader


def test_seconds_of_waiting_for_data_are_measured_and_logged(tmp_path: Path) -> None:
    """Steps of 10 ms and a loader of 30; warm-up, an evaluation of 100 ms and checkpoints are no waiting."""
    slow, evaluated = Slow(24), []

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.01)
        return loss_sum(model, batch)

    def each(engine: Engine) -> None:
        if engine.step_count == 5:
            inner = slow_loader(own := Slow(12), engine.args, 12, train=False)
            metrics, _ = engine.run.evaluate(inner, lambda batch: (loss_sum(engine.run.model, batch), None), "eval")
            evaluated.append((metrics, own.seconds))
            engine.evaluate(lambda: time.sleep(0.1) or metrics)

    flags = ["--max_steps", "12", "--logging_steps", "4", "--save_steps", "6", "--throughput_warmup_steps", "1"]
    engine, *_ = run(
        tmp_path / "run", *flags, rows=24, loss=loss, each=each, make_loader=lambda *given: slow_loader(slow, *given)
    )
    before = list(slow.seconds)
    metrics = engine.finish_training()
    assert slow.seconds == before
    near = {"rel": 0.1, "abs": 0.02}  # a busy machine may take its time between two looks at the clock
    assert metrics["train_data_wait_seconds"] == pytest.approx(sum(before[1:]), **near)
    assert metrics["train_data_wait_seconds"] == float(f"{metrics['train_data_wait_seconds']:.6g}")
    (found, inside), log = evaluated[0], tmp_path / "run" / "logs" / "metrics.csv"
    assert found["eval_data_wait_seconds"] == pytest.approx(sum(inside[1:]), **near)
    logged = [float(row["data_wait_seconds"]) for row in csv.DictReader(log.open()) if row["data_wait_seconds"]]
    assert logged == pytest.approx([sum(before[1:4]), sum(before[4:8]), sum(before[8:])], **near)
    assert sum(logged) == pytest.approx(metrics["train_data_wait_seconds"], abs=1e-4)


def test_workers_that_are_fast_enough_leave_nothing_to_wait_for(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.04)
        return loss_sum(model, batch)

    def loader(*given: Any) -> BatchLoader:
        made = slow_loader(Slow(24), *given)
        made.workers = 2
        return made

    engine, *_ = run(
        tmp_path, "--num_train_epochs", "1", "--throughput_warmup_steps", "1", rows=24, loss=loss, make_loader=loader
    )
    metrics = engine.finish_training()
    assert metrics["train_steps"] == 6
    assert metrics["train_data_wait_seconds"] < 0.25 * 5 * 0.03


@pytest.mark.parametrize("pipelined", [False, True])
def test_step_boundaries_and_fused_kernels_on_a_gaudi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """On a stand-in for the bridge: where the boundaries are, which kernels run; the numbers are the CPU's."""
    flags = ["--max_steps", "3", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    flags += [
        "--learning_rate",
        "0.01",
        "--save_strategy",
        "no",
        "--logging_steps",
        "100",
        "--use_hpu_graphs_for_training",
    ]
    config = GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)
    _, expected, _ = run(tmp_path / "cpu", *flags)  # without dropout: a CPU draws other masks than a card
    with fake_bridge.installed(tmp_path / "bridge", mode="lazy") as bridge:
        device = Device("hpu", "gaudi2", "lazy", torch.device("cpu"), torch.hpu)
        monkeypatch.setattr("core.run.select_device", lambda args, mode: device)
        flags += ["--pipelining_fwd_bwd"] if pipelined else []
        args = arguments(tmp_path / "hpu", *flags)
        args.execution_mode = "lazy"
        whole = Run(args, config, "toy")
        model = Model()
        engine = Engine(whole, model, loader_of(args))
        boundaries = []
        for window in engine.windows():
            before = bridge.count("mark_step")
            for batch in engine.micro_batches(window):
                with engine.autocast():
                    loss = loss_sum(model, batch)
                engine.backward(loss)
            synced = bridge.count("synchronize")
            engine.step(window)
            boundaries.append(bridge.count("mark_step") - before - (bridge.count("synchronize") - synced))
        names = [name for name, _ in bridge.calls]
        waited = engine.finish_training()["train_data_wait_seconds"]
    assert type(engine.optimizer).__name__ == "FusedAdamW"
    assert names.count("ModuleCacher") == names.count("FusedClipNorm") == 1
    assert names.count("clip_norm") == 3
    assert names.count("record") == 2 * 3  # events around each turn of the loader, read at the end
    assert 0 < waited < 1
    assert "disable_dynamic_shape" in names
    assert boundaries[-1] == 2 * (2 if pipelined else 1) + 1
    assert all(parameter.grad is not None for parameter in model.parameters())  # graphs write into the same gradients
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=1e-6)


def test_lamb_on_a_gaudi_steps_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_bridge.installed(tmp_path / "bridge", mode="lazy"):
        device = Device("hpu", "gaudi2", "lazy", torch.device("cpu"), torch.hpu)
        monkeypatch.setattr("core.run.select_device", lambda args, mode: device)
        flags = ["--optim", "lamb", "--max_steps", "4", "--save_steps", "2", "--learning_rate", "0.01"]
        _, straight, _ = run(tmp_path / "straight", *flags)
        run(tmp_path / "two", *flags, stop=2)
        _, resumed, _ = run(tmp_path / "two", *flags, "--resume_from_checkpoint", "auto")
    assert torch.equal(weights(resumed), weights(straight))


def test_profile_is_written_for_the_steps_asked_for(tmp_path: Path) -> None:
    run(tmp_path / "run", "--max_steps", "6", "--profiling_warmup_steps", "1", "--profiling_steps", "2")
    traces = list((tmp_path / "run" / "profile").glob("*.json*"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 1000


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_training_equals_eager(tmp_path: Path, regional: bool) -> None:
    flags = ["--max_steps", "3", "--learning_rate", "0.01", "--save_strategy", "no"]
    _, expected, _ = run(tmp_path / "eager", *flags)
    flags += ["--torch_compile_backend", "aot_eager", "--compile_from_sec_iteration"]
    args = arguments(tmp_path / "compiled", *flags, *(["--use_regional_compilation"] if regional else []))
    args.execution_mode = "compile"
    whole = Run(args, GaudiConfig(), "toy")
    model = Model()
    engine = Engine(whole, model, loader_of(args))
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(loss_sum(model, batch))
        engine.step(window)
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=1e-6)
    assert list(model.state_dict()) == list(expected.state_dict())


def denoised(unet: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss of a UNet of diffusers on the toy's rows, whose numbers become latents."""
    rows = len(batch["inputs"])
    latents = batch["inputs"].float().sum(1).reshape(rows, 1, 1, 1) / 10 + torch.linspace(-1, 1, 256).reshape(
        1, 4, 8, 8
    )
    text, steps = torch.ones(rows, 2, 16), torch.full((rows,), 5)
    return (unet(latents, steps, text).sample - latents).square().mean(dim=(1, 2, 3)).sum()


def unet_of(folder: Path) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_unet_trains_resumes_and_is_written_with_averages(tiny_sd: Path, tmp_path: Path, rank: int) -> None:
    """Whole or through adapters, with recomputed activations; published as its library loads it."""
    flags = ["--learning_rate", "0.01", "--save_steps", "2", "--logging_steps", "1", "--gradient_checkpointing"]
    flags += ["--per_device_train_batch_size", "2", "--max_steps", "4"]
    targets = ["to_k", "to_q", "to_v", "to_out.0"]

    def model() -> torch.nn.Module:
        unet = unet_of(tiny_sd / "unet")
        if rank:
            adapters.add_lora(unet, rank, 8, 0.0, targets, 1)
        return unet

    def losses(folder: Path, *more: str) -> tuple[Engine, torch.nn.Module, list[float]]:
        engine, unet, steps = run(folder, *flags, *more, rows=8, buckets=1, model=model(), loss=denoised)
        return engine, unet, [loss for *_, loss in steps]

    engine, unet, straight = losses(tmp_path / "straight")
    assert unet.is_gradient_checkpointing
    source = ("--resume_from_checkpoint", str(tmp_path / "straight" / "checkpoint-2"))
    assert losses(tmp_path / "again", *source)[2] == straight[2:]
    trained = {name: parameter.detach() for name, parameter in unet.named_parameters() if parameter.requires_grad}
    averages = {name: parameter + 0.5 for name, parameter in trained.items()}
    engine.run.save_model(tmp_path / "own")
    engine.run.save_model(tmp_path / "averaged", override=averages)
    own, averaged = (unet_of(tmp_path / name) for name in ("own", "averaged"))
    batch = {"inputs": torch.ones(1, 3)}
    unet.eval()
    with torch.no_grad():
        torch.testing.assert_close(denoised(own, batch), denoised(unet, batch))
        unchanged = denoised(unet, batch)
        for name, parameter in unet.named_parameters():
            parameter.copy_(averages.get(name, parameter))
        torch.testing.assert_close(denoised(averaged, batch), denoised(unet, batch))
        assert (denoised(averaged, batch) - unchanged).abs() > 1e-3
    if rank:
        file = load_file(tmp_path / "averaged" / "adapter" / adapters.WEIGHTS)
        assert all(torch.equal(tensor, file[adapters.file_name(name)]) for name, tensor in averages.items())


def test_a_model_of_diffusers_that_cannot_recompute_is_refused(tmp_path: Path) -> None:
    from diffusers import T2IAdapter

    with pytest.raises(UserError, match="--gradient_checkpointing: T2IAdapter cannot do it; leave it out"):
        run(tmp_path, "--gradient_checkpointing", model=T2IAdapter(channels=[8], num_res_blocks=1))


def test_averages_of_a_model_without_adapters_are_written_and_it_keeps_its_own(tmp_path: Path) -> None:
    engine, model, _ = run(tmp_path / "run", "--max_steps", "1", "--save_strategy", "no")
    before = weights(model).clone()
    override = {"head.weight": torch.full_like(model.head.weight, 2.0)}
    (tmp_path / "out").mkdir()
    engine.run.save_model(tmp_path / "out", override=override)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["head.weight"], override["head.weight"])
    assert torch.equal(saved["head.bias"], model.head.bias)
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(weights(model), before)


def to_myself(number: int) -> None:
    """Send a signal, and wait until it is noted: another thread may get it."""
    os.kill(os.getpid(), number)
    while not preemption.asked():
        time.sleep(0.001)


def preempted_at(step: int) -> Callable[[Engine], None]:
    def each(engine: Engine) -> None:
        if engine.step_count == step:
            to_myself(signal.SIGTERM)

    return each


def test_a_signal_at_an_epochs_end_leaves_no_epoch_out(tmp_path: Path) -> None:
    """Four steps in an epoch; the run goes on at the beginning of the epoch that it is in."""
    flags = ["--max_steps", "12", "--per_device_train_batch_size", "8"]
    with pytest.raises(Preempted, match="checkpoint-4 is complete"), preemption.listen():
        run(tmp_path, *flags, each=preempted_at(4))
    flags += ["--resume_from_checkpoint", "auto", "--ignore_data_skip"]
    engine, *_ = run(tmp_path, *flags, stop=5)
    assert (engine.epoch, engine.position) == (1, 1)


def test_a_checkpoint_that_fails_is_not_said_to_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "_complete", full)
    flags = ["--max_steps", "4", "--save_strategy", "no", "--on_save_error", "continue"]
    with pytest.raises(Preempted, match="checkpoint-2 could not be written"), preemption.listen():
        run(tmp_path, *flags, each=preempted_at(2))


def test_a_cut_evaluation_is_made_again_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Also its random numbers; and once more, if the run is cut off within it again."""
    flags = ["--max_steps", "6", "--save_steps", "4", "--eval_strategy", "steps", "--eval_steps", "3"]

    def go(name: str, *more: str, cut: int | None = None) -> tuple[list[dict[str, float]], torch.Tensor]:
        args, found = arguments(tmp_path / name, *flags, *more), []
        engine = Engine(Run(args, GaudiConfig(), "toy"), Model(0.5), loader_of(args))

        def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
            if engine.step_count == cut:
                to_myself(signal.SIGUSR1)
            return loss_sum(engine.run.model, batch) * torch.rand(()), None

        def evaluation() -> dict[str, float]:
            metrics, _ = engine.run.evaluate(loader_of(args, train=False, batch=4), forward, "eval")
            found.append({"step": engine.step_count, "loss": metrics["eval_loss"]})
            return metrics

        for window in engine.windows():
            for batch in engine.micro_batches(window):
                engine.backward(loss_sum(engine.model, batch))
            engine.step(window)
            if engine.due("eval"):
                engine.evaluate(evaluation)
            if engine.due("save"):
                engine.save()
        return found, weights(engine.run.model)

    expected, straight = go("straight")
    for more in ([], ["--resume_from_checkpoint", "auto"]):
        with pytest.raises(Preempted, match="checkpoint-3 is complete"), preemption.listen():
            go("cut", *more, cut=3)
        assert json.loads((tmp_path / "cut" / "checkpoint-3" / "state.json").read_text())["left"] == ["eval"]
    found, again = go("cut", "--resume_from_checkpoint", "auto")
    assert found == expected
    assert torch.equal(again, straight)


def test_a_finished_run_leaves_its_folder_to_others(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from core import locks; locks.hold(Path(sys.argv[1]))"

    def other() -> int:
        return subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True
        ).returncode

    engine, *_ = run(tmp_path, "--max_steps", "1")
    assert other() != 0
    engine.run.close()
    assert other() == 0
