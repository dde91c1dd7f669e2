"""A rank whose file server does not answer: its agent looks at it all the same, and serves the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run, running, until

RANK = """
import os, sys
data = os.open(sys.argv[1], os.O_RDONLY)
os.read(data, 4096)
open(sys.argv[2], "w").close()
os.read(data, 4096)
"""


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="only root can mount a file system")
def test_the_agent_does_not_wait_for_the_file_system_of_a_hung_rank(tmp_path: Path) -> None:
    mounted, switch, script = tmp_path / "mounted", tmp_path / "hangs", tmp_path / "script.py"
    mounted.mkdir()
    script.write_text(RANK)
    options = ("--nproc-per-node=1", "--ft-initial-rank-heartbeat-timeout=4", "--max-restarts=0")
    run = Run(tmp_path / "run", str(script), str(mounted / "data"), str(switch), options=options)
    server = [sys.executable, str(SCRIPTS / "hanging_files.py"), str(mounted), str(switch)]
    shell = '"$0" "$1" "$2" "$3" </dev/null & until [ -e "$2/data" ]; do sleep 0.05; done; shift 3; exec "$@"'
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this machine does not let root make namespaces")
    run.command = ["unshare", "-m", "sh", "-c", shell, *server, *run.command]
    try:
        with running(run):
            until(lambda: run.records("fault_seen"), run.console)
            assert switch.exists()
            (fault,) = run.records("fault_seen")
            assert (fault["fault"], fault["rank"]) == ("hang", 0)
            (verdict,) = (tmp_path / "run" / "incidents").glob("*/verdict.json")
            assert json.loads(verdict.read_text())["ranks"][0]["doing"].startswith("waits for storage")
            switch.unlink()
            assert run.finish() == 1
    finally:
        switch.unlink(missing_ok=True)
