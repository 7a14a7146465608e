"""Five steps of each optimiser on the simulated device, one of them with a bad gradient; prints what became of each.

Compared with two runs: one that never made the step, and one whose gradients were zeros in it.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import Any

import torch
from setting import this_device
from torch import nn

from core.arguments import parse_arguments
from core.gaudi_config import GaudiConfig
from core.lamb import Lamb
from core.strategies import Replicated
from hpu_simulator import runtime

FUSED = GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1}
CASES: dict[str, tuple[list[str], GaudiConfig, Any]] = {
    "FusedAdamW": ([], FUSED, None),
    "FusedLamb": (["--optim", "lamb"], FUSED, None),
    "AdamW": (["--max_grad_norm", "0"], GaudiConfig(), None),
    "Adafactor": (["--optim", "adafactor"], GaudiConfig(), None),
    "SGD": (["--optim", "sgd", "--optim_args", "momentum=0.9"], GaudiConfig(), None),
    # These two are a GPU's.
    "torch's fused AdamW": ([], GaudiConfig(), lambda parameters: torch.optim.AdamW(parameters, fused=True, **ADAM)),
    "Lamb": ([], GaudiConfig(), lambda parameters: Lamb(parameters, **ADAM)),
}
device = this_device()


def flags(*given: str) -> Namespace:
    base = ["--do_train", "--learning_rate", "0.01", "--weight_decay", "0.1", "--max_grad_norm", "1"]
    return parse_arguments([*base, *given], description="")


def syncs_so_far() -> int:
    return sum(sync["count"] for sync in runtime.snapshot()["syncs"])


def go(case: str, policy: str, bad: int, value: float | str, graphs: bool = False) -> dict[str, Any]:
    """Train with drawn gradients, but at the ``bad`` step: one is ``value``, or all are zeros, or there is no step."""
    given, config, build = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(device.torch_device)
    more = ["--use_hpu_graphs_for_training"] * graphs
    strategy = Replicated(model, flags(*given, "--on_nonfinite", policy, *more), config, device)
    if build:
        strategy.optimizer = build(model.parameters())
    syncs, norms, places = [], [], set()
    for step in range(1, 6):
        draw = torch.Generator().manual_seed(step)
        drawn = [torch.randn(p.shape, generator=draw) for p in model.parameters()]
        if step == bad and value == "none":
            continue
        if step == bad and value == "zeros":
            drawn = [torch.zeros_like(one) for one in drawn]
        elif step == bad:
            drawn[1][2] = value
        for parameter, gradient in zip(model.parameters(), drawn, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.to(device.torch_device)
            else:
                parameter.grad.add_(gradient.to(device.torch_device))
        device.step_boundary()
        places.add(next(model.parameters()).grad.data_ptr())
        before = syncs_so_far()
        norm = strategy.step()
        device.step_boundary()
        syncs.append(syncs_so_far() - before)
        norms.append(norm.cpu())
    state = {name: tensor.cpu() for name, tensor in strategy.named_state()}
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    left = None if next(model.parameters()).grad is None else float(next(model.parameters()).grad.abs().sum())
    return {"state": state, "weights": weights, "norms": norms, "syncs": syncs, "places": len(places), "left": left}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one[what], other[what]) for what in ("weights", "state")]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def weights_of(one: dict[str, Any]) -> list[torch.Tensor]:
    return list(one["weights"].values())


def finite(one: dict[str, Any]) -> bool:
    return all(bool(weight.isfinite().all()) for weight in weights_of(one))


def decayed(dtype: torch.dtype) -> float:
    """A weight of 1 after a hundred steps of Habana's AdamW at rate 1e-4 and decay 0.1, by gradients of zero."""
    model = nn.Linear(1, 1, bias=False).to(device.torch_device, dtype)
    nn.init.ones_(model.weight)
    strategy = Replicated(model, flags("--learning_rate", "1e-4"), FUSED, device)
    for _ in range(100):
        model.weight.grad = torch.zeros_like(model.weight)
        strategy.step()
        device.step_boundary()
    return float(model.weight)


found: dict[str, Any] = {"decayed": [decayed(dtype) for dtype in (torch.bfloat16, torch.float32)]}
for case in CASES:
    usual = go(case, "stop", 0, 1.0)
    for bad, value in ((1, math.nan), (2, math.inf)):
        one, stopped = go(case, "skip", bad, value), go(case, "stop", bad, value)
        found[f"{case} {value}"] = {
            "finite": [math.isfinite(norm) for norm in one["norms"]] == [step != bad for step in range(1, 6)],
            "like": [what for what in ("none", "zeros") if same(one, go(case, "skip", bad, what))],
            "syncs": [one["syncs"] == usual["syncs"], sum(usual["syncs"])],
            "weights": [finite(one), finite(stopped)],
        }
    difference = [abs(a - b).max() for a, b in zip(*map(weights_of, (usual, go(case, "skip", 0, 1.0))), strict=True)]
    found[f"{case} close"] = float(max(difference))
kept = go("FusedAdamW", "skip", 2, math.nan, graphs=True)
found["kept"] = [kept["places"], kept["left"], same(kept, go("FusedAdamW", "skip", 2, math.nan))]
print(json.dumps(found))
