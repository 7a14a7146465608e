"""A training step of the built-in summarization run: on the simulated HPU, and on the CPU. Target: at most 2 times.

python -m benchmarks.simulator_overhead [--rounds 5] [--steps 60] [--output FILE]

Both run the recipe, in turn (A B A B ...), with the same seed, thread and batch order. The step's time is the recipe's
own measurement, which leaves out start-up, evaluation and saving.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = "recipes/summarization/run.py --gaudi_config t5 --do_eval False --do_predict False --eval_strategy no"
OPTIONS = "--save_strategy no --load_best_model_at_end False --disable_tqdm True --cpu_threads 1"
KINDS = {"cpu": [], "hpu": ["-m", "hpu_simulator", "--generation", "gaudi2"]}


def seconds_per_step(kind: str, steps: int) -> float:
    """Run the recipe for ``steps`` steps on ``kind`` and return the seconds of a steady one.

    Raises:
        RuntimeError: the recipe failed, or had too few steps to measure.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *KINDS[kind], *RECIPE.split(), *OPTIONS.split()]
        command += ["--max_steps", str(steps), "--output_dir", folder, "--overwrite_output_dir", "True"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        rate = json.loads((Path(folder) / "train_results.json").read_text(encoding="utf-8"))["train_steps_per_second"]
        if not isinstance(rate, float):
            raise RuntimeError(f"--steps {steps}: too few to measure")
        return 1 / rate


def main() -> None:
    """Measure, print one line, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    measured: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind, seconds in measured.items():
            seconds.append(seconds_per_step(kind, args.steps))
        print(f"round {number + 1}: " + ", ".join(f"{kind} {1000 * s[-1]:.1f} ms" for kind, s in measured.items()))
    ratios = [hpu / cpu for cpu, hpu in zip(measured["cpu"], measured["hpu"], strict=True)]
    median = statistics.median(ratios)
    print(f"simulated HPU / CPU, time of a step: median {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if args.output:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "steps": args.steps}
        args.output.write_text(json.dumps({**facts, "seconds": measured, "ratios": ratios, "median": median}, indent=2))


if __name__ == "__main__":
    main()
