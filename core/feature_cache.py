"""Arrays that are computed once per row and kept on disk: what a frozen model makes of each row, for all epochs.

A folder of ``.npy`` files is complete or absent: it is filled under another name, its marker is written last, and then
it is renamed. Rows are shared out over the machine's processes, each of which writes its own into the same files.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from core import distributed
from core.errors import UserError, read_json_object, say, warn_once
from core.files import write_json

MARKER = "features.json"  # written last: the key, the number of rows, and each file's size
SAY_EVERY = 60  # seconds between two lines of progress
Arrays = Mapping[str, np.ndarray]


class StoredArray(np.memmap):
    """An array in a file, read-only. A process that gets it, forked or not, opens the file instead of a copy."""

    def __reduce__(self) -> Any:
        whole = isinstance(self.base, mmap.mmap)
        return (open_array, (self.filename,)) if whole else np.array(self).__reduce__()


def open_array(path: str | Path) -> StoredArray:
    """Map a ``.npy`` file into memory; nothing in it is unpickled.

    Raises:
        ValueError: it is no such file, or shorter than it says.
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds objects, not numbers")
        return StoredArray(path, dtype, "r", file.tell(), shape)


def cached(
    folder: Path,
    name: str,
    key: str,
    count: int,
    compute: Callable[[list[int]], Arrays],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Return arrays of ``count`` rows, read-only and left on disk: found there, or computed now. For all ranks.

    Args:
        folder: where such arrays are kept, on each machine; may be shared between them.
        name: what they are, for the folder's name and for messages.
        key: says all that they depend on; another key has arrays of its own.
        count: rows, 1 or more.
        compute: returns arrays by name, whose first axis is that of the row numbers that it gets: always
            ``batch_size`` of them, the last batch filled up with its last row. Ranks call it for different rows: it
            must not wait for other ranks.

    Raises:
        UserError: the folder cannot be written, e.g. it is full; all ranks raise it.
    """
    final = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    reason = distributed.together(lambda: _problem(final, key, count))
    machine = _machine()
    told = [json.loads(text) for text in distributed.gather_texts(json.dumps([machine, reason]))]
    ours = [rank for rank, (other, _) in enumerate(told) if other == machine]
    work = any(told[rank][1] is not None for rank in ours)
    if work and reason:
        warn_once(f"{reason}; it is computed anew")
    if any(reason is not None for _, reason in told):
        _compute(_Part(final, key, count, ours if work else [], compute, batch_size))
    found = distributed.together(lambda: _open(final))
    if not work:
        size = sum(array.nbytes for array in found.values()) / 1e6
        say(f"{final}: {count:,} rows, {size:,.1f} MB, kept from before")
    return found


def _machine() -> str:
    """The same for processes that have one file system and one set of process numbers, else not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _problem(folder: Path, key: str, count: int) -> str | None:
    """Why the arrays cannot be used: an empty text if there are none, None if they can."""
    if not folder.exists():
        return ""
    try:
        marker = read_json_object(folder / MARKER, "features")
        if (marker.get("key"), marker.get("count")) != (key, count):
            return f"{folder} has {marker.get('count')} rows of another key, not {count}"
        for file, size in marker["bytes"].items():
            if Path(file).name != file:
                return f"{folder} names the file {file!r:.200}, which is not in it"
            if (folder / file).stat().st_size != size:
                return f"{folder / file} was truncated or altered"
        if any(len(array) != count for array in _open(folder).values()):
            return f"{folder} has arrays of other lengths than {count}"
    except (UserError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{folder} cannot be read ({error})"
    return None


def _open(folder: Path) -> dict[str, np.ndarray]:
    files = read_json_object(folder / MARKER, "features")["bytes"]
    return {file.removesuffix(".npy"): open_array(folder / file) for file in files}


def _compute(part: _Part) -> None:
    """Fill the folder, all ranks in step: who has no work left, or none at all, learns of the others' errors."""
    rounds = int(max(_of_ranks(part.rounds)))
    try:
        first = distributed.together(part.make)
        distributed.together(lambda: part.begin(first))
        distributed.together(lambda: part.write(first))
        for _ in range(1, rounds):
            distributed.together(lambda: part.write(part.make()))
        distributed.together(part.flush)
        distributed.together(part.complete)
    finally:
        part.close()


def _of_ranks(number: int) -> list[int]:
    return [int(text) for text in distributed.gather_texts(str(number))]


@contextmanager
def _writing(what: Path) -> Iterator[None]:
    """An error of the system becomes one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{what} cannot be written: {reason}; make room or give another folder") from None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Part:
    """One rank's share of the rows: every so many batches one."""

    def __init__(
        self, final: Path, key: str, count: int, ours: list[int], compute: Callable[..., Arrays], batch_size: int
    ) -> None:
        self.final, self.key, self.count, self.compute, self.batch_size = final, key, count, compute, batch_size
        self.main = bool(ours) and distributed.rank() == ours[0]
        starts = range(0, count, batch_size) if ours else ()
        self.starts = list(starts[ours.index(distributed.rank()) :: len(ours)]) if ours else []
        self.rounds, self.made = len(self.starts), 0
        pid = distributed.gather_texts(str(os.getpid()))[ours[0] if ours else 0]  # of the rank that begins and ends
        self.folder = final.with_name(f".{final.name}.{socket.gethostname()}-{pid}.tmp")
        self.files, self.open = {}, ExitStack()
        self.said = time.monotonic()

    def make(self) -> tuple[int, Arrays]:
        """This rank's next rows, from the first of them on; none if there are no more."""
        if self.made == self.rounds:
            return self.count, {}
        start, self.made = self.starts[self.made], self.made + 1
        rows = list(range(start, min(start + self.batch_size, self.count)))
        arrays = self.compute(rows + rows[-1:] * (self.batch_size - len(rows)))
        return start, {name: np.ascontiguousarray(array[: len(rows)]) for name, array in arrays.items()}

    def begin(self, first: tuple[int, Arrays]) -> None:
        """Make the folder and the files, on one rank of the machine, and remove what killed runs have left."""
        if not self.main:
            return
        self._sweep()
        sizes = {name: self.count * array[0].nbytes for name, array in first[1].items()}
        size = sum(sizes.values()) / 1e6
        with _writing(self.final):
            self.folder.mkdir(parents=True)
            free = shutil.disk_usage(self.folder).free / 1e6
            if size > free:
                raise UserError(f"{self.final} needs {size:,.1f} MB, and {free:,.1f} MB are free; make room for it")
            for name, array in first[1].items():
                (self.folder / f"{name}.npy").write_bytes(self._header(array))
        say(f"{self.final}: {self.count:,} rows, {size:,.1f} MB, computed now and kept")

    def _sweep(self) -> None:
        for path in self.final.parent.glob(f".{self.final.name}.{socket.gethostname()}-*.tmp"):
            try:
                os.kill(int(path.stem.rpartition("-")[2]), 0)
            except (ProcessLookupError, ValueError):
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # another user's, and alive

    def _header(self, array: np.ndarray) -> bytes:
        shape = (self.count, *array.shape[1:])
        about = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file := BytesIO(), about)
        return file.getvalue()

    def write(self, rows: tuple[int, Arrays]) -> None:
        """Put rows at their place. Not through a map: a full disk would kill the process instead of being told."""
        start, arrays = rows
        for name, array in arrays.items():
            header, path = self._header(array), self.folder / f"{name}.npy"
            with _writing(self.final):
                if name not in self.files:
                    self.files[name] = self.open.enter_context(open(path, "r+b"))  # noqa: SIM115 - see `close`
                    if self.files[name].read(len(header)) != header:
                        raise ValueError(f"{name}: {array.dtype} {array.shape[1:]} on rank {distributed.rank()} alone")
                self.files[name].seek(len(header) + start * array[0].nbytes)
                self.files[name].write(array.data)
        if self.main and self.made < self.rounds and time.monotonic() - self.said > SAY_EVERY:
            self.said = time.monotonic()
            say(f"{self.final}: {start / self.count:.0%}")

    def flush(self) -> None:
        with _writing(self.final):
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())

    def complete(self) -> None:
        """Write the marker and give the folder its name, on one rank of the machine, when all have written."""
        if not self.main:
            return
        with _writing(self.final):
            sizes = {path.name: path.stat().st_size for path in sorted(self.folder.glob("*.npy"))}
            write_json(self.folder / MARKER, {"key": self.key, "count": self.count, "bytes": sizes})
            if _problem(self.final, self.key, self.count) is None:
                return  # another run, or another machine on this file system, was faster
            shutil.rmtree(self.final, ignore_errors=True)
            _sync(self.folder)
            try:
                self.folder.rename(self.final)
            except OSError:
                if _problem(self.final, self.key, self.count) is not None:
                    raise
                return  # faster by a moment
            _sync(self.final.parent)

    def close(self) -> None:
        """Leave nothing open, and nothing half written."""
        with suppress(OSError):
            self.open.close()
        if self.main:
            shutil.rmtree(self.folder, ignore_errors=True)
