"""Saves are put off, at the same step on all ranks, while buffers lack their pages."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, running

SCRIPT = """
import os, signal
import outlast, torch
from outlast.checkpoint.content import memory
from outlast.checkpoint.save import buffers

rank, generation = int(os.environ["RANK"]), os.environ["OUTLAST_GENERATION"]
if rank == 1:  # its thread makes no buffer that no save waits for
    buffers._REST, buffers._AT_ONCE, memory._PAGES_BYTES = 1e9, 0, 4096
torch.distributed.init_process_group("gloo")
options = outlast.CheckpointOptions(save_interval=5, async_save=False)  # no save overtakes another
with outlast.start(checkpoints=options) as session:
    session.restore(state=torch.full((1000,), rank))
    for step in session.steps(52):
        if (step, rank, generation) == (42, 0, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
"""


def test_saves_are_put_off_on_all_ranks_until_each_buffer_was_made_and_not_after_a_restart(
    tmp_path: Path,
) -> None:
    """Rank 1 makes its buffers only when a save waits: after another interval, so that no save is skipped."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node", "2"))) as run:
        assert run.finish() == 0, run.console()
    saved = {one["step"]: one["reason"] for one in run.records("saved")}
    third = [25, 30] if 25 in saved else [30]  # where the buffer of the first save is free again by then
    assert list(saved) == [10, 20, *third, 35, 40, 45, 50, 52], run.console()
    assert [step for step, reason in saved.items() if "put off" in reason] == [
        10,
        20,
        *([] if 25 in saved else [30]),
    ]
