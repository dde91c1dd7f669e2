"""Bounds for a piece of code that reads what others wrote."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def bounded_memory(more: int = 1 << 30) -> Iterator[None]:
    """Refuse this process memory beyond what it has and so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def bounded_time(seconds: float = 20.0) -> Iterator[None]:
    """Fail where the processor was used for longer; a decoder that is caught in a loop takes for ever."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


@contextlib.contextmanager
def bounded_wait(seconds: float = 60.0) -> Iterator[None]:
    """Fail where this, on the main thread, takes longer; the open of a FIFO waits for a writer for ever."""
    late: list[str] = []

    def interrupt(*_: object) -> None:
        late.append(f"not done after {seconds} s")
        pytest.fail(late[0])

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not late, "the code caught the interruption"
