"""What happened on a node reaches the leader once and in order, also after a change of the leader."""

from __future__ import annotations

from outlast.cluster.policy.event_queue import EventQueue
from outlast.cluster.policy.messages import MESSAGES, EventBatch
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import AllStarted, CommitSeen, Event, StepsDone, StopRequested


def _queue(*events: Event, generation: int = 1) -> EventQueue:
    found = EventQueue()
    for one in events:
        found.add(one, generation)
    return found


def _commits(count: int) -> list[Event]:
    return [CommitSeen(step, f"step-{step}") for step in range(count)]


def _told(queue: EventQueue, taken: int = 0, generation: int = 1) -> list[Event]:
    """Return what a leader takes that has taken some events before, in the batches that it accepts."""
    found = []
    for batch in queue.batches(taken, generation):
        read = MESSAGES.read(MESSAGES.write(batch))
        assert isinstance(read, EventBatch)
        assert read.after <= taken, "an event before it seems to be lost"
        found += [one.event for one in read.events if one.number > taken]
        taken = max(taken, read.events[-1].number)
    return found


def test_each_event_has_the_number_after_the_one_before_it() -> None:
    queue = EventQueue()
    assert [queue.add(one, 1) for one in _commits(3)] == [0, 1, 2]


def test_a_leader_is_told_what_it_has_not_taken_yet_and_that_nothing_is_missing_before_it() -> None:
    events = _commits(3)
    queue = _queue(*events)
    assert [_told(queue, taken) for taken in range(4)] == [events, events[1:], events[2:], []]
    assert [[one.after for one in queue.batches(taken, 1)] for taken in range(4)] == [[0], [1], [2], []]


def test_many_events_come_in_several_messages_that_join_without_a_gap() -> None:
    events = _commits(200)
    queue = _queue(*events)
    assert _told(queue) == events
    first, *others = queue.batches(0, 1)
    assert others
    assert _told(queue, first.events[-1].number) == events[len(first.events) :]


def test_only_the_newest_events_are_kept() -> None:
    events = _commits(2000)
    queue = _queue(*events)
    kept = _told(queue)
    assert 100 < len(kept) < 1000
    assert kept == events[-len(kept) :]


def test_of_completed_steps_only_the_newest_number_is_told() -> None:
    queue = _queue(StepsDone(1), *_commits(1), StepsDone(2), AllStarted(1))
    assert _told(queue) == [*_commits(1), StepsDone(2), AllStarted(1)]
    queue.add(StepsDone(3), 1)
    assert _told(queue, 1) == [*_commits(1), AllStarted(1), StepsDone(3)]


def test_what_happened_before_a_generation_is_not_told_but_for_a_request_to_stop() -> None:
    queue = _queue(AllStarted(1), StopRequested(15))
    queue.add(AllStarted(2), 2)
    assert _told(queue, 0, 2) == [StopRequested(15), AllStarted(2)]
    assert _told(queue, 0, 3) == [StopRequested(15)]
    assert [one.event for one in queue.since(1)] == [AllStarted(1), StopRequested(15), AllStarted(2)]


def test_the_first_request_to_stop_outlives_the_job_that_was_left() -> None:
    queue = _queue(AllStarted(1))
    assert queue.asked == 0
    queue.add(StopRequested(15), 1)
    queue.add(StopRequested(2), 1)
    queue.clear()
    assert queue.asked == 15
    assert _told(queue) == [StopRequested(15), StopRequested(2)]


def test_an_event_is_late_when_a_heartbeat_later_the_leader_has_still_not_taken_it() -> None:
    queue = _queue(*_commits(2))
    assert not queue.late(0), "the leader cannot have answered yet"
    assert queue.late(0)
    assert queue.late(1)
    assert not queue.late(2)
    queue.add(AllStarted(1), 1)
    assert not queue.late(2)
    assert queue.late(2)


def test_a_generation_that_was_stopped_for_a_previous_leader_is_reported_as_lost() -> None:
    queue = EventQueue()
    queue.report_stopped("n1", 0)
    assert _told(queue, 0, 0) == [], "no generation has begun"
    queue.report_stopped("n1", 1)
    (fault,) = _told(queue)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.node, fault.generation) == (FaultKind.LOST, "n1", 1)
    assert (fault.rank, fault.step) == (-1, -1)
    assert fault.reason == "n1 has stopped generation 1 by order of a previous leader"
