"""Reading ahead: a killed worker is one line, signals are the main process's; the rest is tested in `test_data`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from core.errors import UserError
from core.workers import read_ahead


class Deadly(Dataset):
    """Item 2 kills the process that makes it, as a system without memory does; item 7 is a bug."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(number)


class Faulty(Deadly):
    def __getitem__(self, number: int) -> torch.Tensor:
        raise RuntimeError("a bug")


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises(UserError, match=r"a process of --dataloader_num_workers 1 ended \(.*\); .*give fewer"):
        list(read_ahead(Deadly(), workers=1, pin_memory=False))


def test_a_bug_in_a_worker_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Original Traceback.*a bug"):
        list(read_ahead(Faulty(), workers=1, pin_memory=False))


class Slow(Deadly):
    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor(number)


def forked(main: Callable[[], int]) -> int:
    """Run a function in a process that leads a session; return its exit code."""
    if not (pid := os.fork()):
        code = 99
        try:
            os.setsid()
            code = main()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def from_outside(numbers: tuple[int, ...], *pids: int) -> None:
    """Send signals from another process: what a process itself sends to its workers is an order."""
    words = "; ".join(f"kill -{int(number)} {' '.join(map(str, pids))}" for number in numbers)
    subprocess.run(["sh", "-c", words], start_new_session=True, check=True)


def workers_of(batches: Iterator[torch.Tensor]) -> list[psutil.Process]:
    assert next(batches) == 0
    return psutil.Process().children()


@pytest.mark.processes
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_schedulers_signals_to_all_processes_leave_workers_at_work(after):
    """Also one that comes while they start."""

    def main() -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        pid, found = os.getpid(), []
        if not after:  # as soon as there is one
            sender = f"while ! pgrep -P {pid} -n > /dev/null; do :; done; kill -15 -{pid}; kill -10 -{pid}"
            subprocess.Popen(["setsid", "sh", "-c", sender])
        for item in read_ahead(Slow(), workers=2, pin_memory=False):
            found.append(int(item))
            if len(found) == after:
                from_outside((signal.SIGTERM, signal.SIGUSR1), -pid)
        return int(found != list(range(9)))

    assert forked(main) == 0


@pytest.mark.processes
def test_a_worker_ends_when_its_main_process_says_so():
    def main() -> int:
        batches = read_ahead(Slow(), workers=2, pin_memory=False)  # held: without it they end by themselves
        workers = workers_of(batches)
        for worker in workers:
            worker.terminate()
        gone, _ = psutil.wait_procs(workers, timeout=3)
        return int([process.returncode for process in gone] != [0, 0])

    assert forked(main) == 0


@pytest.mark.processes
def test_workers_end_with_their_main_process_at_once(tmp_path):
    def main() -> int:
        batches = read_ahead(Slow(), workers=2, pin_memory=False)  # held: without it they end by themselves
        workers = workers_of(batches)
        (tmp_path / "pids").write_text(" ".join(str(worker.pid) for worker in workers))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert forked(main) == -signal.SIGKILL
    pids, end = [int(pid) for pid in (tmp_path / "pids").read_text().split()], time.monotonic() + 2
    assert len(pids) == 2

    def alive() -> list[int]:
        return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]

    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive()
