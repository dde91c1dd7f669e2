"""How far the nodes of a generation are, what they have saved, and what waits for that."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.recovery.policy.job import CommitSeen, CopyEvent, LoadSeen, NoSaveComes, OwnCheckpoint
from outlast.recovery.policy.pending import Pending


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


class SavedSteps:
    """What the ranks of a generation have saved, by completed steps and by their agreement on a step.

    A session agrees on completed steps. A framework's steps may be counted otherwise than those on which its
    ranks agree, which are its calls since the begin of its loop.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a generation: it has saved nothing."""
        self._completed = self._agreed = -1
        self._never = False

    def take(self, event: CopyEvent) -> None:
        """Take what has become of saves and loads; any other event has no effect."""
        match event:
            case CommitSeen(step):
                self._saved(step, step)
            case OwnCheckpoint(step, agreed):
                self._saved(step, agreed)
            case LoadSeen(step):
                self._went_back(step)
            case NoSaveComes():
                self._never = True

    def ask(self) -> None:
        """Ask for an agreement on a step; earlier numbers, which may be another loop's, do not count."""
        self._agreed = -1

    def _saved(self, completed: int, agreed: int) -> None:
        """Take note of a save, by both numbers of its step."""
        self._never = False
        self._completed = max(completed, self._completed)
        self._agreed = max(agreed, self._agreed)

    def _went_back(self, step: int) -> None:
        """Forget what was saved after a step: the ranks have loaded a checkpoint of that."""
        self._completed, self._agreed = min(step, self._completed), min(step, self._agreed)

    def reach(self, leaving: Pending) -> bool:
        """Return whether the step after which a node is to be replaced is saved, or never will be."""
        if leaving.step is None or self._never:
            return self._never
        return (self._agreed if leaving.agreed else self._completed) >= leaving.step
