"""Ranks of one node are silent beyond a learned timeout, and ranks of another node wait for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agents, agents


@contextmanager
def played(folder: Path, ranks: int, *what: str, options: tuple[str, ...] = ()) -> Iterator[Agents]:
    """Run a job on nodes n0 and n1, of which all ranks of n1 do something; give it when it has ended."""
    names = ",".join(str(ranks + one) for one in range(ranks))
    every = ("--nproc-per-node", str(ranks), *options)
    with agents(folder, "2:2", script=("apart.py", names, *what), options=every) as found:
        found.start("n0")
        found.until_said("n0", "this node is the leader")
        found.start("n1")
        assert found.finish() == {"n0": 0, "n1": 0}, found.consoles()
        found.nothing_left()
        yield found


def hangs(found: Agents) -> list[dict[str, Any]]:
    """Return the hangs in the event logs."""
    seen = (one for name in ("n0", "n1") for one in found.records(name, "fault_seen"))
    return [one for one in seen if one["fault"] == "hang"]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sleeping_rank_of_another_node_is_named_as_on_one_node(tmp_path: Path, ranks: int) -> None:
    with played(tmp_path, ranks, "sleep", "3600") as found:
        assert found.generations() == [1, 2], found.consoles()
        (fault,) = hangs(found)
    assert (fault["node"], fault["rank"]) == ("n1", ranks), fault
    assert "is behind in the order of collectives" in fault["reason"]
    assert "waiting for it: ranks 0" in fault["reason"]
    assert "(by collective sequence numbers)" in fault["reason"]
    verdict = json.loads((Path(fault["evidence"]["stacks"]) / "verdict.json").read_text())
    assert verdict["convicted"]


@pytest.mark.timeout(420)
def test_ranks_have_patience_with_one_of_another_node_that_computes(tmp_path: Path) -> None:
    options = ("--ft-busy-rank-timeout", "8")
    with played(tmp_path, 1, "compute", "16", options=options) as found:
        assert hangs(found) == []
        assert found.generations() == [1], found.consoles()
        assert found.said("n0", "the agent of its node decides")
