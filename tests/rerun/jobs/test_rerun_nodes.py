"""A device that is convicted or suspected on one of several nodes: its node goes, a spare takes its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents
from tests.support.ranks import lines, ranks

STEPS = 12


@pytest.fixture
def made() -> Iterator[list[Agents]]:
    found: list[Agents] = []
    yield found
    for one in found:
        one.stop()


def training(folder: Path, *words: str, spares: int = 0) -> Agents:
    script = (
        "rerunning.py",
        str(folder / "run"),
        str(STEPS),
        "interval=3",
        f"hold={folder / 'begin'}",
        *words,
    )
    return Agents(folder, "2:2", spares, script, ("--nproc-per-node", "1"))


def incident(job: Agents) -> dict[str, Any]:
    (path,) = (job.run / "incidents").glob("rerun-step-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kinds(job: Agents) -> list[str]:
    return [one["action"] for name in job.agents for one in job.records(name, "action_taken")]


def begin(job: Agents, spare: str = "") -> None:
    """Start agents whose ranks name their devices after them, so that n0 has rank 0."""
    job.start("n0", environment={"DEVICES": "n0"})
    job.until_said("n0", "this node is the leader")
    job.start("n1", environment={"DEVICES": "n1"})
    job.until_said("n0", "generation 1: n0, n1")
    if spare:
        job.start(spare, environment={"DEVICES": spare})
        job.until_said(spare, "this node is a spare")
    (job.folder / "begin").touch()


def contents(trace: Path) -> list[Any]:
    return [lines(trace / f"rank-{rank}")[-1]["content"] for rank in (0, 1)]


def test_the_node_of_a_convicted_device_goes_and_a_spare_takes_its_place(
    tmp_path: Path, made: list[Agents]
) -> None:
    with ranks(tmp_path / "without", "interval=3", steps=STEPS, script="rerunning.py") as without:
        assert without.finish() == [0, 0], without.output()

    job = training(tmp_path / "bad", "stays@n1-1@7", spares=1)
    made.append(job)
    begin(job, "n2")
    codes = job.finish()
    assert {codes["n0"], codes["n2"]} == {0}, job.consoles()
    assert contents(job.trace) == contents(without.trace)
    found = incident(job)
    assert (found["verdict"], found["culprit"]) == ("persistent", "n1-1")
    assert kinds(job) == ["replace-node", "stop"], job.consoles()
    assert "n1 is excluded" in job.consoles()


def test_a_suspected_device_that_no_peer_can_stand_in_for_is_convicted_by_a_spare(
    tmp_path: Path, made: list[Agents]
) -> None:
    made.append(training(tmp_path, "stays@n1-1@7", "alone", spares=1))
    job = made[0]
    begin(job, "n2")
    codes = job.finish()
    assert {codes["n0"], codes["n2"]} == {0}, job.consoles()
    found = incident(job)
    assert [one["remedy"] for one in found["attempts"]] == [
        "rerun the step",
        "replace the node of the device",
    ]
    assert (found["verdict"], found["culprit"]) == ("persistent", "n1-1")
    assert kinds(job) == ["replace-node", "stop"], job.consoles()


def test_data_that_a_spare_rejects_as_well_is_blamed_and_not_the_devices(
    tmp_path: Path, made: list[Agents]
) -> None:
    made.append(training(tmp_path, "batch@1@7", "alone", spares=1))
    job = made[0]
    begin(job, "n2")
    codes = job.finish()
    assert {codes["n0"], codes["n2"]} == {93}, job.consoles()
    found = incident(job)
    assert found["verdict"] == "data or model", found
    assert "rejected on several devices: n1-1, n2-1" in found["reason"]


def test_a_suspected_device_whose_spare_never_came_ends_the_job_as_an_unfit_node_does(
    tmp_path: Path, made: list[Agents]
) -> None:
    made.append(training(tmp_path, "stays@n1-1@7", "alone", spares=1))
    job = made[0]
    begin(job)
    assert set(job.finish().values()) == {69}, job.consoles()
    assert incident(job)["pending"] == "replace the node of the device"
