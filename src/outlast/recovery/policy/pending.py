"""The faults that are not answered yet: each with the reason why it waits, and when the wait ends.

A fault is answered when it is due. A new generation needs no answer to the faults of the one before. Until
then a fault leaves the list for one reason only: the ranks that it called silent go on. So what is known of
one fault never removes another one, in any order of events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from outlast.recovery.policy.events import FaultKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.recovery.policy.events import Fault


class Why(Enum):
    """What a fault waits for."""

    CAUSE = "another fault that may be its cause"
    STATUS = "nodes that report whether their ranks can restart in process"
    SAVE = "a save, before its node is replaced"
    BARRIER = "ranks that are to reach the re-entry barrier"


@dataclass(frozen=True)
class Pending:
    """A fault that is not answered yet.

    Args:
        fault: what was reported.
        due: when the wait ends at the latest.
        why: what it waits for.
        step: for a save, the step that is to be saved; None: the ranks have not agreed on one yet.
        agreed: the ranks have agreed on the step; else it is the one at which the fault was reported.
    """

    fault: Fault
    due: float
    why: Why
    step: int | None = None
    agreed: bool = False


class PendingFaults:
    """The faults of one job that are not answered yet, in the order in which they were reported."""

    def __init__(self) -> None:
        self._list: list[Pending] = []

    def __iter__(self) -> Iterator[Pending]:
        return iter(tuple(self._list))

    @property
    def deadline(self) -> float:
        """When the next one is due; infinite: none is pending."""
        return min((one.due for one in self._list), default=math.inf)

    def first(self, why: Why) -> Pending | None:
        """Return the first fault that waits for something; None: none does."""
        return next((one for one in self._list if one.why is why), None)

    def add(self, one: Pending) -> None:
        """Add a fault, unless its node has reported one of the same kind that waits for the same."""
        fault = one.fault
        known = {(other.fault.node, other.fault.kind, other.why) for other in self._list}
        if (fault.node, fault.kind, one.why) not in known:
            self._list.append(one)

    def remove(self, one: Pending) -> None:
        """Remove a fault that is answered now."""
        self._list.remove(one)

    def clear(self) -> None:
        """Remove all: a generation has begun without them."""
        self._list.clear()

    def take_due(self, now: float) -> Pending | None:
        """Remove and return a fault that is due; None: none is.

        Where it may be a consequence of another fault, the one that was reported first is returned instead,
        and the one that was due stays.
        """
        found = next((one for one in self._list if now >= one.due), None)
        if found is not None and found.why is Why.CAUSE:
            found = self.first(Why.CAUSE)
        if found is not None:
            self._list.remove(found)
        return found

    def go_on(self, step: int) -> tuple[Fault, ...]:
        """Remove and return the hangs that wait for their cause, since every rank has completed a step."""
        over = [
            one
            for one in self._list
            if one.why is Why.CAUSE and one.fault.kind is FaultKind.HANG and step > one.fault.step
        ]
        for one in over:
            self._list.remove(one)
        return tuple(one.fault for one in over)

    def hold(self, step: int | None) -> bool:
        """Take the step after which all ranks save and wait; say whether a fault waits for that.

        Args:
            step: that they have agreed on; None: they cannot be held, and any save after the fault counts.
        """
        waiting = [one for one in self._list if one.why is Why.SAVE and one.step is None]
        for one in waiting:
            known = replace(one, step=one.fault.step if step is None else step, agreed=step is not None)
            self._list[self._list.index(one)] = known
        return bool(waiting)
