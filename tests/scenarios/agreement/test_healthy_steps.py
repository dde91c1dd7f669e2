"""No collective of ours is in a healthy step, on one node or several; saves and stops come all the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents, agents
from tests.support.launching import Run, running
from tests.support.ranks import copies, lines

STEPS = 60


def launched(folder: Path, *words: str) -> Run:
    options = ("--nproc-per-node", "2")
    return Run(folder / "run", "healthy.py", str(folder / "trace"), str(STEPS), *words, options=options)


def ours(trace: Path) -> set[int]:
    """Return how many collectives were ours in a step, of all steps of both ranks."""
    found = [line for rank in (0, 1) for line in lines(trace / f"rank-{rank}") if "step" in line]
    assert all(line["training"] > 0 for line in found), "they are counted"
    return {line["all"] - line["training"] for line in found}


def asked_for(saved: list[dict[str, Any]], seconds: str) -> set[int]:
    """Return the steps that were saved because a rank asked for it: not by time, and not the last one."""
    assert any(seconds in one["reason"] for one in saved), saved
    last = max(one["step"] for one in saved)
    return {one["step"] for one in saved if seconds not in one["reason"] and one["step"] < last}


def test_with_a_guard_one_collective_is_ours(tmp_path: Path) -> None:
    with running(launched(tmp_path, "guard")) as run:
        assert run.finish() == 0, run.console()
    assert ours(tmp_path / "trace") == {1}


def test_saves_by_time_and_by_request_are_of_one_step_on_all_ranks_without_a_vote(tmp_path: Path) -> None:
    with running(launched(tmp_path, "seconds=0.3", "save@1@5")) as run:
        assert run.finish() == 0, run.console()
    (step,) = asked_for(run.records("saved"), "0.3")
    assert step > 6, "it is ahead of every rank"
    assert copies(run.folder)[-1] == STEPS
    assert ours(tmp_path / "trace") == {0}
    assert len(lines(tmp_path / "trace" / "rank-0")) == STEPS, "of each step but the first, and of the end"


def trained(found: Agents, steps: int) -> bool:
    return all(len(lines(found.trace / f"rank-{rank}")) >= steps for rank in (0, 1))


@pytest.mark.timeout(420)
def test_on_two_nodes_saves_and_the_stop_after_a_notice_are_of_one_step_without_a_vote(
    tmp_path: Path,
) -> None:
    with agents(tmp_path / "job", script=("healthy.py", "100000", "seconds=0.5", "save@1@5")) as found:
        found.start("n0", "n1")
        found.until(lambda: trained(found, 60), "steps")
        found.send("n1", signal.SIGTERM)
        assert found.finish() == dict.fromkeys(("n0", "n1"), 128 + signal.SIGTERM), found.consoles()
    (step,) = asked_for([*found.records("n0", "saved"), *found.records("n1", "saved")], "0.5")
    assert step > 6, "it is ahead of every rank"
    ends = [one["ended"] for rank in (0, 1) for one in lines(found.trace / f"rank-{rank}") if "ended" in one]
    assert set(ends) == {copies(found.run)[-1]}, found.consoles()
    assert ours(found.trace) == {0}
