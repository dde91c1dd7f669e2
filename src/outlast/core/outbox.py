"""What happened on a node and has to reach whoever coordinates, each event once and in order, whatever
gets lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outlast.core.events import Fault, FaultKind
from outlast.core.job import Event, StepsDone, StopRequested
from outlast.core.letters import event_to_json

_KEPT = 512
_AT_ONCE = 64


class Outbox:
    """Keeps the events of the present generation: a successor of the coordinator is told all of them."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Event]] = []  # number, generation, event
        self._numbered = self._told_until = 0

    def add(self, event: Event, generation: int) -> int:
        """Take an event; return the number of the one before it."""
        if isinstance(event, StepsDone):
            self._events = [one for one in self._events if not isinstance(one[2], StepsDone)]
        self._numbered += 1
        self._events.append((self._numbered, generation, event))
        del self._events[:-_KEPT]
        return self._numbered - 1

    def own_up(self, name: str, generation: int) -> None:
        """Say that a node has ended a generation that is in force still: who ordered it was succeeded."""
        if generation > 0:
            words = f"{name} has ended generation {generation} for a coordinator that was succeeded"
            fault = Fault(FaultKind.LOST, name, -1, generation, -1, words, f"{name} ended it")
            self.add(fault, generation)

    def clear(self) -> None:
        """Forget the events of a job that was left; a request to stop is for whichever is joined."""
        self._events = [one for one in self._events if isinstance(one[2], StopRequested)]

    @property
    def asked(self) -> int:
        """The first signal that asked this agent to stop; 0: none has."""
        return next((event.signum for _, _, event in self._events if isinstance(event, StopRequested)), 0)

    def late(self, taken: int) -> bool:
        """Say whether an event that was told before the last call has not been taken yet."""
        late = any(taken < number <= self._told_until for number, _, _ in self._events)
        self._told_until = self._numbered
        return late

    def since(self, generation: int) -> list[tuple[int, Event]]:
        """Return what happened in a generation and after it, each with the generation."""
        return [(one, event) for _, one, event in self._of(generation)]

    def _of(self, generation: int) -> list[tuple[int, int, Event]]:
        return [one for one in self._events if one[1] >= generation or isinstance(one[2], StopRequested)]

    def letters(self, taken: int, generation: int) -> Iterator[dict[str, Any]]:
        """Yield letters with the events after the last one that was taken.

        Args:
            taken: its number.
            generation: what happened before it is not told any more, but for a request to stop.
        """
        kept = self._of(generation)
        after = max((number for number, _, _ in kept if number <= taken), default=0)
        events = [one for one in kept if one[0] > taken]
        for at in range(0, len(events), _AT_ONCE):
            some = events[at : at + _AT_ONCE]
            said = [[number, one, event_to_json(event)] for number, one, event in some]
            yield {"kind": "said", "after": after, "events": said}
            after = some[-1][0]
