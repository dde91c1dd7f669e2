"""Under the launcher no collective of ours is in a healthy step, and saves by time come all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running
from tests.support.ranks import copies, lines

STEPS = 60
RANKS = 2


@pytest.mark.parametrize(("words", "ours"), [((), 0), (("guard",), 1)], ids=["plain", "guard"])
def test_the_collectives_of_a_healthy_step(tmp_path: Path, words: tuple[str, ...], ours: int) -> None:
    options = ("--nproc-per-node", str(RANKS))
    run = Run(tmp_path / "run", "healthy.py", str(tmp_path / "trace"), str(STEPS), *words, options=options)
    with running(run):
        assert run.finish() == 0, run.console()
    for rank in range(RANKS):
        found = [line for line in lines(tmp_path / "trace" / f"rank-{rank}") if "step" in line]
        assert len(found) == STEPS - 1
        assert all(line["training"] > 0 for line in found), "they are counted"
        assert {line["all"] - line["training"] for line in found} == {ours}


def test_saves_by_time_and_by_request_are_of_one_step_on_all_ranks_without_a_vote(tmp_path: Path) -> None:
    words = ("seconds=0.3", "save@1@5")
    options = ("--nproc-per-node", str(RANKS))
    run = Run(tmp_path / "run", "healthy.py", str(tmp_path / "trace"), str(STEPS), *words, options=options)
    with running(run):
        assert run.finish() == 0, run.console()
    saved = run.records("saved")
    reasons = {one["reason"] for one in saved}
    assert "every 0.3 s" in reasons, reasons
    assert copies(run.folder)[-1] == STEPS
    asked = [one["step"] for one in saved if one["reason"] == "a rank asked for it"]
    assert len(asked) == 1, saved
    assert asked[0] > 6, "it is ahead of every rank"
    for rank in range(RANKS):
        found = [line for line in lines(tmp_path / "trace" / f"rank-{rank}") if "step" in line]
        assert {line["all"] - line["training"] for line in found} == {0}
