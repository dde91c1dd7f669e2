"""How fast bytes are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

BURST_BYTES = 4 << 20
HOLD_SECONDS = 0.5  # well below every sensible timeout of a receiver


class RateLimit:
    """A token bucket that lends: what is taken beyond its content is waited for.

    Args:
        bytes_per_second: how fast it fills; None: no limit.
        burst: bytes that it holds at most, and at first.
    """

    def __init__(self, bytes_per_second: float | None, burst: float = BURST_BYTES) -> None:
        self._rate = bytes_per_second
        self._burst = self._content = burst
        self._at: float | None = None

    def reserve(self, nbytes: int, now: float) -> float:
        """Take bytes out and return for how many seconds from now on they must be held back."""
        if self._rate is None:
            return 0.0
        passed = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now if self._at is None else max(self._at, now)
        self._content = min(self._content + passed * self._rate, self._burst) - nbytes
        return max(-self._content / self._rate, 0.0)


class Throttle:
    """A rate limit that several connections share.

    Args:
        limit: used by nobody else.
        clock: seconds, monotonic.
        wait: sleeps.
    """

    def __init__(
        self,
        limit: RateLimit,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()

    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until the bytes may be sent, in slices; one item comes after each."""
        with self._lock:
            left = self._limit.reserve(nbytes, self._clock())
        while left > 0:
            self._wait(min(left, HOLD_SECONDS))
            left -= HOLD_SECONDS
            yield
