"""Fast data parallelism beside DistributedDataParallel: a step of two gloo processes on this machine's CPU.

python -m benchmarks.gradient_reduction [--rounds 30] [--width 256] [--batch 2] [--variants NAME ...] [--output FILE]

A model of the shape of an encoder and decoder (many small tensors and a large table, 20 million parameters at the
default width), forward, backward, gradients to None. All variants train in the same processes and in turn (A B C A B C
...), so that what disturbs the machine disturbs all. A row is a variant's median time of a step, the median of its
ratios to the first row's, round by round, with their quartiles, and the CPU time of one process. Target: fast DDP in
fp32 takes at most the time of DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contests import OURS, Contest, Measured, Row, Settings
from benchmarks.turns import run_command
from core.device import Device
from core.gradients import GradientReducer, synchronize_state

RANKS = 2
PEER = "DDP, buckets of 25 MiB"  # torch's default
FAST = "fast DDP, views, overlap"  # what --distribution_strategy fast_ddp is on a CPU
STEPS = 8  # in a round of the contest: their mean is its figure
Step = Callable[[torch.Tensor], None]


class Block(nn.Module):
    """The products of one layer's attention and feed-forward; attention itself is left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) in and out."""
        y = self.norms[0](x)
        for product in self.products:
            y = product(y)
        x = x + y
        return x + self.down(self.up(self.norms[1](x)).relu())


def build(width: int) -> nn.Module:
    """A table of 32,000 rows, as a vocabulary has, and 16 blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32_000, width), *[Block(width) for _ in range(16)])


def cpu_seconds() -> float:
    """CPU time of this process, its communication threads included: less disturbed by what else the machine does."""
    return sum(os.times()[:2])


def with_ddp(model: nn.Module, bucket_cap_mb: float) -> Step:
    """As a recipe wraps it: gradients are views of the buckets. The model has no buffers."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)

    def step(rows: torch.Tensor) -> None:
        wrapped(rows).square().mean().backward()
        model.zero_grad()

    return step


def with_reducer(model: nn.Module, bucket_cap_mb: float, **options: object) -> Step:
    """The same step with a `GradientReducer`."""
    device = Device("cpu", "cpu", "eager", torch.device("cpu"))
    reducer = GradientReducer(model, device, bucket_cap_mb, **options)
    synchronize_state(model)

    def step(rows: torch.Tensor) -> None:
        loss = model(rows).square().mean()
        reducer.arm()
        loss.backward()
        reducer.finish()
        model.zero_grad()

    return step


HALF = {"reduction_dtype": torch.bfloat16}
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {  # the first is what the others are compared to
    PEER: lambda model: with_ddp(model, 25),
    "DDP, 230 MiB": lambda model: with_ddp(model, 230),
    "fast DDP, views": lambda model: with_reducer(model, 25, as_views=True, overlap=False),
    FAST: lambda model: with_reducer(model, 25, as_views=True, overlap=True),
    "fast DDP, in place, overlap": lambda model: with_reducer(model, 25, overlap=True),
    "fast DDP, bf16": lambda model: with_reducer(model, 25, overlap=False, **HALF),
    "fast DDP, bf16, overlap": lambda model: with_reducer(model, 25, overlap=True, **HALF),
}


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    """One of the processes; rank 0 writes the seconds of every round beside ``store``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    steps = {name: VARIANTS[name](build(args.width)) for name in args.variants}  # a model each, of the same weights
    seconds, busy = {name: [] for name in steps}, {name: [] for name in steps}
    generator = torch.Generator().manual_seed(rank)
    for number in range(args.rounds + 2):  # two to warm up: DDP arranges its buckets anew after the first
        rows = torch.randint(32_000, (args.batch, 32), generator=generator)
        first = number % len(steps)
        for name in [*steps][first:] + [*steps][:first]:  # each comes after each: what it finds in the caches differs
            dist.barrier()
            began, used = time.perf_counter(), cpu_seconds()
            steps[name](rows)
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
                busy[name].append(cpu_seconds() - used)
    if rank == 0:
        Path(f"{store}.json").write_text(json.dumps([seconds, busy]), encoding="utf-8")
    dist.destroy_process_group()


def measure_in_rounds(settings: Settings) -> Measured:
    """Seconds of a step with the variant that a recipe takes, and with DDP."""
    figures, width = settings.folder / "figures.json", 16 if settings.small else 256
    words = [sys.executable, "-m", "benchmarks.gradient_reduction", "--rounds", settings.rounds * STEPS]
    run_command([*words, "--width", width, "--variants", PEER, FAST, "--output", figures])
    found = json.loads(figures.read_text(encoding="utf-8"))
    values = {
        side: [statistics.mean(seconds[at : at + STEPS]) for at in range(0, len(seconds), STEPS)]
        for side, seconds in ((OURS, found["seconds"][FAST]), ("ddp", found["seconds"][PEER]))
    }
    facts = {"parameters": found["parameters"], "processes": RANKS, "threads of each": 1, "precision": "fp32"}
    facts |= {"rows of each": found["batch"], "tokens of a row": 32, "our variant": FAST, "steps of a round": STEPS}
    return Measured(values, facts)


ROW = Row("gradient reduction, 2 processes", "ddp", "torch's DDP with its default buckets", 1.0, at_most=True)
CONTESTS = [Contest("gradient_reduction", "s/step", [ROW], measure_in_rounds, devices=("cpu",))]


def main() -> None:
    """Measure, print the table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="rows of 32 tokens in each process")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="these only")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        torch.multiprocessing.spawn(measure, (store, args), nprocs=RANKS)
        seconds, busy = json.loads(Path(f"{store}.json").read_text(encoding="utf-8"))
    first = next(iter(seconds.values()))
    parameters = sum(one.numel() for one in build(args.width).parameters())
    print(f"{RANKS} processes, {parameters / 1e6:.1f} M parameters, {args.rounds} rounds")
    ratios = {name: [a / b for a, b in zip(own, first, strict=True)] for name, own in seconds.items()}
    for name, own in seconds.items():
        quarter, middle, three = statistics.quantiles(ratios[name], n=4, method="inclusive")
        cpu = 1000 * statistics.mean(busy[name])  # its clock is too coarse for a median
        spread = f"{middle:.2f} ({quarter:.2f} to {three:.2f})"
        print(f"{name:28} {1000 * statistics.median(own):7.1f} ms  {spread}  {cpu:7.1f} ms CPU")
    if args.output:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "parameters": parameters, **vars(args)}
        del facts["output"]
        args.output.write_text(
            json.dumps({**facts, "seconds": seconds, "cpu_seconds": busy, "ratios": ratios}, indent=2), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
