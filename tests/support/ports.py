"""Ports for servers of tests that have to be told where to listen."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_BELOW, _MANY = 4_000, 8_000  # from the kernel's own range down: over the defaults of torch, 29400 and 29500


def free_port() -> int:
    """Return a port that nobody has, out of the range from which the kernel gives ports.

    A port that the kernel gives is given again, to any other test, before the server of this one has begun.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = first - _BELOW - secrets.randbelow(_MANY)
        with socket.socket() as probe:
            try:
                probe.bind(("", max(port, 0)))
            except OSError:  # somebody listens there, or did a moment ago
                continue
            return int(probe.getsockname()[1])
    raise AssertionError(f"no port is free below {first - _BELOW}")
