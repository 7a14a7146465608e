"""Real processes: exit codes, signals, whole lines, who failed first, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from core import processes
from core.launcher import DistributedRunner
from core.processes import Processes
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.processes
HEAD = "import os, signal, subprocess, sys, threading, time\nrank = int(os.environ['RANK'])\n"
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not on the PATH")


class Job:
    """A launcher on a program of this test, and what it has written so far."""

    def __init__(self, folder: Path, program: str, *flags: str) -> None:
        self.script, self.out, self.err = folder / "program.py", folder / "out", folder / "err"
        self.script.write_text(HEAD + program)
        command = [sys.executable, str(REPOSITORY / "gaudi_spawn.py"), *flags, str(self.script)]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=folder)

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def wait_for(self, text: str, count: int = 1) -> None:
        assert soon(lambda: self.out.read_text().count(text) >= count, 20), self.err.read_text()

    def running(self) -> list[psutil.Process]:
        """Processes that know this job's program: its ranks, and what they started."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.script) in words and process.pid != self.process.pid:
                found.append(process)
        return found


def soon(check: Callable[[], bool], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not (met := check()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs; after the test there must be nothing of them."""
    jobs: list[Job] = []

    def start(program: str, *flags: str) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(folder, program, *flags))
        return jobs[-1]

    yield start
    left = [process for job in jobs for process in job.running()]
    for process in left:
        process.kill()
    for job in jobs:
        job.process.kill()
        job.process.wait()
    assert not left


def test_a_rank_knows_its_place(launch):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR".split()
    job = launch(f"print(*[os.environ[name] for name in {names}])", "--world_size", "3")
    assert job.wait() == 0
    assert sorted(job.out.read_text().splitlines()) == [
        f"[rank {rank}] {rank} {rank} 3 3 3 127.0.0.1" for rank in range(3)
    ]


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("7", "7")])
def test_threads_are_shared_out_unless_the_user_says_how_many(launch, monkeypatch, given, expected):
    from core.launcher import cores

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    job = launch("print(os.environ['OMP_NUM_THREADS'])", "--world_size", "2")
    assert job.wait() == 0
    assert job.out.read_text().split()[2] == (expected or str(max(1, cores() // 2)))


def test_a_single_rank_has_the_terminal_and_the_input_to_itself(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("print(input(), end='')")
    command = [sys.executable, str(REPOSITORY / "gaudi_spawn.py"), str(script)]
    assert subprocess.run(command, input="typed\n", text=True, capture_output=True).stdout == "typed"


def test_the_first_failing_ranks_code_and_its_traceback_last(launch):
    """The others wait for it forever, as in a collective."""
    job = launch("if rank == 2:\n    raise RuntimeError('the cause')\ntime.sleep(300)", "--world_size", "4")
    started = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - started < 15
    head, _, tail = job.err.read_text().partition("rank 2 failed first (exit code 1); the end of its output:\n")
    assert "the cause" in head
    assert all(line.startswith("[rank 2] ") for line in tail.splitlines())
    assert tail.splitlines()[-1] == "[rank 2] RuntimeError: the cause"


@pytest.mark.parametrize("flags", [[], pytest.param(["--use_mpi"], marks=needs_mpirun)])
def test_the_cause_is_named_although_its_victims_end_sooner(launch, flags):
    program = """
if rank == 1:
    print("ValueError: the cause", file=sys.stderr)
    time.sleep(0.6)
    sys.exit(3)
time.sleep(0.2)
print("RuntimeError: Connection closed by peer [127.0.0.1]:29500", file=sys.stderr)
sys.exit(1)
"""
    job = launch(program, "--world_size", "2", *flags)
    assert job.wait() == 3
    assert job.err.read_text().endswith(
        "rank 1 failed first (exit code 3); the end of its output:\n[rank 1] ValueError: the cause\n"
    )


def test_a_rank_that_does_not_stop_is_killed(launch):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank:\n    sys.exit(9)\ntime.sleep(300)"
    job = launch(program, "--world_size", "2")
    started = time.monotonic()
    assert job.wait() == 9
    assert time.monotonic() - started < processes.SETTLE + processes.GRACE + 4


def test_a_killed_rank(launch):
    job = launch("print('pid', os.getpid(), flush=True)\ntime.sleep(300)", "--world_size", "3")
    job.wait_for("pid", 3)
    os.kill(int(re.search(r"\[rank 1\] pid (\d+)", job.out.read_text())[1]), signal.SIGKILL)
    assert job.wait(15) == 128 + signal.SIGKILL
    assert "rank 1 failed first (killed by SIGKILL)" in job.err.read_text()


GRANDCHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', __file__])\n"


@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.exit(4) if rank else time.sleep(300)"])
def test_what_a_rank_has_started_ends_with_it(launch, ending):
    job = launch(GRANDCHILD + "time.sleep(0.3)\n" + ending, "--world_size", "2")
    assert job.wait() == (4 if "4" in ending else 0)
    assert not job.running()


@pytest.mark.parametrize("flags", [[], pytest.param(["--use_mpi"], marks=needs_mpirun)])
def test_a_killed_launcher_leaves_nothing(launch, flags):
    """Not even what the ranks have started, and ranks that ignore every polite signal."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if not flags else ""
    job = launch(ignore + GRANDCHILD + "print('up', flush=True)\ntime.sleep(300)", "--world_size", "2", *flags)
    job.wait_for("up", 2)
    assert len(job.running()) >= 4
    job.process.kill()
    job.wait()
    assert soon(lambda: not job.running(), 10)


WAITS = """
def note(number, _):
    print("got", signal.Signals(number).name, flush=True)
    got.append(number)
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
print("up", flush=True)
while not got:
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(CODE if CODE else rank)
"""


@pytest.mark.parametrize("flags", [[], pytest.param(["--use_mpi"], marks=needs_mpirun)])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_all_ranks_once_and_their_code_comes_back(launch, name, flags):
    job = launch(WAITS.replace("CODE", "75"), "--world_size", "3", *flags)
    job.wait_for("up", 3)
    job.process.send_signal(getattr(signal, name))
    assert job.wait() == 75
    assert sorted(line for line in job.out.read_text().splitlines() if "got" in line) == [
        f"[rank {rank}] got {name}" for rank in range(3)
    ]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_without_one_code_of_their_own_it_is_the_signals(launch, name):
    job = launch(WAITS.replace("CODE", "0"), "--world_size", "2")
    job.wait_for("up", 2)
    job.process.send_signal(getattr(signal, name))
    assert job.wait() == 128 + getattr(signal, name)
    assert "failed first" not in job.err.read_text()


def test_ranks_that_save_after_a_signal_are_not_hurried_by_one_that_is_done(launch):
    program = WAITS.replace("time.sleep(0.5)", "time.sleep(0 if rank else 3)\nprint('saved', flush=True)")
    job = launch(program.replace("CODE", "75"), "--world_size", "2")
    job.wait_for("up", 2)
    job.process.terminate()
    assert job.wait() == 75
    assert job.out.read_text().count("saved") == 2
    assert job.out.read_text().count("got") == 2


ASKED = """
def end(number, _):
    print("got", signal.Signals(number).name, flush=True)
    time.sleep(1.5 * (rank == 0))
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
print("pid", os.getpid(), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "flags"),
    [("SIGTERM", []), ("SIGUSR1", []), pytest.param("SIGUSR1", ["--use_mpi"], marks=needs_mpirun)],
)
def test_when_one_rank_is_preempted_the_others_are_asked_and_have_the_time_to_save(launch, name, flags):
    """Rank 0 saves for longer than ranks have that outlive a failed one."""
    job = launch(ASKED + "time.sleep(300)", "--world_size", "2", *flags)
    job.wait_for("pid", 2)
    os.kill(int(re.search(r"\[rank 1\] pid (\d+)", job.out.read_text())[1]), getattr(signal, name))
    assert job.wait() == 75
    said = job.out.read_text()
    assert (said.count("saved"), said.count("[rank 0] got SIGTERM"), said.count("got")) == (2, 1, 2)
    assert "failed first" not in job.err.read_text()


def test_a_victim_of_a_preempted_rank_changes_no_exit_code(launch):
    victim = "if rank:\n    print('Connection closed by peer', file=sys.stderr)\n    sys.exit(1)\n"
    job = launch("time.sleep(rank)\n" + victim + "sys.exit(75)", "--world_size", "2")
    assert job.wait() == 75
    assert "failed first" not in job.err.read_text()


def test_a_failed_rank_is_not_taken_for_a_preempted_one(launch):
    """The others end as if they were preempted, since the launcher asks them to."""
    job = launch(ASKED + "if rank == 1:\n    sys.exit(3)\ntime.sleep(300)", "--world_size", "3")
    assert job.wait() == 3
    assert "rank 1 failed first (exit code 3)" in job.err.read_text()


def test_a_preempted_rank_whose_peers_do_not_end_in_time(launch):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank:\n    sys.exit(75)\ntime.sleep(300)"
    job = launch(program, "--world_size", "2", "--grace_seconds", "1.5")
    assert job.wait(20) == 128 + signal.SIGKILL
    assert "killed, not ended after 1.5 seconds (--grace_seconds): rank 0\n" in job.err.read_text()


def test_a_second_interrupt_kills(launch):
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(300)"
    job = launch(program, "--world_size", "2")
    job.wait_for("up", 2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    assert len(job.running()) == 2
    job.process.send_signal(signal.SIGINT)
    assert job.wait(5) == 128 + signal.SIGINT


@pytest.mark.parametrize(("name", "patience"), [("SIGTERM", 1.0), ("SIGINT", 3.0)])
def test_after_a_termination_ranks_have_a_while_and_after_an_interrupt_any(
    tmp_path, monkeypatch, capfd, name, patience
):
    """They ignore both; a second interrupt ends them, unless the while was over before."""
    script, number = tmp_path / "program.py", getattr(signal, name)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script.write_text(HEAD + ignore + "open(f'up{rank}', 'w')\ntime.sleep(300)")
    monkeypatch.chdir(tmp_path)
    before, times, ended = signal.getsignal(number), [], threading.Event()

    def send() -> None:
        soon(lambda: len(list(tmp_path.glob("up*"))) == 2, 10)
        times.append(time.monotonic())
        os.kill(os.getpid(), number)
        if name == "SIGINT" and not ended.wait(patience):
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert DistributedRunner([[str(script)]], world_size=2, grace_seconds=1.0).run() == 128 + number
    ended.set()
    sender.join()
    assert patience <= time.monotonic() - times[0] < patience + 3
    said = "killed, not ended after 1 seconds (--grace_seconds): rank 0, 1\n"
    assert capfd.readouterr().err == (said if name == "SIGTERM" else "")
    assert signal.getsignal(number) == before


def test_lines_of_eight_ranks_are_whole_and_in_order(launch):
    program = """
for number in range(10_000):
    os.write(1 + number % 2, b"%d line %d %s\\n" % (rank, number, b"x" * (number % 90)))
for stream in (sys.stdout, sys.stderr):
    print(str(rank) * 100_000, file=stream)
sys.stdout.write("the end")
"""
    job = launch(program, "--world_size", "8")
    assert job.wait(60) == 0
    for path, odd in ((job.out, 0), (job.err, 1)):
        lines = path.read_text().splitlines()
        for rank in range(8):
            own = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
            numbers = range(odd, 10_000, 2)
            last = [str(rank) * 100_000, *(["the end"] if not odd else [])]
            assert own == [f"{rank} line {number} {'x' * (number % 90)}" for number in numbers] + last
        assert len(lines) == 8 * (5_001 + (not odd))


@needs_mpirun
def test_lines_through_mpirun_are_whole_too(launch):
    program = "for number in range(300):\n    print(rank, number, str(rank) * (number * 97 % 20_000))"
    job = launch(program, "--world_size", "3", "--use_mpi")
    assert job.wait(60) == 0
    lines = job.out.read_text().splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {rank} {n} {str(rank) * (n * 97 % 20_000)}" for n in range(300)]
    assert len(lines) == 900


ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("flag", ["--use_deepspeed", pytest.param("--use_mpi", marks=needs_mpirun)])
def test_ranks_find_each_other(launch, flag):
    job = launch(ALL_REDUCE, "--world_size", "2", flag)
    assert job.wait(60) == 0, job.err.read_text()
    assert sorted(job.out.read_text().splitlines()) == ["[rank 0] sum 3.0", "[rank 1] sum 3.0"]


def test_two_at_once_while_the_default_port_is_taken_and_again_after_a_crash(launch):
    taken = socket.socket()
    try:
        taken.bind(("", 29500))
        taken.listen()
    except OSError:
        pass  # taken already
    with taken:
        crash = launch(ALL_REDUCE.replace("print(", "os.kill(os.getpid(), 9) if rank else print("), "--world_size", "2")
        assert crash.wait(60) == 137
        jobs = [launch(ALL_REDUCE + "print(os.environ['MASTER_PORT'])", "--world_size", "2") for _ in range(2)]
        assert [job.wait(60) for job in jobs] == [0, 0], [job.err.read_text() for job in jobs]
    ports = [set(re.findall(r"\] (\d{5})$", job.out.read_text(), re.MULTILINE)) for job in jobs]
    assert [len(port) for port in ports] == [1, 1]
    assert ports[0] != ports[1]
    for port in (int(*port) for port in ports):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("", port))


def test_a_reader_that_leaves_ends_the_job(launch, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HEAD + "while True:\n    print('more', flush=True)\n    time.sleep(0.02)")
    command = [sys.executable, str(REPOSITORY / "gaudi_spawn.py"), "--world_size", "2", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"[rank ")
    process.stdout.close()
    try:
        assert process.wait(15) == 128 + signal.SIGTERM
    finally:
        process.kill()  # the guard ends the ranks


def test_in_a_thread_signals_stay_the_callers(tmp_path):
    script, codes = tmp_path / "program.py", []
    script.write_text("raise SystemExit(6)")
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: codes.append(DistributedRunner([[str(script)]], world_size=2).run()))
    thread.start()
    thread.join(20)
    assert codes == [6]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_program_that_is_not_there_is_one_error_and_leaves_nothing():
    from core.errors import UserError

    before = psutil.Process().children()
    with pytest.raises(UserError, match=r"rank 1 cannot be started \(/no/python\): No such file"):
        Processes("ranks", 2).run([(["sleep", "300"], dict(os.environ)), (["/no/python"], {})])
    assert psutil.Process().children() == before
