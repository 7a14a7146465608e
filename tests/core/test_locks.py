"""One run per output folder: real processes, real signals, forks that outlive their parent, twenty at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from core import locks
from core.errors import UserError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(locks.fcntl is None, reason="no POSIX locks on this system"),
]
Fork = Callable[[Callable[[], object]], int]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Call a function in a process of its own, and return its id; its exit code is 2 after a `UserError`."""
    started: list[int] = []

    def begin(work: Callable[[], object]) -> int:
        child = os.fork()
        if not child:
            code = 1
            try:
                work()
                code = 0
            except UserError as error:
                print(error, flush=True)
                code = 2
            finally:
                os._exit(code)
        started.append(child)
        return child

    yield begin
    for child in started:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    for descriptor, _ in locks._held.values():
        os.close(descriptor)
    locks._held.clear()


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hold_and_wait(folder: Path) -> None:
    locks.hold(folder)
    (folder / "held").touch()
    time.sleep(60)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_second_process_is_told_who_has_the_folder(tmp_path, fork):
    child = fork(lambda: hold_and_wait(tmp_path))
    wait_for(tmp_path / "held")
    begin = time.monotonic()
    with pytest.raises(UserError) as error:
        locks.hold(tmp_path)
    assert time.monotonic() - begin < locks.SETTLE_S / 2
    assert f"--output_dir: {tmp_path} is in use" in str(error.value)
    assert f"(process {child} on {socket.gethostname()}, since {time.strftime('%Y-')}" in str(error.value)
    with pytest.raises(UserError):  # asking does not loosen it
        locks.hold(tmp_path)


def test_a_killed_run_leaves_the_folder_free_at_once(tmp_path, fork):
    child = fork(lambda: hold_and_wait(tmp_path))
    wait_for(tmp_path / "held")
    os.kill(child, signal.SIGKILL)
    assert code_of(child) == -signal.SIGKILL
    assert (tmp_path / locks.FILE).stat().st_size
    locks.hold(tmp_path)
    assert locks._read(locks._held.popitem()[1][0])["pid"] == os.getpid()


def test_a_process_that_a_killed_run_had_forked_does_not_keep_it(tmp_path, fork):
    def run() -> None:
        locks.hold(tmp_path)
        if worker := os.fork():
            (tmp_path / "worker.tmp").write_text(str(worker))
            (tmp_path / "worker.tmp").rename(tmp_path / "worker")
        time.sleep(60)

    child = fork(run)
    wait_for(tmp_path / "worker")
    worker = int((tmp_path / "worker").read_text())
    try:
        with pytest.raises(UserError, match=f"process {child} "):
            locks.hold(tmp_path)
        os.kill(child, signal.SIGKILL)
        assert code_of(child) == -signal.SIGKILL
        os.kill(worker, 0)  # it is still there
        locks.hold(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_same_process_may_hold_it_again(tmp_path, fork, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    before = len(os.listdir("/proc/self/fd"))
    for folder in (tmp_path / "run", tmp_path / "run" / ".." / "run", tmp_path / "link"):
        locks.hold(folder)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert code_of(fork(lambda: locks.hold(tmp_path / "link"))) == 2
    monkeypatch.chdir(tmp_path)
    assert code_of(fork(lambda: locks.hold(Path("run")))) == 2
    locks.release(tmp_path / "link")
    assert code_of(fork(lambda: locks.hold(tmp_path / "run"))) == 0


def test_a_forked_process_is_judged_as_its_own(tmp_path, fork):
    """It neither has, nor gives away, what its parent holds; closing what it has inherited changes nothing."""
    locks.hold(tmp_path)

    def child() -> None:
        locks.release(tmp_path)
        for descriptor, _ in locks._held.values():
            os.close(descriptor)
        locks.hold(tmp_path)

    assert code_of(fork(child)) == 2
    assert str(os.getpid()) in (tmp_path / locks.FILE).read_text()


def test_what_is_released_is_free_and_names_nobody(tmp_path, fork):
    locks.release(tmp_path)  # not held: nothing
    assert not (tmp_path / locks.FILE).exists()
    locks.hold(tmp_path)
    assert code_of(fork(lambda: locks.hold(tmp_path))) == 2
    locks.release(tmp_path)
    assert (tmp_path / locks.FILE).read_bytes() == b""
    assert code_of(fork(lambda: locks.hold(tmp_path))) == 0
    assert not locks._held


def test_a_folder_that_was_removed_and_made_again_is_another_one(tmp_path, fork):
    folder = tmp_path / "run"
    folder.mkdir()
    locks.hold(folder)
    (folder / locks.FILE).unlink()
    folder.rmdir()
    folder.mkdir()
    locks.hold(folder)
    assert code_of(fork(lambda: locks.hold(folder))) == 2


def test_one_of_twenty_that_start_at_once_wins(tmp_path, fork):
    def racer() -> None:
        wait_for(tmp_path / "go")
        hold_and_wait(tmp_path)

    children = [fork(racer) for _ in range(20)]
    (tmp_path / "go").touch()
    codes, until = {}, time.monotonic() + 10
    while len(codes) < 19 and time.monotonic() < until:
        ended = [os.waitpid(child, os.WNOHANG) for child in children if child not in codes]
        codes |= {child: os.waitstatus_to_exitcode(status) for child, status in ended if child}
        time.sleep(0.01)
    assert list(codes.values()) == [2] * 19
    (winner,) = set(children) - set(codes)
    wait_for(tmp_path / "held")
    with pytest.raises(UserError, match=f"process {winner} "):
        locks.hold(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"host": 1, "pid": "x", "since": 0}', b"\xff\x00" * 9000])
def test_a_holder_that_cannot_be_read_is_not_named(tmp_path, fork, monkeypatch, content):
    monkeypatch.setattr(locks, "SETTLE_S", 0.05)
    child = fork(lambda: hold_and_wait(tmp_path))
    wait_for(tmp_path / "held")
    (tmp_path / locks.FILE).write_bytes(content)
    with pytest.raises(UserError, match="in use by another run; give another"):
        locks.hold(tmp_path)
    os.kill(child, 0)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_holder_that_has_not_yet_written_who_it_is_is_waited_for(tmp_path, fork, earlier):
    if earlier:  # an earlier run that was killed has left its own
        child = fork(lambda: hold_and_wait(tmp_path))
        wait_for(tmp_path / "held")
        os.kill(child, signal.SIGKILL)
        code_of(child)
        (tmp_path / "held").unlink()
    write = locks._write

    def slow() -> None:
        locks._write = lambda descriptor: ((tmp_path / "locked").touch(), time.sleep(0.1), write(descriptor))
        hold_and_wait(tmp_path)

    child = fork(slow)
    wait_for(tmp_path / "locked")
    with pytest.raises(UserError, match=f"process {child} "):
        locks.hold(tmp_path)


def test_descriptors_of_removed_folders_are_closed(tmp_path):
    """Else a process that trains many times, each in a folder that it removes, would run out of them."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        locks.hold(folder)
        shutil.rmtree(folder)
    assert len(locks._held) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        locks.hold(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: no locks on that file system ({os.strerror(code)}); other runs are not kept out"
    ]
    assert len(os.listdir("/proc/self/fd")) == before
    locks.release(tmp_path)


def test_a_system_without_posix_locks_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "fcntl", None)
    for _ in range(2):
        locks.hold(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: no POSIX locks on this system; other runs are not kept out"
    ]
    locks.release(tmp_path)


def test_what_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--output_dir: .*gone/\.lock cannot be written to: No such file"):
        locks.hold(tmp_path / "gone")
    (tmp_path / locks.FILE).mkdir()
    with pytest.raises(UserError, match=r"--output_dir: .*\.lock cannot be written to: Is a directory"):
        locks.hold(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    (tmp_path / locks.FILE).rmdir()
    with pytest.raises(UserError, match="cannot be locked: Input/output error"):
        locks.hold(tmp_path)
