"""What a test opens in its own process, closed at its end, so that nothing adds up over a suite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_closers: list[Callable[[], object]] = []


def close_at_end(close: Callable[[], object]) -> None:
    """Have something closed at the end of the test, after what was opened later. From any thread."""
    _closers.append(close)


@contextlib.contextmanager
def closed_at_end() -> Iterator[None]:
    """Close at the end of the block what was opened in it."""
    before = len(_closers)
    with contextlib.ExitStack() as stack:
        try:
            yield
        finally:
            for close in _closers[before:]:
                stack.callback(close)
            del _closers[before:]
