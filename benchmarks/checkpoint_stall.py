"""How long training stands still for a checkpoint: written in the background, written while it waits, and torch.save.

python -m benchmarks.checkpoint_stall [--rounds 5] [--width 256] [--folder FOLDER] [--output FILE]

A model of 20 million parameters at the default width, trained by AdamW through the engine, on one device. The three are
taken in turn (A B C A B C ...) in one training, some steps apart. A row is the median, the quartiles, and the median of
the ratios, round by round, to the second row's. ``torch.save`` writes weights and moments, and makes nothing sure: no
checksum, and nothing that has reached the disk. Target: the first row is below a tenth of the second's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.contests import OURS, Contest, Measured, Row, Settings
from benchmarks.gradient_reduction import build
from benchmarks.turns import run_command
from core.arguments import parse_arguments
from core.data import Batch, BatchLoader
from core.engine import Engine
from core.gaudi_config import GaudiConfig
from core.run import Run

NAMES = ("in the background", "while training waits", "torch.save")
BETWEEN = 4  # steps from one save to the next: more than the thread takes


def collate(rows: list[int], shape: tuple[int, ...]) -> Batch:
    """Token numbers (rows, length), which are the labels, too."""
    tokens = torch.randint(1, 32_000, (len(rows), shape[0]), generator=torch.Generator().manual_seed(rows[0]))
    return {"input_ids": tokens, "labels": tokens}


def measure(rounds: int, width: int, folder: Path) -> dict[str, list[float]]:
    """Seconds that training stood still at each save, by row."""
    flags = ["--output_dir", str(folder), "--do_train", "--use_cpu", "--disable_tqdm", "--report_to", "none"]
    steps = 3 * BETWEEN * (rounds + 1) + BETWEEN - 1
    flags += ["--max_steps", str(steps), "--save_strategy", "no", "--save_total_limit", "2"]
    args = parse_arguments(flags, description="")
    args.execution_mode = "eager"
    model, seconds = build(width), {name: [] for name in NAMES}
    loader = BatchLoader(range(64), collate, [(32,)] * 64, [(32,)], batch_size=8, seed=0)
    engine = Engine(Run(args, GaudiConfig(), "benchmark"), model, loader)
    kept: dict[str, float] = {}
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(model(batch["input_ids"]).square().sum() / width)
        engine.step(window)
        at, number = engine.step_count % BETWEEN, engine.step_count // BETWEEN
        if at == BETWEEN - 1 and "lost" in kept:  # what the background's save cost, also in the steps after it
            engine.writer.finish()
            seconds[NAMES[0]].append(engine.writer.lost[-1])
            kept.clear()
        if at:
            continue
        began, name = time.perf_counter(), NAMES[number % 3]
        if name == NAMES[2]:
            state = {"model": model.state_dict(), "optimizer": engine.optimizer.state_dict()}
            torch.save(state, folder / "state.pt")
        else:
            engine.save()
        if name == NAMES[1]:
            engine.writer.finish()
        if name == NAMES[0]:
            kept["lost"] = 1
        else:
            seconds[name].append(time.perf_counter() - began)
    engine.finish_training()
    return {name: values[1:] for name, values in seconds.items()}  # the first of each is cold


def measure_in_rounds(settings: Settings) -> Measured:
    """Seconds that training stands still for our checkpoint, and for torch.save of the same state."""
    figures, width = settings.folder / "seconds.json", 16 if settings.small else 256
    words = [sys.executable, "-m", "benchmarks.checkpoint_stall", "--rounds", max(settings.rounds, 2)]
    run_command([*words, "--width", width, "--folder", settings.folder, "--output", figures])
    found = json.loads(figures.read_text(encoding="utf-8"))
    values = {OURS: found["seconds"][NAMES[0]], "torch": found["seconds"][NAMES[2]]}
    waiting = statistics.median(found["seconds"][NAMES[1]])
    parameters = sum(one.numel() for one in build(width).parameters())
    facts = {"parameters": parameters, "optimiser": "AdamW", "threads": found["threads"], "precision": "fp32"}
    return Measured(values, facts | {"our checkpoint while training waits, s": waiting})


ROW = Row("checkpoint, training stands still", "torch", "torch.save of the same state", 0.1, at_most=True)
CONTESTS = [Contest("checkpoint_stall", "s", [ROW], measure_in_rounds, devices=("cpu",))]


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure, print a table, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--folder", help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--output", help="JSON file of the results")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds = measure(args.rounds, args.width, Path(folder))
    table = {}
    for name, values in seconds.items():
        ratios = [one / other for one, other in zip(values, seconds[NAMES[1]], strict=False)]
        low, middle, high = statistics.quantiles(values, n=4)
        table[name] = {"median": middle, "low": low, "high": high, "ratio": statistics.median(ratios)}
        print(f"{name:<22} {middle:8.3f} s ({low:.3f} to {high:.3f})  ratio {table[name]['ratio']:.3f}")
    if args.output:
        Path(args.output).write_text(json.dumps({"threads": torch.get_num_threads(), "seconds": seconds}, indent=1))
    return table


if __name__ == "__main__":
    main()
