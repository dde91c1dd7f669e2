"""A rank that NCCL's watchdog ends has waited for another rank: it is not the culprit."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, running

SCRIPT = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        sys.stderr.write(
            "[rank0]:[E1123 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation"
            " timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 ms\\n"
        )
        os.abort()
    time.sleep(600)
"""


def test_an_abort_of_the_watchdog_is_a_hang_of_a_rank_that_is_not_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node=2",))) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("hang", -1)
    assert "SIGABRT): Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7" in fault["reason"]


def test_another_abort_is_a_crash_of_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("Watchdog caught", "An assertion found a"))
    with running(Run(tmp_path / "run", str(script), options=("--nproc-per-node=2",))) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("crash", 0)
