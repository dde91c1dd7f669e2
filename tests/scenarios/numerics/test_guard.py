"""A guard in real ranks: bad numbers reach no weight, all ranks do the same, in one reduction a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Run, running, until
from tests.support.ranks import Ranks, copies, lines, ranks

SCRIPT = "guarded.py"
STEPS = 30
PREEMPTED = 75


def numerics(**options: object) -> str:
    return f"numerics={json.dumps(options)}"


def run(folder: Path, *words: str, steps: int = STEPS, world: int = 2) -> list[list[dict[str, Any]]]:
    """Run to the end and return what each rank has written."""
    with ranks(folder, *words, steps=steps, script=SCRIPT, world=world) as job:
        assert job.finish() == [0] * world, job.output()
        return [job.lines(rank) for rank in range(world)]


def failed(folder: Path, *words: str) -> Ranks:
    """Run until both ranks fail."""
    with ranks(folder, *words, steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [1, 1], job.output()
        return job


def steps_of(lines: list[dict[str, Any]]) -> list[int]:
    return [one["step"] for one in lines if "step" in one]


def refused(lines: list[dict[str, Any]]) -> list[int]:
    return [one["step"] for one in lines if "step" in one and not one["accepted"]]


def content(found: list[list[dict[str, Any]]]) -> list[str]:
    ends = [lines[-1] for lines in found]
    assert all(end["finite"] for end in ends)
    assert ends[0]["content"] == ends[1]["content"]
    return list(ends[0]["content"])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param((), id="ddp"),
        pytest.param(("micro=3",), id="micro-batches", marks=pytest.mark.long),
        pytest.param(("sharded",), id="fsdp2", marks=pytest.mark.long),
    ],
)
def test_a_poisoned_batch_is_skipped_as_if_it_had_not_been(tmp_path: Path, kind: tuple[str, ...]) -> None:
    without = run(tmp_path / "without", "leave@-1@7", "leave@-1@12", *kind)
    found = run(tmp_path / "bad", "nan@1@7", "inf@0@12", *kind)
    assert [refused(lines) for lines in found] == [[7, 12], [7, 12]]
    assert content(found) == content(without)


@pytest.mark.parametrize("kind", [(), ("sharded",)], ids=["ddp", "fsdp2"])
def test_the_norm_is_that_of_all_gradients_however_they_lie(tmp_path: Path, kind: tuple[str, ...]) -> None:
    found = run(tmp_path, *kind, "norms", "large@-1@1", steps=3)
    norms = [[(one["norm"], one["true_norm"]) for one in lines if "norm" in one] for lines in found]
    assert [norm for norm, _ in norms[0]] == [norm for norm, _ in norms[1]]
    assert len(norms[0]) == 3
    for norm, true in norms[0]:
        assert norm == pytest.approx(true, rel=1e-5)
    assert refused(found[0]) == []


def test_a_rollback_goes_back_and_skips_what_is_bad_again(tmp_path: Path) -> None:
    found = run(tmp_path / "bad", "nan@1@13", "interval=5", numerics(nan_in_loss_action="rollback"))
    expected = [*range(14), *range(10, STEPS)]
    assert [steps_of(lines) for lines in found] == [expected, expected]
    assert [refused(lines) for lines in found] == [[13, 13], [13, 13]]
    assert content(found) == content(run(tmp_path / "without", "leave@-1@13"))


def test_copies_newer_than_what_was_gone_back_to_are_put_away_and_made_anew(tmp_path: Path) -> None:
    """Steps 8 to 12 are bad, their copies are saved meanwhile; the sixth bad step goes back behind them."""
    job = failed(tmp_path, "nan@1@8-30", "interval=2", numerics(max_consecutive=5, max_rollbacks=1))
    assert re.search(r"NonFinite: .*\b1 .*\bnan\b.*\b13\b.*\b1\b.*\b1\b", job.output())
    expected = [*range(14), *range(8, 13)]
    assert [steps_of(job.lines(rank)) for rank in (0, 1)] == [expected, expected]
    aside = {path.name for path in (job.run / "checkpoints" / "quarantine").iterdir()}
    assert {"step-000000010.g0", "step-000000012.g0"} <= aside
    assert max(copies(job.run)) == 12


@pytest.mark.long
def test_a_job_that_is_to_end_after_a_rollback_keeps_what_was_staged_since(tmp_path: Path) -> None:
    """Training goes back from step 13 to 8, then hangs: ranks do not agree, so what is staged is kept."""
    words = ["nan@1@8-30", "interval=4", "memory", "hang@-1@9", numerics(max_consecutive=5)]
    config = json.dumps({"preempt_time": 12.0})
    with ranks(tmp_path, *words, f"config={config}", steps=STEPS, script=SCRIPT) as job:
        until(lambda: all({"hangs": 9} in job.lines(rank) for rank in (0, 1)), "the hang")
        job.send(0, 1)
        assert job.finish() == [PREEMPTED] * 2, job.output()
    assert copies(job.run) == [4, 8, 9]


@pytest.mark.parametrize(("bad", "names"), [("nan", r"\b1 .*\bnan\b"), ("inf", r"\b0, 1 .*\b(inf|nan)\b")])
def test_to_raise_ends_all_ranks_at_the_same_step_and_names_the_one(
    tmp_path: Path, bad: str, names: str
) -> None:
    raises = numerics(nan_in_loss_action="raise", nan_in_grad_action="raise")
    job = failed(tmp_path, f"{bad}@1@7", "sharded", raises)
    assert [steps_of(job.lines(rank))[-1] for rank in (0, 1)] == [6, 6]
    for output in job.outputs:
        assert re.search(f"NonFinite: .*{names}.*7", output.read_text())


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("nan@0@3", numerics(nan_in_loss_action="rollback")), r"NonFinite: .*\bnan\b.*\b3\b"),
        (("past",), r"Error: .*\b3\b.*session\.restore"),
    ],
    ids=["nothing to go back to", "a step past the guard"],
)
def test_both_ranks_end_with_an_error_that_names_the_step(
    tmp_path: Path, words: tuple[str, ...], names: str
) -> None:
    job = failed(tmp_path, *words)
    assert re.search(names, job.output())


def test_one_reduction_a_step_carries_the_numbers_and_the_vote(tmp_path: Path) -> None:
    counted, totals = 20, []
    for words in (["bare", "count"], ["count", "stop@1@35"]):
        found = run(tmp_path / words[0], *words, steps=40)
        (line,) = (one["collectives"] for one in found[0] if "collectives" in one)
        totals.append(line)
    bare, guarded = totals
    assert guarded.pop("c10d::allreduce_") == bare.pop("c10d::allreduce_") + counted
    assert guarded == bare
    assert found[0][-1]["ended"] == found[1][-1]["ended"] == 37, "a wish rides in the same reduction"


@pytest.mark.long
def test_four_ranks_are_compared_in_the_same_reduction_and_the_one_far_off_is_named_in_another(
    tmp_path: Path,
) -> None:
    words, totals = ["norms", "count", numerics(check_for_rank_outlier=True, spike_warmup=8)], []
    for far in ([], ["far@2@25"]):
        with ranks(tmp_path / f"far-{len(far)}", *words, *far, steps=40, script=SCRIPT, world=4) as job:
            assert job.finish() == [0] * 4, job.output()
            told = [[one for one in job.lines(rank) if "norm" in one] for rank in range(4)]
            (counted,) = (one["collectives"] for one in job.lines(0) if "collectives" in one)
        assert told[0] == told[1] == told[2] == told[3], "bit for bit"
        assert len(told[0]) == 40
        totals.append(counted["c10d::allreduce_"])
        assert bool(re.search(r"\b2 \w+ [\d.]+ .*\b25; ", job.output())) is bool(far)
    assert totals[1] == totals[0] + 1


def test_a_signal_is_heeded_through_the_guard(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait@-1@0-9999", steps=10_000, script=SCRIPT) as job:
        job.reach(5)
        job.send(1)
        assert job.finish() == [PREEMPTED] * 2, job.output()
        ends = [job.lines(rank)[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(job.run)[-1], job.output()


def test_a_run_that_is_stopped_among_bad_steps_goes_on_counting_them(tmp_path: Path) -> None:
    words = ["nan@0@10-17", numerics(max_consecutive=5, max_rollbacks=0)]
    run(tmp_path, *words, "stop@0@12")
    job = failed(tmp_path, *words)
    assert [steps_of(job.lines(rank))[-1] for rank in (0, 1)] == [14, 14]


def launched(folder: Path, *words: str) -> Run:
    """Return a launcher whose file wants a rollback."""
    table = folder / "outlast.toml"
    table.write_text('[numerics]\nnan_in_loss_action = "rollback"\n')
    options = ("--nproc-per-node", "2", "--config", str(table))
    return Run(
        folder / "run", SCRIPT, str(folder / "trace"), str(folder / "run"), "30", *words, options=options
    )


def test_under_a_launcher_its_table_wins_and_a_rollback_is_no_restart(tmp_path: Path) -> None:
    with running(launched(tmp_path, "nan@1@13", "interval=5")) as job:
        assert job.finish() == 0, job.console()
    for rank in (0, 1):
        assert steps_of(lines(tmp_path / "trace" / f"rank-{rank}")) == [*range(14), *range(10, 30)]
    assert len(job.records("generation_started")) == 1
    assert not job.records("fault_seen")
    (loaded,) = job.records("loaded")
    assert (loaded["step"], loaded["checkpoint"]) == (10, "step-000000010.g1")


def test_a_table_without_a_guard_is_refused(tmp_path: Path) -> None:
    with running(launched(tmp_path, "bare")) as job:
        assert job.finish() != 0
    assert re.search(r"\[numerics\].*nan_in_loss_action", job.console())
