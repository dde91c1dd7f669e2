"""Which node keeps failing: faults of its own, by node, within a day.

A node is struck by a fault whose culprit is on it. The same fault at the same step counts once, since that
speaks against the step; a node that is lost counts each time. A node is bad with ``ENOUGH`` strikes, if all
others together have fewer: a program that fails everywhere convicts nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.diagnosis import looks_like_victim
from outlast.core.events import FaultKind
from outlast.core.ladder import evidence_of, out_of_memory

if TYPE_CHECKING:
    from outlast.core.events import Fault

ENOUGH = 3  # as many as restarts without progress by default
DAY = 86_400.0  # seconds
_KEPT = 256


class Strikes:
    """The strikes of all nodes of a job."""

    def __init__(self) -> None:
        self._struck: list[tuple[float, str, str]] = []  # when, node, evidence

    def count(self, fault: Fault, now: float) -> None:
        """Take in a fault; ``now`` in seconds on a clock that goes on between launchers."""
        self._struck = [(min(at, now), node, what) for at, node, what in self._struck if now - at < DAY]
        if not _is_own(fault):
            return
        what = evidence_of(fault)
        known = any(node == fault.node and what == before for _, node, before in self._struck)
        if fault.kind is FaultKind.LOST or not known:
            self._struck = [*self._struck, (now, fault.node, what)][-_KEPT:]

    def against(self, node: str) -> str:
        """Return why a node is bad, in a few words; empty: it is not known to be."""
        of_node = sum(struck == node for _, struck, _ in self._struck)
        if of_node < ENOUGH or of_node <= len(self._struck) - of_node:
            return ""
        return f"{node} had {of_node} faults of its own in 24 h"

    def state(self) -> list[list[float | str]]:
        """Return what must outlive the launcher, as JSON values."""
        return [list(one) for one in self._struck]

    @classmethod
    def of(cls, state: list[list[float | str]]) -> Strikes:
        """Return the strikes that an earlier launcher knew of.

        Raises:
            TypeError, ValueError: the state is not one of ours.
        """
        found = cls()
        found._struck = [(float(at), str(node), str(what)) for at, node, what in state]
        return found


def _is_own(fault: Fault) -> bool:
    """Say whether the node may be the cause of a fault on it."""
    if fault.kind is FaultKind.LOST:
        return True
    return fault.rank >= 0 and not out_of_memory(fault) and not looks_like_victim(fault.signature)
