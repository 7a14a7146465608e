"""How cost grows: a step's time, peak memory and start-up against batch, length, model, rows and ranks.

python -m benchmarks.growth [--output_dir FOLDER] [--small]

Each point is a process of its own, with one thread, forked from one that has imported everything: start-up is the time
from there to the end of the first step. A curve's exponent is the slope of a line through the logarithms, fitted on its
larger half; so is that of the work behind it (counted FLOPs, parameters, rows). A curve that is steeper than its work
by more than `TOLERANCE` grows too fast. Writes growth.png, and growth.json if it is a command of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns import REPOSITORY

TOLERANCE = 0.2  # of exponents: a quadratic curve is off by 1
PATIENCE = 60  # seconds: a point whose start-up would take longer, as its predecessor foretells, is left out
LEAST_BYTES = 2**20  # memory below it is not told from nothing
BASE = {"batch": 8, "length": 64, "width": 128, "layers": 2, "ranks": 1, "rows": 0, "path": "", "seconds": 1.5}
MEASURES = {"step_seconds": "a step, s", "peak_bytes": "peak memory, bytes", "start_seconds": "start-up, s"}
Point = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """What grows along it, and what may.

    Attributes:
        name: in words.
        points: what differs from `BASE` in each.
        x: of a point, what grows.
        work: by measure, the work behind it: of a point, and in words.
    """

    name: str
    points: Sequence[Point]
    x: Callable[[Point], float]
    work: dict[str, tuple[Callable[[Point], float], str]] = field(default_factory=dict)


# --- Curves ----------------------------------------------------------------------------------------------------------


def flops(point: Point) -> float:
    """FLOPs of a step of all ranks, for each core that they have."""
    return point["flops"] * point["ranks"] / min(point["ranks"], os.cpu_count() or 1)


def activations(point: Point) -> float:
    """What a layer keeps for the backward pass, in bytes of fp32: linear in the length, and attention's square.

    Source of the counts: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
    section 4.1: of attention weights, the softmax, its mask and what dropout leaves.
    """
    heads = max(point["width"] // 64, 1)
    return point["batch"] * point["length"] * (66 * point["width"] + 9 * heads * point["length"])


def curves(small: bool) -> list[Curve]:
    """All of them; ``small``: few and short ones."""
    counted = {"step_seconds": (flops, "counted FLOPs"), "start_seconds": (flops, "counted FLOPs")}
    batches, lengths = ((1, 2, 4), (8, 16, 32)) if small else ((1, 2, 4, 8, 16, 32), (32, 64, 128, 256, 512, 1024))
    widths, layers = ((16, 32, 64), (1, 2, 4)) if small else ((64, 128, 256, 512), (1, 2, 4, 8, 16))
    rows, ranks = ((100, 300, 1000), (1, 2)) if small else ((10**3, 10**4, 10**5, 10**6, 10**7), (1, 2, 4))
    spread = 4 if small else 32
    found = [_model_curve(name, key, values, counted) for name, key, values in (
        ("batch size", "batch", batches), ("sequence length", "length", lengths),
        ("width", "width", widths), ("layers", "layers", layers),
    )]  # fmt: skip
    for path, words in (("blocks", "joined and cut into blocks"), ("rows", "each row padded")):
        points = [{"rows": count, "path": path, "length": 16, "width": 32, "layers": 1} for count in rows]
        work = {
            "step_seconds": (_constant, "none: flat"),
            "peak_bytes": (_rows, "rows"),
            "start_seconds": (_rows, "rows"),
        }
        found.append(Curve(f"rows of the data set, {words}", points, _rows, work))
    shared = {"peak_bytes": (_constant, "none: flat"), "start_seconds": (_ranks, "ranks")}
    shared |= {"step_seconds": (flops, "counted FLOPs for each core")}
    for name, batch in (
        ("of a fixed global batch", lambda n: spread // n),
        ("with a fixed batch each", lambda n: spread // 4),
    ):
        points = [{"ranks": number, "batch": batch(number)} for number in ranks]
        found.append(Curve(f"ranks {name}", points, _ranks, shared))
    return found


def _model_curve(name: str, key: str, values: Sequence[int], counted: dict[str, Any]) -> Curve:
    state, kept = (lambda point: point["parameters"], "parameters"), (activations, "activations kept for backward")
    memory = state if key in ("width", "layers") else kept
    return Curve(name, [{key: value} for value in values], lambda point: point[key], counted | {"peak_bytes": memory})


def _rows(point: Point) -> float:
    return point["rows"]


def _ranks(point: Point) -> float:
    return point["ranks"]


def _constant(point: Point) -> float:
    return 1.0


# --- What a curve says -----------------------------------------------------------------------------------------------


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x, fitted on the larger half of x: at least three points, if there are."""
    order = np.argsort(x)[-max(3, math.ceil(len(x) / 2)) :]
    return float(np.polyfit(np.log(np.asarray(x, float)[order]), np.log(np.asarray(y, float)[order]), 1)[0])


def judge(x: Sequence[float], y: Sequence[float], work: Sequence[float]) -> dict[str, Any]:
    """The exponents of a curve and of the work behind it, and whether the curve ``grows_faster``."""
    own, allowed = exponent(x, y), exponent(x, work)
    return {"exponent": own, "work_exponent": allowed, "grows_faster": own > allowed + TOLERANCE}


def describe(curve: Curve, points: list[Point]) -> dict[str, Any]:
    """A curve's points, and what `judge` says of each measure."""
    measured = [point for point in points if "left_out" not in point]
    entry: dict[str, Any] = {"points": points, "measures": {}}
    for measure in MEASURES:
        work, words = curve.work[measure]
        x, y = [curve.x(point) for point in measured], [point[measure] for point in measured]
        entry["measures"][measure] = {"x": x, "y": y, "work": words, **judge(x, y, [work(point) for point in measured])}
    if len(measured) > 1 and measured[-1]["rows"]:
        last, before = measured[-1], measured[-2]
        more = last["peak_bytes"] - before["peak_bytes"]
        entry["bytes_per_row"] = more / (last["rows"] - before["rows"])
    return entry


# --- A point, in a process of its own --------------------------------------------------------------------------------


def memory() -> dict[str, int]:
    """Bytes of this process: the peak, what is its own now, and pages of files that are mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile")}


def write_rows(path: Path, count: int) -> None:
    """An Arrow file of rows of 4 to 12 tokens, a chunk in memory at a time: the same tokens in each."""
    import pyarrow as pa

    draw, chunk = np.random.default_rng(0), min(count, 100_000)
    ends = np.cumsum(draw.integers(4, 12, chunk, endpoint=True), dtype=np.int32)
    values = pa.array(draw.integers(1, 512, ends[-1], dtype=np.int32))
    column = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), values)
    batch = pa.record_batch({"input_ids": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
        for at in range(0, count, chunk):
            out.write_batch(batch.slice(0, min(chunk, count - at)))


def recipe_loader(args: Namespace, path: Path, recipe: Any) -> Any:
    """The loader that language modeling makes of rows of tokens in a file."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", eos_token="w1")
    return recipe.make_loader(args, Dataset.from_file(str(path)), tokenizer, "train")


def parse(point: Point, folder: Path, recipe: Any) -> Namespace:
    """Flags of one point: fp32, one thread, everything else by default."""
    from benchmarks.contests import Settings
    from benchmarks.ours import common_flags
    from core import hub
    from core.arguments import parse_arguments

    flags = ["--do_train", "--max_steps", "8" if point["ranks"] > 1 else "10000", "--cpu_threads", "1"]
    flags += ["--per_device_train_batch_size", str(point["batch"]), *common_flags(Settings(folder), folder / "run")]
    groups = (recipe.LanguageModelingArguments, hub.LoraArguments, hub.HubArguments, hub.TokenizerArguments)
    flags += ["--block_size", str(point["length"]), "--objective", "causal"]
    args = parse_arguments(flags + ["--line_by_line"] * (point["path"] == "rows"), *groups, description="")
    args.execution_mode = "eager"
    recipe.check(args)
    return args


def train(point: Point, folder: Path, recipe: Any) -> Point:
    """Train a little; what it took."""
    from benchmarks import engine_overhead as loop
    from core.data import BatchLoader
    from core.engine import Engine
    from core.gaudi_config import GaudiConfig
    from core.run import Run

    began, before = time.perf_counter(), memory()
    Path("/proc/self/clear_refs").write_text("5")  # a new peak
    args = parse(point, folder, recipe)
    run = Run(args, GaudiConfig(use_fused_adam=True), "benchmark")
    size = {"n_embd": point["width"], "n_layer": point["layers"], "n_head": max(point["width"] // 64, 1)}
    model = loop.build(size | {"vocab_size": 512, "length": point["length"]})
    if point["path"]:
        loader = recipe_loader(args, folder.parent / f"rows_{point['rows']}.arrow", recipe)
    else:
        tokens = [np.full(point["length"], 1 + number) for number in range(8 * point["batch"] * point["ranks"])]
        shape, lengths = (point["length"],), [(point["length"],)] * len(tokens)
        loader = BatchLoader.from_arguments(args, tokens, loop.collate, lengths, shape, train=True)
    engine, ends = Engine(run, model, loader), []
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            engine.backward(loop.loss_sum(engine.model, batch))
        engine.step(window)
        ends.append(time.perf_counter())
        if point["ranks"] == 1 and len(ends) > 4 and ends[-1] - ends[0] > point["seconds"]:
            break
    after = memory()
    own = after["VmHWM"] - after["RssFile"] - before["RssAnon"]
    found = {"step_seconds": statistics.median(np.diff(ends[1:])), "start_seconds": ends[0] - began}
    found |= {"peak_bytes": max(own, LEAST_BYTES), "parameters": engine.parameters}
    batch = {name: value for name, value in batch.items() if name != "row_weights"}
    return found | {"flops": loop.flops_of(run.model, [batch], run.device)}


def be(point: Point, rank: int, port: int, folder: Path, recipe: Any, answer: int) -> None:
    """Be one rank of a point, in a fork; rank 0 answers with JSON. Never returns."""
    status = 1
    try:
        if point["ranks"] > 1:
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": point["ranks"], "MASTER_PORT": port}
            os.environ.update({"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in of_rank.items()})
        found = train(point, folder, recipe)
        if rank == 0:
            os.write(answer, json.dumps(found).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def fork(point: Point, folder: Path, recipe: Any) -> Point:
    """Measure a point in copies of this process, one a rank.

    Raises:
        RuntimeError: one failed.
    """
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    ranks = []
    for rank in range(point["ranks"]):
        child = os.fork()
        if child == 0:
            be(point, rank, port, folder, recipe, writing)
        ranks.append(child)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        text = answer.read()
    failed = [os.waitpid(child, 0)[1] for child in ranks]
    if any(failed):
        raise RuntimeError(f"a process failed at {point}")
    return point | json.loads(text)


def measure_all(points: list[list[Point]], folder: Path) -> list[list[Point]]:
    """Measure every point of every curve, one after the other: in this process nothing runs but imports."""
    import datasets  # noqa: F401
    import transformers
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: F401

    from benchmarks import engine_overhead  # noqa: F401
    from benchmarks.ours import load_recipe

    transformers.logging.set_verbosity_error()
    recipe, found = load_recipe("language_modeling"), []
    for number, curve in enumerate(points):
        found.append(measured := [])
        for at, point in enumerate(curve):
            foretold = (
                measured[-1]["start_seconds"] * point["rows"] / curve[at - 1]["rows"] if point["rows"] and at else 0
            )
            if foretold > PATIENCE:
                measured += [one | {"left_out": f"starting would take {foretold:.0f} s or more"} for one in curve[at:]]
                break
            file = folder / f"rows_{point['rows']}.arrow"
            if point["rows"] and not file.exists():
                write_rows(file, point["rows"])
            measured.append(fork(point, folder / f"{number}_{at}", recipe))
    return found


# --- All of them -----------------------------------------------------------------------------------------------------


def measure(output_dir: Path, small: bool = False) -> dict[str, Any]:
    """Measure, write growth.png, print a line for each curve, and return `describe` of each by its name.

    Raises:
        RuntimeError: a point failed; with the end of its output.
    """
    every = curves(small)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = BASE | ({"seconds": 0.05} if small else {})  # that a point trains, unless that is less than 4 steps
        asked = [[base | point for point in curve.points] for curve in every]
        (folder / "points.json").write_text(json.dumps(asked), encoding="utf-8")
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "benchmarks.growth", "--points", name]
        done = subprocess.run(words, cwd=REPOSITORY, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"growth: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        points = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    found = {curve.name: describe(curve, of_curve) for curve, of_curve in zip(every, points, strict=True)}
    draw(found, output_dir / "growth.png")
    for curve, entry in found.items():
        print(f"{curve}: {'; '.join(in_words(name, one) for name, one in entry['measures'].items())}")
    return found


def in_words(measure: str, found: dict[str, Any]) -> str:
    """One measure of a curve, in a few words."""
    verdict = "GROWS FASTER" if found["grows_faster"] else "not faster"
    return (
        f"{MEASURES[measure]}: exponent {found['exponent']:.2f}, {verdict} than its work ({found['work_exponent']:.2f})"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """One small picture for each curve and measure; a dashed line is the slope of the work."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), len(MEASURES), squeeze=False)
    for line, (name, entry) in zip(panels, found.items(), strict=True):
        for panel, (measure, one) in zip(line, entry["measures"].items(), strict=True):
            x, y = np.asarray(one["x"], float), np.asarray(one["y"], float)
            panel.loglog(x, y, "o-", color="firebrick" if one["grows_faster"] else "steelblue")
            panel.loglog(x, y[-1] * (x / x[-1]) ** one["work_exponent"], "--", color="grey", linewidth=1)
            slope = f"exponent {one['exponent']:.2f}, work {one['work_exponent']:.2f} ({one['work']})"
            panel.set_title(slope, fontsize=8)
            panel.set_xlabel(name, fontsize=8)
            panel.set_ylabel(MEASURES[measure], fontsize=8)
            panel.set_xticks(x, [f"{value:g}" for value in x])
            panel.minorticks_off()
            if y.max() < 10 * y.min():  # there may be no power of ten to label
                panel.set_yticks([y.min(), y.max()], [f"{y.min():.2g}", f"{y.max():.2g}"])
            panel.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=REPOSITORY / "runs" / "growth")
    parser.add_argument("--small", action="store_true", help="see that all runs; the figures mean nothing")
    parser.add_argument("--points", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.points:
        found = measure_all(json.loads((args.points / "points.json").read_text(encoding="utf-8")), args.points)
        (args.points / "found.json").write_text(json.dumps(found), encoding="utf-8")
        return 0
    args.output_dir.mkdir(parents=True, exist_ok=True)
    found = measure(args.output_dir, args.small)
    (args.output_dir / "growth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(args.output_dir / "growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
