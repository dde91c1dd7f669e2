"""Which node keeps failing: faults of its own, by node, within a day, read from the fault history.

A node is struck by a fault whose culprit is on it. The same fault at the same step counts once, since that
speaks against the step; a node that is lost, or a fault whose step is not known, counts each time. A node is
bad with ``ENOUGH`` strikes, if all others together have fewer: a program that fails everywhere convicts no
node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.diagnosis import looks_like_victim
from outlast.core.events import FaultKind
from outlast.core.ladder import out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.core.events import Fault
    from outlast.core.history import Met

ENOUGH = 3  # as many as restarts without progress by default
DAY = 86_400.0  # seconds


def against(node: str, faults: Iterable[Met], now: float) -> str:
    """Return why a node is bad, in a few words; empty: it is not known to be.

    Args:
        node: its name.
        faults: of all nodes.
        now: wall time.
    """
    strikes: list[str] = []
    known: set[tuple[str, str]] = set()
    for one in faults:
        if not one.own or now - one.at >= DAY:
            continue
        key = (one.node, one.evidence)
        if key not in known or one.counted or one.evidence.startswith(FaultKind.LOST.value):
            strikes.append(one.node)
        known.add(key)
    own = strikes.count(node)
    return f"{node} had {own} faults of its own in 24 h" if own >= ENOUGH and 2 * own > len(strikes) else ""


def is_own(fault: Fault) -> bool:
    """Say whether the node may be the cause of a fault on it."""
    if fault.kind is FaultKind.LOST:
        return True
    return fault.rank >= 0 and not out_of_memory(fault) and not looks_like_victim(fault.signature)
