"""In-process restart over several nodes: real agents on one host, gloo ranks, their faults, the outcome."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.tiers.memory_folder import MemoryFolder, default_root
from tests.support.agents import Agents, certificate
from tests.support.ranks import lines

STEPS = 24
EACH = 2  # ranks of a node
WORLD = 2 * EACH
Result = tuple[str, dict[tuple[int, int], str]]


def training(folder: Path, *faults: str, spares: int = 0, options: tuple[str, ...] = ()) -> Agents:
    script = ("reentering.py", str(STEPS), "10", *faults)
    usual = ("--nproc-per-node", str(EACH), "--max-restarts", "9")
    return Agents(folder, "2:2", spares, script, (*usual, *options))


def begin(found: Agents, *spares: str, **environment: str) -> None:
    """Start the agents, so that n0 coordinates and has the first ranks."""
    found.start("n0", environment=environment)
    found.until_said("n0", "this node is the leader")
    found.start("n1", environment=environment)
    found.until_said("n0", "generation 1: n0, n1")
    found.start(*spares, environment=environment)


def told(found: Agents, kind: str, **wanted: Any) -> Iterator[dict[str, Any]]:
    for path in sorted(found.trace.glob("rank-*")):
        for one in lines(path):
            if one["kind"] == kind and wanted.items() <= one.items():
                yield one


def processes(found: Agents, generation: int) -> dict[int, int]:
    return {one["rank"]: one["pid"] for one in told(found, "entered", generation=generation)}


def result(found: Agents) -> Result:
    """Return the digest of the weights, equal on all ranks, and the losses, equal when computed twice."""
    ends = list(told(found, "done"))
    assert len(ends) == WORLD, found.consoles()
    (digest,) = {one["digest"] for one in ends}
    losses: dict[tuple[int, int], str] = {}
    for one in told(found, "step"):
        assert losses.setdefault((one["rank"], one["step"]), one["loss"]) == one["loss"], one
    return digest, losses


def kinds(found: Agents) -> list[str]:
    """Return what was done, in the words of whichever nodes coordinated."""
    return [one["action"] for name in found.agents for one in found.records(name, "action_taken")]


def generations(found: Agents) -> list[int]:
    return sorted({one["generation"] for one in told(found, "entered")})


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Result:
    found = training(tmp_path_factory.mktemp("faultless"))
    try:
        begin(found)
        assert set(found.finish().values()) == {0}, found.consoles()
        return result(found)
    finally:
        found.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(*faults: str, spares: int = 0, options: tuple[str, ...] = ()) -> Agents:
        made.append(training(tmp_path / "job", *faults, spares=spares, options=options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def replicated(found: Agents, name: str) -> int:
    """Return the newest step of which another node has what a node has in memory."""
    status = MemoryFolder(default_root(found.job, found.run, name)).status()
    return -1 if status is None else status.replicated_step


def ends_well(found: Agents, faultless: Result, *lost: str) -> None:
    codes = found.finish()
    assert {name for name, code in codes.items() if code} == set(lost), found.consoles()
    assert result(found) == faultless
    kept = {str(default_root(found.job, found.run, name)) for name in lost}
    found.until(lambda: kept.issuperset(found.left()), "the savers of lost nodes")
    for folder in kept:  # what was not on disk, for an agent that is started again
        shutil.rmtree(folder, ignore_errors=True)
    found.nothing_left()


def kept(found: Agents, generation: int, until: int) -> set[int]:
    """Return the ranks that two generations have in the same processes."""
    before, after = processes(found, generation), processes(found, until)
    assert set(before) == set(after) == set(range(WORLD)), found.consoles()
    return {rank for rank in before if before[rank] == after[rank]}


def test_a_rank_that_raises_once_it_is_called_out_costs_nothing_more(
    job: Callable[..., Agents], faultless: Result
) -> None:
    """It says so between two generations, when there are no pages to read."""
    found = job("raise@0@10@1", "converts@1@10@1", "converts@3@10@1")
    begin(found)
    ends_well(found, faultless)
    assert kept(found, 1, 2) == set(range(WORLD)), found.consoles()
    assert kinds(found) == ["restart-in-process", "stop"]


@pytest.mark.timeout(420)
def test_a_rank_that_leaves_is_replaced_on_its_node_and_all_others_stay(
    job: Callable[..., Agents], faultless: Result
) -> None:
    """On either node, by an exception or a signal, also while ranks enter; after an exception it stays."""
    found = job(
        *("raise@1@4@1", "raise@2@8@2", "SIGKILL@0@12@3", "SIGKILL@3@16@4"),
        *("SIGKILL@1@20@5", "raise@2@entry@6"),
    )
    begin(found)
    ends_well(found, faultless)
    stay = [{0, 1, 2, 3}, {0, 1, 2, 3}, {1, 2, 3}, {0, 1, 2}]
    assert [kept(found, number, number + 1) for number in range(1, 5)] == stay, found.consoles()
    assert kept(found, 5, 7) >= {0, 2, 3}, found.consoles()
    assert generations(found) == list(range(1, 8))
    assert kinds(found) == ["restart-in-process"] * 6 + ["stop"]
    for generation, at in ((2, 4), (3, 8)):
        (step,) = {one["step"] for one in told(found, "restored", generation=generation)}
        assert step in (at - 1, at)  # ranks of two nodes are at most a save apart


@pytest.mark.timeout(420)
def test_a_rank_that_cannot_be_brought_to_the_gate_is_replaced(
    job: Callable[..., Agents], faultless: Result
) -> None:
    """Whether it does not come when another one's fault calls it out, or is found hung."""
    found = job("second@1@7@1", "spin@3@7@1", "SIGSTOP@3@15@2")
    begin(found, HANG="6")
    ends_well(found, faultless)
    assert [kept(found, number, number + 1) for number in (1, 2)] == [{0, 1, 2}] * 2, found.consoles()
    assert generations(found) == [1, 2, 3]
    assert kinds(found) == ["restart-in-process", "restart-in-process", "stop"]


@pytest.mark.parametrize(("lost", "tls"), [("n0", False), ("n1", False), ("n1", True)])
def test_a_spare_takes_the_place_of_a_lost_node_and_the_living_ranks_stay(
    job: Callable[..., Agents], faultless: Result, tmp_path: Path, lost: str, tls: bool
) -> None:
    """The spare has the state from the memory of the node that stays, newer than what is on disk."""
    found = job("wait@2@15@1", spares=1, options=("--tls", certificate(tmp_path)) if tls else ())
    begin(found, "n2")
    found.until_said("n2", "this node is a spare")
    found.until(lambda: min(replicated(found, name) for name in ("n0", "n1")) >= 13, "replicas")
    found.kill(lost)
    ends_well(found, faultless, lost)
    assert kept(found, 1, 2) == ({0, 1} if lost == "n1" else {2, 3}), found.consoles()
    assert generations(found) == [1, 2]
    assert len(kinds(found)) == 2
    assert {one["step"] for one in told(found, "restored", generation=2)} <= {13, 14, 15}, found.consoles()
