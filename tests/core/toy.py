"""A model of 600 numbers, ragged rows for it, and a training loop as a recipe has one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core import distributed
from core.arguments import parse_arguments
from core.buckets import make_buckets
from core.data import IGNORE_INDEX, BatchLoader
from core.engine import Engine
from core.gaudi_config import GaudiConfig
from core.run import Run
from core.stream import Loader

Lengths = Sequence[tuple[int, int]]
LENGTHS = [(1 + (row * 5) % 8, 1 + (row * 3) % 8) for row in range(26)]


class Model(nn.Module):
    """Predicts each target from the mean of the inputs and the position; dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(32, 8), nn.Embedding(8, 8)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 32)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["mask"].unsqueeze(-1).to(self.head.weight.dtype)
        mean = (self.embedding(batch["inputs"]) * mask).sum(1) / mask.sum(1)
        places = self.position(torch.arange(batch["labels"].shape[1], device=mean.device))
        return self.head(self.dropout(mean.unsqueeze(1) + places))


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


class Rows:
    """Makes batches of rows, which are their numbers."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def __call__(self, rows: list[int], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        inputs = torch.zeros(len(rows), shape[0], dtype=torch.long)
        labels = torch.full((len(rows), shape[1]), IGNORE_INDEX)
        mask = torch.zeros(len(rows), shape[0])
        for at, row in enumerate(rows):
            source, target = self.lengths[row]
            inputs[at, :source] = torch.arange(source) + row % 3
            mask[at, :source] = 1
            labels[at, :target] = torch.arange(target) * 2 + row % 5
        return {"inputs": inputs, "mask": mask, "labels": labels}


collate = Rows(LENGTHS)


def loader_of(
    args: Namespace,
    rows: int = 26,
    train: bool = True,
    batch: int | None = None,
    buckets: int = 3,
    lengths: Lengths = LENGTHS,
    shuffled: bool = True,
) -> BatchLoader:
    lengths = lengths[:rows]
    shapes = make_buckets(lengths, (8, 8), buckets, multiple=2)
    batch = batch or args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps if train else 1
    seed = args.seed if train and shuffled else None
    return BatchLoader(list(range(len(lengths))), Rows(lengths), lengths, shapes, batch, accumulation, seed)


def arguments(folder: Path, *flags: str) -> Namespace:
    given = ["--output_dir", str(folder), "--do_train", "--use_cpu", "--disable_tqdm", "--report_to", "none", *flags]
    args = parse_arguments(given, description="")
    args.execution_mode = "eager"
    return args


def run(
    folder: Path,
    *flags: str,
    dropout: float = 0.0,
    rows: int = 26,
    model: nn.Module | None = None,
    stop: int | None = None,
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor] = loss_sum,
    each: Callable[[Engine], None] = lambda engine: None,
    changed: dict[str, Any] | None = None,
    make_loader: Callable[..., Loader] = loader_of,
    **rows_as: Any,
) -> tuple[Engine, nn.Module, list[tuple[list[int], float, float]]]:
    """Train as a recipe does; returns the engine, the model, and per step (own row ids, learning rate, loss).

    Args:
        stop: after this step, as if killed.
        each: is called after each step.
        changed: arguments to set after parsing.
        make_loader: what makes the training rows.
        rows_as: options of `loader_of`.
    """
    args = arguments(folder, *flags)
    vars(args).update(changed or {})
    whole = Run(args, GaudiConfig(), "toy")
    model = model or Model(dropout)
    engine = Engine(whole, model, make_loader(args, rows, **rows_as))
    steps = []
    for window in engine.windows():
        step_loss = 0.0
        for batch in engine.micro_batches(window):
            with engine.autocast():
                losses = loss(engine.model, batch)
            engine.backward(losses)
            step_loss += losses.item()
        rate = engine.schedule.get_last_lr()[0]
        engine.step(window)
        step_loss = distributed.sum_over_ranks([step_loss])[0]
        steps.append((sorted(window.row_ids), rate, step_loss / max(window.targets, 1)))
        each(engine)
        if engine.due("log"):
            engine.log()
        if engine.due("save"):
            engine.save()
        if engine.step_count == stop:
            break
    return engine, model, steps


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
