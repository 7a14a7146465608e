"""The report of a run: text for the terminal, JSON, and the HTML page. Made of a snapshot, a plain dict."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpu_simulator import findings, page
from hpu_simulator.settings import Settings
from hpu_simulator.units import WIDTH, gigabytes, per_step, plural, quantity, seconds, share, short, shorten, table

SHOWN = 10  # graphs and lines of each list


def at_exit(snapshot: Callable[[], dict[str, Any]], settings: Settings) -> None:
    """Report when this process ends, however its program ends. Call once, when the device is first loaded.

    The text goes to stderr, from rank 0 only; each rank writes its own files. Where nothing ran on the device (a
    launcher), and in a process forked from this one, there is no report.
    """
    process = os.getpid()

    def report() -> None:
        if os.getpid() == process:
            finish(snapshot(), settings)

    atexit.register(report)


def finish(snapshot: dict[str, Any], settings: Settings) -> None:
    """Print the text on rank 0 and write the files asked for; a file that cannot be written costs one line."""
    if not snapshot.get("ops") and not snapshot.get("out_of_memory"):
        return
    rank, world_size = _rank()
    if rank == settings.rank:  # without the others there is one report
        rank, world_size = 0, 1
    for path, make in ((settings.json, as_json), (settings.html, page.render)):
        if path:
            _write(rank_path(path, rank, world_size), make(snapshot))
    if rank != 0:
        return
    said = text(snapshot)
    # What the program said comes before what is said of it. A stream may be missing, closed, or its reader gone.
    for stream, content in ((sys.stdout, ""), (sys.stderr, f"\n{said}\n")):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.write(content)
            stream.flush()


def rank_path(path: str, rank: int, world_size: int) -> Path:
    """Return where a rank writes: ``report.json`` becomes ``report-rank1.json`` where there are several ranks."""
    file = Path(path)
    return file.with_name(f"{file.stem}-rank{rank}{file.suffix}") if world_size > 1 else file


def as_json(snapshot: dict[str, Any]) -> str:
    """Return the snapshot with ``findings``, ``flops_per_step`` and ``floor_seconds_per_step`` as JSON text."""
    derived = {
        "findings": findings.find(snapshot),
        "flops_per_step": findings.flops_per_step(snapshot),
        "floor_seconds_per_step": findings.floor_seconds_per_step(snapshot),
    }
    return json.dumps(snapshot | derived, indent=1) + "\n"


def text(snapshot: dict[str, Any]) -> str:
    """Return the report for a terminal of `WIDTH` columns."""
    sections = (_graphs, _syncs, _operators, _copies, _memory, _int32, _collectives, _findings)
    blocks = [_head(snapshot), *(section(snapshot) for section in sections)]
    blocks.append([*textwrap.wrap(findings.HONEST, WIDTH), "-" * WIDTH])
    return "\n".join("\n".join(block) + "\n" for block in blocks if block).rstrip("\n")


def _head(snapshot: dict[str, Any]) -> list[str]:
    mode = "lazy" if snapshot.get("lazy") else "eager"
    what = {"compute": "everything computed", "shapes": "nothing computed"}
    steps, devices = snapshot.get("steps") or 0, snapshot.get("devices", 1)
    facts = [
        snapshot["generation"],
        f"{mode} mode",
        f"{snapshot['mode']} ({what[snapshot['mode']]})",
        f"{devices} device{'s' * (devices != 1)}",
        *([] if snapshot.get("rank") is None else [f"rank {snapshot['rank']} of {snapshot['world_size']}"]),
        f"{steps} optimiser step{'s' * (steps != 1)}" if steps else "no optimiser step",
    ]
    return ["-" * WIDTH, "HPU simulator: " + ", ".join(facts)]


def _graphs(snapshot: dict[str, Any]) -> list[str]:
    if not snapshot.get("lazy"):
        return [f"Operators compiled: {snapshot.get('op_compilations', 0)} distinct operator shapes (eager mode)"]
    graphs = snapshot.get("graphs") or []
    if not graphs:
        return ["Graphs: none ended, so none was compiled"]
    phases = findings.graphs_by_phase(snapshot)
    rows = [(phase, compiled, reused) for phase, (compiled, reused) in phases.items()]
    total = ("all", *(sum(row[column] for row in rows) for column in (1, 2)))
    lines = ["Graphs", *table(("phase", "compiled", "reused"), [*rows, total] if len(rows) > 1 else rows)]
    lines += ["  new graphs in order:"]
    late = [graph["id"] for graph in findings.late_graphs(snapshot)]
    for graph in graphs[:SHOWN]:
        mark = "  <- compiled late" if graph["id"] in late else ""
        head = f"  {graph['id']:>4}  step {graph['step']}, {graph['phase']}, {plural(graph['ops'], 'op')}, "
        shapes = ", ".join(graph["inputs"]) or "no input from the host"
        lines.append(shorten(head + shapes, WIDTH - len(mark)) + mark)
        new = f"new from {findings.new_from(graph)}"
        cut = f"cut by {graph['cut_by']}" + (f" at {short(graph['cut_at'])}" if graph.get("cut_at") else "")
        both = f"{' ' * 8}{new}; {cut}"
        lines += [both] if len(both) <= WIDTH else [shorten(f"{' ' * 8}{part}") for part in (new, cut)]
    return lines + _more(graphs)


def _syncs(snapshot: dict[str, Any]) -> list[str]:
    syncs = sorted(snapshot.get("syncs") or [], key=lambda item: -item["count"])
    if not syncs:
        return ["Host syncs: none"]
    total = per_step(sum(item["count"] for item in syncs), snapshot.get("steps"))
    rows = [
        (findings.how_often(item, snapshot.get("steps")), item["kind"], gigabytes(item["bytes"]), short(item["line"]))
        for item in syncs[:SHOWN]
    ]
    return [f"Host syncs: {total}", *table(("how often", "kind", "bytes", "line"), rows, left=(1, 3)), *_more(syncs)]


def _operators(snapshot: dict[str, Any]) -> list[str]:
    ops, steps = snapshot.get("ops") or {}, snapshot.get("steps") or 0
    count = sum(item["count"] for item in ops.values())
    phases = snapshot.get("phases") or {}
    in_steps = sum(phases[name]["ops"] for name in findings.TRAINING if name in phases)
    rate = f", {in_steps / steps:,.0f} per step" if steps and in_steps else ""
    lines = [f"Operators: {count:,} of {plural(len(ops), 'kind')}{rate}"]
    flops, floor = findings.flops_per_step(snapshot), findings.floor_seconds_per_step(snapshot)
    if flops and floor:
        lines.append(
            f"  {quantity(flops)}FLOPs per step: at least {seconds(floor)} on {snapshot['generation']} at its peak "
            "in bf16, which is never reached"
        )
    return lines


def _copies(snapshot: dict[str, Any]) -> list[str]:
    copies = snapshot.get("copies") or {}
    named = (("to_device", "to the device"), ("to_host", "to the host"))
    parts = [
        f"{gigabytes(copies[key]['bytes'])} {name} in {plural(copies[key]['count'], 'copy', 'copies')}"
        for key, name in named
        if key in copies
    ]
    return [f"Copied: {', '.join(parts)}"] if parts else []


def _memory(snapshot: dict[str, Any]) -> list[str]:
    memory = snapshot.get("memory") or {}
    limit = memory.get("limit")
    rows = [
        (phase, gigabytes(values["peak_bytes"]), share(values["peak_bytes"], limit))
        for phase, values in (snapshot.get("phases") or {}).items()
        if values.get("peak_bytes")
    ]
    if not limit or not rows:
        return []
    peak = f"peak {gigabytes(memory['peak'])} of {gigabytes(limit)} ({share(memory['peak'], limit)})"
    where = f", in {memory['peak_phase']}" if memory.get("peak_phase") else ""
    return [f"Memory: {peak}{where}", *table(("phase", "peak", "of the limit"), rows)]


def _int32(snapshot: dict[str, Any]) -> list[str]:
    values = snapshot.get("out_of_int32") or []
    if not values:
        return []
    rows = [(item["value"], item["count"], item["op"], short(item["line"])) for item in values[:SHOWN]]
    return ["Values outside int32", *table(("value", "times", "op", "line"), rows, left=(2, 3)), *_more(values)]


def _collectives(snapshot: dict[str, Any]) -> list[str]:
    calls = snapshot.get("collectives") or []
    if not calls:
        return []
    rows = [
        (
            item["op"],
            item["dtype"],
            item["count"],
            gigabytes(item["bytes"]),
            {True: "yes", False: "NO"}.get(item.get("supported"), "n/a"),
            short(item["line"]),
        )
        for item in calls[:SHOWN]
    ]
    header = ("collective", "dtype", "times", "bytes", "in HCCL", "line")
    return ["Collectives", *table(header, rows, left=(0, 1, 4, 5)), *_more(calls)]


def _findings(snapshot: dict[str, Any]) -> list[str]:
    found = findings.find(snapshot)
    if not found:
        return ["Findings: none"]
    lines = ["Findings"]
    for item in found:
        lines += textwrap.wrap(f"{item['severity'].upper()}: {item['title']}", WIDTH - 2, initial_indent="  ")
        lines += [shorten(f"    {place}") for place in item["places"][:SHOWN]]
        lines += ["  " + line for line in _more(item["places"])]
        lines += textwrap.wrap(item["advice"], WIDTH, initial_indent="    -> ", subsequent_indent="       ")
    return lines


def _more(items: list[Any]) -> list[str]:
    return [f"  ... {len(items) - SHOWN} more"] if len(items) > SHOWN else []


def _rank() -> tuple[int, int]:
    """This process's rank and how many there are: from the launcher's variables, else from torch's process group."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if os.environ.get(rank, "").isdecimal():
            return int(os.environ[rank]), int(os.environ.get(size) or 1)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _write(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"hpu_simulator: {path} was not written: {error.strerror}", file=sys.stderr, flush=True)
