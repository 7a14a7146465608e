"""Where figures come from: machine, versions, commit, and how fast its matrix products are."""

from __future__ import annotations

import os
import platform
import statistics
import time
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

PEERS = ("timm", "evaluate")  # beside what a run of ours lists
SIDE = 2048  # of the square matrices: large enough for any core's best, 17 GFLOP a product


def describe() -> dict[str, Any]:
    """Date, commit, versions, processor, cores, threads, memory in bytes, and the accelerators by name."""
    import psutil
    import torch

    from core.results import describe_run

    facts = describe_run(Namespace())
    versions = facts["versions"] | {name: metadata.version(name) for name in PEERS if _installed(name)}
    return {
        "date": facts["date"],
        "commit": facts["commit"],
        "versions": {name: version for name, version in versions.items() if version},
        "machine": {
            "platform": facts["machine"],
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": psutil.virtual_memory().total,
            "load_before": os.getloadavg()[0],  # of others: what disturbs the figures
        },
    }


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def processor() -> str:
    """The processor's name, as the system gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def devices() -> dict[str, str]:
    """Where contests can be held: "cpu" and, if torch finds one, "accelerator", each with its name."""
    import torch

    found = {"cpu": processor()}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found["accelerator"] = getattr(torch, kind).get_device_name()
    return found


def matmul_rates(device: str, rounds: int = 7) -> dict[str, float]:
    """FLOP/s of the product of two square matrices, by precision; the median of some rounds, fp32 and bf16 in turn."""
    import torch

    where = torch.device("cpu") if device == "cpu" else torch.accelerator.current_accelerator()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    pairs = {name: torch.randn(2, SIDE, SIDE, device=where).to(kind) for name, kind in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 2):  # two to warm up
        for name, pair in pairs.items():
            began = time.perf_counter()
            for _ in range(4):
                pair[0] @ pair[1]
            if where.type != "cpu":
                torch.accelerator.synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    return {name: 4 * 2 * SIDE**3 / statistics.median(values) for name, values in seconds.items()}
