"""Timeouts that were learned convict on evidence: real jobs that pause, and real jobs that hang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT
from tests.support.agents import Agents, agents
from tests.support.launching import Run, running, until

pytestmark = pytest.mark.timeout(420)
LONG = pytest.mark.long
BY_ORDER, BY_STACKS, BY_STATE = "collective sequence numbers", "stacks", "process state"


def played(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return the records of the benchmark."""
    out = folder / "out.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "hang.py"), *options, "--out", str(out)]
    subprocess.run(command, check=False, timeout=400, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "basis"),
    [
        # A rank that computes, waits for storage, or sleeps for a moment is not hung.
        *(
            pytest.param(kind, "", marks=LONG)
            for kind in ("evaluation_of_rank_0", "sleep_of_all", "sleep_of_one", "frozen_disk_torch_save")
        ),
        pytest.param("stopped_saver", "", marks=LONG),
        pytest.param("cpu_limited", "", marks=LONG),
        # A hang is found, and its culprit named, on the best evidence.
        pytest.param("endless_polls", BY_ORDER, marks=LONG),
        pytest.param("mismatched_collectives", BY_ORDER, marks=LONG),
        pytest.param("native_with_lock_held", BY_STACKS, marks=LONG),
        pytest.param("lock_alone", BY_STATE, marks=LONG),
        ("stopped", BY_STATE),
    ],
)
def test_a_hang_is_found_on_the_best_evidence_and_a_pause_is_none(
    tmp_path: Path, kind: str, basis: str
) -> None:
    records = played(tmp_path, "--kinds", kind, "--pause", "5")
    found = next(one for one in records if one["record"] == "kind")
    if found.get("skipped"):
        pytest.skip(str(found["said"]))
    assert found["right"], found["said"]
    assert not basis or found["basis"] == basis


@pytest.mark.long
def test_hangs_of_one_job_are_decided_by_the_flight_recorder_one_after_the_other(tmp_path: Path) -> None:
    records = played(tmp_path, "--tries", "2", "--side-by-side", "4")
    found = {one["kind"]: one["by_flight_recorder"] for one in records if one["record"] == "tries"}
    assert found == {"late": 2, "ahead": 2, "deadlock": 2, "stopped": 0}


@pytest.mark.long
def test_a_script_that_spawns_its_ranks_itself_learns_the_cure(tmp_path: Path) -> None:
    variable = "TORCHELASTIC_USE_AGENT_STORE"
    with running(Run(tmp_path / "run", "spawning.py", options=("--nproc-per-node", "1"))) as run:
        until(lambda: variable in run.console(), lambda: f"the cure; console:\n{run.console()}")
    cured = Run(tmp_path / "cured", "spawning.py", "cured", options=("--nproc-per-node", "1"))
    with running(cured):
        assert cured.finish() == 0, cured.console()
    assert "rank 1: [2.0, 2.0, 2.0]" in cured.console()
    assert variable not in cured.console()


OUTSIDE = """
import time, outlast
with outlast.start() as session:
    with session.section("data"):
        session.heartbeat()
    time.sleep(1000)
"""


def test_a_hang_outside_of_sections_names_the_option_that_sets_its_limit(tmp_path: Path) -> None:
    script, option = tmp_path / "train.py", "--ft-rank-out-of-section-timeout"
    script.write_text(OUTSIDE)
    options = (f"{option}=1", "--max-restarts=0")
    with running(Run(tmp_path / "run", str(script), options=options)) as run:
        assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("hang", 0), fault
    assert re.findall(r"--ft-[\w-]+", fault["reason"]) == [option]


# Ranks of one node are silent beyond a learned timeout, and ranks of another node wait for them.


@contextmanager
def apart(folder: Path, ranks: int, *what: str, options: tuple[str, ...] = ()) -> Iterator[Agents]:
    """Run a job on nodes n0 and n1, of which all ranks of n1 do something; give it when it has ended."""
    names = ",".join(str(ranks + one) for one in range(ranks))
    every = ("--nproc-per-node", str(ranks), *options)
    with agents(folder, "2:2", script=("apart.py", names, *what), options=every) as found:
        found.start("n0")
        found.until_said("n0", "leader")
        found.start("n1")
        assert found.finish() == {"n0": 0, "n1": 0}, found.consoles()
        found.nothing_left()
        yield found


def hangs(found: Agents) -> list[dict[str, Any]]:
    """Return the hangs in the event logs."""
    seen = (one for name in ("n0", "n1") for one in found.records(name, "fault_seen"))
    return [one for one in seen if one["fault"] == "hang"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sleeping_rank_of_another_node_is_named_as_on_one_node(tmp_path: Path, ranks: int) -> None:
    with apart(tmp_path, ranks, "sleep", "3600") as found:
        assert found.generations() == [1, 2], found.consoles()
        (fault,) = hangs(found)
    assert (fault["node"], fault["rank"]) == ("n1", ranks), fault
    assert fault["evidence"]["found by"] == BY_ORDER
    verdict = json.loads((Path(fault["evidence"]["stacks"]) / "verdict.json").read_text())
    assert verdict["convicted"]


@pytest.mark.long
def test_ranks_have_patience_with_one_of_another_node_that_computes(tmp_path: Path) -> None:
    options = ("--ft-busy-rank-timeout", "8")
    with apart(tmp_path, 1, "compute", "16", options=options) as found:
        assert hangs(found) == []
        assert found.generations() == [1], found.consoles()
