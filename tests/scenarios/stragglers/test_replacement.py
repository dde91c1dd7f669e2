"""Two nodes and a spare: the node of a slow rank is replaced after a save, if there is a second sign."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.agents import agents

SLOW = 3
pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]


@pytest.mark.parametrize(
    ("sign", "slowness"), [("a crash", ("100",)), ("the same product", ("0", "60", "100"))]
)
def test_a_slow_node_with_a_second_sign_is_replaced_by_a_spare(
    tmp_path: Path, sign: str, slowness: tuple[str, ...]
) -> None:
    config = tmp_path / "outlast.toml"
    config.write_text('[stragglers]\naction = "replace"\n')
    script = ("agreeing.py", "100000", "20", str(SLOW), *slowness)
    options = ("--nproc-per-node", "2", "--config", str(config))
    with agents(tmp_path / "job", "2:2", 1, script, options) as job:
        job.start("n1")
        job.start("n2")
        job.until_runs(4)
        job.start("n3")
        job.until_said("n3", "spare")
        if sign == "a crash":
            os.kill(job.ranks(1, 4)[SLOW], signal.SIGSEGV)
            assert job.until_runs(4, after=1) == 2

        def replaced() -> list[str]:
            taken = [one for name in ("n1", "n2") for one in job.records(name, "action_taken")]
            return [one["reason"] for one in taken if one["action"] == "replace-node"]

        before = max(job.generations())
        (reason,) = job.until(replaced, "a node that is replaced", 200.0)
        assert re.search(rf"\b{SLOW} .*\bn2\b.*; ", reason)
        assert job.until_runs(4, after=before) == before + 1
        assert job.records("n3", "generation_started")
