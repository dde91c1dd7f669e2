"""Sections on the device: how long the kernels of a section take, by pairs of CUDA events.

On the host a section is timed by :class:`outlast.ipc.heartbeat_page.Section`. Kernels run later, so with
CUDA a section also records an event at its beginning and one at its end. The events are
read when the device has passed them, without a synchronisation; they are used again.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from outlast.ipc.heartbeat_page import Section

MOST_PENDING = 4096  # pairs that the device has not passed; sections beyond are timed on the host only


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Have the device note the time when it gets here."""

    def query(self) -> bool:
        """Say whether the device got here."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from here to another event."""


class _Span:
    """One entry of a section: two events, and the time of the sections within it."""

    __slots__ = ("begin", "end", "inner", "outer", "section")

    def __init__(self, section: DeviceSection, begin: Event, end: Event, outer: _Span | None) -> None:
        self.section = section
        self.begin = begin
        self.end = end
        self.outer = outer
        self.inner = 0.0


class DeviceTimes:
    """The spans of this process that the device has not passed yet.

    Args:
        make: returns a new event that can tell times.
        measured: takes the durations of a section, in seconds, without those of the sections within it.
    """

    def __init__(self, make: Callable[[], Event], measured: Callable[[Section, list[float]], None]) -> None:
        self._make = make
        self._measured = measured
        self._free: list[Event] = []
        self._pending: deque[_Span] = deque()
        self._open: list[_Span | None] = []
        self._pid = os.getpid()

    def begin(self, section: DeviceSection) -> None:
        """Record the begin of an entry."""
        full = len(self._pending) + len(self._open) >= MOST_PENDING
        if full or not self._may_record():
            self._open.append(None)
            return
        free = self._free
        events = [free.pop() if free else self._make() for _ in range(2)]
        outer = self._open[-1] if self._open else None
        self._open.append(_Span(section, events[0], events[1], outer))
        try:
            events[0].record()
        except RuntimeError:  # an event that was used on another device
            self._open[-1] = None

    def end(self) -> None:
        """Record the end of the innermost entry."""
        span = self._open.pop() if self._open else None
        if span is None or not self._may_record():
            return
        try:
            span.end.record()
        except RuntimeError:  # the same
            return
        self._pending.append(span)

    def _may_record(self) -> bool:
        """Say whether events can be recorded: not in a fork, nor while a CUDA graph is captured."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if os.getpid() != self._pid:
            return False
        return cuda is None or not cuda.is_initialized() or not cuda.is_current_stream_capturing()

    def collect(self) -> None:
        """Read what the device has passed."""
        if os.getpid() != self._pid:
            return
        pending = self._pending
        while pending and pending[0].end.query():
            span = pending.popleft()
            taken = span.begin.elapsed_time(span.end) * 1e-3
            if span.outer is not None:
                span.outer.inner += taken
            self._measured(span.section.host, [max(0.0, taken - span.inner)])
            self._free += [span.begin, span.end]


class DeviceSection:
    """A section that is timed on the host and on the device.

    Args:
        host: the section on the host.
        times: of the device.
    """

    __slots__ = ("_times", "host")

    def __init__(self, host: Section, times: DeviceTimes) -> None:
        self.host = host
        self._times = times

    def __enter__(self) -> DeviceSection:
        self.host.__enter__()
        self._times.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._times.end()
        self.host.__exit__(kind, error, trace)


def cuda_events() -> Callable[[], Event] | None:
    """Return what makes events of the device; None: this process does not use CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return lambda: cuda.Event(enable_timing=True)
