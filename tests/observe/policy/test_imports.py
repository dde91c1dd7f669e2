"""What the imports cost, from the event log."""

from __future__ import annotations

from outlast.observe.policy.imports import ImportCosts, fold
from outlast.recovery.policy.events import GenerationStarted, ImportedAhead, Record, RunStarted


def run() -> RunStarted:
    return RunStarted(0.0, 0.0, 1, "r", "n", 1, "b", ("t.py",), 2, "")


def generation(number: int, start: str = "zygote") -> GenerationStarted:
    return GenerationStarted(0.0, 0.0, number, 2, (1, 2), start, "")


def ahead(seconds: float) -> ImportedAhead:
    return ImportedAhead(0.0, 0.0, 1, 7, seconds, {"bad": "it starts a process"}, "")


def test_nothing_is_told_of_a_log_without_imports_ahead() -> None:
    assert fold([run(), generation(1), generation(2)]) is None


def test_each_start_from_a_zygote_that_imported_ahead_saves_the_imports() -> None:
    log: list[Record] = [run(), generation(1), ahead(2.0), generation(2), generation(3, "cold: why")]
    log += [ahead(3.0), generation(4, "zygote, 1 of 2 kept")]
    assert fold(log) == ImportCosts(7, 3.0, 2, 5.0, {"bad": "it starts a process"})


def test_a_new_launch_saves_nothing_until_its_own_zygote_has_imported() -> None:
    assert fold([run(), ahead(2.0), generation(1), run(), generation(2)]) == ImportCosts(
        7, 2.0, 1, 2.0, {"bad": "it starts a process"}
    )
