"""In-process restart over several nodes: real agents on one host, gloo ranks, their faults, the outcome."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents, certificate
from tests.support.reentering import STEPS, WORLD, Result, generations, replaced, result, told

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]


def training(folder: Path, *faults: str, spares: int = 0, options: tuple[str, ...] = ()) -> Agents:
    script = ("reentering.py", str(STEPS), "10", *faults)
    usual = ("--nproc-per-node", str(WORLD // 2), "--max-restarts", "9")
    return Agents(folder, "2:2", spares, script, (*usual, *options))


def begin(found: Agents, *spares: str, **environment: str) -> None:
    """Start the agents, so that n0 coordinates and has the first ranks."""
    found.start("n0", environment=environment)
    found.until_said("n0", "leader")
    found.start("n1", environment=environment)
    found.until_said("n0", "generation 1: n0, n1")
    found.start(*spares, environment=environment)


def actions(found: Agents) -> list[str]:
    """Return what was done, as recorded by whichever nodes coordinated."""
    return [one["action"] for name in found.agents for one in found.records(name, "action_taken")]


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Result:
    found = training(tmp_path_factory.mktemp("faultless"))
    try:
        begin(found)
        assert set(found.finish().values()) == {0}, found.consoles()
        return result(found.folder)
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


def memory_of(found: Agents, node: str) -> list[str]:
    """Return the memory folder of a node."""
    return glob.glob(f"/dev/shm/outlast-memory-*-{found.job}-*-{node}")


def replicated(found: Agents, node: str) -> int:
    """Return the newest step of which another node has what a node has in memory."""
    status = [Path(folder) / "status.json" for folder in memory_of(found, node)]
    return max(
        (json.loads(one.read_bytes())["replicated_step"] for one in status if one.exists()), default=-1
    )


def ends_well(found: Agents, faultless: Result, *lost: str) -> None:
    codes = found.finish()
    assert {name for name, code in codes.items() if code} == set(lost), found.consoles()
    assert result(found.folder) == faultless
    kept = {folder for name in lost for folder in memory_of(found, name)}
    found.until(lambda: kept.issuperset(found.left()), "the savers of lost nodes")
    for folder in kept:  # what was not on disk, for an agent that is started again
        shutil.rmtree(folder, ignore_errors=True)
    found.nothing_left()


def test_a_rank_that_raises_once_it_is_called_out_costs_nothing_more(
    job: Callable[..., Agents], faultless: Result
) -> None:
    """It does so between two generations, when there are no pages to read."""
    found = job("raise@0@10@1", "converts@1@10@1", "converts@3@10@1")
    begin(found)
    ends_well(found, faultless)
    assert replaced(found.folder, 1) == set(), found.consoles()
    assert actions(found) == ["restart-in-process", "stop"]


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
    gone = [replaced(found.folder, number) for number in range(1, 5)]
    assert gone == [set(), set(), {0}, {3}], found.consoles()
    assert replaced(found.folder, 5, 7) <= {1}, found.consoles()
    assert generations(found.folder) == list(range(1, 8))
    assert actions(found) == ["restart-in-process"] * 6 + ["stop"]
    for generation, at in ((2, 4), (3, 8)):
        (step,) = {one["step"] for one in told(found.folder, "restored", generation=generation)}
        assert step in (at - 1, at)  # ranks of two nodes are at most a save apart


def test_a_rank_that_cannot_be_brought_to_the_gate_is_replaced(
    job: Callable[..., Agents], faultless: Result
) -> None:
    """Whether it does not come when another one's fault calls it out, or is found hung."""
    found = job("second@1@7@1", "spin@3@7@1", "SIGSTOP@3@15@2")
    begin(found, HANG="6")
    ends_well(found, faultless)
    assert [replaced(found.folder, number) for number in (1, 2)] == [{3}] * 2, found.consoles()
    assert generations(found.folder) == [1, 2, 3]
    assert actions(found) == ["restart-in-process", "restart-in-process", "stop"]


@pytest.mark.parametrize(("lost", "tls"), [("n0", False), ("n1", True)])
def test_a_spare_takes_the_place_of_a_lost_node_and_the_living_ranks_stay(
    job: Callable[..., Agents], faultless: Result, tmp_path: Path, lost: str, tls: bool
) -> None:
    """The spare has the state from the memory of the node that stays, newer than what is on disk."""
    found = job("wait@2@15@1", spares=1, options=("--tls", certificate(tmp_path)) if tls else ())
    begin(found, "n2")
    found.until_said("n2", "spare")
    found.until(lambda: min(replicated(found, name) for name in ("n0", "n1")) >= 13, "replicas")
    found.kill(lost)
    ends_well(found, faultless, lost)
    assert replaced(found.folder, 1) == ({2, 3} if lost == "n1" else {0, 1}), found.consoles()
    assert generations(found.folder) == [1, 2]
    assert len(actions(found)) == 2
    restored = {one["step"] for one in told(found.folder, "restored", generation=2)}
    assert restored <= {13, 14, 15}, found.consoles()
