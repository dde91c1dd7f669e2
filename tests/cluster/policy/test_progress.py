"""How far the nodes of a generation are."""

from __future__ import annotations

from outlast.cluster.policy.progress import Progress


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
