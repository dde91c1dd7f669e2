"""One child process and the signals that arrive meanwhile, waited for together."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from outlast.core.errors import ExitCode

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK = 30.0


class Noted:
    """Takes the signals that end a job and only notes them; a context manager."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.signal(number, self._take) for number in STOPPING}

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.numbers.append(number)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._reader

    def forget_wakeups(self) -> None:
        """Make the descriptor wait for the next signal."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return


class Child:
    """A process that was started, and its end as a shell would tell it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command)
        self._ended = os.pidfd_open(self._process.pid)

    def wait(self, noted: Noted, seconds: float = _LOOK) -> int | None:
        """Wait for its end, a signal or the deadline; return the exit code, None while it runs."""
        select.select([self._ended, noted.fileno()], [], [], seconds)
        noted.forget_wakeups()
        code = self._process.poll()
        if code is None:
            return None
        os.close(self._ended)
        return ExitCode.SIGNAL_BASE - code if code < 0 else code
