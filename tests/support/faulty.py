"""Commands that see a file system with outages; see scripts/faulty_files.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS

# The server is no child of the command, which may end children that it does not know.
_SHELL = """
("$0" "$1" "$2" "$3" "$4" $$ </dev/null >"$4.server" 2>&1 &)
until [ -s "$4.server" ]; do sleep 0.05; done
shift 4
exec "$@"
"""

needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.W_OK)
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="only root can mount a file system in a namespace",
)


def with_faults(command: Sequence[str], behind: Path, mounted: Path, switch: Path) -> list[str]:
    """Return a command in a mount namespace in which a folder shows another one, except in an outage.

    Args:
        command: what is started; its process id is that of the command returned.
        behind: the folder that is shown; other processes see it without outages.
        mounted: where.
        switch: file that makes an outage and has its kind in it.
    """
    server = [sys.executable, str(SCRIPTS / "faulty_files.py"), str(behind), str(mounted), str(switch)]
    return ["unshare", "-m", "sh", "-c", _SHELL, *server, *command]
