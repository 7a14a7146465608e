"""This project beside its peers, in one run: python -m benchmarks

Every contest that this machine can hold: its sides work alternately (A B A B ...) on the same model, data, precision
and batch, on the CPU and, where torch finds one, on the accelerator. A row is the median of the rounds' ratios. Prints
one table, and writes report.json (machine, versions, commit, every figure) and growth.png into the folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.contests import Contest, Impossible, Settings, compare
from benchmarks.turns import REPOSITORY

MODULES = (
    "summarization",
    "language_modeling",
    "image_classification",
    "text_to_image",
    "engine_overhead",
    "gradient_reduction",
    "checkpoint_stall",
    "starts",
)


def contests() -> list[Contest]:
    """All contests, in the order of the table."""
    return [contest for name in MODULES for contest in importlib.import_module(f"benchmarks.{name}").CONTESTS]


def hold(contest: Contest, device: str, name: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure one contest on one device, and add its rows to what was found."""
    where = {"contest": contest.name, "device": name}
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = contest.measure(Settings(Path(folder), args.rounds, device, args.small))
    except Impossible as error:
        found["missing"].append(where | {"why": str(error)})
        print(f"{contest.name}: not measured: {error}", flush=True)
        return
    except Exception as error:  # the others' figures are worth keeping
        found["failed"].append(where | {"why": str(error)})
        print(f"{contest.name}: FAILED: {error}", file=sys.stderr, flush=True)
        return
    rows = [where | compare(contest, row, measured) for row in contest.rows]
    found["rows"] += rows
    precision = measured.facts.get("precision", "fp32")
    if measured.flops_per_second:
        rate = statistics.median(measured.flops_per_second)
        share = rate / found["matmul"][name][precision]
        found["mfu"].append(where | {"precision": precision, "flops_per_second": rate, "mfu": share})
    found["measured"].append(where | {"values": measured.values, "facts": measured.facts})
    took = time.perf_counter() - began
    for row in rows:
        print("  ".join(report.cells(row)), f" [{took:.0f} s]", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; returns 1 if a contest failed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = contests()
    parser.add_argument("--only", nargs="+", choices=["growth", *(each.name for each in known)], help="these contests")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side that count (default: 5)")
    parser.add_argument("--small", action="store_true", help="see that all runs; the figures mean nothing")
    parser.add_argument("--output_dir", type=Path, help="default: runs/benchmarks/<time>")
    parser.add_argument("--readme", type=Path, metavar="REPORT", help="measure nothing: put this report's table there")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that sides and folders are cleared away
    if args.readme:
        path = args.readme.resolve().relative_to(REPOSITORY).as_posix()
        report.write_into(REPOSITORY / "README.md", json.loads(args.readme.read_text(encoding="utf-8")), path)
        return 0
    folder = args.output_dir or REPOSITORY / "runs" / "benchmarks" / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    devices = machine.devices()
    found: dict[str, Any] = machine.describe() | {"rounds": args.rounds, "small": args.small}
    found["matmul"] = {name: machine.matmul_rates(device) for device, name in devices.items()}
    found |= {"rows": [], "mfu": [], "missing": [], "failed": [], "measured": []}
    for device, name in devices.items():
        for contest in known:
            if device in contest.devices and (not args.only or contest.name in args.only):
                hold(contest, device, name, args, found)
    if not args.only or "growth" in args.only:
        from benchmarks import growth

        found["growth"] = growth.measure(folder, args.small)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report.table(found)}\n\n{folder / 'report.json'}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
