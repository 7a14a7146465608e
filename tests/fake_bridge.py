"""A stand-in for Habana's ``habana_frameworks`` package that records what is called: for wiring, not for numbers.

Tensors stay on the CPU. As the real package does, it reads ``PT_HPU_LAZY_MODE`` and the operator lists' files once,
when it is imported, and torch imports it by an entry point. In a process of its own: `write` and `run`; in this one,
undone afterwards: `installed`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]

FILES = {
    "fake_bridge-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fake-bridge\nVersion: 1.0\n",
    "fake_bridge-1.0.dist-info/entry_points.txt": "[torch.backends]\nhpu = habana_frameworks:__autoload\n",
    "habana_frameworks/__init__.py": """
def __autoload():
    import habana_frameworks.torch
""",
    "habana_frameworks/torch/__init__.py": """
import os
from pathlib import Path

LAZY_MODE = os.environ.get("PT_HPU_LAZY_MODE")
NAMES = ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")
OP_LISTS = {name: Path(os.environ[name]).read_text().split() for name in NAMES if name in os.environ}
calls = []  # (name, arguments) of every call, in order


def count(name):
    return sum(called == name for called, _ in calls)


import torch
from habana_frameworks.torch import core, hpu

torch._register_device_module("hpu", hpu)
""",
    "habana_frameworks/torch/core/__init__.py": """
from habana_frameworks.torch import calls


def mark_step():
    calls.append(("mark_step", {}))
""",
    "habana_frameworks/torch/hpu/__init__.py": """
import time

import habana_frameworks.torch as bridge
from habana_frameworks.torch import calls
from habana_frameworks.torch.hpu import metrics, random

cards = 1
memory = {"Limit": 96 * 2**30, "InUse": 3 * 2**20, "MaxInUse": 7 * 2**20, "NumAllocs": 5}


class Event:
    def __init__(self, enable_timing=False):
        self.timed = enable_timing

    def record(self):
        calls.append(("record", {}))
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        assert self.timed and end.timed
        return 1000 * (end.at - self.at)


def is_available():
    return cards > 0


def device_count():
    return cards


def current_device():
    return 0


def synchronize(device=None):
    calls.append(("synchronize", {}))


def memory_stats(device=None):
    return dict(memory)


def reset_peak_memory_stats(device=None):
    memory["MaxInUse"] = memory["InUse"]


def enable_dynamic_shape():
    calls.append(("enable_dynamic_shape", {}))


def disable_dynamic_shape():
    calls.append(("disable_dynamic_shape", {}))


def wrap_in_hpu_graph(module, asynchronous=False, disable_tensor_cache=False, dry_run=False, max_graphs=None):
    assert bridge.LAZY_MODE == "1", "graphs exist in lazy mode only"
    given = {"disable_tensor_cache": disable_tensor_cache, "max_graphs": max_graphs}
    calls.append(("wrap_in_hpu_graph", {"model": module, **given}))
    return module


class ModuleCacher:
    def __call__(self, model, inplace=False, allow_unused_input=False):
        assert bridge.LAZY_MODE == "1", "graphs exist in lazy mode only"
        calls.append(("ModuleCacher", {"model": model, "inplace": inplace}))
        return model
""",
    "habana_frameworks/torch/hpu/metrics.py": """
names = ["graph_compilation"]
compiled = 0


class Metric:
    def stats(self):
        return [("TotalNumber", compiled), ("TotalTime", 1500 * compiled), ("AvgTime", 1500.0)]


def metric_global(name):
    return Metric() if name in names else None
""",
    "habana_frameworks/torch/hpu/random.py": """
import torch

generator = torch.Generator().manual_seed(0)


def manual_seed_all(seed):
    generator.manual_seed(seed)


def get_rng_state(device="hpu"):
    return generator.get_state()


def set_rng_state(state, device="hpu"):
    generator.set_state(state)
""",
    "habana_frameworks/torch/hpex/__init__.py": "",
    "habana_frameworks/torch/hpex/optimizers/__init__.py": """
import torch
from habana_frameworks.torch import calls


class Fused(torch.optim.Optimizer):
    # Moments per parameter, but one step count per group: what a parameter that comes later finds.

    def __init__(self, params, **options):
        params = list(params)
        calls.append((type(self).__name__, options))
        for group in params:
            if isinstance(group, dict) and not list(group["params"]):
                raise IndexError("list index out of range")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
                    self.update(parameter, group, **state)

    def direction(self, gradient, group, exp_avg, exp_avg_sq):
        beta1, beta2 = group["betas"]
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (exp_avg_sq / (1 - beta2 ** group["step"])).sqrt()
        return exp_avg / (1 - beta1 ** group["step"]) / (root + group["eps"])


class FusedAdamW(Fused):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, bias_correction=True
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, parameter, group, exp_avg, exp_avg_sq):
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(self.direction(parameter.grad, group, exp_avg, exp_avg_sq), alpha=group["lr"])


class FusedLamb(Fused):
    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0,
        grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_lamb=False,
    ):
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )

    def zero_grad(self):  # the real one takes no ``set_to_none`` either
        super().zero_grad()

    def step(self, closure=None):
        self.shrink, limit = 1.0, self.defaults["max_grad_norm"]
        if limit is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.shrink = max(1.0, torch.nn.utils.get_total_norm(gradients).item() / limit)
        super().step()

    def update(self, parameter, group, exp_avg, exp_avg_sq):
        update = self.direction(parameter.grad / self.shrink, group, exp_avg, exp_avg_sq)
        if group["weight_decay"]:
            update = update + group["weight_decay"] * parameter
            norms = parameter.norm(), update.norm()
            update = update * (norms[0] / norms[1] if min(norms) > 0 else 1.0)
        parameter.sub_(update, alpha=group["lr"])
""",
    "habana_frameworks/torch/hpex/normalization.py": """
import torch
from habana_frameworks.torch import calls


class FusedClipNorm:
    def __init__(self, parameters, max_norm):
        calls.append(("FusedClipNorm", {"parameters": list(parameters), "max_norm": max_norm}))
        self.max_norm = max_norm

    def clip_norm(self, parameters):
        calls.append(("clip_norm", {}))
        parameters = list(parameters)
        if not any(parameter.grad is not None for parameter in parameters):
            return torch.tensor(0.0)
        return torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
""",
    "habana_frameworks/torch/hpex/kernels.py": """
import torch
from habana_frameworks.torch import calls


class FusedSDPA:
    @staticmethod
    def apply(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode="None",
        recompute_mode=False, valid_sequence_lengths=None, padding_side="None",
    ):
        given = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        calls.append(("FusedSDPA", {**given, "softmax_mode": softmax_mode, "recompute_mode": recompute_mode}))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
""",
    "habana_frameworks/torch/utils/__init__.py": "",
    "habana_frameworks/torch/utils/internal.py": """
import habana_frameworks.torch as bridge


def is_lazy():
    return bridge.LAZY_MODE == "1"
""",
    "habana_frameworks/torch/utils/experimental.py": """
from enum import Enum

found = "synDeviceGaudi2"
synDeviceType = Enum("synDeviceType", ["synDeviceGaudi", "synDeviceGaudi2", "synDeviceGaudi3", "synDeviceGaudi4"])


def _get_device_type():
    return synDeviceType[found]
""",
}


def write(folder: Path) -> Path:
    """Write the package into ``folder``, which is to come on the path of an interpreter; returns it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
    return folder


def run(code: str, *folders: Path, timeout: float = 120, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that finds the core and ``folders``; a variable that is None is unset."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PT_HPU_")}
    path = os.pathsep.join(map(str, [*folders, REPOSITORY]))
    whole = {**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folders[0] if folders else None,
        env={name: value for name, value in whole.items() if value is not None},
    )


@contextmanager
def installed(folder: Path, mode: str = "lazy") -> Iterator[ModuleType]:
    """Import the package into this process, as if it had started in ``mode``; afterwards it was never there."""
    import torch

    variable, before = "PT_HPU_LAZY_MODE", os.environ.get("PT_HPU_LAZY_MODE")
    os.environ[variable] = "1" if mode == "lazy" else "0"
    sys.path.insert(0, str(write(folder)))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("habana_frameworks.torch")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
            del sys.modules[name]
        if sys.modules.pop("torch.hpu", None):
            del torch.hpu
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
