"""The report as text and JSON, and when and where it is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpu_simulator import findings, report, settings, units
from tests.conftest import REPOSITORY
from tests.hpu_simulator.snapshots import clean, empty, full, graph, sync

GAUDI2 = settings.Settings(settings.GENERATIONS["gaudi2"])


@pytest.mark.parametrize("snapshot", [clean(), full(), empty(), empty(steps=3), clean(graphs=[], phases={}, memory={})])
def test_every_run_prints_within_the_terminal_and_ends_with_what_it_is(snapshot: dict[str, Any]) -> None:
    lines = report.text(snapshot).splitlines()
    assert max(map(len, lines)) <= units.WIDTH
    assert " ".join(lines).rstrip("- ").endswith("none reaches.")
    assert "claims no speed" in report.text(snapshot)
    assert not any(word in report.text(snapshot) for word in ("None", "nan", "{", "}"))


def test_only_the_generation_the_mode_and_an_operator_are_needed() -> None:
    few = {"mode": "compute", "lazy": True, "generation": "gaudi3", "ops": {"aten::mm": {"count": 1, "flops": 1}}}
    assert "gaudi3, lazy mode, compute (everything computed), 1 device, no optimiser step" in report.text(few)
    assert json.loads(report.as_json(few))["findings"] == []


def test_the_graphs_are_counted_by_phase_and_each_new_one_is_placed() -> None:
    text = report.text(full())
    table = [line.split() for line in text.splitlines()]
    assert ["forward+backward", "3", "19"] in table
    assert ["optimizer", "2", "18"] in table
    assert ["all", "6", "37"] in table
    assert "5  step 12, forward+backward, 200 ops, int64[8, 57]  <- compiled late" in text
    assert "new from train.py:25 (aten::embedding); cut by mark_step at train.py:31" in text


def test_long_lists_are_cut_with_their_count() -> None:
    graphs = [graph(number, "forward", 0, 1, [f"int64[{number}]"]) for number in range(1, 14)]
    text = report.text(clean(graphs=graphs, syncs=[sync(f"a.py:{n}", "item", 1) for n in range(12)]))
    assert "int64[10]" in text
    assert "int64[11]" not in text
    assert "... 3 more" in text
    assert "... 2 more" in text


def test_eager_mode_counts_operator_shapes() -> None:
    assert "57 distinct operator shapes" in report.text(clean(lazy=False, graphs=[], op_compilations=57))


def test_memory_is_held_against_the_limit() -> None:
    text = report.text(clean())
    assert "Memory: peak 50.0 GB of 103.1 GB (48.5%), in backward" in text
    assert ["forward", "40.0", "GB", "38.8%"] in [line.split() for line in text.splitlines()]


def test_rates_copies_and_floor() -> None:
    text = report.text(full())
    assert "Operators: 1,700 of 2 kinds, 650 per step" in text
    assert "150 TFLOPs per step: at least 347 ms on gaudi2" in text
    assert "never reached" in text
    assert "Copied: 6.0 GB to the device in 140 copies, 0 B to the host in 0 copies" in text
    assert ["1", "per", "step", "item", "80", "B", "train.py:30"] in [line.split() for line in text.splitlines()]


def test_every_finding_is_in_the_text() -> None:
    words = " ".join(report.text(full()).split())
    for item in findings.find(full()):
        assert f"{item['severity'].upper()}: {item['title']}" in words
        assert f"-> {item['advice']}" in words


def test_json_is_the_snapshot_with_what_follows_from_it() -> None:
    written = json.loads(report.as_json(full()))
    assert full().items() <= written.items()
    assert written["findings"] == findings.find(full())
    assert written["floor_seconds_per_step"] == pytest.approx(1.5e14 / 432e12)
    assert json.loads(report.as_json(empty()))["floor_seconds_per_step"] is None


def test_a_lone_rank_is_named_and_reports_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lone = full() | {"mode": "shapes", "devices": 8, "rank": 3, "world_size": 8}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    report.finish(lone, replace(to(tmp_path), rank=3))
    assert written(tmp_path / "new") == ["run.html", "run.json"]
    assert "8 devices, rank 3 of 8, 20 optimiser steps" in capsys.readouterr().err
    assert "8 devices, rank 3 of 8" in (tmp_path / "new" / "run.html").read_text(encoding="utf-8")


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def to(folder: Path) -> settings.Settings:
    return settings.Settings(
        GAUDI2.generation, json=str(folder / "new" / "run.json"), html=str(folder / "new" / "run.html")
    )


@pytest.mark.parametrize(
    ("environ", "names", "printed"),
    [
        ({}, ["run.html", "run.json"], True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ["run.html", "run.json"], True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["run-rank0.html", "run-rank0.json"], True),
        ({"RANK": "3", "WORLD_SIZE": "8"}, ["run-rank3.html", "run-rank3.json"], False),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ["run-rank1.html", "run-rank1.json"], False),
    ],
)
def test_rank_0_prints_and_every_rank_writes_its_files(
    environ: dict[str, str],
    names: list[str],
    printed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    report.finish(full(), to(tmp_path))
    assert written(tmp_path / "new") == names
    out, err = capsys.readouterr()
    assert out == ""
    assert ("HPU simulator: gaudi2" in err) is printed
    assert json.loads((tmp_path / "new" / names[1]).read_text())["steps"] == 20


def test_nothing_is_said_where_nothing_ran(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report.finish(empty(ops={}), to(tmp_path))
    assert capsys.readouterr() == ("", "")
    assert written(tmp_path) == []


def test_a_model_that_does_not_fit_at_all_is_still_reported(capsys: pytest.CaptureFixture) -> None:
    failed = {"bytes": 10**9, "op": "empty", "phase": "setup", "line": "train.py:3"}
    report.finish(empty(ops={}, out_of_memory=failed), GAUDI2)
    assert "ERROR: out of memory in setup: empty asked for 1.0 GB" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_costs_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "new").write_text("a file, no folder")
    report.finish(clean(), to(tmp_path))
    complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpu_simulator:")]
    assert len(complaints) == 2
    assert "run.json was not written" in complaints[0]


@pytest.mark.parametrize("missing", [True, False])
def test_closed_streams_do_not_cost_the_files(missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        stream = (tmp_path / name).open("w")
        stream.close()
        monkeypatch.setattr(sys, name, None if missing else stream)
    report.finish(clean(), to(tmp_path))
    assert written(tmp_path / "new") == ["run.html", "run.json"]


PROGRAM = """
import os, signal, sys
from hpu_simulator import report, settings
from tests.hpu_simulator.snapshots import clean
report.at_exit(clean, settings.Settings(settings.GENERATIONS["gaudi2"]))
print("said by the program")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_the_report_comes_at_the_end_however_the_program_ends(end: str, status: int, last: str) -> None:
    command = [sys.executable, "-c", PROGRAM + end]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout == "said by the program\n"
    before, found, after = done.stderr.partition("-" * units.WIDTH + "\nHPU simulator: gaudi2")
    assert found
    assert before.strip().endswith(last)
    assert "Traceback" not in after


@pytest.mark.processes
def test_a_forked_child_does_not_report_again() -> None:
    fork = "pid = os.fork()\nif not pid: sys.exit()\nos.waitpid(pid, 0)"
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + fork], cwd=REPOSITORY, capture_output=True, text=True, env=environ
    )
    assert done.stderr.count("HPU simulator: gaudi2") == 1
