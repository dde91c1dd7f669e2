"""The state axis: what the next generation is told of the copies that it may load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks
from outlast.recovery.policy.events import FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    JobDecider,
    JobState,
    LoadSeen,
    OwnCheckpoint,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from tests.recovery.policy.test_job import again, committed, fault, job, loads, name, only, suspicious


def against(decider: JobDecider) -> list[str]:
    """Return what speaks against copies, the way the ranks are told."""
    marks = map(Mark.parse, decider.avoid)
    return [mark.place for mark in marks if mark.bearing in (CopyStatus.SUSPECT, CopyStatus.QUARANTINED)]


def test_a_first_fault_loads_the_newest() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    action = again(decider)
    assert (action.state, against(decider)) == (StateSource.NEWEST, [])
    assert Marks(action.avoid).durable == {name(10), name(20)}


def test_a_fault_that_came_back_makes_what_was_loaded_a_suspect_and_all_that_came_out_of_it() -> None:
    decider = job()
    committed(decider, 10, 20)
    again(decider)
    decider.handle(AllStarted(2), 0.0)
    loads(decider, 20)
    decider.handle(CommitSeen(20, name(20, 2)), 0.0)
    decider.handle(CommitSeen(24, name(24, 2)), 0.0)
    action = again(decider)
    assert action.state is StateSource.OLDER
    assert action.avoid == decider.avoid
    assert against(decider) == [f"local/{name(20)}", f"local/{name(20, 2)}", f"local/{name(24, 2)}", "*/*.g2"]
    decider.handle(CommitSeen(26, name(26, 2)), 0.0)
    assert f"local/{name(26, 2)}" in against(decider), "the saver was late with it"
    loads(decider, 10)
    assert again(decider).kind is RecoveryAction.STOP


@pytest.mark.parametrize("loaded", [None, 10])
def test_without_a_load_or_an_older_copy_there_is_no_older_state(loaded: int | None) -> None:
    decider = job()
    committed(decider, 10, 20)
    again(decider)
    if loaded is not None:
        loads(decider, loaded)
    assert again(decider).kind is RecoveryAction.STOP


def test_the_load_of_an_earlier_generation_does_not_count() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    again(decider)
    assert again(decider).kind is RecoveryAction.STOP


def test_a_copy_that_is_gone_cannot_be_gone_back_to() -> None:
    decider = job()
    committed(decider, 10, 20)
    again(decider)
    loads(decider, 20)
    assert decider.handle(CopyGone(name(10)), 0.0) == ()
    assert decider.handle(CopyGone("never heard of"), 0.0) == ()
    assert again(decider).kind is RecoveryAction.STOP


def test_a_load_whose_copy_is_gone_since_leaves_the_older_ones() -> None:
    decider = job()
    committed(decider, 10, 20)
    again(decider)
    loads(decider, 20)
    decider.handle(CopySetAside(name(20), "rank 1: digest"), 0.0)
    assert again(decider).state is StateSource.OLDER
    assert [one.trust for one in decider.trust_changes()] == ["quarantined"]


SUSPECTS = [f"local/{name(20)}", f"local/{name(24)}", "*/*.g2"]


def test_suspects_come_last_until_the_job_is_beyond_them() -> None:
    decider = suspicious()
    action = again(decider, step=13)
    assert (action.state, against(decider)) == (StateSource.OLDER, SUSPECTS)
    assert f"local/{name(20)}, local/{name(24)} are suspect (error (E: x) 5 steps after" in action.reason
    decider.handle(CommitSeen(25, name(25, 4)), 0.0)
    action = again(decider, step=26)
    assert (action.state, against(decider)) == (StateSource.NEWEST, SUSPECTS)
    assert "suspect" not in action.reason


def test_a_number_that_is_not_finite_soon_after_a_load_makes_a_suspect_the_first_time() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    decider.handle(StepsDone(23), 0.0)
    action = again(decider, step=23, kind=FaultKind.NON_FINITE)
    assert (action.state, against(decider)) == (StateSource.OLDER, [f"local/{name(20)}", "*/*.g1"])
    loads(decider, 10)
    decider.handle(StepsDone(30), 0.0)
    assert [one.trust for one in decider.trust_changes()] == ["suspect", "proven"]
    assert Marks(decider.avoid).proven == {name(10)}


def test_a_copy_that_training_went_on_from_is_a_suspect_only_when_nothing_else_is_left_to_be_tried() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    decider.handle(StepsDone(60), 0.0)
    assert again(decider, step=60).state is StateSource.NEWEST
    loads(decider, 20)
    action = again(decider, step=60)
    assert (action.state, against(decider)[0]) == (StateSource.OLDER, f"local/{name(20)}")


def test_a_fault_that_comes_from_every_state_clears_those_states() -> None:
    decider = suspicious()
    loads(decider, 10)
    decider.trust_changes()
    end = again(decider)
    assert "from every checkpoint that was tried" in end.reason
    assert (end.kind, against(decider)) == (RecoveryAction.STOP, [])
    changes = [(one.place, one.trust, one.reason) for one in decider.trust_changes()]
    reason = "the same fault occurred at step 25 from other checkpoints"
    assert changes == [(f"local/{name(step)}", "released", reason) for step in (20, 24)]
    assert only(decider.handle(StopRequested(1), 0.0)).reason.endswith("after the end of the job")


def test_a_fault_that_speaks_against_the_state_clears_none() -> None:
    decider = job()
    committed(decider, 10, 20, 30)
    for loaded in (30, 20, 10):
        loads(decider, loaded)
        end = again(decider, step=35, kind=FaultKind.NON_FINITE)
    assert end.reason.endswith("or the machine, or all of these checkpoints are bad")
    assert f"local/{name(30)}" in against(decider)


def test_the_newest_checkpoint_is_no_suspect_before_every_plain_restart_was_made() -> None:
    """With in-process restart an error is met with two plain restarts, and then with an older checkpoint."""
    decider = job()
    committed(decider, 10, 20)
    kinds = []
    for loaded in (20, 20, 20, 10):
        loads(decider, loaded)
        one = replace(fault(decider.generation), reenters=True)
        action = only(decider.handle(one, 0.0))
        kinds.append((action.kind, action.state, bool(against(decider))))
    assert kinds == [
        (RecoveryAction.RESTART_IN_PROCESS, StateSource.NEWEST, False),
        (RecoveryAction.RESTART_IN_JOB, StateSource.NEWEST, False),
        (RecoveryAction.RESTART_IN_JOB, StateSource.OLDER, True),
        (RecoveryAction.STOP, StateSource.NEWEST, False),
    ]
    assert "from every checkpoint that was tried" in action.reason


def test_the_diagnosis_tells_what_was_loaded_and_not_what_was_ordered() -> None:
    decider = job()
    committed(decider, 10, 20)
    for _ in range(3):
        loads(decider, 20)  # the older one could not be read, so the newest was loaded once more
        end = again(decider)
    assert end.kind is RecoveryAction.STOP
    assert "every state" not in end.reason
    assert f"local/{name(20)}" in against(decider), "nothing acquits it"


def test_an_older_checkpoint_that_is_loaded_for_another_reason_counts_as_tried() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    assert again(decider, step=25).state is StateSource.NEWEST
    loads(decider, 20)
    decider.handle(CopySetAside(name(20), "rank 1: digest"), 0.0)
    decider.handle(LoadSeen(10, name(10)), 0.0)
    end = again(decider, step=25)
    assert end.kind is RecoveryAction.STOP
    assert "from every checkpoint that was tried" in end.reason


def test_another_fault_clears_nothing() -> None:
    decider = suspicious()
    for _ in range(2):
        loads(decider, 10)
        end = again(decider, step=13)
    assert end.kind is RecoveryAction.STOP
    assert set(SUSPECTS) <= set(against(decider))


def test_a_generation_that_begins_afresh_proves_what_it_saves() -> None:
    decider = job()
    decider.handle(AllStarted(1), 0.0)
    committed(decider, 5)
    decider.handle(StepsDone(25), 0.0)
    assert [(one.place, one.trust) for one in decider.trust_changes()] == [(f"local/{name(5)}", "proven")]


def test_a_generation_that_another_decider_takes_over_goes_on() -> None:
    first, second = job(), job()
    committed(first, 3)
    again(first)
    first.handle(AllStarted(2), 0.0)
    second.restore(first.state(), in_force=True)
    assert (second.generation, second.state_now) == (2, JobState.RUNNING)
    second.handle(CommitSeen(5, name(5, 2)), 0.0)
    second.handle(StepsDone(25), 0.0)
    assert f"local/{name(5, 2)}" in [one.place for one in second.trust_changes()]


def test_one_suspect_that_is_all_there_is_is_loaded_and_the_reason_says_so() -> None:
    decider = job()
    committed(decider, 20)
    loads(decider, 20)
    action = again(decider, step=23, kind=FaultKind.NON_FINITE)
    assert action.state is StateSource.NEWEST
    assert action.reason.endswith(
        f"; local/{name(20)} is suspect (non-finite (E: x) 3 steps after it was loaded), "
        "and no other checkpoint is left"
    )


def test_one_suspect_beside_a_good_copy_is_held_back() -> None:
    decider = job()
    committed(decider, 10, 20)
    loads(decider, 20)
    action = again(decider, step=23, kind=FaultKind.NON_FINITE)
    assert action.state is StateSource.OLDER
    assert action.reason.endswith(
        f"; local/{name(20)} is suspect (non-finite (E: x) 3 steps after it was loaded)"
    )


def test_a_suspect_that_is_gone_is_none_any_more() -> None:
    decider = suspicious()
    decider.handle(CopyGone(name(24)), 0.0)
    assert against(decider) == [f"local/{name(20)}", "*/*.g2"]


def test_only_so_many_copies_are_remembered() -> None:
    decider = job()
    committed(decider, *range(1, 400))
    assert len(decider.state()["copies"]["copies"]) == 256


def test_what_a_person_released_is_no_suspect_to_the_next_launcher() -> None:
    decider = job()
    decider.restore({**suspicious().state(), "released": {name(20): "looked at"}})
    assert against(decider) == [f"local/{name(24)}", "*/*.g2"]
    assert Marks(decider.avoid).of("local", name(20)) is None
    (change,) = decider.trust_changes()
    assert (change.place, change.trust, change.reason) == (
        f"local/{name(20)}",
        "released",
        "looked at",
    )
    assert "released" not in decider.state()


def test_a_copy_that_was_damaged_and_is_written_again_is_as_good_as_any() -> None:
    decider = job()
    committed(decider, 10, 20)
    decider.handle(LoadSeen(20, name(20), (f"memory/{name(20)}",), "ab"), 0.0)
    decider.handle(CopySetAside(f"memory/{name(20)}", "rank 1: digest"), 0.0)
    decider.handle(CopySetAside(name(20), "rank 1: digest"), 0.0)
    assert [one.trust for one in decider.trust_changes()] == ["quarantined", "quarantined"]
    committed(decider, 20)
    assert against(decider) == []
    assert only(decider.handle(StopRequested(1), 0.0)).reason.endswith("resume from step 20 or later")


def test_what_a_newer_version_kept_is_not_guessed_at() -> None:
    state = suspicious().state()
    decider = job()
    with pytest.raises(ValueError, match="trust in copies is kept in version 2, this one knows 1"):
        decider.restore({**state, "copies": {**state["copies"], "version": 2}})
    assert decider.state() == job().state()


def test_what_the_job_would_go_on_from_is_our_checkpoint_or_else_the_scripts() -> None:
    decider = job()
    assert decider.saved == -1
    decider.handle(OwnCheckpoint(40), 0.0)
    assert decider.saved == 40
    committed(decider, 0)
    assert decider.saved == 0


def test_a_checkpoint_of_the_script_at_step_0_is_one() -> None:
    decider = job()
    decider.handle(OwnCheckpoint(0), 0.0)
    assert only(decider.handle(StopRequested(15), 0.0)).reason.endswith(
        "; the script announced a checkpoint of its own at step 0"
    )


@pytest.mark.parametrize("changes", [{}, {"own": 0}, {"complete": 0}])
def test_the_state_of_a_launcher_that_ended_at_once_is_taken_over(changes: dict[str, object]) -> None:
    state = {**job().state(), **changes}
    assert state["generation"] == 1
    decider = job()
    decider.restore(state)
    found = decider.state()
    assert found == {**state, "generation": 2, "copies": found["copies"]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"generation": 0}, ValueError),
        ({"own": -2}, ValueError),
        ({"complete": -2}, ValueError),
        ({"knows_steps": 1}, TypeError),
    ],
)
def test_a_number_that_cannot_be_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    decider = job()
    with pytest.raises(error):
        decider.restore({**suspicious().state(), **changes})
    assert decider.state() == job().state()


def test_a_run_is_finished_at_the_last_step_also_where_it_was_not_saved() -> None:
    decider = job()
    committed(decider, 20)
    decider.handle(StepsDone(30), 0.0)
    for rank in range(decider.world_size):
        decider.handle(WorkerFinished(rank, 1), 0.0)
    assert decider.state()["complete"] == 30


def test_a_finished_run_is_known_as_such_until_training_goes_on() -> None:
    decider = job()
    committed(decider, 10, 20)
    for rank in range(decider.world_size):
        decider.handle(WorkerFinished(rank, 1), 0.0)
    state = decider.state()
    assert state["complete"] == 20
    decider.restore(state)
    decider.handle(StepsDone(20), 0.0)
    assert decider.state()["complete"] == 20
    decider.handle(StepsDone(21), 0.0)
    assert decider.state()["complete"] == -1
    del state["complete"]
    decider.restore(state)
    assert decider.state()["complete"] == -1, "an earlier version has left the state"


def test_a_run_that_was_complete_before_any_step_is_one_too() -> None:
    first, heir = job(), job()
    committed(first, 0)
    for rank in range(first.world_size):
        first.handle(WorkerFinished(rank, 1), 0.0)
    heir.restore(first.state())
    for _ in range(2):
        loads(heir, 0)
        end = again(heir, step=0)
    assert end.reason.startswith("the run was complete, ")
