"""Signals as inputs of the agent's loop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import FrameType


class Signals:
    """Takes the signals that end a job; ``fileno()`` is readable when one has arrived.

    A hangup that is ignored already, as under nohup, stays so unless it is one of the repeated ones;
    ``problems`` says it.

    Args:
        names: of the signals.
        repeated: names of further ones, and of those that mean the same however often they come.
    """

    def __init__(self, names: Sequence[str], repeated: Sequence[str] = ()) -> None:
        self._repeated = frozenset(map(_number, repeated))
        self.last = 0
        self._arrived: list[int] = []
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._numbers = {*map(_number, names), *self._repeated}
        self.problems: tuple[str, ...] = ()
        if (
            signal.SIGHUP in self._numbers - self._repeated
            and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        ):
            self._numbers.remove(signal.SIGHUP)
            self.problems = ("SIGHUP was ignored when this launcher began (nohup): it does not end the job",)
        for number in self._numbers:
            signal.signal(number, self._take)

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

    def insist(self) -> bool:
        """Say whether a signal has arrived that is not of those which schedulers repeat."""
        return any(number not in self._repeated for number in self.taken())

    def close(self) -> None:
        """Ignore them from now on: the exit code is settled, and this process is about to end with it."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
        os.close(self._reader)
        os.close(self._writer)


def _number(name: str) -> int:
    return signal.Signals[name].value
