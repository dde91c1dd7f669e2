"""Signals as inputs of the agent's loop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import FrameType


class Signals:
    """Takes the signals that end a job; ``fileno()`` is readable when one has arrived."""

    def __init__(self, names: Sequence[str]) -> None:
        self.last = 0
        self._arrived: list[int] = []
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.signal(number, self._take) for number in map(_number, names)}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._arrived.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._reader

    def taken(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        found, self._arrived = self._arrived, []
        if found:
            self.last = found[-1]
        return found

    def close(self) -> None:
        """Put the old handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


def _number(name: str) -> int:
    return signal.Signals[name].value
