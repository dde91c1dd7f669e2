"""A node is killed while a step is proposed and not committed: the job goes on from the copy before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outlast.agreement.policy.steps import Stage, Want
from outlast.ipc.heartbeat_page import HeartbeatPage
from tests.support.agents import agents
from tests.support.launching import runtime_folders
from tests.support.ranks import copies, lines

NODES = ("n0", "n1", "n2")


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("dead", ["n0", "n2"], ids=["leader", "node"])
def test_a_node_killed_between_proposal_and_commit_ends_in_a_restart(tmp_path: Path, dead: str) -> None:
    with agents(tmp_path / "job", "2:3", script=("healthy.py", "300", "save@1@5")) as found:

        def trained(steps: int) -> bool:
            return all(len(lines(found.trace / f"rank-{rank}")) >= steps for rank in range(3))

        found.start("n0")
        found.until_said("n0", "leader")
        found.start("n1", "n2")
        found.until(lambda: trained(20) and copies(found.run), "steps and the save")
        (saved,) = copies(found.run)
        found.until(lambda: trained(saved + 5), "more steps")
        begun = [lambda name=name: found.records(name, "generation_started") for name in NODES]
        pids = [found.until(one, "the records of the start")[0]["pids"][0] for one in begun]
        os.kill(pids[2], signal.SIGSTOP)  # it answers no proposal
        (page,) = (
            page for folder in runtime_folders(found.agents["n1"].pid) for page in folder.glob("heartbeat-*")
        )
        asks = found.trace / f"ask-{page.name.rpartition('-')[2]}"
        asks.touch()

        def proposed() -> int:
            said = HeartbeatPage.open(page).agreement.read()
            if said is None or said.stage is not Stage.PROPOSED or not said.wants & Want.SAVE:
                return 0
            return said.step

        before = found.until(proposed, "a proposal")
        asks.unlink()
        found.kill(dead)
        left = [name for name in NODES if name != dead]
        assert found.finish(*left) == dict.fromkeys(left, 0), found.consoles()
        loaded = [one for name in NODES for one in found.records(name, "loaded") if one["generation"] > 1]
    (step,) = {one["step"] for one in loaded}  # a copy in memory may be newer than the one on disk
    assert saved <= step < before, found.consoles()
    assert copies(found.run)[-1] == 300
