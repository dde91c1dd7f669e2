"""What happened on a node and has to reach the leader: each event once and in order, whatever gets lost."""

from __future__ import annotations

from outlast.cluster.policy.messages import MOST_EVENTS, EventBatch, NumberedEvent
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import Event, StepsDone, StopRequested

_KEPT = 512


class EventQueue:
    """Keeps the events of the present generation: a successor of the leader is told all of them."""

    def __init__(self) -> None:
        self._events: list[NumberedEvent] = []
        self._numbered = self._told_until = 0

    def add(self, event: Event, generation: int) -> int:
        """Take an event; return the number of the one before it."""
        if isinstance(event, StepsDone):
            self._events = [one for one in self._events if not isinstance(one.event, StepsDone)]
        self._numbered += 1
        self._events.append(NumberedEvent(self._numbered, generation, event))
        del self._events[:-_KEPT]
        return self._numbered - 1

    def report_stopped(self, name: str, generation: int) -> None:
        """Report LOST for a generation that a previous leader stopped, and that is in force still."""
        if generation > 0:
            words = f"{name} has stopped generation {generation} by order of a previous leader"
            fault = Fault(FaultKind.LOST, name, -1, generation, -1, words, f"{name} stopped it")
            self.add(fault, generation)

    def clear(self) -> None:
        """Forget the events of a job that was left; a request to stop is for the next job, too."""
        self._events = [one for one in self._events if isinstance(one.event, StopRequested)]

    @property
    def asked(self) -> int:
        """The first signal that asked this agent to stop; 0: none has."""
        found = (one.event.signum for one in self._events if isinstance(one.event, StopRequested))
        return next(found, 0)

    def late(self, taken: int) -> bool:
        """Say whether an event that was told before the last call has not been taken yet."""
        late = any(taken < one.number <= self._told_until for one in self._events)
        self._told_until = self._numbered
        return late

    def since(self, generation: int) -> list[NumberedEvent]:
        """Return what happened in a generation and after it, and the requests to stop."""
        return [
            one
            for one in self._events
            if one.generation >= generation or isinstance(one.event, StopRequested)
        ]

    def batches(self, taken: int, generation: int) -> list[EventBatch]:
        """Return the events after the last one that was taken.

        Args:
            taken: its number.
            generation: what happened before it is not told any more, but for a request to stop.
        """
        kept = self.since(generation)
        after = max((one.number for one in kept if one.number <= taken), default=0)
        events = [one for one in kept if one.number > taken]
        found = []
        for at in range(0, len(events), MOST_EVENTS):
            some = tuple(events[at : at + MOST_EVENTS])
            found.append(EventBatch(after, some))
            after = some[-1].number
        return found
