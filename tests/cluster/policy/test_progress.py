"""How far the nodes of a generation are."""

from __future__ import annotations

from outlast.cluster.policy.progress import Progress, SavedSteps
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import CommitSeen
from outlast.recovery.policy.pending import Pending, Why


def _begun(*names: str) -> Progress:
    found = Progress()
    found.begin(names)
    return found


def test_all_have_started_when_the_last_one_has() -> None:
    progress = _begun("n0", "n1")
    assert [progress.started(name) for name in ("n1", "n1", "n0")] == [False, False, True]


def test_the_step_of_all_is_that_of_the_slowest_and_is_told_when_it_rises() -> None:
    progress = _begun("n0", "n1", "n2")
    assert [progress.done("n0", 3), progress.done("n1", 2)] == [None, None]
    assert progress.done("n2", 2) == 2
    assert progress.done("n0", 9) is None
    assert progress.done("n1", 4) is None
    assert progress.done("n2", 2) is None
    assert progress.done("n2", 5) == 4
    assert progress.done("n1", 5) == 5


def test_a_step_that_is_told_late_is_no_step_back() -> None:
    progress = _begun("n0")
    assert progress.done("n0", 7) == 7
    assert progress.done("n0", 3) is None
    assert progress.least() == 7
    assert progress.done("n0", 8) == 8


def test_no_step_at_all_is_none() -> None:
    progress = _begun("n0")
    assert progress.done("n0", -1) is None
    assert progress.done("n0", 0) == 0


def test_what_one_node_said_counts_before_the_others_have_spoken() -> None:
    progress = _begun("n0", "n1")
    assert progress.least() == -1
    progress.done("n1", 6)
    assert progress.least() == 6
    progress.done("n0", 4)
    assert progress.least() == 4


def test_a_new_generation_begins_at_nothing() -> None:
    progress = _begun("n0", "n1")
    progress.started("n0")
    progress.done("n0", 5)
    progress.done("n1", 5)
    progress.begin(("n0", "n1"))
    assert progress.least() == -1
    assert not progress.started("n1")
    assert progress.done("n0", 0) is None
    assert progress.done("n1", 0) == 0


def test_before_any_generation_nobody_is_waited_for() -> None:
    assert Progress().started("n0")
    assert Progress().least() == -1


def test_a_node_that_fails_before_the_first_step_waits_for_no_save() -> None:
    """Where ranks can be held, they agree on a step first."""
    fault = Fault(FaultKind.FAILING, "n0", -1, 1, -1, "n0 is failing: XID 79", "n0 is failing")
    saved = SavedSteps()
    assert saved.reach(Pending(fault, 600.0, Why.SAVE, fault.step))
    assert not saved.reach(Pending(fault, 600.0, Why.SAVE))
    assert not saved.reach(Pending(fault, 600.0, Why.SAVE, 0, agreed=True))


def test_what_an_earlier_generation_saved_or_could_not_save_does_not_count() -> None:
    fault = Fault(FaultKind.FAILING, "n0", -1, 2, 4, "n0 is failing: XID 79", "n0 is failing")
    saved = SavedSteps()
    saved.take(CommitSeen(4, "step-4"))
    assert saved.reach(Pending(fault, 600.0, Why.SAVE, 4))
    assert saved.reach(Pending(fault, 600.0, Why.SAVE, 4, agreed=True))
    saved.begin()
    assert not saved.reach(Pending(fault, 600.0, Why.SAVE, 4))
    assert not saved.reach(Pending(fault, 600.0, Why.SAVE, 4, agreed=True))
