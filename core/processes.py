"""Runs processes side by side until all have ended: signals passed on, the first failure named, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGALRM, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2

from core.errors import UserError
from core.lines import Lines, write
from core.preemption import EXIT_CODE

SETTLE = 1.0  # seconds in which ranks that end because another one failed still end by themselves
GRACE = 5.0  # seconds from SIGTERM to SIGKILL, for what outlives a failed rank
SAVING = 30.0  # the same after a signal from outside, when ranks may be saving, unless the user says otherwise

# Which signals are passed on, and as what. mpirun ends the job at once on INT and TERM, but hands others on: through it
# the two travel under other names, and get their own back before the rank. DeepSpeed's launcher knows TERM only; a
# recipe takes USR1 for the same.
PASSED = {SIGINT: SIGINT, SIGTERM: SIGTERM, SIGUSR1: SIGUSR1}
ENGINE_SIGNALS = {
    "mpirun": {SIGINT: SIGALRM, SIGTERM: SIGUSR2, SIGUSR1: SIGUSR1},
    "deepspeed": dict.fromkeys(PASSED, SIGTERM),
}
KEEPER_SIGNALS = PASSED | {SIGALRM: SIGINT, SIGUSR2: SIGTERM}

# What a rank says when another one is gone: not the cause that somebody looks for.
PEER_GONE = re.compile(
    rb"connection (was |has been )?(closed|reset|refused)|recv failed|sendbytes failed|recvvalue failed|broken pipe|"
    rb"remote process exited|socket (timeout|closed)|(nccl|hccl|dist)\w*error.*(remote|peer|closed)",
    re.IGNORECASE,
)
# Ends the process groups that it was told of when the launcher is gone without a word, even by SIGKILL. Unlike a death
# signal of the kernel's it reaches what the ranks have started, too.
GUARD = """
import os, signal, sys
for name in "SIGINT", "SIGTERM", "SIGHUP":
    signal.signal(getattr(signal, name), signal.SIG_IGN)
groups = sys.stdin.read().split()
for group in groups if "done" not in groups else ():
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""


class Processes:
    """Processes that run together, each in a session of its own.

    Args:
        kind: ``ranks``; ``engine``, one program that starts the ranks through keepers; or ``keeper``, of one rank.
        size: number of ranks of the whole job. Lines of a single one are not marked.
        signals: which are passed on, as what.
        first: rank of the first process.
        grace: seconds from SIGTERM, or the first rank's end by `preemption`, until ranks that still run are killed.
    """

    def __init__(
        self, kind: str, size: int, signals: dict[int, int] = PASSED, first: int = 0, grace: float = SAVING
    ) -> None:
        self.kind, self.size, self.signals, self.first, self.grace = kind, size, signals, first, grace
        self.lines = Lines(kind, size > 1, self.end)
        self.alive: dict[int, subprocess.Popen] = {}  # by rank
        self.codes: dict[int, int] = {}  # of ranks that have ended
        self.failures: list[tuple[float, int, int]] = []  # time, rank, exit code
        self.received: list[int] = []
        self.engine_code = 0
        self.steps = [signals[SIGTERM], SIGKILL]  # how what does not end is ended, from `next_at` on
        if kind == "engine":
            self.steps.insert(1, SIGTERM)  # it ends its ranks, on all machines, before it is ended
        self.next_at, self.patient = float("inf"), False

    def run(self, commands: Sequence[tuple[list[str], dict[str, str]]]) -> int:
        """Run the commands (arguments, environment) until all have ended; return the exit code.

        It is that of the rank which failed first (128 + signal); after SIGINT or SIGTERM 128 + signal, unless all ranks
        ended with one code of their own; after a preemption 75, whichever rank was asked.

        Raises:
            UserError: a process cannot be started.
        """
        sys.stdout.flush()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        guard = subprocess.Popen([sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, **quiet)
        try:
            with self.handlers():
                for rank, (argv, env) in enumerate(commands, start=self.first):
                    if not self.received:
                        self.start(rank, argv, env, guard.stdin.fileno(), self.kind != "ranks" or len(commands) > 1)
                self.watch()
        finally:
            for process in self.alive.values():
                kill_group(process.pid)
                process.wait()
            with suppress(BrokenPipeError):
                guard.communicate(b"done")
            self.lines.close()
        if self.kind == "keeper":
            return self.codes.get(self.first, 128 + SIGTERM)
        self.report()
        return self.exit_code()

    def start(self, rank: int, argv: list[str], env: dict[str, str], guard: int, piped: bool) -> None:
        """Start one process; the guard knows its group at once. A single rank keeps terminal and standard input."""
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL} if piped else {}
        try:
            process = subprocess.Popen(argv, env=env, bufsize=0, start_new_session=True, **pipes)
        except OSError as error:
            raise UserError(f"rank {rank} cannot be started ({argv[0]}): {error.strerror}") from None
        self.alive[rank] = process
        os.write(guard, b"%d\n" % process.pid)
        if piped:
            self.lines.follow(process.stdout, rank, 1)
            self.lines.follow(process.stderr, rank, 2)

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Receive signals while the processes run. Only a main thread can; elsewhere they are the caller's."""
        main = threading.current_thread() is threading.main_thread()
        numbers = KEEPER_SIGNALS if self.kind == "keeper" else PASSED
        before = {number: signal.signal(number, self.receive) for number in numbers if main}
        try:
            yield
        finally:
            for number, handler in before.items():  # a keeper is done; mpirun would hang if a late signal killed it
                signal.signal(number, signal.SIG_IGN if self.kind == "keeper" else handler)

    def receive(self, number: int, _frame: object = None) -> None:
        """Pass a signal on. It kills nobody at first: the ranks may be saving."""
        self.received.append(KEEPER_SIGNALS[number])
        self.send(self.signals[number])
        if SIGTERM in self.received or self.received.count(SIGINT) > 1:
            self.limit(0 if self.received.count(SIGINT) > 1 else self.grace)

    def limit(self, seconds: float) -> None:
        """A signal has asked the ranks to end: the rest of the steps comes after so many seconds."""
        self.steps = self.steps[-2:] if self.kind == "engine" else self.steps[-1:]
        until = time.monotonic() + seconds
        self.next_at, self.patient = min(self.next_at, until), seconds > 0 and until <= self.next_at

    def send(self, number: int) -> None:
        for process in list(self.alive.values()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def watch(self) -> None:
        """Pass on output and ends until there are no more. A stray process may hold a pipe; nobody waits for it."""
        busy, last_end = True, time.monotonic()
        while self.alive or (self.lines.streams and (busy or time.monotonic() < last_end + SETTLE)):
            busy, lost = self.lines.turn(100), self.lines.lost
            for rank, process in list(self.alive.items()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    kill_group(process.pid)  # what it started; until it is reaped its number is nobody else's
                    code, last_end = process.wait(), time.monotonic()
                    del self.alive[rank]
                    self.end(rank if self.kind != "engine" else None, 128 - code if code < 0 else code)
            if lost and SIGTERM not in self.received:  # the launcher or the reader is gone: nobody wants the job
                self.receive(SIGTERM)
                self.next_at = min(self.next_at, time.monotonic() + GRACE)
            self.escalate(time.monotonic())
        self.lines.flush()

    def end(self, rank: int | None, code: int) -> None:
        """Note that a rank has ended, or (None) the engine."""
        if rank is None:
            self.engine_code = code
            return
        self.codes[rank] = code
        if self.kind == "keeper":
            self.lines.tell_end(rank, code)
        elif code:
            now = time.monotonic()
            if code == EXIT_CODE and not (self.failures or self.received):  # the others may not know
                self.send(self.signals[SIGTERM])
                self.limit(self.grace)
            self.failures.append((now, rank, code))
            self.next_at = min(self.next_at, now + (self.grace if self.received or self.patient else SETTLE))

    def escalate(self, now: float) -> None:
        """Take the next step against what outlives a failed rank, or a signal for too long."""
        if now < self.next_at or not self.steps:
            return
        (step, *self.steps), self.next_at = self.steps, now + GRACE
        if self.patient and self.kind != "keeper":
            left = ", ".join(str(rank) for rank in range(self.size) if rank not in self.codes)
            with suppress(BrokenPipeError):
                write(2, f"killed, not ended after {self.grace:g} seconds (--grace_seconds): rank {left}\n".encode())
            self.patient = False
        if step != SIGKILL:
            self.send(step)
            return
        for process in self.alive.values():
            kill_group(process.pid)

    def first_failure(self) -> tuple[float, int, int]:
        """Of the ranks that failed at nearly the same time the first that was no victim of another's end."""
        failed = [failure for failure in self.failures if failure[2] != EXIT_CODE] or self.failures
        near = [failure for failure in failed if failure[0] <= failed[0][0] + SETTLE]
        return min(near, key=lambda failure: (self.victim(failure), failure[0]))

    def victim(self, failure: tuple[float, int, int]) -> bool:
        """Whether a rank failed since others had ended, or were to."""
        _, rank, code = failure
        return code == 128 + SIGTERM or bool(PEER_GONE.search(b"\n".join(self.lines.tails[rank])))

    def preempted(self) -> bool:
        """Whether the ranks ended by `preemption`, but for victims of the others' end."""
        codes = [code for _, _, code in self.failures]
        return EXIT_CODE in codes and all(one[2] == EXIT_CODE or self.victim(one) for one in self.failures)

    def exit_code(self) -> int:
        """The exit code of the whole job, see `run`."""
        asked = next((number for number in self.received if number in (SIGINT, SIGTERM)), None)
        codes = set(self.codes.values())
        if len(self.codes) == self.size and self.preempted():
            return EXIT_CODE
        if asked and (len(self.codes) < self.size or len(codes) > 1 or codes == {128 + SIGKILL}):
            return 128 + asked
        if self.failures:
            return self.first_failure()[2]
        return 0 if asked else self.engine_code

    def report(self) -> None:
        """Say last which rank failed first, and what it said: the rest has scrolled away."""
        asked = SIGINT in self.received or SIGTERM in self.received or self.preempted()
        if not self.failures or asked or self.size == 1:
            return
        _, rank, code = self.first_failure()
        names = {128 + number: number.name for number in signal.Signals}
        how = f"killed by {names[code]}" if code in names else f"exit code {code}"
        tail = self.lines.tails[rank] or [b"(nothing on stderr)"]
        lines = b"".join(self.lines.mark(rank) + line + b"\n" for line in tail)
        with suppress(BrokenPipeError):
            write(2, f"rank {rank} failed first ({how}); the end of its output:\n".encode() + lines)


def kill_group(pid: int) -> None:
    """Kill the process and all that it has started in its session, also in process groups of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, SIGKILL)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            session = int(stat.read_text(errors="replace").rpartition(")")[2].split()[3])
            if session == pid:
                os.kill(int(stat.parent.name), SIGKILL)
