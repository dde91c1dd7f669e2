"""Bounds for a piece of code that reads what others wrote."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path


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
