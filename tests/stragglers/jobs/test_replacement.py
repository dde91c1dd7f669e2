"""Two nodes and a spare: the node of a slow rank is replaced after a save, if there is a second sign."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.agents import agents

CONFIG = '[stragglers]\naction = "replace"\n'
SLOW, SLOW_FROM = 3, 100


@pytest.mark.timeout(420)
def test_a_slow_node_with_a_second_sign_is_replaced_by_a_spare(tmp_path: Path) -> None:
    config = tmp_path / "outlast.toml"
    config.write_text(CONFIG)
    script = ("agreeing.py", "100000", "20", str(SLOW), str(SLOW_FROM))
    options = ("--nproc-per-node", "2", "--config", str(config))
    with agents(tmp_path / "job", "2:2", 1, script, options) as job:
        job.start("n1")
        job.start("n2")
        job.until_runs(4)
        job.start("n3")
        job.until_said("n3", "this node is a spare")
        os.kill(job.ranks(1, 4)[SLOW], signal.SIGSEGV)
        assert job.until_runs(4, after=1) == 2

        def replaced() -> list[str]:
            taken = [one for name in ("n1", "n2") for one in job.records(name, "action_taken")]
            return [one["reason"] for one in taken if one["action"] == "replace-node"]

        (reason,) = job.until(replaced, "a node that is replaced", 200.0)
        assert f"rank {SLOW} on n2" in reason
        assert "second sign: " in reason
        assert "so a spare takes the place of n2" in reason
        assert job.until_runs(4, after=2) == 3
        assert job.records("n3", "generation_started")


@pytest.mark.timeout(420)
def test_a_slow_node_that_computes_a_product_slowly_is_replaced_by_a_spare(tmp_path: Path) -> None:
    config = tmp_path / "outlast.toml"
    config.write_text(CONFIG)
    script = ("agreeing.py", "100000", "20", str(SLOW), "0", "60", "100")
    options = ("--nproc-per-node", "2", "--config", str(config))
    with agents(tmp_path / "job", "2:2", 1, script, options) as job:
        job.start("n1")
        job.start("n2")
        job.until_runs(4)
        job.start("n3")
        job.until_said("n3", "this node is a spare")

        def replaced() -> list[str]:
            taken = [one for name in ("n1", "n2") for one in job.records(name, "action_taken")]
            return [one["reason"] for one in taken if one["action"] == "replace-node"]

        (reason,) = job.until(replaced, "a node that is replaced", 200.0)
        assert f"rank {SLOW} on n2" in reason
        assert "times as long as 2 ranks of other nodes for the same product" in reason
        assert sum(job.said(name, "every rank computes the same product") for name in job.agents)
        assert job.until_runs(4, after=1) == 2
