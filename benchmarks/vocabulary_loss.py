"""`core.losses` beside torch's cross-entropy: peak memory and time of a linear head and its loss.

python -m benchmarks.vocabulary_loss [--rounds 3] [--hidden 256] [--tokens 2048] [--classes 50257] [--output FILE]

Forward and backward, in fp32 and under bf16 autocast, on this machine's CPU. Every measurement has a process of its
own, and the variants come in turn (A B A B ...), so that what disturbs the machine disturbs all. A row is a variant's
peak resident memory over what the process held before the step, in units of one fp32 tensor of the size of the logits,
its median time, and the median of its ratios to torch's in that precision, round by round. The weight's gradient is
in the peak. Target: ours in fp32 peaks below 1.4 units, and takes at most the time of torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional

from core.losses import cross_entropy_sum

REPOSITORY = Path(__file__).resolve().parents[1]
VARIANTS = ("torch fp32", "ours fp32", "torch bf16", "ours bf16")
Sizes = tuple[int, int, int]  # hidden, tokens, classes


def with_torch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What a recipe would write without `core.losses`."""
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def measure(variant: str, sizes: Sizes) -> dict[str, float]:
    """Return ``seconds`` of a step and ``units`` of its peak memory. Once a process: the system keeps one peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, tokens, classes = sizes
    loss_of = with_torch if variant.startswith("torch") else cross_entropy_sum
    head = nn.Linear(hidden, classes, bias=False)
    rows, labels = torch.randn(tokens, hidden, requires_grad=True), torch.randint(classes, (tokens,))

    def step(count: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.endswith("bf16")):
            loss = loss_of(head(rows[:count]), labels[:count])
        loss.backward()

    step(2)  # makes the gradients, and what a first call makes
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    step(tokens)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "units": (peak - before) / (4 * tokens * classes)}


def measure_each(sizes: Sizes) -> None:
    """Print `measure` of each variant as a line of JSON, each in a copy of this process, which imports torch once."""
    for name in VARIANTS:
        child = os.fork()
        if child == 0:
            print(json.dumps(measure(name, sizes)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} failed")


def measure_all(rounds: int, sizes: Sizes) -> dict[str, list[dict[str, float]]]:
    """Return what each variant measured, round by round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    command = [sys.executable, "-m", "benchmarks.vocabulary_loss", "--measure", *flags(sizes)]
    for _ in range(rounds):
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
        for name, line in zip(VARIANTS, done.stdout.splitlines(), strict=True):
            found[name].append(json.loads(line))
    return found


def flags(sizes: Sizes) -> list[str]:
    """Return the words that give these sizes to another process."""
    return [
        word
        for name, size in zip(("hidden", "tokens", "classes"), sizes, strict=True)
        for word in (f"--{name}", str(size))
    ]


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return a line for each variant: units, seconds and the ratio of its seconds to torch's, each a median."""
    lines = []
    for name, own in found.items():
        base = found[f"torch {name[-4:]}"]
        units = statistics.median(one["units"] for one in own)
        seconds = statistics.median(one["seconds"] for one in own)
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(own, base, strict=True))
        lines.append(f"{name:12} {units:5.2f} units  {seconds:7.2f} s  {ratio:.2f}")
    return lines


def main() -> None:
    """Measure, print the table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=50257)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--measure", action="store_true", help="one round, as lines of JSON")
    args = parser.parse_args()
    sizes = (args.hidden, args.tokens, args.classes)
    if args.measure:
        measure_each(sizes)
        return
    found = measure_all(args.rounds, sizes)
    unit = 4 * args.tokens * args.classes
    print(f"{args.tokens:,} tokens, {args.classes:,} classes: a unit is {unit / 1e6:,.0f} MB; {args.rounds} rounds")
    print("\n".join(table(found)))
    if args.output:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "sizes": sizes}
        args.output.write_text(json.dumps({**facts, "found": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
