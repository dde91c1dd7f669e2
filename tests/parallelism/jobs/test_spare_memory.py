"""A job of three nodes goes on with one; a part of what it loads is in the memory of a spare."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.agents import Agents

CONFIG = """\
[checkpoints]
non_persistent_save_interval = 1

[parallelism]
layouts = [{ dp = 3 }, {}]
"""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    (tmp_path / "job.toml").write_text(CONFIG)
    endless = ("uneven.py", "1000000", "6", "1", "-1", "0", "0", "0.02")
    options = ("--config", str(tmp_path / "job.toml"), "--nproc-per-node", "1")
    found = Agents(tmp_path / "job", "1:3", script=endless, options=options)
    yield found
    found.stop()


def steps(agents: Agents, world: int) -> list[int]:
    """Return the steps that rank 0 did in a world."""
    path = agents.trace / "0.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [one["step"] for one in lines if one["world"] == world]


def replicated(agents: Agents) -> int:
    """Return the newest step of which every node's part is in the memory of another one; -1: none."""
    found = [-1]
    for path in Path("/dev/shm").glob(f"outlast-memory-*-{agents.job}*/status.json"):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text())["replicated_step"])
    return max(found)


def test_nothing_is_lost_when_the_layout_leaves_a_node_out_that_has_a_part(agents: Agents) -> None:
    agents.start("n0")
    agents.until_said("n0", "this node is the leader")
    agents.start("n1", "n2")
    agents.until(lambda: replicated(agents) > 0, "a step of which every node's part is on another one")
    safe = replicated(agents)
    for pid in agents.tree("n2"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agents.until(lambda: steps(agents, 1), "a step of the rank that is left")
    assert agents.records("n0", "loaded"), agents.consoles()
    loaded = agents.records("n0", "loaded")[-1]
    assert (loaded["reason"].endswith("from memory"), loaded["step"] >= safe) == (True, True), loaded
    assert steps(agents, 1)[0] == loaded["step"]
    assert agents.said("n0", "also of node(s) n1, which left"), agents.consoles()
