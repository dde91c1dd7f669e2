"""Scripts of other systems, as one plain interpreter: their path, their lines, what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support import warm

WITHIN = 120.0
LOGGING = """
from outlast.compat.kempnerforge import log_health_status, log_job_info
log_health_status()
log_job_info()
"""
CLIENT = """
import json
from beside import STATE
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
before = client.loaded_hb_timeouts, client.loaded_section_timeouts
try:
    client.load_state_dict(STATE)
except Exception as error:
    after = client.loaded_hb_timeouts, client.loaded_section_timeouts
    print(json.dumps([type(error).__name__, before == after]))
"""
BESIDE = """
STATE = {"current_timeouts": {"heartbeat": {"initial": 7.0}, "section": {"no such field": 1}}}
"""


def printed(tmp_path: Path, script: str, **environment: str) -> tuple[str, str]:
    (tmp_path / "script.py").write_text(script)
    done = warm.run([tmp_path / "script.py", tmp_path / "run"], WITHIN, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_lines_of_kempnerforge_are_shown_where_a_script_has_not_set_up_logging(tmp_path: Path) -> None:
    _, err = printed(tmp_path, LOGGING, SLURM_JOB_ID="4711")
    assert len(re.findall(r"\bGPU 0\b.*\bcuda=", err)) == 1, err
    assert len(re.findall(r"\bid=4711\b", err)) == 1, err


def test_a_script_behind_a_link_imports_what_is_beside_it_and_loads_no_half_of_a_state(
    tmp_path: Path,
) -> None:
    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir()
    links.mkdir()
    (real / "train.py").write_text(CLIENT)
    (real / "beside.py").write_text(BESIDE)
    (links / "train.py").symlink_to(real / "train.py")
    command = [sys.executable, "-m", "outlast.compat.nvrx", str(links / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '["RankMonitorClientError", true]\n'
