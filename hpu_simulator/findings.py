"""What in a snapshot deserves a word, how much it matters, and what to change. Pure functions of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpu_simulator.settings import GENERATIONS
from hpu_simulator.units import gigabytes, per_step, plural, short

SEVERITIES = ("error", "warning", "note")
STEADY_AFTER = 2  # steps after which a phase should have met all its graphs
NEAR_LIMIT = 0.9  # workspace of compiled graphs and fragmentation are not counted, so the last tenth is no reserve
MANY_READS = 20  # where there are no steps to count against
HONEST = (
    "This is a functional model of the device. It claims no speed: it counts what the program asks for, and its "
    "floors are times that no run goes below, and none reaches."
)
TRAINING = ("forward", "backward", "optimizer")


def finding(severity: str, title: str, places: Iterable[str], advice: str) -> dict[str, Any]:
    return {"severity": severity, "title": title, "places": list(places), "advice": advice}


def find(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings, the gravest first.

    Returns:
        Dicts with ``severity`` (of `SEVERITIES`), ``title`` (one line), ``places`` (lines ``file:number`` with
        details, maybe none) and ``advice``.
    """
    found = [
        *_memory(snapshot),
        *_lazy_variable(snapshot),
        *_out_of_int32(snapshot),
        *_collectives(snapshot),
        *_late_graphs(snapshot),
        *_inference_graphs(snapshot),
        *_syncs(snapshot),
    ]
    return sorted(found, key=lambda item: SEVERITIES.index(item["severity"]))


def flops_per_step(snapshot: dict[str, Any]) -> float | None:
    """Return the floating point operations of one optimiser step, without setup and inference; None if uncounted."""
    phases = snapshot.get("phases") or {}
    total = sum(phases[name].get("flops", 0) for name in TRAINING if name in phases)
    return total / snapshot["steps"] if total and snapshot.get("steps") else None


def floor_seconds_per_step(snapshot: dict[str, Any]) -> float | None:
    """Return the seconds below which no step can be on that generation: FLOPs over the peak; None if uncounted.

    The peak is that of bf16 whatever the dtypes were: fp32 products run at that rate at best.
    """
    flops, peak = flops_per_step(snapshot), GENERATIONS[snapshot["generation"]].bf16
    return flops / (peak * 1e12) if flops else None


def late_graphs(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the training graphs that appeared when all of them should have been met.

    What appears after the last step (a last read of the loss) comes once and is not counted; nor are evaluations.
    """
    training = [graph for graph in snapshot.get("graphs") or [] if any(name in graph["phase"] for name in TRAINING)]
    begin = min((graph["step"] for graph in training), default=0)
    return [graph for graph in training if begin + STEADY_AFTER < graph["step"] < (snapshot.get("steps") or 0)]


def graphs_by_phase(snapshot: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (compiled, reused) of the graphs by phase, in order of appearance."""
    phases: dict[str, tuple[int, int]] = {}
    for graph in snapshot.get("graphs") or []:
        compiled, reused = phases.get(graph["phase"], (0, 0))
        phases[graph["phase"]] = (compiled + graph["compiled"], reused + graph["reused"])
    return phases


def new_from(graph: dict[str, Any]) -> str:
    """Return the line that made a graph new, with its operator if it has one that no graph had before it there."""
    operator = graph.get("first_new_op")
    return short(graph["line"]) + (f" ({operator})" if operator else "")


def _memory(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    failed, memory = snapshot.get("out_of_memory"), snapshot.get("memory") or {}
    name = snapshot["generation"]
    less = (
        "Use a smaller batch with more accumulation steps, gradient checkpointing, bf16, or shard the state (ZeRO). "
        "--mode shapes finds the largest batch that fits."
    )
    if failed:
        title = f"out of memory in {failed['phase']}: {failed['op']} asked for {gigabytes(failed['bytes'])}"
        return [finding("error", title, [short(failed["line"])] if failed.get("line") else [], less)]
    limit, peak = memory.get("limit"), memory.get("peak")
    if limit and peak and peak > NEAR_LIMIT * limit:
        title = f"the peak is {peak / limit:.0%} of {name}'s memory, in {memory.get('peak_phase')}"
        more = "A card also needs room for the workspace of compiled graphs, which is not counted here. "
        return [finding("warning", title, [], more + less)]
    return []


def _lazy_variable(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    changed = snapshot.get("lazy_variable_changed")
    if changed is None:
        return []
    mode = "lazy" if snapshot.get("lazy") else "eager"
    title = f"PT_HPU_LAZY_MODE became {changed!r} after the bridge was imported: the mode stayed {mode}"
    advice = "Set it in the environment, or before the first import of torch and of habana_frameworks."
    return [finding("error", title, [], advice)]


def _out_of_int32(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    values = snapshot.get("out_of_int32") or []
    places = [f"{short(item['line'])}: {item['op']}, value {item['value']}, {item['count']} times" for item in values]
    advice = (
        "The card computes int64 as int32, so these values would be cut off. Keep them on the host, or smaller "
        "than 2**31 (hash, offset, split in two); PT_ENABLE_INT64_SUPPORT=1 turns real int64 on where it is supported."
    )
    return [finding("error", "int64 values that int32 cannot hold", places, advice)] if values else []


def _collectives(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    bad = [item for item in snapshot.get("collectives") or [] if item.get("supported") is False]
    places = [f"{short(item['line'])}: {item['op']} of {item['dtype']}, {item['count']} times" for item in bad]
    advice = (
        "Cast before the collective and back after it: float32 or bfloat16 for numbers, int32 for counts and masks."
    )
    return [finding("error", "collectives on dtypes that HCCL does not have", places, advice)] if bad else []


def _late_graphs(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    late = late_graphs(snapshot)
    shapes = {(graph["phase"], tuple(graph["inputs"])) for graph in snapshot.get("graphs") or [] if graph not in late}
    reshaped = [graph for graph in late if (graph["phase"], tuple(graph["inputs"])) not in shapes]
    same = [graph for graph in late if graph not in reshaped]
    found = []
    if reshaped:
        found.append(
            finding(
                "warning",
                f"recompiles later: {plural(len(reshaped), 'new graph')} from new shapes after step {STEADY_AFTER}",
                map(_where, reshaped),
                "Pad batches to one length or to a few buckets, and fill the last batch (or drop it): every new shape "
                "is compiled while all devices wait.",
            )
        )
    if same:
        found.append(
            finding(
                "warning",
                f"recompiles later: {plural(len(same), 'new graph')} with known shapes but other operators",
                map(_where, same),
                "The step does not always run the same operators: look for a branch, a read of a value (logging) or a "
                "Python number that changes inside the step; move it out of the step or make the number a tensor.",
            )
        )
    return found


def _inference_graphs(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    graphs = [graph for graph in snapshot.get("graphs") or [] if graph["phase"] == "inference"]
    once = [graph for graph in graphs if not graph["reused"]]
    if len(once) <= 3 or len(once) * 2 < len(graphs):
        return []
    return [
        finding(
            "warning",
            f"inference compiles often: {len(once)} of {len(graphs)} graphs were never used again",
            map(_where, once[:5]),
            "Shapes change from batch to batch or from token to token: pad inputs to a few lengths, give caches a "
            "fixed length, and write into them by position instead of concatenating.",
        )
    ]


_SYNC_ADVICE = {
    "item": "Keep the value on the device: add it up there and read the sum at every logging step only.",
    "copy to host": "Copy after the loop or at logging steps only; move what is only printed or saved out of the step.",
    "shape depends on data": "Replace boolean indexing, nonzero and unique by torch.where or a multiplication with a "
    "mask, so that the shape does not depend on values: each new shape would be compiled, too.",
}


def _syncs(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    steps, found = snapshot.get("steps") or 0, []
    for kind, advice in _SYNC_ADVICE.items():
        of_kind = [item for item in snapshot.get("syncs") or [] if item["kind"] == kind]
        often = [item for item in of_kind if _is_often(item, steps)]
        chosen = of_kind if kind.startswith("shape") else often
        if not chosen:
            continue
        count = sum(item["count"] for item in chosen)
        places = [f"{short(item['line'])}: {how_often(item, steps)}" for item in chosen]
        what = {"item": "the host reads a value", "copy to host": "the host copies a tensor back"}.get(kind, kind)
        found.append(finding("warning", f"{what}, {per_step(count, steps)}: the device waits", places, advice))
    return found


def how_often(sync: dict[str, Any], steps: int | None) -> str:
    """Return e.g. ``1 per step``, or ``26 in 1 of 20 steps`` for what is not done in all of them."""
    return per_step(sync["count"], steps, sync.get("steps"))


def _is_often(sync: dict[str, Any], steps: int) -> bool:
    """In every step; many reads in a few steps are a checkpoint or an evaluation."""
    return sync.get("steps", sync["count"]) >= steps if steps else sync["count"] >= MANY_READS


def _where(graph: dict[str, Any]) -> str:
    return f"{short(graph['line'])}: step {graph['step']}, {graph['phase']}, {', '.join(graph['inputs']) or 'no input'}"
