"""torchelastic's file timers: workers ask to be ended unless they take it back in time.

``torch.distributed.elastic.timer.FileTimerClient`` writes one JSON line a request into a FIFO; a negative
time takes a request back. torchrun serves it where ``TORCHELASTIC_ENABLE_FILE_TIMER=1``, and so does the
agent. torchrun ends itself together with the worker; here the worker is ended and the job recovers.

Source: torch 2.13, elastic/timer/file_based_local_timer.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outlast.core.errors import UsageError

_READ_BYTES = 1 << 16
_MOST = 4096  # timers in force; further ones are not taken


@dataclass(frozen=True)
class Timer:
    """One request: when it expires (wall time, as the client says it) and which signal ends the worker."""

    pid: int
    scope: str
    expires: float
    number: int


class FileTimers:
    """Takes requests from a FIFO; ``fileno()`` is readable when some wait.

    Args:
        path: of the FIFO; it is made here, and removed by :meth:`close`.

    Raises:
        UsageError: something else is at that path, or the FIFO cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISFIFO(os.lstat(path).st_mode):
                    raise UsageError(
                        f"TORCHELASTIC_TIMER_FILE={path}: exists and is no FIFO; nothing was started"
                    )
                os.unlink(path)
            os.mkfifo(path, 0o600)
            # opened for both: a FIFO without a writer would always be readable
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"TORCHELASTIC_TIMER_FILE={path}: {error.strerror}; nothing was started"
            ) from error
        self._rest = b""
        self._timers: dict[tuple[int, str], Timer] = {}

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._file

    def take(self) -> None:
        """Take the requests that have arrived; a line that makes no sense is passed over."""
        with contextlib.suppress(BlockingIOError):
            data = self._rest + os.read(self._file, _READ_BYTES)
            lines = data.split(b"\n")
            self._rest = lines.pop()[-_READ_BYTES:]
            for line in filter(None, lines):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._put(json.loads(line))

    def _put(self, request: dict[str, object]) -> None:
        pid, scope = int(str(request["pid"])), str(request["scope_id"])
        expires, number = float(str(request["expiration_time"])), int(str(request["signal"]))
        if expires < 0:
            self._timers.pop((pid, scope), None)
        elif math.isfinite(expires) and len(self._timers) < _MOST:
            self._timers[pid, scope] = Timer(pid, scope, expires, number)

    def deadline(self, now: float) -> float | None:
        """Return the monotonic time at which the first timer expires; None: there is none."""
        if not self._timers:
            return None
        return now + max(0.0, min(one.expires for one in self._timers.values()) - time.time())

    def expire(self, sessions: Iterable[int]) -> list[tuple[Timer, bool]]:
        """End the processes whose time is over; return their timers, and whether a signal was sent.

        Args:
            sessions: pids of workers; only they and what belongs to their sessions is ever signalled.
        """
        allowed, wall = frozenset(sessions), time.time()
        due = sorted(
            (one for one in self._timers.values() if one.expires <= wall), key=lambda one: one.expires
        )
        found: dict[int, tuple[Timer, bool]] = {}
        for timer in due:
            del self._timers[timer.pid, timer.scope]
            if timer.pid not in found and timer.number in signal.valid_signals():
                found[timer.pid] = (timer, _signalled(timer, allowed))
        for key in [key for key in self._timers if key[0] in found]:
            del self._timers[key]
        return list(found.values())

    def forget(self) -> None:
        """Drop all timers: the generation that asked for them is over."""
        self._timers.clear()

    def close(self) -> None:
        """Remove the FIFO."""
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _signalled(timer: Timer, sessions: frozenset[int]) -> bool:
    try:
        if os.getsid(timer.pid) not in sessions:
            return False
        os.kill(timer.pid, timer.number)
    except (OSError, OverflowError):  # it has ended meanwhile, or there is no such pid
        return False
    return True
