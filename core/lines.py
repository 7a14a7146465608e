"""Output of several processes as whole lines, marked with the rank, also through engines that cut and mix it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import sys
import termios
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

BAR_EVERY = 5.0  # seconds between two states of a progress bar, which has no lines
BEAT_EVERY = 5.0  # seconds between a keeper's signs of life on stdout: an ssh that nobody reads notices at the next
PIECE = 3900  # bytes: with its head less than a pipe takes in one piece
# A line on its way through mpirun or ssh, which cut and mix what they carry: rank, stream (x: exit code), whether more
# of the line comes, text.
FRAME = re.compile(rb"\x1e(\d+)([12x])([+.])(.*)", re.DOTALL)


@dataclass
class Stream:
    """One pipe: whose it is, where its lines go (1 or 2), what is no whole line yet, when a bar was shown."""

    rank: int
    to: int
    rest: bytearray = field(default_factory=bytearray)
    shown: float = 0.0


class Lines:
    """Reads pipes and writes whole lines, one write each.

    Args:
        kind: ``ranks``: lines are marked ``[rank N]``; ``keeper``: they become frames on stderr; ``engine``: frames
            that keepers sent become marked lines, what else an engine says stays as it is.
        marked: whether lines carry a mark at all.
        ended: called with rank and exit code, for each frame that tells them.

    Attributes:
        tails: the last lines that each rank wrote to stderr.
        lost: nobody reads the output any more.
    """

    def __init__(self, kind: str, marked: bool, ended: Callable[[int, int], None]) -> None:
        self.kind, self.marked, self.ended = kind, marked, ended
        self.streams: dict[int, Stream] = {}  # by descriptor
        self.tails: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=60))
        self.lost = False
        self._parts: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self._frames, self._beat = bytearray(), time.monotonic()
        self._poller = select.poll()
        if kind == "keeper":
            for descriptor in (1, 2):
                self._poller.register(descriptor, 0)  # tells when its reader is gone

    def follow(self, pipe: BinaryIO, rank: int, to: int) -> None:
        """Read a process's pipe from now on; it is closed here."""
        descriptor = os.dup(pipe.fileno())
        pipe.close()
        self.streams[descriptor] = Stream(rank, to)
        self._poller.register(descriptor, select.POLLIN)

    def turn(self, milliseconds: int) -> bool:
        """Pass on what comes within that time; return whether something did."""
        ready = self._poller.poll(milliseconds)
        for descriptor, _ in ready:
            if descriptor in self.streams:
                self._read(descriptor)
            else:
                self.lost = True
                self._poller.unregister(descriptor)
        self._show_bars()
        if self.kind == "keeper" and time.monotonic() - self._beat >= BEAT_EVERY:
            self._beat = time.monotonic()
            with suppress(BrokenPipeError):
                write(1, b"\x1e01+\n")  # nothing, and more of it comes
        self.flush()
        return bool(ready)

    def close(self) -> None:
        """Stop reading, whoever may still write."""
        for descriptor in self.streams:
            os.close(descriptor)
        self.streams.clear()

    def _read(self, descriptor: int) -> None:
        stream, data = self.streams[descriptor], os.read(descriptor, 65536)
        if not data:
            self._poller.unregister(descriptor)
            os.close(descriptor)
            del self.streams[descriptor]
            data = b"\n" if stream.rest else b""  # a last line without an end gets one
        stream.rest += data
        if b"\n" in data:
            *lines, rest = bytes(stream.rest).split(b"\n")
            stream.rest = bytearray(rest)
            for line in lines:
                self._pass_on(stream, line)

    def _show_bars(self) -> None:
        """Of a progress bar, which overwrites itself, show the state now and then, and the last one."""
        for stream in self.streams.values():
            if b"\r" in stream.rest and time.monotonic() - stream.shown >= BAR_EVERY:
                stream.shown = time.monotonic()
                stream.rest = bytearray(b"\r" + last_state(stream.rest))
                self._pass_on(stream, bytes(stream.rest))

    def _pass_on(self, stream: Stream, line: bytes) -> None:
        """Give a line, or an engine's piece of one, to whom it belongs."""
        frame = FRAME.search(line) if self.kind == "engine" else None
        if frame is None:
            self.emit(None if self.kind == "engine" else stream.rank, stream.to, last_state(line))
        elif frame[2] == b"x":
            self.ended(int(frame[1]), int(frame[4]))
        else:
            key = (int(frame[1]), int(frame[2]))
            self._parts[key] += frame[4]
            if frame[3] == b".":
                self.emit(*key, self._parts.pop(key))

    def emit(self, rank: int | None, to: int, line: bytes) -> None:
        """Write one line at once, marked with its rank; remember what goes to stderr."""
        if self.kind == "keeper":
            pieces = [line[at : at + PIECE] for at in range(0, len(line), PIECE)] or [b""]
            for number, piece in enumerate(pieces, start=1):
                self._frames += b"\x1e%d%d%s%s\n" % (rank, to, b"+" if number < len(pieces) else b".", piece)
            return
        if to == 2 and rank is not None:
            self.tails[rank].append(line)
        if self.lost:
            return
        try:
            write(to, self.mark(rank) + line + b"\n")
        except BrokenPipeError:
            self.lost = True

    def mark(self, rank: int | None) -> bytes:
        """What stands before the lines of a rank."""
        return b"[rank %d] " % rank if self.marked and rank is not None else b""

    def tell_end(self, rank: int, code: int) -> None:
        """A keeper's last word: its rank's exit code."""
        self._frames += b"\x1e%dx.%d\n" % (rank, code)

    def flush(self) -> None:
        """Send a keeper's frames, each piece into an empty pipe: so the engine carries it in one piece, too."""
        while self._frames:
            cut = self._frames.rfind(b"\n", 0, select.PIPE_BUF) + 1
            piece, self._frames = self._frames[:cut], self._frames[cut:]
            for _ in range(20_000):  # a reader that stands still for ten seconds gets it nevertheless
                if self.lost or not int.from_bytes(fcntl.ioctl(2, termios.FIONREAD, bytes(4)), sys.byteorder):
                    break
                time.sleep(0.0005)
            with suppress(BrokenPipeError):
                write(2, piece)


def last_state(line: bytes | bytearray) -> bytes:
    """What a terminal would show of a line that returned to its start."""
    return bytes(line).rstrip(b"\r").rpartition(b"\r")[2]


def write(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of it, in one call where the system takes it.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # a terminal that another program set so
            select.select([], [descriptor], [])
