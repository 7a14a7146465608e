"""Signals that end a run: at once, or when it is held at a safe place; their time, their children, what is put back."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from core import preemption
from core.preemption import Preempted, listen

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """After `Preempted` the signals stay ignored: in a program nothing follows."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (TERM, USR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(run: Callable[[], None], error: type[BaseException] = Preempted) -> BaseException:
    """Let a run be ended, by an error."""
    with pytest.raises(error) as stop, listen():
        run()
    return stop.value


def to_myself(number: int) -> None:
    """Send a signal, and wait until another thread has received it: where the run is held, the main one does not."""
    os.kill(os.getpid(), number)
    time.sleep(0.05)


@pytest.mark.parametrize("number", [TERM, USR1])
def test_without_hold_a_signal_ends_the_run_at_once(number):
    stop = ended(lambda: (to_myself(number), pytest.fail("it went on")), SystemExit)
    assert stop.code == 75
    assert str(stop) == f"stopped by {signal.Signals(number).name}: training had not begun"


def test_held_it_is_noted_and_a_second_one_changes_nothing():
    def run() -> None:
        preemption.hold()
        assert not preemption.asked()
        to_myself(USR1)
        time.sleep(0.1)
        to_myself(TERM)
        assert preemption.asked()
        assert preemption.signal_name() == "SIGUSR1"
        assert 0.1 <= preemption.seconds_since() < 5
        preemption.release("all is saved")

    stop = ended(run)
    assert str(stop) == "stopped by SIGUSR1: all is saved"
    to_myself(TERM)  # while the program ends


def test_released_without_a_signal_the_next_one_ends_the_run():
    def run() -> None:
        preemption.hold()
        preemption.release("the model is saved")
        preemption.phase("evaluation; the model is saved")
        to_myself(TERM)

    assert str(ended(run)) == "stopped by SIGTERM: evaluation; the model is saved"


def test_a_signal_to_another_process():
    def run() -> None:
        preemption.hold()
        preemption.note(2.0)
        assert 2 <= preemption.seconds_since() < 7
        to_myself(TERM)  # the launcher's, who tells all: the end must not be disturbed
        preemption.release("all is saved")

    stop = ended(run)
    assert str(stop) == "stopped by a signal to another process: all is saved"


def test_the_first_noted_is_not_disturbed_by_the_second_while_the_run_ends():
    went_on = []

    def run() -> None:
        preemption.hold()
        preemption.note()
        try:
            preemption.release("all is saved")
        finally:
            to_myself(TERM)
            went_on.append(True)

    ended(run)
    assert went_on


def test_the_time_is_that_of_the_signal_not_of_the_interpreters_next_step():
    """A compilation in C keeps the main thread from seeing it for minutes."""

    def run() -> None:
        preemption.hold()
        sender = threading.Timer(0.1, to_myself, [TERM])
        sender.start()
        began = time.monotonic()
        while time.monotonic() < began + 0.1:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        took, since = time.monotonic() - began, preemption.seconds_since()
        sender.join()
        assert since > (took - 0.1) / 2
        preemption.release("")

    ended(run)


class Swallows:
    def __del__(self) -> None:
        to_myself(TERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_got_lost_is_raised_by_the_next_call():
    def run() -> None:
        Swallows()
        preemption.hold()

    assert str(ended(run)) == "stopped by SIGTERM: training had not begun"


@pytest.mark.parametrize("held", [False, True])
def test_an_error_after_a_signal_is_the_signals_unless_the_run_is_held(held):
    """Another rank was asked as well, and is gone."""

    def run() -> None:
        if held:
            preemption.hold()
        with suppress(Preempted):
            to_myself(TERM)
        raise ConnectionError("closed by peer")

    ended(run, ConnectionError if held else Preempted)


@pytest.mark.parametrize("told", [True, False])
def test_an_error_of_one_rank_waits_for_word_of_another(monkeypatch, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sender = threading.Timer(0.1, to_myself, [TERM])

    def run() -> None:
        if told:
            sender.start()
        raise ConnectionError("closed by peer")

    ended(run, Preempted if told else ConnectionError)


def test_what_is_started_while_the_run_is_held_does_not_get_what_all_processes_get():
    """A compiler, without which the step would fail; from outside, to the group, as from ``timeout`` or torchrun."""

    def run() -> None:
        preemption.hold()
        with subprocess.Popen(["sleep", "0.4"]) as compiler:
            os.kill(compiler.pid, TERM)
        assert compiler.returncode == 0

    with listen():
        run()
        preemption.release("")
        with subprocess.Popen(["sleep", "30"]) as other:
            other.terminate()
    assert other.returncode == -TERM


def test_a_forked_child_ends_as_ever_and_its_parent_goes_on():
    with listen():
        preemption.hold()
        if not (pid := os.fork()):
            to_myself(TERM)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
        assert not preemption.asked()
        assert preemption._state.arrived is None


def test_what_was_before_is_put_back():
    before = [signal.getsignal(number) for number in (TERM, USR1)]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    for error in (None, ValueError):
        try:
            with listen():
                assert signal.getsignal(TERM) != before[0]
                if error:
                    raise error
        except ValueError:
            pass
        assert [signal.getsignal(number) for number in (TERM, USR1)] == before
        assert signal.set_wakeup_fd(wakeup) == wakeup
    end = time.monotonic() + 5
    while any(thread.name.endswith("(_watch)") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_in_another_thread_signals_stay_the_callers():
    seen = []

    def watch() -> None:
        with listen():
            seen.append(signal.getsignal(TERM))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
