"""A rank whose file server does not answer: its agent looks at it all the same, and serves the rest."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.support.faulty import needs_fuse, with_faults
from tests.support.launching import Run, running

RANK = """
import os, sys
data = os.open(sys.argv[1], os.O_RDONLY)
os.pread(data, 4096, 0)
open(sys.argv[2], "w").close()
os.pread(data, 4096, 1 << 22)  # far behind what the kernel has read ahead
"""


@needs_fuse
def test_the_agent_does_not_wait_for_the_file_system_of_a_hung_rank(tmp_path: Path) -> None:
    mounted, switch, script = tmp_path / "mounted", tmp_path / "hangs", tmp_path / "script.py"
    behind = tmp_path / "behind"
    mounted.mkdir()
    behind.mkdir()
    with open(behind / "data", "wb") as file:
        file.truncate(8 << 20)
    script.write_text(RANK)
    options = ("--nproc-per-node=1", "--ft-initial-rank-heartbeat-timeout=4", "--max-restarts=1")
    run = Run(tmp_path / "run", str(script), str(mounted / "data"), str(switch), options=options)
    run.command = with_faults(run.command, behind, mounted, switch)
    with running(run):
        try:
            run.until(lambda: run.records("fault_seen"))
            assert switch.exists()
            (fault,) = run.records("fault_seen")
            assert (fault["fault"], fault["rank"]) == ("hang", 0)
            (verdict,) = (tmp_path / "run" / "incidents").glob("*/verdict.json")
            assert "storage" in json.loads(verdict.read_text())["ranks"][0]["doing"]
            # It outlives SIGKILL. The agent obeys meanwhile; it would give the rank up after 10 s.
            assert run.process is not None
            run.process.send_signal(signal.SIGTERM)
            run.until(lambda: len(run.records("action_taken")) > 1)
            restart, stop = (one["clock"] for one in run.records("action_taken"))
            assert stop - restart < 9.0
            switch.unlink()
            assert run.finish() == 143, run.console()
        finally:
            switch.unlink(missing_ok=True)
