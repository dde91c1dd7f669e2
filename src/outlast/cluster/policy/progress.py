"""How far the nodes of a generation are, and what waits for them: a fault, a node that is to be replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.recovery.policy.events import Fault


class Progress:
    """How far the nodes of a generation are: who has started, and which step all have completed."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self.begin(())

    def begin(self, names: Iterable[str]) -> None:
        """Expect every node of a generation to start, and to do steps."""
        self._unstarted = set(names)
        self._steps.clear()
        self._slowest = -1  # step of the nodes that are the furthest behind
        self._behind = set(self._unstarted)  # their names

    def started(self, node: str) -> bool:
        """Take note that a node has started its ranks; say whether all nodes have."""
        self._unstarted.discard(node)
        return not self._unstarted

    def done(self, node: str, step: int) -> int | None:
        """Take note of what all ranks of a node have completed; return the step of all nodes if it rose."""
        self._steps[node] = max(step, self._steps.get(node, step))
        if self._steps[node] > self._slowest:
            self._behind.discard(node)
        if self._behind:
            return None
        self._slowest = min(self._steps.values())
        self._behind = {name for name, one in self._steps.items() if one == self._slowest}
        return self._slowest

    def least(self) -> int:
        """Return the step of the node that is the furthest behind, of those that said one; -1: none did."""
        return min(self._steps.values(), default=-1)


@dataclass(frozen=True)
class Charge:
    """A fault that is not judged yet.

    Args:
        fault: what was reported.
        until: when it is judged at the latest.
        for_status: it waits for the status of nodes; otherwise for a fault that it may be a consequence of.
    """

    fault: Fault
    until: float
    for_status: bool = False


@dataclass(frozen=True)
class Leaving:
    """A failing node that a spare is to replace.

    Args:
        fault: of the node.
        until: when it is replaced at the latest.
        step: completed steps that are to be saved before; None: the ranks have not agreed on them yet.
    """

    fault: Fault
    until: float
    step: int | None = None
