"""A rank whose script is done ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running


@pytest.mark.parametrize("number", range(2))
def test_a_script_that_ends_right_after_its_last_step_ends(tmp_path: Path, number: int) -> None:
    """gloo's thread frees the last collective, for which it needs the interpreter's lock."""
    del number  # without the remedy about every second run waits for ever
    with running(Run(tmp_path / "run", "ending.py", options=("--nproc-per-node=2",))) as run:
        assert run.finish() == 0, run.console()
