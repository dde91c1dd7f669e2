"""The limit of open files: an agent raises its own, and its ranks get what it had at first.

A program that uses ``select`` must not get descriptors beyond 1023, so the ranks' limit is the user's affair.
What strangers may take of an agent's is bounded by the limit, so that pidfds, pages and the sockets of
zygotes always find a descriptor.
"""

from __future__ import annotations

import contextlib
import resource

_WHICH = resource.RLIMIT_NOFILE
_MOST = 1 << 20  # where nothing limits it
_RESERVE = 512  # for the processes of a node, its files, and a few peers
_FEWEST = 16


class _Here:
    """The limit with which this process was started; None: it is in force."""

    given: tuple[int, int] | None = None


def raise_limit() -> None:
    """Raise the soft limit of this process to the hard one."""
    soft, hard = resource.getrlimit(_WHICH)
    wanted = _MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(_WHICH, (wanted, hard))
        _Here.given = _Here.given or (soft, hard)


def give_back(pid: int = 0) -> None:
    """Give a process the limit with which this one was started; 0: this process, in a fork of it."""
    if _Here.given is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, _WHICH, _Here.given)


def for_strangers(most: int, share: int) -> int:
    """Return how many descriptors strangers may take at one place.

    Args:
        most: where the limit allows it.
        share: the part of what the reserve leaves, as its inverse.
    """
    soft, _ = resource.getrlimit(_WHICH)
    return most if soft == resource.RLIM_INFINITY else max(_FEWEST, min(most, (soft - _RESERVE) // share))
