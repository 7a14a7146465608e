"""Sides work in turn: while one does, nothing of the others runs; in the end nothing of any is left."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.contests import Contest, Measured, Row, Settings, compare
from benchmarks.turns import rates, run_command, take_turns

MODULE = "tests.benchmarks.sides"


@pytest.mark.processes
def test_sides_alternate_and_nothing_runs_out_of_turn(tmp_path: Path) -> None:
    found = take_turns(MODULE, ["ours", "theirs"], Settings(tmp_path, rounds=3))
    order = (tmp_path / "order.txt").read_text().split("\n")[:-1]
    warm = [f"{name} 0 {moment}" for name in ("ours", "theirs") for moment in ("begins", "ends")]
    rest = [f"{name} {n} {moment}" for n in (1, 2, 3) for name in ("ours", "theirs") for moment in ("begins", "ends")]
    assert order == warm + rest
    assert [each["samples"] for each in found["ours"]] == [20, 30, 40]  # the warm-up is left out
    for each in found["ours"] + found["theirs"]:
        assert 0.1 <= each["seconds"] < 1
    written = [len((tmp_path / f"{name}.child").read_text()) for name in ("ours", "theirs")]
    alone = 0.1 * 8 / 0.005  # what a child that is not stopped would write: it starts with the first side's first turn
    assert all(0 < count < 0.9 * alone for count in written), (written, alone)
    pids = [int(pid) for name in ("ours", "theirs") for pid in (tmp_path / f"{name}.pids").read_text().split()]
    until = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.processes
def test_a_side_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)side failing ended.*on its way.*the loader is empty"):
        take_turns(MODULE, ["failing"], Settings(tmp_path, rounds=1))


def test_rates_and_ratios_are_those_of_each_round() -> None:
    reports = {
        "ours": [{"seconds": 1.0, "samples": 40}, {"seconds": 2.0, "samples": 40}, {"seconds": 4.0, "samples": 40}],
        "peer": [{"seconds": 2.0, "samples": 40}, {"seconds": 2.0, "samples": 40}, {"seconds": 2.0, "samples": 40}],
    }
    row = Row("training", "peer", "the peer", target=1.1)
    contest = Contest("training", "samples/s", [row], lambda settings: Measured({}))
    result = compare(contest, row, Measured(rates(reports, "samples")))
    assert (result["ours"], result["theirs"]) == (20, 20)
    assert result["ratio"] == 1  # of 2, 1 and 0.5
    assert result["range"] == [0.5, 2]
    assert result["quartiles"] == [0.75, 1.5]
    assert not result["reached"]
    at_most = Row("start", "peer", "the peer", target=1.0, at_most=True)
    assert compare(contest, at_most, Measured(rates(reports, "samples")))["reached"]


def test_a_command_is_timed_to_its_end_or_to_a_line() -> None:
    whole = run_command([sys.executable, "-c", "x = bytearray(60_000_000); print('done')"], memory=True)
    assert whole.output == "done\n"
    assert 60e6 < whole.peak_bytes < 120e6
    slow = "import time; print('first step'); time.sleep(60)"
    until = run_command([sys.executable, "-c", slow], until="first step")
    assert 0 < until.seconds < 30
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*gone"):
        run_command([sys.executable, "-c", "print('gone'); raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="exit code 0"):
        run_command([sys.executable, "-c", "print('gone')"], until="first step")
