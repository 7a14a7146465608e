"""Four steps, the second with bad gradients on the last rank alone: ``leaving_out.py FOLDER NAME...``.

A name is one of `trials.flags_of`, with ``bf16 sums`` for fast DDP that adds up in bf16. Each rank prints, per name and
kind of gradient, the norms, whether weights, state and rates are those of a run that never made the step, and more.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from core import distributed, optimizers
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy, trials

STEPS, KINDS = 4, {"nan": 2, "inf": 2, "first": 1}


def flags_of(name: str, policy: str, folder: Path) -> list[str]:
    flags = ["--reduction_dtype", "bf16"] if name.endswith(" sums") else []
    if name.startswith("own schedule"):
        bf16 = ["--bf16"] if name.endswith("bf16") else []
        return ["--deepspeed", str(folder / "own_schedule.json"), *bf16, "--on_nonfinite", policy]
    return [*trials.flags_of(name.removesuffix(" bf16 sums")), *flags, "--on_nonfinite", policy]


def spoil(loss: torch.Tensor, logits: torch.Tensor, kind: str) -> torch.Tensor:
    """A loss that is no number; or one that is, with an infinite number in what flows back from it."""
    if kind != "inf":
        return loss * math.nan
    logits.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]).to(gradient.device), math.inf))
    return loss


def go(folder: Path, flags: list[str], kind: str | None, missing: int = 0) -> dict[str, Any]:
    """Train; step ``missing`` is bad if a kind is given, else it is not made. The schedule advances all the same."""
    args = toy.arguments(folder, "--max_grad_norm", "1", "--learning_rate", "0.01", "--weight_decay", "0.1", *flags)
    if "HPU_SIMULATOR" in os.environ:
        args.use_cpu, args.execution_mode = False, "lazy"
    run = Run(args, GaudiConfig(), "toy")
    torch.manual_seed(5)
    strategy = run.train(toy.Model(), STEPS)
    schedule = strategy.schedule or optimizers.create_schedule(strategy.optimizer, args, STEPS)
    norms, rates = [], []
    for step in range(1, STEPS + 1):
        rates.append(strategy.optimizer.param_groups[0]["lr"])
        if step != missing or kind:
            batch = run.device.move(toy.collate([4 * distributed.rank() + row + step for row in range(4)], (8, 8)))
            with strategy.micro_batch(True), run.autocast():
                logits = strategy.model(batch)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
                bad = step == missing and distributed.rank() == distributed.world_size() - 1
                strategy.backward(spoil(loss, logits, kind) if bad else loss, torch.ones_like(loss))
            norms.append(float(strategy.step()))
        if not (strategy.schedule and (step != missing or kind)):
            schedule.step()
    weights, state = strategy.weights(), dict(strategy.named_state())
    if weights is None:
        weights = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    own = torch.cat([p.detach().float().flatten() for p in run.model.parameters()]).cpu().double().sum().item()
    counters = [strategy.model.global_steps, strategy.model.skipped_steps] if args.deepspeed else None
    strategy.close()
    return {"norms": norms, "rates": rates, "weights": weights, "state": state, "own": own, "counters": counters}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


folder, *names = sys.argv[1:]
if any("zero" in name for name in names):
    import deepspeed  # noqa: F401
found: dict[str, Any] = {"warned": []}
for name in names:
    for policy in ("stop", "skip"):
        here, flags = Path(folder) / name.replace(" ", "_") / policy, flags_of(name, policy, Path(folder))
        for kind, missing in KINDS.items():
            other = go(here / f"without_{kind}", flags, None, missing)
            with warnings.catch_warnings(record=True) as warned:
                one = go(here / kind, flags, kind, missing)
            found["warned"] += [str(each.message) for each in warned if "lr_scheduler" in str(each.message)]
            found[f"{name} {policy} {kind}"] = {
                "same": [same(one[what], other[what]) for what in ("weights", "state")],
                "rates": one["rates"] == other["rates"],
                "entries": len(one["state"]),
                "finite": all(
                    bool(one[what][name].isfinite().all()) for what in ("weights", "state") for name in one[what]
                ),
                **{what: one[what] for what in ("norms", "own", "counters")},
            }
distributed.stop()
print(json.dumps(found))
