"""What a step through the engine costs beside a bare PyTorch loop over the same batches, with the same options.

Both train a decoder of the same first weights in one process, and in turn: an epoch through the engine, the same epoch
in the bare loop, the next one the other way round. The bare loop is what one writes without this project: a DataLoader,
autocast, a mean loss, backward, clipping, fused AdamW, the schedule, gradients to None. It does not look for losses
that are not finite, counts nothing, and cannot go on from a checkpoint.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.contests import OURS, Contest, Measured, Row, Settings
from benchmarks.ours import common_flags
from core.arguments import parse_arguments
from core.data import Batch, BatchLoader, pad_rows
from core.engine import Engine
from core.gaudi_config import GaudiConfig
from core.losses import IGNORED, cross_entropy_sum
from core.run import Run
from core.throughput import flop_counter

PAIRS = 8  # of turns in a round: short turns, so that what disturbs one disturbs the other
SIZES = {  # of the model, a batch, and a turn; a step of the first takes about 10 ms on a CPU's core, of the second 100
    "short": {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 512, "rows": 4, "length": 32, "steps": 64},
    "long": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "rows": 4, "length": 128, "steps": 6},
}


class Batches(Dataset):
    """The batches of an epoch, made when asked for: ``plan`` has each one's rows, and the length to pad them to."""

    def __init__(self, rows: Sequence[np.ndarray], plan: list[tuple[list[int], int]]) -> None:
        self.rows, self.plan = rows, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Batch:
        chosen, length = self.plan[number]
        return collate([self.rows[row] for row in chosen], (length,))


def collate(rows: Sequence[np.ndarray], shape: tuple[int, ...]) -> Batch:
    """Token numbers and those that follow them: (rows, length)."""
    labels = pad_rows([row[1:] for row in rows], shape[0], IGNORED)
    return {"input_ids": pad_rows(rows, shape[0], 0), "labels": labels}


def build(size: dict[str, Any]) -> nn.Module:
    """A decoder; its dropout is the usual one, 0.1, if ``size`` has none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {name: size[name] for name in ("n_embd", "n_layer", "n_head", "vocab_size")}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), size.get("dropout", 0.1))
    sizes |= {"n_positions": size["length"], "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the cross-entropies of a batch's targets."""
    return cross_entropy_sum(model(batch["input_ids"]).logits, batch["labels"])


def parse(settings: Settings, steps: int, size: dict[str, Any]) -> Namespace:
    """What a user asks for: bf16, and all else as it is by default."""
    flags = [*common_flags(settings, settings.folder / "run"), "--do_train", "--bf16", "--max_steps", str(steps)]
    args = parse_arguments([*flags, "--per_device_train_batch_size", str(size["rows"])], description="")
    args.execution_mode = "eager"
    return args


def through_the_engine(engine: Engine) -> Iterator[float]:
    """Train as a recipe does; yield the seconds of each epoch."""
    began = time.perf_counter()
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch)
            engine.backward(loss)
        engine.step(window)
        if engine.due("log"):
            engine.log()
        if engine.due("eval") or engine.due("save"):
            raise RuntimeError("nothing else is to be measured")
        if window.last_in_epoch:
            engine.device.synchronize()
            yield time.perf_counter() - began
            began = time.perf_counter()


class Bare:
    """The loop that one writes with PyTorch alone."""

    def __init__(self, model: nn.Module, args: Namespace, device: Any) -> None:
        from transformers import get_scheduler

        self.device, self.max_norm = device, args.max_grad_norm
        self.model = model.to(device.torch_device).train()
        options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "fused": True}
        rate, decay = args.learning_rate, args.weight_decay
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, **options)
        self.schedule = get_scheduler("linear", self.optimizer, 0, args.max_steps)

    def epoch(self, batches: Dataset) -> float:
        """Train an epoch; return its seconds."""
        began, kind = time.perf_counter(), self.device.torch_device.type
        total = torch.zeros((), device=self.device.torch_device)
        for batch in DataLoader(batches, batch_size=None):
            targets = int((batch["labels"] != IGNORED).sum())
            batch = {name: value.to(self.device.torch_device) for name, value in batch.items()}
            with torch.autocast(kind, torch.bfloat16):
                loss = loss_sum(self.model, batch) / targets
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        self.device.synchronize()
        return time.perf_counter() - began


def make_rows(size: dict[str, Any], steps: int) -> list[np.ndarray]:
    """Rows of random tokens, from half of the longest on."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(size["length"] // 2, size["length"], size["rows"] * steps, endpoint=True)
    return [draw.integers(0, size["vocab_size"], length) for length in lengths]


def prepare(settings: Settings, size: dict[str, Any], turns: int) -> tuple[Engine, Bare, list[np.ndarray]]:
    """Both sides, of the same weights, and the rows."""
    steps = 4 if settings.small else size["steps"]
    rows, args = make_rows(size, steps), parse(settings, turns * steps, size)
    run = Run(args, GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True), "benchmark")
    lengths = [(len(row),) for row in rows]
    loader = BatchLoader.from_arguments(args, rows, collate, lengths, (size["length"],), train=True)
    engine = Engine(run, build(size), loader)
    return engine, Bare(build(size), args, engine.device), rows


def planned(loader: BatchLoader, epoch: int) -> list[tuple[list[int], int]]:
    """The rows of each batch of an epoch, and the length that they are padded to."""
    return [(window.row_ids, window.batches[0]["input_ids"].shape[1]) for window in loader.windows(epoch)]


def flops_of(model: nn.Module, batches: Batches, device: Any) -> int:
    """FLOPs of an epoch's forward and backward passes: those of a batch follow from its shape."""
    found: dict[tuple[int, ...], int] = {}
    for batch in batches:
        shape = batch["input_ids"].shape
        if shape not in found:
            with torch.no_grad(), flop_counter() as counter:
                loss_sum(model, device.move(batch))
            found[shape] = 3 * counter.total
    return sum(found[batch["input_ids"].shape] for batch in batches)


def measure(settings: Settings, name: str) -> Measured:
    """Seconds of a step on both sides, turn by turn; the first turn of each is the warm-up."""
    size, turns = SIZES[name], 1 + settings.rounds * (1 if settings.small else PAIRS)
    engine, bare, rows = prepare(settings, size, turns)
    ours, steps = through_the_engine(engine), engine.loader.windows_per_epoch
    values, flops = {OURS: [], "bare": []}, []
    for turn in range(turns):
        batches = Batches(rows, planned(engine.loader, turn))
        for side in (OURS, "bare") if turn % 2 else ("bare", OURS):
            seconds = next(ours) if side == OURS else bare.epoch(batches)
            if turn:
                values[side].append(seconds / steps)
        if turn:
            flops.append(flops_of(bare.model, batches, engine.device) / (values[OURS][-1] * steps))
    next(ours, None)
    metrics = engine.finish_training()
    facts = {
        "parameters": engine.parameters,
        "batch": size["rows"],
        "mean length": sum(map(len, rows)) / len(rows),
        "batch shapes": [list(shape) for shape in engine.loader.buckets],
        "precision": "bf16" if engine.run.precision.name.startswith("bf16") else "fp32",
        "optimiser of both": f"{type(bare.optimizer).__name__}, fused",
        "threads": torch.get_num_threads(),
        "steps of a turn": steps,
        "samples of a turn, both": len(rows),
        "training loss": metrics["train_loss"],
    }
    engine.run.close()
    return Measured(values, facts, flops)


def contest(name: str, words: str) -> Contest:
    """A contest of that size."""
    row = Row(f"a step of {words}", "bare", "bare PyTorch loop", 1.02, at_most=True)
    return Contest(f"engine_overhead_{name}", "s/step", [row], lambda settings: measure(settings, name))


CONTESTS = [contest("short", "about 10 ms"), contest("long", "about 100 ms")]
