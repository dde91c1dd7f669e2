"""A loop that the script owns, with ``session.step_done``: it goes on bit for bit, and misuse is refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run
from tests.support.ranks import copies, lines, ranks

STEPS = 14


def ended(trace: Path, rank: int = 0) -> dict[str, Any]:
    return [line for line in lines(trace / f"rank-{rank}") if "ended" in line][-1]


def launched(folder: Path, *words: str) -> Run:
    """Run two ranks under the launcher to their end."""
    folder.mkdir()
    run = Run(
        folder / "run",
        "own_loop.py",
        str(folder / "trace"),
        "-",
        str(STEPS),
        *words,
        options=("--nproc-per-node=2",),
    )
    try:
        assert run.start(OMP_NUM_THREADS="1").finish() == 0, run.console()
    finally:
        run.stop()
    return run


def test_it_goes_on_bit_for_bit_after_a_sigkill(tmp_path: Path) -> None:
    plain = launched(tmp_path / "plain")
    killed = launched(tmp_path / "killed", "kill@1@9")
    assert [one["generation"] for one in plain.records("generation_started")] == [1]
    assert [one["generation"] for one in killed.records("generation_started")] == [1, 2]
    for rank in range(2):
        expected, found = (
            ended(tmp_path / "plain" / "trace", rank),
            ended(tmp_path / "killed" / "trace", rank),
        )
        assert found["content"] == expected["content"]
        assert (found["ended"], found["generation"]) == (STEPS, 2)
    again = [
        line["restored"] for line in lines(tmp_path / "killed" / "trace" / "rank-0") if "restored" in line
    ]
    assert again[0] == 0
    assert 4 <= again[1] <= 9
    assert STEPS in copies(tmp_path / "killed" / "run")


@pytest.mark.long
def test_a_notice_ends_the_loop_after_the_same_step_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with ranks(tmp_path / "told", "pace=0.05", script="own_loop.py") as job:
        job.reach(3)
        job.send(1, number=signal.SIGTERM)
        assert job.finish() == [75, 75], job.output()
        first, second = (ended(job.trace, rank) for rank in range(2))
        assert first["preempted"]
        assert second["preempted"]
        assert first["ended"] == second["ended"]
        assert first["ended"] in copies(job.run)
    steps = first["ended"] + 4
    for name in ("told", "plain"):
        with ranks(tmp_path / name, steps=steps, script="own_loop.py") as job:
            assert job.finish() == [0, 0], job.output()
    for rank in range(2):
        found, expected = (ended(tmp_path / name / "trace", rank) for name in ("told", "plain"))
        assert found["ended"] == expected["ended"] == steps
        assert found["content"] == expected["content"]


def test_a_request_to_stop_is_heard_on_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path / "job", "stop@1@5", "pace=0.01", script="own_loop.py") as job:
        assert job.finish() == [0, 0], job.output()
        first, second = (ended(job.trace, rank) for rank in range(2))
        assert first["ended"] == second["ended"] > 5
        assert first["ended"] in copies(job.run)


def test_a_rollback_is_returned_and_the_loop_goes_on_from_there(tmp_path: Path) -> None:
    words = [tmp_path / "trace", tmp_path / "run", str(STEPS), "poison@9"]
    done = warm.run([SCRIPTS / "own_loop.py", *words], timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in lines(tmp_path / "trace" / "rank-0") if "step" in line]
    at = steps.index(9)
    assert steps[: at + 1] == list(range(10))
    assert steps[at + 1] <= 8
    assert steps[at + 1 :] == list(range(steps[at + 1], STEPS))
    assert ended(tmp_path / "trace")["ended"] == STEPS


def test_calls_that_make_no_sense_are_refused_with_the_reason(tmp_path: Path) -> None:
    done = warm.run([SCRIPTS / "refused_calls.py", tmp_path / "run"], timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert said == [
        "nothing | session.restore",
        "twice | session.register",
        "restored 0",
        "late | session.register",
        "again | session.register",
        "ahead | session.step_done",
        "done 1",
        "backwards | session.step_done",
        "mixed | session.steps",
        "done 2 2",
        "restored 2",
        "mixed | session.step_done",
    ]
