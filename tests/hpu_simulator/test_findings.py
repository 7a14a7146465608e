"""Findings: each one where it should be, and none where it should not."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_simulator import findings
from tests.hpu_simulator.snapshots import LIMIT, clean, empty, full, graph, sync


def titles(snapshot: dict[str, Any]) -> list[str]:
    return [item["title"] for item in findings.find(snapshot)]


def test_a_clean_run_has_no_finding() -> None:
    assert findings.find(clean()) == []
    assert findings.find(empty()) == []


def test_everything_is_found_the_gravest_first_with_advice() -> None:
    found = findings.find(full())
    assert len(found) == 8
    order = [findings.SEVERITIES.index(item["severity"]) for item in found]
    assert order == sorted(order)
    assert all(item["advice"] and "\n" not in item["title"] for item in found)


def test_a_new_shape_after_the_first_steps_is_named_with_its_line() -> None:
    snapshot = clean()
    snapshot["graphs"].append(graph(5, "forward+backward", 12, 0, ["int64[8, 57]"], line="train.py:25"))
    (found,) = findings.find(snapshot)
    assert found["title"] == "recompiles later: 1 new graph from new shapes after step 2"
    assert found["places"] == ["train.py:25: step 12, forward+backward, int64[8, 57]"]
    assert "Pad" in found["advice"]


def test_a_late_graph_of_known_shapes_is_another_finding() -> None:
    snapshot = clean()
    snapshot["graphs"].append(graph(5, "forward+backward", 12, 0, ["int64[8, 64]"]))
    (found,) = findings.find(snapshot)
    assert found["title"] == "recompiles later: 1 new graph with known shapes but other operators"


@pytest.mark.parametrize(("step", "late"), [(2, 0), (3, 1), (19, 1), (20, 0)])
def test_what_is_late(step: int, late: int) -> None:
    """The first steps may compile; what appears after the last step is no step."""
    snapshot = clean()
    snapshot["graphs"].append(graph(5, "forward", step, 0, ["int64[8, 57]"]))
    assert len(findings.late_graphs(snapshot)) == late


def test_evaluation_may_come_late_but_not_with_a_shape_for_each_batch() -> None:
    snapshot = clean()
    snapshot["graphs"].append(graph(5, "inference", 10, 100, ["int64[8, 64]"]))
    assert findings.find(snapshot) == []
    snapshot["graphs"] += [graph(6 + n, "inference", 10, 0, [f"int64[8, {n + 1}]"]) for n in range(30)]
    assert titles(snapshot) == ["inference compiles often: 30 of 31 graphs were never used again"]


def test_a_read_in_every_step_is_a_finding_and_a_rare_one_is_not() -> None:
    assert titles(clean(syncs=[sync("train.py:30", "item", 4), sync("train.py:31", "copy to host", 19)])) == []
    found = findings.find(clean(syncs=[sync("train.py:30", "item", 20), sync("train.py:31", "item", 1)]))
    assert [item["title"] for item in found] == ["the host reads a value, 1 per step: the device waits"]
    assert found[0]["places"] == ["train.py:30: 1 per step"]


def test_many_reads_in_few_steps_are_a_checkpoint_and_no_finding() -> None:
    assert titles(clean(syncs=[sync("save.py:3", "copy to host", 500, steps=2)])) == []
    found = findings.find(clean(syncs=[sync("train.py:3", "item", 60, steps=20)]))
    assert found[0]["places"] == ["train.py:3: 3 per step"]


def test_many_reads_without_steps_are_a_finding() -> None:
    assert titles(empty(syncs=[sync("infer.py:3", "item", 19)])) == []
    assert titles(empty(syncs=[sync("infer.py:3", "item", 20)])) == [
        "the host reads a value, 20 times: the device waits"
    ]


def test_a_shape_that_depends_on_data_is_always_a_finding() -> None:
    assert titles(clean(syncs=[sync("train.py:38", "shape depends on data", 1)])) == [
        "shape depends on data, 1 in 20 steps: the device waits"
    ]


@pytest.mark.parametrize(("peak", "found"), [(0.9 * LIMIT, 0), (0.901 * LIMIT, 1)])
def test_a_peak_near_the_limit(peak: float, found: int) -> None:
    snapshot = clean()
    snapshot["memory"]["peak"] = int(peak)
    assert len(findings.find(snapshot)) == found


def test_out_of_memory_is_an_error_and_replaces_the_warning() -> None:
    snapshot = full() | {
        "out_of_memory": {"bytes": 12_000_000_000, "op": "aten::mm", "phase": "backward", "line": "train.py:9"}
    }
    found = findings.find(snapshot)[0]
    assert found["severity"] == "error"
    assert found["title"] == "out of memory in backward: aten::mm asked for 12.0 GB"
    assert found["places"] == ["train.py:9"]
    assert not any("the peak is" in title for title in titles(snapshot))


def test_only_unsupported_collectives_are_a_finding() -> None:
    snapshot = clean(collectives=full()["collectives"][:1])
    assert findings.find(snapshot) == []
    snapshot["collectives"] = [{**full()["collectives"][0], "supported": None}]
    assert findings.find(snapshot) == [], "not known"
    snapshot["collectives"] = full()["collectives"]
    assert findings.find(snapshot)[0]["places"] == ["ddp.py:5: allgather of float64, 2 times"]


def test_a_changed_variable_is_reported_with_the_mode_that_stayed() -> None:
    assert titles(clean(lazy_variable_changed="0")) == [
        "PT_HPU_LAZY_MODE became '0' after the bridge was imported: the mode stayed lazy"
    ]


def test_the_floor_is_the_steps_flops_over_the_peak() -> None:
    """3e15 in forward and backward over 20 steps, at 432e12 a second; setup and inference are no part of a step."""
    snapshot = clean()
    snapshot["phases"]["inference"] = {"ops": 1, "flops": 10**18, "peak_bytes": 1}
    assert findings.flops_per_step(snapshot) == 1.5e14
    assert findings.floor_seconds_per_step(snapshot) == pytest.approx(1.5e14 / 432e12)
    assert findings.floor_seconds_per_step(snapshot | {"generation": "gaudi"}) == pytest.approx(2.5)


def test_nothing_counted_gives_no_floor() -> None:
    assert findings.floor_seconds_per_step(empty()) is None
    assert findings.floor_seconds_per_step(clean(steps=0)) is None
    assert findings.floor_seconds_per_step(clean(phases={})) is None
