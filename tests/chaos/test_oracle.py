"""The oracle must see every planted difference, and none where there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.chaos.oracle import Outcome, Step, judge, read_traces, steps_lost

STEPS, RANKS = 6, 3
Traces = dict[int, list[Step]]


def fault_free() -> Traces:
    return {
        rank: [
            Step(step, float(step + rank / 8).hex(), (100 * step + 10 * rank, 100 * step + 10 * rank + 1))
            for step in range(STEPS)
        ]
        for rank in range(RANKS)
    }


def outcome(traces: Traces, weights: str = "abc", leftovers: tuple[str, ...] = ()) -> Outcome:
    return Outcome(traces, weights, leftovers)


def with_replay(traces: Traces) -> Traces:
    """Return the traces of a run that fell back from step 4 to step 2."""
    return {rank: lines[:4] + lines[2:] for rank, lines in traces.items()}


def test_an_equal_run_has_no_problems() -> None:
    assert judge(outcome(fault_free()), outcome(fault_free()), STEPS) == ()


def test_replays_that_are_equal_have_no_problems() -> None:
    run = outcome(with_replay(fault_free()))
    assert run.replayed() == 2
    assert judge(outcome(fault_free()), run, STEPS) == ()


def test_lost_steps_are_counted_between_two_moments() -> None:
    clocks = [
        Step(step, "0x0p+0", (), float(at)) for at, step in enumerate([0, 1, 2, 1, 2, 3, 4, 2, 3, 4, 5])
    ]
    assert steps_lost({0: clocks}, since=2.5, until=6.5) == 2
    assert steps_lost({0: clocks}, since=6.5, until=math.inf) == 3
    assert steps_lost({0: clocks}, since=8.0, until=math.inf) == 0
    assert steps_lost({}, since=0.0, until=math.inf) == 0


def _other_loss(traces: Traces) -> None:
    traces[1][3] = replace(traces[1][3], loss=(float.fromhex(traces[1][3].loss) + 2**-40).hex())


def _other_loss_in_a_replay(traces: Traces) -> None:
    traces[2][5] = replace(traces[2][5], loss="0x1.8p+9")


def _swapped_samples(traces: Traces) -> None:
    first, second = traces[0][1], traces[1][1]
    traces[0][1], traces[1][1] = replace(first, ids=second.ids), replace(second, ids=first.ids)


def _sample_twice(traces: Traces) -> None:
    last = traces[0][-1]
    traces[0][-1] = replace(last, ids=(last.ids[0], last.ids[0]))


def _missing_step(traces: Traces) -> None:
    traces[1] = [line for line in traces[1] if line.step != 4]


def _step_too_far(traces: Traces) -> None:
    traces[1].append(Step(STEPS, "0x1p0", (1, 2)))


def _missing_rank(traces: Traces) -> None:
    del traces[2]


PLANTED: list[tuple[Callable[[Traces], None], str]] = [
    (_other_loss, "rank 1.* 3.* 1.*loss"),
    (_other_loss_in_a_replay, "rank 2.* 3.* 2.*loss"),
    (_swapped_samples, "rank 0.* 1.* 1"),
    (_sample_twice, " 501 .* 1 "),
    (_sample_twice, " 500 .* 1 "),
    (_missing_step, "rank 1: 1 .*6.*4"),
    (_step_too_far, "rank 1: .*6.*6"),
    (_missing_rank, r"\[0, 1\].*\[0, 1, 2\]"),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTED)
def test_a_planted_difference_is_found(plant: Callable[[Traces], None], expected: str) -> None:
    traces = with_replay(fault_free())
    plant(traces)
    problems = judge(outcome(fault_free()), outcome(traces), STEPS)
    assert any(re.search(expected, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"weights": "abd"}, "abd.*abc"), ({"leftovers": ("process 17",)}, "process 17")],
)
def test_other_weights_and_leftovers_are_problems(changed: dict[str, Any], named: str) -> None:
    (problem,) = judge(outcome(fault_free()), outcome(fault_free(), **changed), STEPS)
    assert re.search(named, problem)


@pytest.mark.parametrize(
    "reference",
    [
        outcome({}),
        outcome(fault_free(), weights=""),
        outcome(with_replay(fault_free())),
        outcome({rank: lines[:-1] for rank, lines in fault_free().items()}),
    ],
)
def test_a_broken_reference_proves_nothing(reference: Outcome) -> None:
    assert judge(reference, reference, STEPS)


def test_many_differences_are_counted_not_listed() -> None:
    traces = {rank: [replace(line, loss="0x1p0") for line in lines] for rank, lines in fault_free().items()}
    problems = judge(outcome(fault_free()), outcome(traces), STEPS)
    assert len(problems) == 6
    assert "13" in problems[-1]


def test_traces_are_read_by_rank(tmp_path: Path) -> None:
    (tmp_path / "rank-00002.jsonl").write_text('{"step": 3, "loss": "0x1p0", "ids": [4, 5], "clock": 1.5}\n')
    assert read_traces(tmp_path) == {2: (Step(3, "0x1p0", (4, 5), 1.5),)}


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4}', "[]"])
def test_a_torn_line_is_named(tmp_path: Path, torn: str) -> None:
    (tmp_path / "rank-00000.jsonl").write_text('{"step": 3, "loss": "0x1p0", "ids": []}\n' + torn + "\n")
    with pytest.raises(ValueError, match=r"rank-00000\.jsonl, line 2"):
        read_traces(tmp_path)
