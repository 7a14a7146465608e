"""The engine on the simulated card: where step boundaries fall, what is compiled, what waits, exact resume, graphs."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.arguments import parse_arguments
from core.device import LAZY_VARIABLE, decide_execution_mode
from core.engine import Engine
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.run import Run
from hpu_simulator import runtime
from tests.core.test_engine import Model, loader_of, loss_sum, weights

LAZY = os.environ[LAZY_VARIABLE] == "1"
lazy_only = pytest.mark.skipif(not LAZY, reason="HPU graphs exist in lazy mode only")
eager_only = pytest.mark.skipif(LAZY, reason="torch.compile needs eager mode")
FUSED = GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)


def arguments(folder: Path, *flags: str) -> Namespace:
    given = ["--output_dir", str(folder), "--do_train", "--disable_tqdm", "--report_to", "none"]
    args = parse_arguments([*given, "--save_strategy", "no", *flags], description="")
    args.execution_mode = decide_execution_mode(args)
    return args


def make(
    folder: Path,
    *flags: str,
    dropout: float = 0.0,
    rows: int = 26,
    config: GaudiConfig = FUSED,
    width: int | None = None,
) -> tuple[Engine, nn.Module]:
    args = arguments(folder, *flags)
    run = Run(args, config, "toy")
    model = Model(dropout) if width is None else Wide(width)
    return Engine(run, model, loader_of(args, rows)), model


class Wide(Model):
    """Of another width: its graphs are new to this process."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(32, width), nn.Embedding(8, width)
        self.head = nn.Linear(width, 32)


def train(engine: Engine, stop: int | None = None) -> Iterator[int]:
    """The loop of a recipe; yields after each step."""
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch)
            engine.backward(loss)
        engine.step(window)
        if engine.due("log"):
            engine.log()
        if engine.due("save"):
            engine.save()
        yield engine.step_count
        if engine.step_count == stop:
            return


def trained(folder: Path, *flags: str, stop: int | None = None, **options: Any) -> tuple[Engine, torch.Tensor]:
    engine, model = make(folder, *flags, **options)
    for _ in train(engine, stop):
        pass
    return engine, weights(model).cpu()


def losses(folder: Path) -> list[float]:
    with (folder / "logs" / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


# ----------------------------------------------------------------------------------------------------- step boundaries


class Events(list):
    """What happens in order: forward, backward, optimizer, and mark at each step boundary.

    After the optimizer a mark is one only if the gradients were cleared before it.
    """

    def watch(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        core = engine.device.bridge("core")
        mark = core.mark_step

        def boundary() -> None:
            kept = any(parameter.grad is not None for parameter in engine.model.parameters())
            self.append("mark with gradients" if kept and self[-1:] == ["optimizer"] else "mark")
            mark()

        monkeypatch.setattr(core, "mark_step", boundary)
        engine.model.register_forward_hook(lambda *_: self.append("forward"))
        engine.model.position.weight.register_hook(lambda _: self.append("backward"))
        engine.optimizer.register_step_post_hook(lambda *_: self.append("optimizer"))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("pipelining", [False, True])
def test_boundaries_are_where_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, pipelining: bool
) -> None:
    """After each backward pass and after each optimiser step; with pipelining between forward and backward too."""
    flags = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", str(accumulation)]
    flags += ["--num_train_epochs", "3", "--logging_steps", "1000", *(["--pipelining_fwd_bwd"] if pipelining else [])]
    engine, _ = make(tmp_path / "run", *flags, rows=18)
    events, found = Events(), []
    events.watch(engine, monkeypatch)
    for _ in train(engine):
        found.append(list(events))
        events.clear()
        assert all(parameter.grad is None for parameter in engine.model.parameters())
    mark = ["mark"] if LAZY else []
    micro_batch = ["forward", *(mark if pipelining else []), "backward", *mark]
    expected = [*micro_batch * accumulation, "optimizer", *mark]
    steady = found[len(found) // 3 : -1]  # from the second epoch on; the last step is logged
    assert len(steady) >= 5
    assert steady == [expected] * len(steady)


def test_evaluation_has_a_boundary_after_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path / "run")
    args.do_train = False
    run = Run(args, GaudiConfig(), "toy")
    model = run.place(Model())
    core, marks = run.device.bridge("core"), []
    monkeypatch.setattr(core, "mark_step", lambda: marks.append(torch.is_grad_enabled()))

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        marks.append("batch")
        return loss_sum(model, batch), batch["mask"].sum(1)

    metrics, outputs = run.evaluate(loader_of(args, 13, train=False, batch=4), forward, "eval")
    between = "".join("b" if mark == "batch" else "m" for mark in marks).strip("m")
    assert between.count("b") == 4
    assert all(("m" in part) is LAZY for part in between.split("b")[1:-1])
    host = Model()
    host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    args = arguments(tmp_path / "host", "--use_cpu")
    args.do_train = False
    run = Run(args, GaudiConfig(), "toy")
    model = run.place(host)
    expected, there = run.evaluate(loader_of(args, 13, train=False, batch=13), forward, "eval")
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    assert [int(row) for row in outputs] == [int(row) for row in there]
    assert all(row.device.type == "cpu" for row in outputs)


# ------------------------------------------------------------------------------------------------- graphs and syncs


OPTIMIZERS = {
    "fused": ["--learning_rate", "0.01", "--adam_epsilon", "1e-12"],  # which the card adds at another place
    "sgd": ["--optim", "sgd"],
    "lamb": ["--optim", "lamb"],
    "adafactor": ["--optim", "adafactor", "--optim_args", "scale_parameter=True"],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_is_compiled_after_the_first_epoch_and_nothing_waits(
    tmp_path: Path, optimizer: str, accumulation: int
) -> None:
    """26 rows of three lengths in batches of 4: the last window of each epoch is filled, in the largest length."""
    flags = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", str(accumulation)]
    flags += ["--num_train_epochs", "4", "--logging_steps", "1000", *OPTIMIZERS[optimizer]]
    engine, _ = make(tmp_path / "run", *flags, width=10 + 2 * list(OPTIMIZERS).index(optimizer) + accumulation)
    buckets, an_epoch = len(engine.loader.buckets), engine.loader.windows_per_epoch
    runtime.synchronize()
    start, first = len(runtime.snapshot()["graphs"]), None
    for step in train(engine, stop=3 * an_epoch):
        if step == 1:
            engine.device.synchronize()
            syncs, by_first = runtime.snapshot()["syncs"], runtime.graph_compilations()
        if step == an_epoch:
            first = runtime.graph_compilations()
    engine.device.synchronize()
    assert runtime.graph_compilations() == first > by_first
    assert runtime.snapshot()["syncs"] == syncs
    if LAZY:
        new = runtime.snapshot()["graphs"][start:]
        of_training = [graph for graph in new if "forward" in graph["phase"] or "backward" in graph["phase"]]
        of_updates = [graph for graph in new if graph not in of_training and graph["phase"] != "setup"]
        assert len(of_training) <= buckets * min(accumulation, 2)  # the first micro-batch makes the gradients
        assert len(of_training) >= buckets
        assert len(of_updates) <= 2  # the first step makes the optimiser's state
        assert all(graph["cut_by"] == "mark_step" for graph in of_training + of_updates)


def test_a_step_is_logged_with_one_read(tmp_path: Path) -> None:
    def reads() -> int:
        return sum(sync["count"] for sync in runtime.snapshot()["syncs"])

    engine, _ = make(tmp_path / "run", "--max_steps", "6", "--logging_steps", "1")
    counts = [reads() for _ in train(engine)]
    assert [after - before for before, after in pairwise(counts[1:])] == [1] * 4


def test_memory_in_a_record_is_the_cards(tmp_path: Path) -> None:
    engine, _ = make(tmp_path / "run", "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2")
    ballast = torch.empty(50_000_000, device="hpu")
    for step in train(engine):
        if step == 2:
            del ballast
    peaks, stats = engine.run.memory.peaks(), engine.device.memory_stats()
    assert list(peaks) == ["train", "save"]
    assert 0.2 <= peaks["save"] <= peaks["train"] < 0.21  # the ballast, until after the first save
    record = engine.run.memory.record()
    assert record["memory_allocated (GB)"] == pytest.approx(stats["InUse"] / 1e9, abs=1e-3)
    assert record["memory_allocated (GB)"] < 0.1
    assert record["max_memory_allocated (GB)"] == peaks["train"]
    assert record["total_memory_available (GB)"] == 103.079


# ------------------------------------------------------------------------------------------- equal, repeatable, exact


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_the_cpus_at_any_split_of_a_window(tmp_path: Path, optimizer: str) -> None:
    runs = {}
    for name, split in {"cpu": (8, 1), "whole": (8, 1), "parts": (2, 4), "pipelined": (4, 2)}.items():
        flags = ["--per_device_train_batch_size", str(split[0]), "--gradient_accumulation_steps", str(split[1])]
        flags += {"cpu": ["--use_cpu"], "pipelined": ["--pipelining_fwd_bwd", "--non_blocking_data_copy"]}.get(name, [])
        flags += ["--logging_steps", "1", "--max_steps", "10", *OPTIMIZERS[optimizer]]
        engine, found = trained(tmp_path / name, *flags)
        assert next(engine.model.parameters()).device.type == ("cpu" if name == "cpu" else "hpu")
        runs[name] = (found, losses(tmp_path / name))
    for found, lost in runs.values():
        torch.testing.assert_close(found, runs["cpu"][0], rtol=0, atol=2e-5)
        assert lost == pytest.approx(runs["cpu"][1], abs=1e-5)


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_dropout_follows_the_seed(tmp_path: Path, flags: list[str]) -> None:
    runs = []
    for number, seed in enumerate(("42", "42", "43")):
        given = ["--seed", seed, "--data_seed", "1", "--max_steps", "3", "--logging_steps", "1", *flags]
        torch.rand(number + 1, device="hpu")  # whatever was drawn before
        engine, model = make(tmp_path / str(number), *given, dropout=0.5)
        with torch.no_grad():
            [parameter.fill_(0.1) for parameter in model.parameters()]
            model.head.weight.copy_(torch.arange(256).reshape(32, 8) / 100)
        for _ in train(engine):
            pass
        runs.append((weights(model).cpu(), losses(tmp_path / str(number))))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] != runs[2][1]


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_resume_with_dropout_equals_the_straight_run(tmp_path: Path, optim: str) -> None:
    flags = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "2"]
    flags += ["--learning_rate", "0.01", "--save_strategy", "steps", "--save_steps", "1", "--optim", optim]
    flags += ["--logging_steps", "3", "--bf16"]
    engine, straight = trained(tmp_path / "straight", *flags, dropout=0.5)
    assert engine.step_count == 8
    for k in (1, 4, 6):
        folder = tmp_path / str(k)
        trained(folder, *flags, dropout=0.5, stop=k)
        engine, again = trained(folder, *flags, "--resume_from_checkpoint", "auto", dropout=0.5)
        assert engine.first_step == k
        assert torch.equal(again, straight)
        assert losses(folder) == losses(tmp_path / "straight")


def test_a_run_that_resumes_on_the_cpu_says_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--logging_steps", "1"]
    trained(tmp_path / "run", *flags, stop=3)
    trained(tmp_path / "straight", *flags)
    resume = ["--resume_from_checkpoint", "auto", "--use_cpu"]
    engine, _ = trained(tmp_path / "run", *flags, *resume, config=GaudiConfig())
    assert (engine.first_step, engine.step_count) == (3, 6)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)
    trained(tmp_path / "cpu", *flags, "--use_cpu", stop=3)
    assert "random state" not in caplog.text
    trained(tmp_path / "cpu", *flags, "--resume_from_checkpoint", "auto")
    assert "no hpu random state" in caplog.text
    assert losses(tmp_path / "cpu") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)


# -------------------------------------------------------------------------------------- recorded graphs, compilation


@lazy_only
@pytest.mark.parametrize("accumulation", [1, 2])
def test_recorded_training_graphs_train_the_same(tmp_path: Path, accumulation: int) -> None:
    flags = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", str(accumulation)]
    flags += ["--num_train_epochs", "4", "--logging_steps", "1", "--learning_rate", "0.01"]
    _, plain = trained(tmp_path / "plain", *flags)
    engine, recorded = trained(tmp_path / "recorded", *flags, "--use_hpu_graphs_for_training")
    torch.testing.assert_close(recorded, plain, rtol=0, atol=1e-6)
    assert losses(tmp_path / "recorded") == pytest.approx(losses(tmp_path / "plain"), abs=1e-6)
    assert all(parameter.grad is not None for parameter in engine.model.parameters())  # a card's graphs write there


@lazy_only
def test_recorded_graphs_do_not_run_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would hold without them."""
    calls = []
    monkeypatch.setattr(Model, "forward", lambda self, batch, run=Model.forward: calls.append(1) or run(self, batch))
    engine, _ = trained(tmp_path / "run", "--num_train_epochs", "4", "--use_hpu_graphs_for_training")
    assert len(calls) == len(engine.run.ledger.met["train"]) < engine.step_count


@lazy_only
def test_an_evaluation_within_training_runs_in_full(tmp_path: Path) -> None:
    """Dropout is off in it, and a graph that was recorded with dropout is not replayed."""
    engine, model = make(tmp_path / "run", "--max_steps", "4", "--use_hpu_graphs", dropout=0.5)
    loader = loader_of(engine.args, 13, train=False, batch=8)

    def evaluation() -> float:
        whole = engine.run.inference_model()
        return engine.run.evaluate(loader, lambda batch: (loss_sum(whole, batch), None), "eval")[0]["eval_loss"]

    for step in train(engine):
        if step == 3:
            assert evaluation() == evaluation()
            assert model.training
    engine.finish_training()
    recorded = [evaluation() for _ in range(2)]
    host = Model()
    host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    host.eval()
    batches = [window.batches[0] for window in loader.windows()]
    targets = sum(window.targets for window in loader.windows())
    expected = float(sum(loss_sum(host, batch) for batch in batches)) / targets
    assert recorded == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.skipif(LAZY, reason="they are refused in eager mode")
@pytest.mark.parametrize("flag", ["--use_hpu_graphs_for_training", "--use_hpu_graphs_for_inference"])
def test_graphs_in_eager_mode_are_refused(tmp_path: Path, flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag} needs --execution_mode lazy"):
        make(tmp_path / "run", flag)


@eager_only
@pytest.mark.parametrize("more", [[], ["--compile_from_sec_iteration"], ["--bf16"]], ids=["", "second", "bf16"])
def test_compiled_training_equals_eager(tmp_path: Path, more: list[str]) -> None:
    flags = ["--num_train_epochs", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
    flags += ["--learning_rate", "0.01", *(word for word in more if word == "--bf16")]
    _, eager = trained(tmp_path / "eager", *flags)
    torch._dynamo.reset()
    before = runtime.graph_compilations()
    engine, compiled = trained(tmp_path / "compiled", *flags, "--execution_mode", "compile", *more[:1])
    assert (engine.device.mode, engine.device.compile_backend) == ("compile", "hpu_backend")
    assert runtime.graph_compilations() > before
    assert engine.model._compiled_call_impl is not None
    torch.testing.assert_close(compiled, eager, rtol=0, atol=2e-3 if "--bf16" in more else 1e-5)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=1e-2 if more else 1e-5)
