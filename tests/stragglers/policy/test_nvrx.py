"""NVRx's scores, by the figures that its formulae give, and where they mislead beside ours."""

from __future__ import annotations

import math
import random
import re

import pytest

from outlast.stragglers.policy.nvrx import (
    ESTIMATED_STEPS,
    THRESHOLD,
    BestTimes,
    Kernel,
    below,
    gpu_score,
    relative_references,
    report_lines,
    section_scores,
    steps_between_reports,
    tail,
)
from tests.stragglers.policy.builders import Fleet, named, slow


def relative(times: list[float]) -> dict[int, float]:
    """Return the relative scores of one section."""
    references = relative_references([{"step": one} for one in times])
    return {rank: section_scores({"step": one}, references)["step"] for rank, one in enumerate(times)}


def against_best(best: BestTimes, own: float) -> float:
    """Return the score of a rank against its fastest window."""
    return section_scores({"f": own}, best.references({"f": own}))["f"]


def test_a_section_against_the_fastest_rank() -> None:
    assert relative([1.0, 2.0, 1.25]) == {0: 1.0, 1: 0.5, 2: 0.8}
    assert math.isnan(relative([0.0, 1.0])[0])
    assert relative_references([{"only": 2.0}]) == {"only": 2.0}
    references = relative_references([{"a": 1.0, "b": 1.0}, {"a": 2.0}])
    assert references["a"] == 1.0
    assert math.isnan(references["b"])
    assert math.isnan(section_scores({"b": 1.0}, references)["b"])


def test_a_rank_against_its_fastest_window() -> None:
    best = BestTimes()
    assert [against_best(best, one) for one in (2.0, 1.0, 4.0)] == [1.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("kernels", "references", "score"),
    [
        ({"matmul": Kernel(2.0, 90.0), "copy": Kernel(1.0, 10.0)}, {"matmul": 1.0, "copy": 1.0}, 0.55),
        ({"matmul": Kernel(2.0, 90.0), "copy": Kernel(1.0, 10.0)}, {"matmul": 1.0, "copy": math.nan}, 0.5),
        ({"matmul": Kernel(2.0, 90.0)}, {"matmul": math.nan}, math.nan),
        ({"k": Kernel(0.0, 0.0)}, {"k": 0.0}, math.nan),
        ({}, {}, math.nan),
    ],
)
def test_the_gpu_score_is_weighted_by_the_time_in_each_kernel(
    kernels: dict[str, Kernel], references: dict[str, float], score: float
) -> None:
    assert gpu_score(kernels, references) == pytest.approx(score, nan_ok=True)


def test_thresholds_intervals_and_tails() -> None:
    assert (THRESHOLD, ESTIMATED_STEPS) == (0.75, 16)
    assert below({0: 0.75, 1: 0.7499, 2: math.nan}, 0.75) == [1]
    assert steps_between_reports([0.5] * 8 + [2.0] * 8, 60.0) == 120.0
    assert steps_between_reports([0.0] * 16, 60.0) == math.inf
    ends = tail({0: 0.9, 1: 0.5, 2: 1.0, 3: 0.8})
    assert (ends.least, ends.median, ends.largest) == (0.5, 0.8, 1.0)
    assert math.isnan(tail({}).least)
    assert math.isnan(tail({0: math.nan, 1: 1.0}).median)


def test_the_report_has_the_worst_and_the_best() -> None:
    """In NVRx's words, which others parse."""
    scores = {rank: 0.94 + rank / 10_000 for rank in range(512)}
    text = report_lines(scores, {rank: f"h100-{rank // 8:03}" for rank in scores}, 2)
    assert text == (
        " Worst performing 2/512 ranks:\n"
        "  Rank=0 Node=h100-000 Score=0.94\n"
        "  Rank=1 Node=h100-000 Score=0.94\n"
        " Best performing 2/512 ranks:\n"
        "  Rank=511 Node=h100-063 Score=0.99\n"
        "  Rank=510 Node=h100-063 Score=0.99\n"
    )
    few = {0: 0.9, 1: math.nan, 2: 0.8, 3: 1.0}
    text = report_lines(few, dict.fromkeys(few, "n"), 2)
    assert re.findall(r"Rank=\d", text) == ["Rank=1", "Rank=2", "Rank=0", "Rank=3"], "all are shown"
    assert "Score=nan" in text
    assert len(report_lines({0: 0.9, 2: 0.8, 3: 1.0}, dict.fromkeys(few, "n"), 1).splitlines()) == 4


# Each with the decider of ``detector`` on the same job.


def test_stages_with_more_work_are_flagged() -> None:
    fleet = Fleet(8, stages=(1.0, 1.0, 1.0, 2.0))
    times = [row.median for row in fleet.window(0) if row.section == "forward"]
    assert below(relative(times), 0.75) == [6, 7]
    assert not named(fleet.watch(40, first=1))


def test_it_is_blind_up_to_1_43_times() -> None:
    fleet = Fleet(8, noise=0.005, slow=slow(3, 1.4))
    times = [row.median for row in fleet.window(0) if row.section == "forward"]
    assert below(relative(times), 0.70) == []
    assert named(fleet.watch(30, first=1)) == {(3, "forward")}


def test_one_window_of_light_work_makes_every_later_one_slow() -> None:
    fleet = Fleet(4, slow=lambda _, window, __: 0.4 if window == 5 else 1.0)
    best, flagged = BestTimes(), []
    for window in range(30):
        (own,) = (row.median for row in fleet.window(window) if (row.rank, row.section) == (0, "forward"))
        flagged += [window] * (against_best(best, own) < THRESHOLD)
    assert flagged == list(range(6, 30))
    assert not named(fleet.watch(30, first=30))


def test_nan_hides_a_straggler() -> None:
    references = relative_references([{"step": 1.0}, {"step": 9.0}, {}])
    assert below({1: section_scores({"step": 9.0}, references)["step"]}, 0.75) == []


def test_healthy_ranks_with_some_spread_are_flagged_the_more_there_are(seed: int) -> None:
    """One window each, 7 % spread; the reference is the fastest of all ranks, by chance the luckiest."""
    draw = random.Random(seed)
    rates = {
        ranks: sum(
            bool(below(relative([draw.gauss(1, 0.07) for _ in range(ranks)]), 0.75)) for _ in range(20)
        )
        for ranks in (8, 512)
    }
    assert rates[8] <= 4
    assert rates[512] >= 18
    assert not Fleet(64, seed, noise=0.07 * 5**0.5).watch(40)  # as much spread between windows
