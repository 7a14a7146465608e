"""Snapshots as the simulated device makes them, by hand: what the report's tests start from."""

from __future__ import annotations

from typing import Any

LIMIT = 96 * 2**30


def graph(number: int, phase: str, step: int, reused: int, inputs: list[str], **other: Any) -> dict[str, Any]:
    made = {"id": number, "phase": phase, "ops": 200, "compiled": 1, "reused": reused, "step": step, "inputs": inputs}
    made |= {"first_new_op": "aten::embedding", "line": "train.py:24", "cut_by": "mark_step", "cut_at": "train.py:31"}
    return made | other


def sync(line: str, kind: str, count: int, steps: int | None = None) -> dict[str, Any]:
    """A read that happened in as many steps as times, if not in ``steps``."""
    return {"line": line, "kind": kind, "count": count, "bytes": 4 * count, "steps": count if steps is None else steps}


def clean(**changes: Any) -> dict[str, Any]:
    """A training run of 20 steps in lazy mode with nothing to find."""
    made: dict[str, Any] = {
        "mode": "compute",
        "lazy": True,
        "lazy_variable_changed": None,
        "generation": "gaudi2",
        "devices": 1,
        "steps": 20,
        "ops": {"aten::mm": {"count": 1200, "flops": 3 * 10**15}, "aten::add.Tensor": {"count": 500, "flops": 0}},
        "phases": {
            "setup": {"ops": 10, "flops": 7, "peak_bytes": 6 * 10**9},
            "forward": {"ops": 4000, "flops": 10**15, "peak_bytes": 40 * 10**9},
            "backward": {"ops": 8000, "flops": 2 * 10**15, "peak_bytes": 50 * 10**9},
            "optimizer": {"ops": 1000, "flops": 0, "peak_bytes": 45 * 10**9},
        },
        "graphs": [
            graph(1, "setup", 0, 0, []),
            graph(2, "forward+backward", 0, 19, ["int64[8, 64]"]),
            graph(3, "optimizer", 0, 18, []),
            graph(4, "optimizer", 1, 0, []),
        ],
        "op_compilations": 0,
        "syncs": [],
        "copies": {"to_device": {"count": 140, "bytes": 6 * 10**9}, "to_host": {"count": 0, "bytes": 0}},
        "out_of_int32": [],
        "collectives": [],
        "memory": {
            "limit": LIMIT,
            "in_use": 30 * 10**9,
            "peak": 50 * 10**9,
            "peak_phase": "backward",
            "by_step": [[step, 30 * 10**9, (45 + step % 6) * 10**9] for step in range(20)],
        },
        "out_of_memory": None,
    }
    return made | changes


def full() -> dict[str, Any]:
    """The same run with something to find in every section."""
    snapshot = clean(
        lazy_variable_changed="0",
        syncs=[
            sync("train.py:30", "item", 20),
            sync("train.py:35", "copy to host", 2),
            sync("train.py:38", "shape depends on data", 1),
        ],
        out_of_int32=[{"line": "data.py:3", "op": "copy to device", "value": 3_000_000_000, "count": 2}],
        collectives=[
            {"op": "allreduce", "dtype": "float32", "count": 3, "bytes": 10**9, "supported": True, "line": "ddp.py:4"},
            {"op": "allgather", "dtype": "float64", "count": 2, "bytes": 10**6, "supported": False, "line": "ddp.py:5"},
        ],
    )
    snapshot["graphs"] += [
        graph(5, "forward+backward", 12, 0, ["int64[8, 57]"], line="train.py:25"),
        graph(6, "forward+backward", 14, 0, ["int64[8, 64]"], line="train.py:26", cut_by="item"),
    ]
    snapshot["phases"]["backward"]["peak_bytes"] = snapshot["memory"]["peak"] = 95 * 10**9
    return snapshot


def empty(**changes: Any) -> dict[str, Any]:
    """A program that did one thing on the device and stopped."""
    nothing = {"count": 0, "bytes": 0}
    made = {
        "mode": "shapes",
        "lazy": False,
        "generation": "gaudi",
        "devices": 2,
        "steps": 0,
        "ops": {"aten::add.Tensor": {"count": 1, "flops": 0}},
        "phases": {},
        "graphs": [],
        "op_compilations": 1,
        "syncs": [],
        "copies": {"to_device": nothing, "to_host": nothing},
        "out_of_int32": [],
        "collectives": [],
        "memory": {"limit": 32 * 2**30, "in_use": 0, "peak": 0, "peak_phase": None, "by_step": []},
        "out_of_memory": None,
    }
    return made | changes
