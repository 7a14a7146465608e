"""Streams and events. Work is done in the order in which it is given: a stream changes no result."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from habana_frameworks import _lacking
from habana_frameworks.torch.hpu._index import Device, index_of

__getattr__ = _lacking.attribute(__name__)


class Stream(torch.Stream):
    """A new stream of a card; with ``stream_id``, ``device_index`` and ``device_type``, a stream that there is."""

    def __new__(cls, device: Device = None, priority: int = 0, **known: int) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device("hpu", index_of(device)), priority=priority)

    def record_event(self, event: Event | None = None) -> Event:
        """Put ``event``, or a new one, here in this stream, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what comes next in this stream wait for ``event``."""
        event.wait(self)


class Event(torch.Event):
    """A point in a stream. `elapsed_time` is the host's time, not a card's."""

    _recorded_at: float | None = None

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, "hpu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._has_timing = enable_timing

    def record(self, stream: torch.Stream | None = None) -> None:
        """Put the event here in ``stream``, or in the current one."""
        super().record(stream)
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the ms on the host from this event to ``end_event``.

        Raises:
            RuntimeError: one was made without ``enable_timing``, or not recorded.
        """
        for event in (self, end_event):
            if not event._has_timing or event._recorded_at is None:
                raise RuntimeError("elapsed_time needs two events that were made with enable_timing and then recorded")
        return (end_event._recorded_at - self._recorded_at) * 1000


def _ours(found: torch.Stream) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def current_stream(device: Device = None) -> Stream:
    """Return the stream that work goes to."""
    return _ours(torch.accelerator.current_stream(index_of(device)))


def default_stream(device: Device = None) -> Stream:
    """Return the stream that work goes to if none is chosen."""
    any_stream = torch.accelerator.current_stream(index_of(device))
    return Stream(stream_id=0, device_index=any_stream.device_index, device_type=any_stream.device_type)


def set_stream(stream: torch.Stream) -> None:
    """Choose the stream that work goes to."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context manager: chooses a stream inside, and the one before it afterwards. None changes nothing."""
    return nullcontext() if stream is None else stream
