"""A signal from a scheduler (SIGTERM, SIGUSR1): a run ends soon, with all that it has done, and may go on elsewhere."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

EXIT_CODE = 75  # os.EX_TEMPFAIL: nothing is wrong, start it again
HEARSAY = 0.5  # seconds in which a launcher tells ranks that another one was preempted, whose end they see at once
LIMIT = 10.0  # seconds for the end of a run that holds nothing: what libraries do at an error may hang
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Preempted(SystemExit):
    """The end of a run that was asked to end; no handler of errors catches it. ``message`` is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass
class _State:
    """What is known of signals: the first one's name and time, whether the run ends by itself, what a signal ends."""

    name: str | None = None
    since: float | None = None
    arrived: float | None = None  # on a wake-up: before the main thread comes back from a compilation
    held: bool = False
    forking: bool = False  # in `later`
    phase: str = "training had not begun"
    handlers: dict[int, object] = field(default_factory=dict)  # those from before `listen`


_state = _State()


@contextmanager
def listen() -> Iterator[None]:
    """Receive the signals. Only a main thread can; in another this does nothing.

    Raises:
        Preempted: also in the place of an error that came after a signal which nobody holds: another process of the
            run was asked as well, and is gone.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state, stopped = _State(handlers={number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}), False
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    wakeup = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(receiving, _state), daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, _receive)
    try:
        with _errors_of_a_stopped_run():
            yield
    except Preempted:
        stopped = True  # the next signal must not change the exit code
        raise
    finally:
        for number, handler in _state.handlers.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        signal.set_wakeup_fd(wakeup)
        os.close(sending)
        _state = _State()


@contextmanager
def _errors_of_a_stopped_run() -> Iterator[None]:
    try:
        yield
    except Exception:
        if not _state.held and os.environ.get("WORLD_SIZE", "1") != "1":
            time.sleep(HEARSAY)
        check()
        raise


def _watch(receiving: int, state: _State) -> None:
    """Note when a signal arrives: the main thread sees it only between two steps of the interpreter.

    This thread receives it, while the main one does not, see `hold`. It also ends a run that does not end by itself.
    """
    number, until, poller = 0, float("inf"), select.poll()
    poller.register(receiving, select.POLLIN)
    with suppress(OSError):
        while _state is state:
            ready = poller.poll(50 * LIMIT if state.arrived else None)  # milliseconds
            if ready and not (data := os.read(receiving, 1)):
                break
            if ready and data[0] in SIGNALS and state.arrived is None:
                number, state.arrived = data[0], time.monotonic()
            until = min(until, time.monotonic() + LIMIT) if state.arrived and not state.held else float("inf")
            if until <= time.monotonic() and _state is state:
                _end_now(f"stopped by {state.name or signal.Signals(number).name}: {state.phase}")
        os.close(receiving)


def _end_now(message: str) -> None:
    """End this process and what it has started: pools that wait for a process which the signal has killed."""
    import psutil

    with suppress(OSError):
        if int(os.environ.get("RANK") or 0) == 0:
            os.write(2, f"\n{message} (and killed: it had not ended after {LIMIT:g} s)\n".encode())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(EXIT_CODE)


def _receive(number: int, _frame: object) -> None:
    if not asked():  # else the run is ending already, and must not be disturbed at it
        _state.name, _state.since = signal.Signals(number).name, _state.arrived or time.monotonic()
        check()


def _forget() -> None:
    """A forked child is asked by its parent alone: signals do to it what they did before `listen`."""
    global _state
    if _state.handlers:
        signal.set_wakeup_fd(-1)
        if _state.held and not _state.forking:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number, handler in _state.handlers.items():
            signal.signal(number, handler)
        _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def hold() -> None:
    """From now on a signal is only noted: who calls this asks for it, saves, and calls `release`.

    What the main thread starts meanwhile, such as a compiler, does not get signals that go to all processes of a run.

    Raises:
        Preempted: one was noted before.
    """
    check()
    _state.held = True
    if _state.handlers:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@contextmanager
def later() -> Iterator[None]:
    """Signals come after the block; what it forks inherits that, and has to let them come itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _state.forking = True
    try:
        yield
    finally:
        _state.forking = False
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def phase(what: str) -> None:
    """Tell what a signal ends from now on, for its message, e.g. ``evaluation; the model is saved``."""
    check()
    _state.phase = what


def over() -> None:
    """All is done: from now on signals change nothing, nor the exit code of a program that listened."""
    if _state.handlers:
        _state.handlers = dict.fromkeys(SIGNALS, signal.SIG_IGN)  # also after `listen`
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def note(seconds: float = 0.0) -> None:
    """Note that another process of the run got a signal, so many seconds ago."""
    _state.since = _state.since or time.monotonic() - seconds


def asked() -> bool:
    """Whether a signal was noted."""
    return _state.since is not None


def seconds_since() -> float:
    """Seconds since the first signal arrived; 0 without one."""
    return time.monotonic() - _state.since if _state.since else 0.0


def signal_name() -> str:
    """The first signal's name."""
    return _state.name or "a signal to another process"


def check() -> None:
    """End the run here if a signal was noted and nobody holds it.

    Raises:
        Preempted: so it is. Also for a signal whose exception got lost, e.g. in a finaliser.
    """
    if asked() and not _state.held:
        raise Preempted(f"stopped by {signal_name()}: {_state.phase}")


def release(what: str) -> None:
    """End `hold`: all that ``what`` tells of, for the message, is safe.

    Raises:
        Preempted: a signal was noted.
    """
    _state.held, _state.phase = False, what
    if _state.handlers:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    check()
