"""The tripwire between real ranks: gloo groups, real stores, bits that flip in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.tools import listing
from outlast.checkpoint.tools.listing import differences
from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run


def train(folder: Path, world: int, steps: int, *words: str) -> list[dict[str, Any]]:
    """Return what each rank wrote."""
    run = warm.run([SCRIPTS / "flipping.py", folder, str(world), str(steps), *words], DEADLINE)
    found = [folder / f"rank-{rank}" for rank in range(world)]
    assert all(path.exists() for path in found), run.stdout + run.stderr
    return [json.loads(path.read_text()) for path in found]


def compared(rank: dict[str, Any]) -> list[tuple[int, bool]]:
    return [(one["step"], bool(one["digest"])) for one in rank["records"]]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_step_raise_no_alarm(world: int, tmp_path: Path) -> None:
    ranks = train(tmp_path, world, 20, "optimizer")
    assert [rank["warnings"] for rank in ranks] == [[]] * world
    assert compared(ranks[0]) == [(step, True) for step in range(0, 21, 2)]
    digests = [one["digest"] for one in ranks[0]["records"]]
    assert len(set(digests)) == len(digests), "the state of each step is another one"


def test_a_flipped_bit_is_found_at_the_next_comparison_and_of_three_the_rank_is_named(tmp_path: Path) -> None:
    ranks = train(tmp_path, 3, 12, "flip=1@4", "action=raise")
    for rank in ranks:
        assert (rank["ranks"], rank["step"], rank["agreed"]) == ([1], 6, 4)
        assert "model.module.0.weight; rank 1 differs from the majority" in rank["raised"]
    last = ranks[0]["records"][-1]
    assert (last["step"], last["digest"], last["ranks"]) == (6, "", [1])
    assert last["tensors"] == ["model.module.0.weight"]


def test_of_two_the_difference_is_found_and_nobody_is_named(tmp_path: Path) -> None:
    ranks = train(tmp_path, 2, 9, "flip=1@4", "action=raise")
    for rank in ranks:
        assert (rank["ranks"], rank["step"], rank["agreed"]) == ([], 6, 4)
        assert "the wrong rank is not known" in rank["raised"]


def test_a_moment_of_an_optimizer_is_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    ranks = train(tmp_path, 3, 6, "optimizer", "flip=2@5")
    assert [len(rank["warnings"]) for rank in ranks] == [1, 1, 1]
    (difference,) = [one for one in ranks[0]["records"] if not one["digest"]]
    assert (difference["ranks"], difference["tensors"]) == ([2], ["optimizer.state.0.exp_avg"])


def test_of_distributed_tensors_only_equal_parts_are_compared(tmp_path: Path) -> None:
    ranks = train(tmp_path, 4, 4, "mesh", "flip=3@1", "action=raise")
    for rank in ranks:
        assert rank["raised"].startswith("ranks 1, 3 should hold the same and do not after step 2")
        assert "model.part" in rank["raised"]
    assert compared(ranks[0]) == [(0, True), (2, False)]


def test_ranks_that_never_were_equal_are_told_so_before_the_first_step(tmp_path: Path) -> None:
    ranks = train(tmp_path, 2, 2, "apart", "action=raise")
    assert all(rank["step"] == 0 and "they never agreed" in rank["raised"] for rank in ranks)


def launched(folder: Path, action: str, flip: int | None = None, *more: str, restarts: int = 0) -> Run:
    """Return a run of 20 steps on three ranks that save every fourth step and compare after every fifth."""
    folder.mkdir()
    if flip is not None:
        (folder / f"flip-{flip}").touch()
    config = folder / "config.toml"
    config.write_text(f'[tripwire]\ntripwire_interval = 5\ntripwire_action = "{action}"\n')
    options = ("--nproc-per-node", "3", "--config", str(config), "--max-restarts", str(restarts), *more)
    script = ("replayed.py", "20", "4", f"{folder / 'flip'}@7")
    return Run(folder / "run", *script, options=options).start()


def test_the_launchers_file_switches_it_on(tmp_path: Path) -> None:
    run = launched(tmp_path / "job", "raise", flip=1)
    assert run.finish() == 1, run.console()
    lines = [(one["step"], bool(one["digest"])) for one in run.records("compared")]
    assert lines == [(0, True), (5, True), (10, False)]
    (fault,) = run.records("fault_seen")
    assert "ReplicasDiffer" in fault["signature"]
    assert "rank 1 differs from the majority" in fault["signature"]
    assert (fault["fault"], fault["rank"]) == ("corrupt", 1), "whichever rank is the first to say so"


def test_of_two_that_differ_neither_is_blamed(tmp_path: Path) -> None:
    run = launched(tmp_path / "job", "raise", 1, "--nproc-per-node", "2")
    assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("corrupt", -1)
    assert "the wrong rank is not known" in fault["reason"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that ended well, in which nothing flipped."""
    run = launched(tmp_path_factory.mktemp("sound") / "job", "raise")
    assert run.finish() == 0, run.console()
    return run


def bitwise(*runs: Run) -> bool:
    """Say whether the newest copies are of step 20 and hold the same bytes."""
    newest = [listing.items(listing.find(str(one.folder)))[0] for one in runs]
    assert [item.name.partition(".")[0] for item in newest] == ["step-000000020"] * len(runs)
    return not list(differences(*newest))


@pytest.mark.parametrize("start", ["zygote", "cold"])
def test_what_was_saved_after_the_ranks_last_agreed_is_not_loaded_at_the_restart(
    start: str, tmp_path: Path, sound: Run
) -> None:
    more = ("--no-zygote",) if start == "cold" else ()
    run = launched(tmp_path / "flipped", "raise", 1, *more, restarts=3)
    assert run.finish() == 0, run.console()
    assert [(one["fault"], one["step"] >= 10) for one in run.records("fault_seen")] == [("corrupt", True)]
    assert [one["step"] for one in run.records("loaded")] == [4]
    aside = {(one["checkpoint"], one["trust"]) for one in run.records("trust_changed")}
    assert ("local/step-000000008.g1", "quarantined") in aside
    assert "saved after step 5 are not loaded" in run.records("action_taken")[0]["reason"]
    assert bitwise(run, sound)


def test_all_ranks_go_back_to_where_they_agreed_and_end_as_if_nothing_had_been(
    tmp_path: Path, sound: Run
) -> None:
    run = launched(tmp_path / "flipped", "rollback", flip=1)
    assert run.finish() == 0, run.console()
    assert [one["kind"] for one in run.records() if one["kind"] == "fault_seen"] == []
    lines = [(one["step"], bool(one["digest"])) for one in run.records("compared")]
    assert lines[:3] == [(0, True), (5, True), (10, False)]
    assert lines[3:] == [(4, True), (5, True), (10, True), (15, True)]
    assert bitwise(run, sound)
