"""The state axis: what the next generation is told of the copies that it may load."""

from __future__ import annotations

import pytest

from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    JobDecider,
    JobState,
    LoadSeen,
    StepsDone,
    StopRequested,
)
from tests.recovery.policy.builders import (
    committed,
    fault,
    heir,
    hit,
    job,
    loads,
    name,
    numbers,
    only,
    resumed,
    short,
    suspicious,
)

SUSPECTS = [f"local/{name(20)}", f"local/{name(24, 2)}", "*/>19.g2"]


def against(decider: JobDecider) -> list[str]:
    """Return what speaks against copies, the way the ranks are told."""
    marks = map(Mark.parse, decider.avoid)
    return [mark.place for mark in marks if mark.bearing in (CopyStatus.SUSPECT, CopyStatus.QUARANTINED)]


def changes(decider: JobDecider) -> list[tuple[str, str]]:
    return [(one.place, one.trust) for one in decider.trust_changes()]


def test_a_first_fault_loads_the_newest() -> None:
    decider = loads(committed(job(), 10, 20), 20)
    action = hit(decider)
    assert (action.state, against(decider)) == ("newest", [])
    assert Marks(action.avoid).durable == {name(10), name(20)}


def test_a_fault_that_came_back_makes_what_was_loaded_a_suspect_and_all_that_came_out_of_it() -> None:
    decider = committed(job(), 10, 20)
    hit(decider)
    decider.handle(AllStarted(2), 0.0)
    committed(loads(decider, 20), 20, 24, generation=2)
    action = hit(decider)
    assert (action.state, action.avoid) == ("older", decider.avoid)
    assert against(decider) == [
        f"local/{name(20)}",
        f"local/{name(20, 2)}",
        f"local/{name(24, 2)}",
        "*/>19.g2",
    ]
    committed(decider, 26, generation=2)
    assert f"local/{name(26, 2)}" in against(decider), "the saver was late with it"
    assert hit(loads(decider, 10)).kind == "stop"


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        (None, None, "stop 93"),
        (None, 10, "stop 93"),  # there is no older one
        (20, None, "stop 93"),  # the load of an earlier generation does not count
        (None, 20, "older"),
    ],
)
def test_an_older_state_needs_a_load_and_an_older_copy(
    before: int | None, after: int | None, answer: str
) -> None:
    decider = committed(job(), 10, 20)
    for loaded in (before, after):
        if loaded is not None:
            loads(decider, loaded)
        found = hit(decider)
    assert short(found) == answer


def test_copies_that_are_gone_are_no_older_state_and_no_suspects() -> None:
    decider = committed(job(), 10, 20)
    hit(decider)
    loads(decider, 20)
    for gone in (name(10), "never heard of"):
        assert decider.handle(CopyGone(gone), 0.0) == ()
    assert hit(decider).kind == "stop"
    other = suspicious()
    other.handle(CopyGone(name(24, 2)), 0.0)
    assert against(other) == [f"local/{name(20)}", "*/>19.g2"]
    third = committed(job(), 10, 20)
    hit(third)
    loads(third, 20)
    third.handle(CopySetAside(name(20), "rank 1: digest"), 0.0)
    assert hit(third).state == "older", "the loaded one is gone, the older ones are not"
    assert changes(third) == [(f"local/{name(20)}", "quarantined")]


def test_suspects_come_last_until_the_job_is_beyond_them() -> None:
    decider = suspicious()
    action = hit(decider, 13)
    assert (action.state, against(decider)) == ("older", SUSPECTS)
    assert all(one in action.reason for one in SUSPECTS[:2])
    committed(decider, 25, generation=4)
    action = hit(decider, 26)
    assert (action.state, against(decider)) == ("newest", SUSPECTS)
    assert name(20) not in action.reason


def test_a_number_that_is_not_finite_soon_after_a_load_makes_a_suspect_the_first_time() -> None:
    decider = resumed(10, 20)
    decider.handle(StepsDone(23), 0.0)
    action = hit(decider, 23, "non-finite")
    assert (action.state, against(decider)) == ("older", [f"local/{name(20)}", "*/>19.g2"])
    assert f"local/{name(20)}" in action.reason
    loads(decider, 10)
    decider.handle(StepsDone(30), 0.0)
    assert [trust for _, trust in changes(decider)] == ["suspect", "proven"]
    assert Marks(decider.avoid).proven == {name(10)}


def test_one_suspect_that_is_all_there_is_is_loaded_and_the_reason_says_so() -> None:
    reasons = []
    for saved, state in (((20,), "newest"), ((10, 20), "older")):
        decider = resumed(*saved)
        action = hit(decider, 23, "non-finite")
        assert action.state == state
        assert f"local/{name(20)}" in action.reason
        reasons.append(action.reason)
    assert reasons[0] != reasons[1]


def test_a_copy_that_training_went_on_from_is_a_suspect_only_when_nothing_else_is_left_to_be_tried() -> None:
    decider = loads(committed(job(), 10, 20), 20)
    decider.handle(StepsDone(60), 0.0)
    assert hit(decider, 60).state == "newest"
    action = hit(loads(decider, 20), 60)
    assert (action.state, against(decider)[0]) == ("older", f"local/{name(20)}")


def test_a_fault_that_comes_from_every_state_clears_those_states() -> None:
    decider = loads(suspicious(), 10)
    decider.trust_changes()
    assert short(hit(decider)) == "stop 93"
    assert against(decider) == []
    found = decider.trust_changes()
    assert [(one.place, one.trust) for one in found] == [
        (f"local/{one}", "released") for one in (name(20), name(24, 2))
    ]
    assert [numbers(one.reason) for one in found] == [[25], [25]]


def test_a_fault_that_speaks_against_the_state_and_another_fault_clear_none() -> None:
    decider = resumed(10, 20, 30)
    for loaded in (30, 20, 10):
        end = hit(loads(decider, loaded), 35, "non-finite")
    assert end.kind == "stop"
    assert f"local/{name(30)}" in against(decider)
    other = suspicious()
    ends = [hit(loads(other, 10), 13) for _ in range(2)]
    assert ends[-1].kind == "stop"
    assert set(SUSPECTS) <= set(against(other))


def test_the_newest_checkpoint_is_no_suspect_before_every_plain_restart_was_made() -> None:
    """With in-process restart an error is met with two plain restarts, and then with an older checkpoint."""
    decider, found = committed(job(), 10, 20), []
    for loaded in (20, 20, 20, 10):
        action = hit(loads(decider, loaded), fault(step=25, reenters=True))
        found.append((short(action), bool(against(decider))))
    assert found == [("in-process", False), ("in-job", False), ("older", True), ("stop 93", False)]


def test_what_was_loaded_counts_and_not_what_was_ordered() -> None:
    decider = committed(job(), 10, 20)
    for _ in range(3):
        end = hit(loads(decider, 20))  # the older one could not be read, so the newest was loaded once more
    assert (end.kind, f"local/{name(20)}" in against(decider)) == ("stop", True), "nothing acquits it"
    other = committed(job(), 10, 20)
    assert hit(loads(other, 20)).state == "newest"
    loads(other, 20).handle(CopySetAside(name(20), "rank 1: digest"), 0.0)
    end = hit(loads(other, 10))
    assert (short(end), against(other)) == ("stop 93", []), "another reason led to the older one"


def test_a_generation_that_begins_afresh_or_is_taken_over_proves_what_it_saves() -> None:
    decider = job()
    decider.handle(AllStarted(1), 0.0)
    committed(decider, 5).handle(StepsDone(25), 0.0)
    assert changes(decider) == [(f"local/{name(5)}", "proven")]
    first, second = committed(job(), 3), job()
    hit(first)
    first.handle(AllStarted(2), 0.0)
    second.restore(first.state(), in_force=True)
    assert (second.generation, second.state_now) == (2, JobState.RUNNING)
    committed(second, 5, generation=2).handle(StepsDone(25), 0.0)
    assert (f"local/{name(5, 2)}", "proven") in changes(second)


def test_only_so_many_copies_are_remembered_and_those_after_the_end_are_known() -> None:
    decider = committed(job(), *range(1, 400))
    decider.handle(StopRequested(15), 0.0)
    assert decider.handle(CommitSeen(400, name(400)), 1.0) == ()
    kept = decider.state()["copies"]["copies"]
    assert (len(kept), f"local/{name(400)}" in kept) == (256, True)


def test_what_a_person_released_is_no_suspect_to_the_next_launcher() -> None:
    decider = heir(suspicious(), released={name(20): "looked at"})
    assert against(decider) == [f"local/{name(24, 2)}", "*/>19.g2"]
    assert Marks(decider.avoid).of("local", name(20)) is None
    (change,) = decider.trust_changes()
    assert (change.place, change.trust, change.reason) == (f"local/{name(20)}", "released", "looked at")
    assert "released" not in decider.state()


def test_a_copy_that_was_damaged_and_is_written_again_is_as_good_as_any() -> None:
    decider = committed(job(), 10, 20)
    decider.handle(LoadSeen(20, name(20), (f"memory/{name(20)}",), "ab"), 0.0)
    for place in (f"memory/{name(20)}", name(20)):
        decider.handle(CopySetAside(place, "rank 1: digest"), 0.0)
    assert [trust for _, trust in changes(decider)] == ["quarantined", "quarantined"]
    committed(decider, 20)
    assert (against(decider), decider.saved) == ([], 20)
    assert numbers(only(decider.handle(StopRequested(15), 0.0)).reason) == [15, 20]
