"""A device that is convicted or suspected on one of several nodes: its node goes, a spare takes its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents
from tests.support.ranks import lines, ranks

STEPS = 12
RERUN, SWAP, SPARE = "rerun the step", "swap the data of two ranks", "replace the node of the device"
CONVICTED = {"verdict": "persistent", "culprit": "n1-1", "pending": None}


def begin(job: Agents, spare: str) -> None:
    """Start agents whose ranks name their devices after them, so that n0 has rank 0."""
    job.start("n0", environment={"DEVICES": "n0"})
    job.until_said("n0", "leader")
    job.start("n1", environment={"DEVICES": "n1"})
    job.until(lambda: all(lines(job.trace / f"rank-{rank}") for rank in (0, 1)), "both ranks")
    if spare:
        job.start(spare, environment={"DEVICES": spare})
        job.until_said(spare, "spare")
    (job.folder / "begin").touch()


def contents(trace: Path) -> list[Any]:
    return [lines(trace / f"rank-{rank}")[-1]["content"] for rank in (0, 1)]


@pytest.mark.parametrize(
    ("words", "spare", "code", "actions", "remedies", "found"),
    [
        (["stays@n1-1@7"], "n2", 0, ["replace-node", "stop"], [RERUN, SWAP, SPARE], CONVICTED),
        pytest.param(
            *(["stays@n1-1@7", "alone"], "n2", 0, ["replace-node", "stop"], [RERUN, SPARE], CONVICTED),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(["batch@1@7", "alone"], "n2", 93, ["replace-node", "stop"]),
            *([RERUN, SPARE], {"verdict": "data or model", "rejected_on": ["n1-1", "n2-1"]}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(["stays@n1-1@7", "alone"], "", 69, ["stop", "stop"], [RERUN, SPARE], {"pending": SPARE}),
            marks=pytest.mark.long,
        ),
    ],
    ids=["convicted", "suspected", "data", "no spare comes"],
)
def test_the_node_of_a_suspected_device_goes_and_a_spare_shows_whether_it_was_the_device(
    tmp_path: Path,
    words: list[str],
    spare: str,
    code: int,
    actions: list[str],
    remedies: list[str],
    found: dict[str, object],
) -> None:
    folder = tmp_path / "bad"
    hold = f"hold={folder / 'begin'}"
    script = ("rerunning.py", str(folder / "run"), str(STEPS), "interval=3", hold, *words)
    job = Agents(folder, "2:2", 1, script, ("--nproc-per-node", "1"))
    try:
        begin(job, spare)
        codes = job.finish()
    finally:
        job.stop()
    assert {codes["n0"], codes[spare or "n1"]} == {code}, job.consoles()
    taken = [one["action"] for name in job.agents for one in job.records(name, "action_taken")]
    assert [taken[0], taken[-1]] == actions, job.consoles()
    (path,) = (job.run / "incidents").glob("rerun-step-*.json")
    incident = json.loads(path.read_text())
    assert [one["remedy"] for one in incident["attempts"]][: len(remedies)] == remedies
    assert {key: incident[key] for key in found} == found
    if not code and "alone" not in words:
        with ranks(tmp_path / "without", "interval=3", steps=STEPS, script="rerunning.py") as without:
            assert without.finish() == [0, 0], without.output()
        assert contents(job.trace) == contents(without.trace)
