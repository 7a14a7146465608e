"""Running a program again: which flag, which start, what a run says. The programs count by a formula, without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpu_simulator import rerun
from tests.conftest import REPOSITORY

PROGRAM = """
import argparse, os, sys
sys.path.insert(0, {repository!r})
from hpu_simulator import report, settings
from tests.hpu_simulator.snapshots import empty

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--per_device_train_batch_size", type=int, default=3)
parser.add_argument("--rows", type=int, default=10**6)
parser.add_argument("--drop_last", action="store_true")
parser.add_argument("--fails_from", type=int, default=10**6)
parser.add_argument("--breaks_from", type=int, default=10**6)
{more}
given = parser.parse_args()
with open("ran.txt", "a") as file:
    print(*sys.argv[1:], file=file)
size = given.per_device_train_batch_size
if size >= given.fails_from:
    sys.exit("first line of a message\\nValueError: too many rows")
chosen = settings.read()
limit = chosen.generation.memory_bytes
batches = given.rows // size if given.drop_last else 1
peak = 10**9 * (20 + (9 * min(size, given.rows) if batches else 0))
failed = dict(bytes=10**9, op="aten::mm", phase="backward", line="train.py:3") if peak > limit else None
phases = dict(setup=20 * 10**9, backward=min(peak, limit))
snapshot = empty(
    generation=chosen.generation.name, mode=chosen.mode, steps=0 if failed else batches, out_of_memory=failed,
    phases={{name: dict(ops=1, flops=0, peak_bytes=count) for name, count in phases.items()}},
    memory=dict(limit=limit, in_use=0, peak=min(peak, limit), peak_phase="backward", by_step=[]),
)
report.at_exit(lambda: snapshot, chosen)
print("training", size)
if size >= given.breaks_from:
    raise ValueError("in the middle")
if failed:
    raise RuntimeError("out of memory")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(repository=str(REPOSITORY), more='parser.add_argument("--output_dir")'))
    return file


def run(program: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HPU_")}
    environ["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", "hpu_simulator", "--mode", "shapes", *options, str(program), *words]
    return subprocess.run(command, cwd=program.parent, env=environ, capture_output=True, text=True, timeout=100)


def last(done: subprocess.CompletedProcess) -> str:
    return done.stderr.splitlines()[-1]


def ran(program: Path) -> list[str]:
    return (program.parent / "ran.txt").read_text().splitlines()


@pytest.mark.processes
def test_the_command_ends_with_the_peaks_by_phase_and_the_largest_batch(program: Path) -> None:
    done = run(program, "--per_device_train_batch_size", "4")
    assert done.returncode == 0
    assert done.stdout == "training 4\n", "the other runs are unseen"
    assert done.stderr.count("HPU simulator: gaudi2") == 1
    assert done.stderr.splitlines()[-5:] == [
        "peak memory by phase",
        "  phase     batch 4   batch 9",
        "  setup     20.0 GB   20.0 GB",
        "  backward  56.0 GB  101.0 GB",
        "largest batch that fits gaudi2: 9 (peak 101.0 GB of 103.1 GB; 10 would need about 110.0 GB)",
    ]
    again = [line.rsplit(" ", 1)[0] for line in ran(program)[1:]]
    given = "--per_device_train_batch_size 4 --per_device_train_batch_size"
    assert again == [f"{given} {batch} --output_dir" for batch in (8, 9, 10)]


@pytest.mark.processes
def test_a_batch_that_does_not_fit_is_said_and_searched_below(program: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(program, "--per_device_train_batch_size=64", options=("--generation", "gaudi", "--json", str(report)))
    assert done.returncode == 1, "the program's own status"
    assert "RuntimeError: out of memory" in done.stderr
    assert "  batch 64: does not fit (out of memory in backward)" in done.stderr
    assert last(done).startswith("largest batch that fits gaudi: 1 (peak 29.0 GB of 34.4 GB; 2 ")
    assert json.loads(report.read_text())["out_of_memory"]["phase"] == "backward", "the first run's report stays"


@pytest.mark.processes
def test_another_failure_is_said_by_its_last_line_and_ends_the_search(program: Path) -> None:
    done = run(program, "--breaks_from", "5")
    assert last(done) == "largest batch: 2 fits gaudi2; not searched further: batch 9: ValueError: in the middle"
    done = run(program, "--fails_from", "5")
    assert last(done) == "largest batch: 2 fits gaudi2; not searched further: batch 9: ValueError: too many rows"


@pytest.mark.processes
def test_a_program_that_fails_by_itself_is_not_run_again(program: Path) -> None:
    done = run(program, "--fails_from", "1")
    assert done.returncode == 1
    assert done.stderr == "first line of a message\nValueError: too many rows\n"
    assert len(ran(program)) == 1


@pytest.mark.processes
def test_too_few_rows_are_said(program: Path) -> None:
    assert "memory is the same at 4 and 8" in last(run(program, "--per_device_train_batch_size", "4", "--rows", "4"))
    done = run(program, "--per_device_train_batch_size", "4", "--rows", "4", "--drop_last")
    assert "batch 8: no optimiser step ended" in last(done)


@pytest.mark.processes
def test_a_program_without_an_output_folder(program: Path) -> None:
    program.write_text(PROGRAM.format(repository=str(REPOSITORY), more=""))
    done = run(program, "--per_device_train_batch_size", "4")
    assert "largest batch that fits gaudi2: 9" in last(done)
    assert sum("--output_dir" in line for line in ran(program)) == 0, "argparse refused it before anything ran"


@pytest.mark.processes
def test_no_search_without_a_flag(program: Path) -> None:
    program.write_text(PROGRAM.format(repository=str(REPOSITORY), more="").replace("per_device_train_batch_size", "b"))
    done = run(program)
    assert "--batch_flag" in last(done)
    assert len(ran(program)) == 1
    assert "largest batch that fits gaudi2: 9" in last(run(program, options=("--batch_flag", "b")))


@pytest.mark.processes
def test_no_search_where_it_is_turned_off_or_nothing_ran(program: Path, tmp_path: Path) -> None:
    assert "largest batch" not in run(program, options=("--batch_flag", "none")).stderr
    assert len(ran(program)) == 1
    idle = tmp_path / "idle.py"
    idle.write_text("import sys  # per_device_train_batch_size")
    assert run(idle).stderr == "largest batch: not searched, nothing ran on the device\n"


@pytest.mark.processes
def test_an_old_report_is_not_taken_for_this_runs(program: Path, tmp_path: Path) -> None:
    report, idle = tmp_path / "report.json", tmp_path / "idle.py"
    run(program, options=("--batch_flag", "none", "--json", str(report)))
    os.utime(report, (1, 1))
    idle.write_text("")
    assert (
        run(idle, options=("--json", str(report))).stderr == "largest batch: not searched, nothing ran on the device\n"
    )


@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_program_has_its_last_word_and_is_not_run_again(program: Path, number: int, status: int) -> None:
    """An interrupt goes to all processes of a terminal, a termination to the command alone."""
    wait = "\nimport time\nprint('waiting', flush=True)\ntime.sleep(60)\n"
    program.write_text(program.read_text() + wait)
    command = [sys.executable, "-m", "hpu_simulator", "--mode", "shapes", str(program)]
    started = subprocess.Popen(
        command,
        cwd=program.parent,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert [started.stdout.readline(), started.stdout.readline()] == ["training 3\n", "waiting\n"]
    if number == signal.SIGINT:
        os.killpg(started.pid, number)
    else:
        started.terminate()
    _, err = started.communicate(timeout=50)
    assert started.returncode == status
    assert len(ran(program)) == 1
    assert "largest batch" not in err
    assert ("HPU simulator: gaudi2" in err) is (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.py", "--bs", "8"], (True, 8)),
        (["train.py", "--bs=16", "--bs", "4"], (True, 4)),
        (["train.py", "--config", "nested.json"], (True, 6)),
        (["train.py", "--config=nested.json"], (True, 6)),
        (["train.py", "--bs", "2", "nested.json"], (True, 2)),
        (["train.py", "--bs", "eight"], (True, None)),
        (["names.py"], (True, None)),
        (["nothing.json"], (True, None)),
        (["other.py", "--bs_eval", "8"], (False, None)),
        (["missing.py", "broken.json"], (False, None)),
    ],
)
def test_where_the_flag_is_looked_for(
    words: list[str], named: tuple[bool, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nested.json").write_text(json.dumps({"list": [{"bs": 99}], "args": {"bs": 6}, "bs_eval": 1}))
    Path("nothing.json").write_text(json.dumps({"bs": "8", "args": {"bs": True}, "bs_eval": 4}))
    Path("broken.json").write_text("{")
    Path("names.py").write_text("parser.add_argument('--bs', default=4)")
    Path("other.py").write_text("parser.add_argument('--bs_eval', default=4)")
    assert rerun.named_batch(["/usr/bin/python", *words], "bs") == named
