"""A launcher and its ranks on a host without a folder of temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE

NAMESPACE = ("unshare", "--mount")
# Only the folder of the run can be written.
READ_ONLY = """
set -e
mount -t tmpfs none /mnt
mkdir /mnt/run
cp "$1" /mnt/train.py
for place in /tmp /var/tmp /usr/tmp; do
    if [ -d $place ]; then mount -t tmpfs -o ro none $place; fi
done
cd /proc
if [ -n "$3" ]; then mount -t tmpfs -o ro none /dev/shm; fi
"$2" -m outlast run --run-dir /mnt/run/r /mnt/train.py
"""
TRAIN = """
import tempfile
import outlast, torch
with outlast.start(save_interval=1) as session:
    session.restore(state=torch.zeros(1))
    for step in session.steps(2):
        pass
print("temporary", tempfile.gettempdir(), flush=True)
"""


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting takes root",
)
@pytest.mark.parametrize("given", ["", pytest.param("/does/not/exist", marks=pytest.mark.long)])
@pytest.mark.parametrize("shared", [True, False])
def test_shared_memory_stands_in_for_a_folder_of_temporary_files(
    tmp_path: Path, given: str, shared: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    if given:
        environment["TMPDIR"] = given
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", READ_ONLY, "sh", script, sys.executable, "" if shared else "full"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE,
        check=False,
    )
    if shared:
        assert done.returncode == 0, done.stderr
        assert "temporary /dev/shm" in done.stdout
        assert "TMPDIR" in done.stderr
    else:
        assert done.returncode == 73, done.stderr
        assert "Traceback" not in done.stderr
        assert "TMPDIR" in done.stderr
