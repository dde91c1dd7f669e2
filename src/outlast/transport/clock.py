"""The clocks of this host."""

from __future__ import annotations

import time


class SystemClock:
    """The port :class:`outlast.core.ports.Clock` on the system's clocks."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()
