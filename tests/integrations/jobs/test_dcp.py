"""A script with FSDP2 and torch.distributed.checkpoint, killed in the middle of a save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import job
from tests.support.launching import running


@pytest.mark.parametrize(("way", "resumed"), [("killed", "step-006"), ("damaged", "step-003")])
def test_a_job_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path, way: str, resumed: str) -> None:
    with running(job(tmp_path / "whole", "dcp_training.py", "none")) as run:
        assert run.finish() == 0, run.console()
    with running(job(tmp_path / "job", "dcp_training.py", way, fatal=9)) as run:
        assert run.finish() == 0, run.console()
    for rank in (0, 1):
        assert (tmp_path / "job" / f"resumed-{rank}").read_text() == resumed
        weights = [(tmp_path / name / f"weights-{rank}").read_text() for name in ("whole", "job")]
        assert weights[0] == weights[1]
    assert {9, 12} <= {one["step"] for one in run.records("script_saved")}
