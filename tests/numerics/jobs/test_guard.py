"""A guard in real ranks: bad numbers reach no weight, all ranks do the same, in one reduction a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ExitCode
from tests.support.launching import Run, running, until
from tests.support.ranks import copies, lines, ranks

SCRIPT = "guarded.py"
STEPS = 30


def numerics(**options: object) -> str:
    return f"numerics={json.dumps(options)}"


def run(folder: Path, *words: str, steps: int = STEPS) -> list[list[dict[str, Any]]]:
    """Run to the end and return what each rank has written."""
    with ranks(folder, *words, steps=steps, script=SCRIPT) as job:
        assert job.finish() == [0, 0], job.output()
        return [job.lines(rank) for rank in (0, 1)]


def steps_of(lines: list[dict[str, Any]]) -> list[int]:
    return [one["step"] for one in lines if "step" in one]


def refused(lines: list[dict[str, Any]]) -> list[int]:
    return [one["step"] for one in lines if "step" in one and not one["accepted"]]


def content(found: list[list[dict[str, Any]]]) -> list[str]:
    ends = [lines[-1] for lines in found]
    assert all(end["finite"] for end in ends)
    assert ends[0]["content"] == ends[1]["content"]
    return list(ends[0]["content"])


@pytest.mark.parametrize("kind", [(), ("micro=3",), ("sharded",)], ids=["ddp", "micro-batches", "fsdp2"])
def test_a_poisoned_batch_is_skipped_as_if_it_had_not_been(tmp_path: Path, kind: tuple[str, ...]) -> None:
    without = content(run(tmp_path / "without", "leave@-1@7", *kind))
    for number, bad in enumerate(["nan@1@7", "inf@0@7"]):
        found = run(tmp_path / f"bad-{number}", bad, *kind)
        assert [refused(lines) for lines in found] == [[7], [7]]
        assert content(found) == without


def test_the_norm_is_that_of_all_gradients_however_they_lie(tmp_path: Path) -> None:
    for kind in ((), ("sharded",)):
        found = run(tmp_path / f"run-{len(kind)}", *kind, "norms", steps=3)
        for told in found:
            norms = [(one["norm"], one["true_norm"]) for one in told if "norm" in one]
            assert len(norms) == 3
            for norm, true in norms:
                assert norm == pytest.approx(true, rel=1e-5)
        assert [one for one in found[0] if "norm" in one] == [one for one in found[1] if "norm" in one]


def test_a_rollback_goes_back_and_skips_what_is_bad_again(tmp_path: Path) -> None:
    rollback = numerics(nan_in_loss_action="rollback")
    found = run(tmp_path / "bad", "nan@1@13", "interval=5", rollback)
    expected = [*range(14), *range(10, STEPS)]
    assert [steps_of(lines) for lines in found] == [expected, expected]
    assert [refused(lines) for lines in found] == [[13, 13], [13, 13]]
    without = run(tmp_path / "without", "leave@-1@13")
    assert content(found) == content(without)


def test_copies_newer_than_what_was_gone_back_to_are_put_away_and_made_anew(tmp_path: Path) -> None:
    """Steps 8 to 12 are bad, their copies are saved meanwhile; the sixth bad step goes back behind them."""
    words = ["nan@1@8-30", "interval=2", numerics(max_consecutive=5, max_rollbacks=1)]
    with ranks(tmp_path, *words, steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [1, 1], job.output()
        found = [job.lines(rank) for rank in (0, 1)]
        assert "rollback 1 of 1 without progress" in job.output()
        assert "NonFinite: the loss of rank 1 is nan in step 13; 1 of 1 rollbacks" in job.output()
    expected = [*range(14), *range(8, 13)]
    assert [steps_of(lines) for lines in found] == [expected, expected]
    aside = {path.name for path in (job.run / "checkpoints" / "quarantine").iterdir()}
    assert {"step-000000010.g0", "step-000000012.g0"} <= aside
    assert max(copies(job.run)) == 12


def test_a_job_that_is_told_to_end_after_a_rollback_keeps_what_was_staged_since(tmp_path: Path) -> None:
    """Training goes back from step 13 to 8, then hangs: ranks do not agree, so what is staged is kept."""
    words = ["nan@1@8-30", "interval=4", "memory", "hang@-1@9", numerics(max_consecutive=5)]
    config = json.dumps({"preempt_time": 12.0})
    with ranks(tmp_path, *words, f"config={config}", steps=STEPS, script=SCRIPT) as job:
        until(lambda: all({"hangs": 9} in job.lines(rank) for rank in (0, 1)), "the hang")
        job.send(0, 1)
        assert job.finish() == [int(ExitCode.PREEMPTED)] * 2, job.output()
    assert "ranks did not agree in time: their group may hang; step 9, which is staged" in job.output()
    assert copies(job.run) == [4, 8, 9]


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_to_raise_ends_all_ranks_at_the_same_step_and_names_the_one(tmp_path: Path, bad: str) -> None:
    words = [f"{bad}@1@7", "sharded", numerics(nan_in_loss_action="raise", nan_in_grad_action="raise")]
    with ranks(tmp_path, *words, steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [1, 1], job.output()
        assert [steps_of(job.lines(rank))[-1] for rank in (0, 1)] == [6, 6]
        whose = "the loss of rank 1 is nan" if bad == "nan" else "the norm of the gradients of rank 0, 1 is"
        for output in job.outputs:
            assert f"NonFinite: {whose}" in output.read_text()


def test_a_rollback_with_nothing_to_go_back_to_ends_with_the_reason(tmp_path: Path) -> None:
    with ranks(
        tmp_path, "nan@0@3", numerics(nan_in_loss_action="rollback"), steps=STEPS, script=SCRIPT
    ) as job:
        assert job.finish() == [1, 1], job.output()
        assert "there is no checkpoint from before step 3" in job.output()


def test_one_reduction_a_step_carries_the_numbers_and_the_vote(tmp_path: Path) -> None:
    counted = 20
    totals = []
    for words in (["bare", "count"], ["count", "stop@1@35"]):
        found = run(tmp_path / words[0], *words, steps=40)
        (line,) = (one["collectives"] for one in found[0] if "collectives" in one)
        totals.append(line)
    bare, guarded = totals
    assert guarded.pop("c10d::allreduce_") == bare.pop("c10d::allreduce_") + counted
    assert guarded == bare
    assert found[0][-1]["ended"] == found[1][-1]["ended"] == 37, "a wish rides in the same reduction"


def test_ranks_are_compared_in_the_same_reduction_and_the_one_far_off_is_named_in_another(
    tmp_path: Path,
) -> None:
    """Four ranks; what they tell of loss and norm is the same on all of them, bit for bit."""
    words = ["norms", "count", numerics(check_for_rank_outlier=True, spike_warmup=8)]
    totals = []
    for far in ([], ["far@2@25"]):
        with ranks(tmp_path / f"far-{len(far)}", *words, *far, steps=40, script=SCRIPT, world=4) as job:
            assert job.finish() == [0] * 4, job.output()
            told = [[one for one in job.lines(rank) if "norm" in one] for rank in range(4)]
            (counted,) = (one["collectives"] for one in job.lines(0) if "collectives" in one)
        assert told[0] == told[1] == told[2] == told[3]
        assert len(told[0]) == 40
        totals.append(counted["c10d::allreduce_"])
        warned = "the loss of rank 2 is" in job.output() and "in step 25; ranks are" in job.output()
        assert warned == bool(far), job.output()
    assert totals[1] == totals[0] + 1


def test_a_signal_is_heeded_through_the_guard(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait@-1@0-9999", steps=10_000, script=SCRIPT) as job:
        job.reach(5)
        job.send(1)
        assert job.finish() == [int(ExitCode.PREEMPTED)] * 2, job.output()
        ends = [job.lines(rank)[-1] for rank in (0, 1)]
    assert ends[0]["ended"] == ends[1]["ended"] == copies(job.run)[-1], job.output()


def test_a_step_past_the_guard_is_an_error(tmp_path: Path) -> None:
    with ranks(tmp_path, "past", steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [1, 1], job.output()
        assert "step 3 was not run through the guard" in job.output()


def test_what_was_learned_is_in_the_checkpoint(tmp_path: Path) -> None:
    """A run that is stopped in a row of bad steps and started again takes the next action when it is due."""
    words = ["nan@0@10-17", numerics(max_consecutive=5, max_rollbacks=0)]
    whole = ended(tmp_path / "whole", *words)
    with ranks(tmp_path / "cut", *words, "stop@0@12", steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [0, 0], job.output()
    assert ended(tmp_path / "cut", *words) == whole == 14


def ended(folder: Path, *words: str) -> int:
    """Run until a guard raises, and return the last step that all ranks have done."""
    with ranks(folder, *words, steps=STEPS, script=SCRIPT) as job:
        assert job.finish() == [1, 1], job.output()
        last = {steps_of(job.lines(rank))[-1] for rank in (0, 1)}
    assert len(last) == 1
    return last.pop()


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
    assert any("rollback 1 of 2" in one["reason"] for one in job.records("note")), job.console()


def test_a_table_without_a_guard_is_refused(tmp_path: Path) -> None:
    with running(launched(tmp_path, "bare")) as job:
        assert job.finish() != 0
    assert "[numerics] (nan_in_loss_action) has no effect without a guard" in job.console()
