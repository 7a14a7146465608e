"""Trains adapters on a real small model: ``adapted.py FOLDER BASE STRATEGY...``; each rank prints what it found."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core import adapters, distributed, progress
from core.engine import Engine
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy, trials

LENGTHS = [(1 + row % 8, 1 + row % 8) for row in range(16)]


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["inputs"], attention_mask=batch["mask"]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def train(flags: list[str], folder: Path, base: Path) -> dict[str, Any]:
    """Four steps on ``base`` with adapters, a checkpoint after the second and the last, and the model at the end.

    Returns:
        Losses by step, how many numbers are trained, and the names of what is gathered at each save.
    """
    from transformers import AutoModelForCausalLM

    given = ["--max_steps", "4", "--save_steps", "2", "--learning_rate", "0.05", "--gradient_checkpointing"]
    args = toy.arguments(folder, *given, *trials.window(8, 2), *flags)
    run = Run(args, GaudiConfig(), "adapted")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapters.add_lora(model, 2, 8, 0.0, None, args.seed)
    engine = Engine(run, model, toy.loader_of(args, 16, lengths=LENGTHS, buckets=1))
    losses, gathered, gather = [], [], engine.strategy.weights

    def watched(only: list[str] | None = None) -> dict[str, torch.Tensor] | None:
        weights = gather(only)
        gathered.append(sorted(weights or ()))
        return weights

    engine.strategy.weights = watched
    for window in engine.windows():
        total = 0.0
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch)
            engine.backward(loss)
            total += loss.item()
        engine.step(window)
        losses.append(distributed.sum_over_ranks([total])[0] / window.targets)
        if engine.due("save"):
            engine.save()
    run.save_model(folder / "final")
    engine.strategy.close()
    return {"losses": losses, "trained": progress.describe(engine)["parameters"], "gathered": gathered}


def resumed(flags: list[str], folder: Path, base: Path) -> dict[str, Any]:
    """The same run straight, and again from the checkpoint of its second step."""
    straight = train(flags, folder / "straight", base)
    source = ["--resume_from_checkpoint", str(folder / "straight" / "checkpoint-2"), "--save_strategy", "no"]
    return straight | {"again": train([*flags, *source], folder / "again", base)["losses"]}


if __name__ == "__main__":
    folder, base = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    for name in sys.argv[3:]:
        gc.freeze()  # DeepSpeed collects at each start, and would walk through every library again
        found[name] = resumed(trials.flags_of(name), folder / name, base)
    distributed.stop()
    print(json.dumps(found))
