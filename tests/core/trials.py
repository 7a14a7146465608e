"""What is tried under every strategy, at one rank and at several; each trial returns what JSON can hold."""

from __future__ import annotations

import csv
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core import checkpoint, distributed, progress
from core.engine import Engine
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy

SGD = ["--optim", "sgd", "--learning_rate", "1", "--max_grad_norm", "0", "--save_strategy", "no"]
ONCE = ["--num_train_epochs", "1"]
# In each window of 8 rows the first 4 are short and the others long: at two ranks, one has all of the long ones.
SHORT_AND_LONG = [(1 + row % 2, 1) if row % 8 < 4 else (8, 8 - row % 3) for row in range(24)]
WITHOUT_TARGETS = [(source, 0 if 8 <= row < 16 else target) for row, (source, target) in enumerate(SHORT_AND_LONG)]
SPLITS = {  # rows of a window, micro-batches of it on each rank, and the rows
    "whole": (8, 1, {"lengths": SHORT_AND_LONG, "rows": 24}),
    "filler": (8, 1, {"lengths": SHORT_AND_LONG, "rows": 20}),  # at two ranks the last window has rows for one only
    "accumulated": (8, 2, {"lengths": SHORT_AND_LONG, "rows": 13}),  # the last window is short on both
    "no_targets": (8, 2, {"lengths": WITHOUT_TARGETS, "rows": 24}),
}


def flags_of(name: str) -> list[str]:
    """``plain``, ``ddp``, ``fast_ddp``, or a shipped DeepSpeed configuration; ``zero2 bf16`` is one in bf16."""
    if "zero" not in name:
        return ["--distribution_strategy", "fast_ddp"] if name == "fast_ddp" else []
    config, _, bf16 = name.partition(" ")
    return ["--deepspeed", config, *(["--bf16"] if bf16 else [])]


def window(rows: int, accumulation: int = 1) -> list[str]:
    """The flags of a window of ``rows`` rows over all ranks."""
    batch = rows // (accumulation * distributed.world_size())
    return ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]


def all_weights(engine: Engine) -> list[float]:
    """Every parameter in fp32, on rank 0; under ZeRO the other ranks have none."""
    gathered = engine.strategy.weights()
    if gathered is None:
        return toy.weights(engine.run.model).tolist()
    names = [name for name, _ in engine.run.model.named_parameters() if gathered]
    return [number for name in names for number in gathered[name].flatten().tolist()]


def split(flags: list[str], folder: Path, name: str) -> dict[str, Any]:
    """Steps of plain gradient descent: losses, norms, rates, and the weights after each."""
    rows, accumulation, rows_as = SPLITS[name]
    norms, after = [], []

    def each(engine: Engine) -> None:
        norms.append(engine.losses.norm)
        after.append(all_weights(engine))

    given = [*SGD, *ONCE, *window(rows, accumulation), *flags]
    engine, _, steps = toy.run(folder, *given, each=each, buckets=1, shuffled=False, **rows_as)
    engine.strategy.close()
    rates, losses = [rate for _, rate, _ in steps], [loss for *_, loss in steps]
    return {"losses": losses, "rates": rates, "norms": norms, "weights": after}


class Slope(nn.Module):
    """Its gradient has norm 10, whatever the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] >= 0).sum() * 10 * self.weight.sum() / math.sqrt(12)


def clip(flags: list[str], folder: Path, limit: float | None) -> dict[str, Any]:
    """One step of rate 1: how far it went, the norm that was logged, and whether it was clipped."""
    flags = [*SGD, *ONCE, *window(8), "--lr_scheduler_type", "constant", "--max_steps", "1", *flags]
    changed = {"max_grad_norm": limit}
    engine, *_ = toy.run(folder, *flags, model=Slope(), loss=lambda model, batch: model(batch), changed=changed)
    moved = torch.tensor(all_weights(engine)).norm().item()
    engine.strategy.close()
    found = {"moved": moved, "norm": engine.losses.norm}
    if distributed.rank() == 0:
        row = next(csv.DictReader((folder / "logs" / "metrics.csv").open()))
        found |= {"logged": float(row["grad_norm"]), "clipped": int(float(row["grad_clipped"]))}
    return found


def rates(flags: list[str], folder: Path, accumulation: int) -> list[float]:
    """The learning rates of six steps of two rows on each rank, the one that follows them last."""
    flags = ["--max_steps", "6", "--warmup_steps", "2", "--save_strategy", "no", *flags]
    given = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", str(accumulation)]
    engine, _, steps = toy.run(folder, *flags, *given)
    engine.strategy.close()
    return [*(rate for _, rate, _ in steps), engine.schedule.get_last_lr()[0]]


def resume(flags: list[str], folder: Path, stops: list[int]) -> dict[str, Any]:
    """Three epochs of four steps with dropout, straight, and again from the checkpoint of each of ``stops``."""
    every = str(stops[0])
    flags = ["--num_train_epochs", "3", "--learning_rate", "0.01", "--save_steps", every, *window(8, 2), *flags]

    def go(name: str, *more: str) -> tuple[list, list[float], list[float]]:
        engine, _, steps = toy.run(folder / name, *flags, *more, dropout=0.1)
        after = all_weights(engine), torch.rand(3).tolist()
        engine.strategy.close()
        return steps, *after

    steps, weights, drawn = go("straight")
    found: dict[str, Any] = {"steps": len(steps), "drawn": drawn, "losses": [loss for *_, loss in steps]}
    for stop in stops:
        source = str(folder / "straight" / f"checkpoint-{stop}")
        again = go(f"from-{stop}", "--resume_from_checkpoint", source, "--save_strategy", "no")
        found[f"from {stop}"] = [again[0] == steps[stop:], again[1] == weights, again[2] == drawn]
    return found


def cross(flags: list[str], folder: Path, source: Path | None = None, saved: int = 3) -> list[float]:
    """The weights after six steps without dropout, or after the last three of them, from a checkpoint of others."""
    flags = ["--max_steps", "6", "--save_steps", str(saved), "--learning_rate", "0.001", *window(8), *flags]
    more = ["--resume_from_checkpoint", str(source / "checkpoint-3")] if source else []
    engine, *_ = toy.run(folder, *flags, *more)
    assert engine.first_step == (3 if source else 0)
    found = all_weights(engine)
    engine.strategy.close()
    return found


def evaluate(flags: list[str], folder: Path, rows: int, train: bool = True) -> dict[str, Any]:
    """Loss and outputs of ``rows`` rows, as while training or by itself."""
    args = toy.arguments(folder, *ONCE, *window(8), *flags)
    args.do_train = train
    whole = Run(args, GaudiConfig(), "toy")
    model = toy.Model()
    engine = Engine(whole, model, toy.loader_of(args)) if train else whole.place(model)
    called = engine.model if train else whole.inference_model()

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return toy.loss_sum(called, batch), batch["mask"].sum(1)

    metrics, outputs = whole.evaluate(toy.loader_of(args, rows, train=False, batch=4), forward, "eval")
    if whole._strategy:
        whole._strategy.close()
    return {"loss": metrics["eval_loss"], "outputs": [int(output) for output in outputs]}


def outcome(work: Callable[[], Any]) -> list[str]:
    """The kind and text of the error that ``work`` raises."""
    try:
        return ["", repr(work())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def unreadable(flags: list[str], folder: Path) -> list[str]:
    """One row cannot be read: by the last rank, in the second window."""

    class Data(list):
        def __getitem__(self, row: int) -> int:
            if row == 15:
                raise ValueError("no such picture")
            return row

    def go() -> None:
        args = toy.arguments(folder, *ONCE, *window(8), *flags)
        loader = toy.loader_of(args, 24, shuffled=False, buckets=1)
        loader.dataset = Data(range(24))
        engine = Engine(Run(args, GaudiConfig(), "toy"), toy.Model(), loader)
        for step in engine.windows():
            for batch in engine.micro_batches(step):
                engine.backward(toy.loss_sum(engine.model, batch))
            engine.step(step)

    return outcome(go)


def nan(flags: list[str], folder: Path) -> list[Any]:
    """The last rank's third loss is no number."""
    calls, steps = 0, 0

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        bad = calls == 3 and distributed.rank() == distributed.world_size() - 1
        return toy.loss_sum(model, batch) * (math.nan if bad else 1.0)

    def each(engine: Engine) -> None:
        nonlocal steps
        steps = engine.step_count

    return [*outcome(lambda: toy.run(folder, *window(8), "--max_steps", "6", *flags, loss=loss, each=each)), steps]


def unsaved(flags: list[str], folder: Path) -> dict[str, Any]:
    """The second checkpoint's optimiser does not fit on the disk of rank 0."""
    # A file's size is limited, since every user may do that: the error is the system's own, in the middle of a file.
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(engine: Engine) -> None:
        if engine.step_count == 2:
            engine.writer.finish()  # the first checkpoint is no matter of this
        if engine.step_count == 2 and distributed.rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, unlimited[1]))

    flags = ["--max_steps", "3", "--save_steps", "1", *window(8), *flags]
    try:
        found = outcome(lambda: toy.run(folder, *flags, each=limit))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    distributed.sum_over_ranks([0.0])
    newest = checkpoint.find("auto", folder)
    return {"error": found, "left": sorted(path.name for path in folder.glob("*checkpoint*")), "newest": newest.name}


def banner(flags: list[str], folder: Path) -> dict[str, Any]:
    args = toy.arguments(folder, "--num_train_epochs", "4", "--per_device_train_batch_size", "4", *flags)
    engine = Engine(Run(args, GaudiConfig(), "toy"), toy.Model(), toy.loader_of(args, 24))
    engine.strategy.close()
    return {name: str(value) for name, value in progress.describe(engine).items()}


def common(flags: list[str], folder: Path) -> dict[str, Any]:
    """What every strategy is asked for, in which nothing fails."""
    found: dict[str, Any] = {name: split(flags, folder / name, name) for name in SPLITS}
    for limit in (1.0, 0.0, None):
        found[f"clip {limit}"] = clip(flags, folder / f"clip-{limit}", limit)
    for accumulation in (1, 3):
        found[f"rates {accumulation}"] = rates(flags, folder / f"rates-{accumulation}", accumulation)
    for rows in (13, 1):
        found[f"eval {rows}"] = evaluate(flags, folder / f"eval-{rows}", rows)
    return found


def own_schedule(config: Path, folder: Path) -> dict[str, Any]:
    """DeepSpeed's own schedule, over a window without targets, and again from the second step's checkpoint."""
    flags = ["--deepspeed", str(config), *ONCE, *window(4), "--warmup_steps", "2", "--learning_rate", "0.01"]

    def go(name: str, *more: str) -> list[float]:
        rows_as = {"lengths": WITHOUT_TARGETS, "rows": 24, "buckets": 1, "shuffled": False}
        engine, _, steps = toy.run(folder / name, *flags, *more, **rows_as)
        engine.strategy.close()
        return [rate for _, rate, _ in steps]

    straight = go("straight", "--save_steps", "4")
    again = go("again", "--resume_from_checkpoint", str(folder / "straight" / "checkpoint-4"), "--save_strategy", "no")
    return {"straight": straight, "again": again}


def pretrained(precision: list[str], folder: Path) -> None:
    """One step of the saved model in ``folder / "model"``, built in shares by ZeRO-3, and its checkpoint."""
    from transformers import T5ForConditionalGeneration

    args = toy.arguments(
        folder / f"zero3{''.join(precision)}", "--deepspeed", "zero3", "--max_steps", "1", *window(4), *precision
    )
    whole = Run(args, GaudiConfig(), "toy")
    model = T5ForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    engine = Engine(whole, model, toy.loader_of(args, 4))
    for step in engine.windows():
        for batch in engine.micro_batches(step):
            given = {"input_ids": batch["inputs"], "attention_mask": batch["mask"], "labels": batch["labels"]}
            engine.backward(engine.model(**given).loss.float() * step.targets / distributed.world_size())
        engine.step(step)
        engine.save()
    engine.strategy.close()
