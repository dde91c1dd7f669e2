"""Ranks that end with status 0 before the job is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running

ALONE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(40):
    if step == 20 and os.environ["RANK"] == "1":
        sys.exit()
    dist.all_reduce(torch.ones(3))
"""
ALL = """
import sys
import torch, torch.distributed as dist
import outlast
dist.init_process_group("gloo")
with outlast.start() as session:
    session.restore(model=torch.nn.Linear(2, 2))
    for step in session.steps(60):
        if step == int(sys.argv[1]):
            break
"""


def test_a_rank_that_leaves_while_others_go_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    options = ("--nproc-per-node", "3", "--max-restarts", "0")
    with running(Run(tmp_path / "run", str(tmp_path / "alone.py"), options=options)) as run:
        assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("error", 1), fault
    assert "rank 1 exited with status 0" in fault["reason"]


@pytest.mark.parametrize(("leave", "told"), [(20, True), (60, False)])
def test_the_end_of_a_loop_that_all_ranks_left_early_names_the_step(
    tmp_path: Path, leave: int, told: bool
) -> None:
    (tmp_path / "all.py").write_text(ALL)
    options = ("--nproc-per-node", "2")
    with running(Run(tmp_path / "run", str(tmp_path / "all.py"), str(leave), options=options)) as run:
        assert run.finish() == 0, run.console()
    (ended,) = run.records("run_ended")
    assert ("20 of 60" in ended["reason"]) is told, ended
    assert ("20 of 60" in run.console()) is told
