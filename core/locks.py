"""An output folder is one run's: a lock of the operating system, which ends with the process that holds it."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from core.errors import UserError, warn_once

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None

FILE = ".lock"  # stays in the folder: a run that removed it could remove the one that another has just locked
SETTLE_S = 1.0  # in which a new holder has written who it is
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: dict[tuple[int, int], tuple[int, int]] = {}  # (device, inode) of a lock file: its descriptor, and whose it is


def hold(folder: Path) -> None:
    """Take an output folder for this process, until it ends or calls `release`. It may take the same one again.

    The lock is a POSIX record lock on ``folder/.lock``: it is gone when its process is, however that ends; processes
    that it has forked, which may outlive it, do not have it; and over NFS it also holds between machines. The system
    drops it if its process closes any descriptor of the file, which is therefore never opened again here.

    Where the file system has no locks, that is said once, and nothing is refused.

    Raises:
        UserError: another process has the folder, and the line tells which; or the file cannot be made.
    """
    if fcntl is None:
        return warn_once(f"{folder}: no POSIX locks on this system; other runs are not kept out")
    _forget_removed()
    path, until = folder / FILE, time.monotonic() + SETTLE_S
    while not _is_ours(path):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"--output_dir: {path} cannot be written to: {error.strerror}") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder, problem = _read(descriptor), error
            os.close(descriptor)
        else:
            _write(descriptor)
            found = os.fstat(descriptor)
            _held[found.st_dev, found.st_ino] = descriptor, os.getpid()
            if found.st_nlink or time.monotonic() > until:
                return None
            continue  # it was removed before it was locked
        if problem.errno in _NO_LOCKS:
            return warn_once(
                f"{folder}: no locks on that file system ({problem.strerror}); other runs are not kept out"
            )
        if problem.errno not in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"--output_dir: {path} cannot be locked: {problem.strerror}")
        if time.monotonic() > until or not _may_be_old(holder):
            raise UserError(
                f"--output_dir: {folder} is in use by another run{_named(holder)}; give another, or wait for its end"
            )
        time.sleep(0.02)
    return None


def release(folder: Path) -> None:
    """Let other processes have a folder that this one holds; nothing happens to one that it does not hold."""
    path = folder / FILE
    if _is_ours(path):
        found = path.stat()
        descriptor, _ = _held.pop((found.st_dev, found.st_ino))
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _forget_removed() -> None:
    """Close the lock files of folders that were removed; forget those of a process that forked this one."""
    for key, (descriptor, owner) in list(_held.items()):
        if owner != os.getpid():
            del _held[key]  # its number may be another file's by now
        elif not os.fstat(descriptor).st_nlink:
            del _held[key]
            os.close(descriptor)


def _is_ours(path: Path) -> bool:
    """Whether this process, and not the one that forked it, has locked the file that is at ``path`` now."""
    try:
        found = path.stat()
    except OSError:
        return False
    return _held.get((found.st_dev, found.st_ino), (0, 0))[1] == os.getpid()


def _write(descriptor: int) -> None:
    record = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with suppress(OSError):  # on a full disk the lock holds as well
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _read(descriptor: int) -> dict[str, str | int]:
    """What a holder has written of itself; nothing if it has not done so, or if the file is not one of ours."""
    try:
        record = json.loads(os.pread(descriptor, 1000, 0))
        return {"host": str(record["host"]), "pid": int(record["pid"]), "since": str(record["since"])}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}


def _named(holder: dict[str, str | int]) -> str:
    return f" (process {holder['pid']} on {holder['host']}, since {holder['since']})" if holder else ""


def _may_be_old(holder: dict[str, str | int]) -> bool:
    """Whether a record is not the present holder's: there is none yet, or it names a process that is dead."""
    if holder and holder["host"] == socket.gethostname():
        try:
            os.kill(int(holder["pid"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return False  # another user's
    return not holder
