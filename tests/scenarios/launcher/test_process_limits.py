"""A launcher on a node that allows few processes: it works, or it ends with an error."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import DEADLINE, Run, until

pytestmark = pytest.mark.timeout(420)
_PLACES = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group that limits processes; the limit is the most that it may have."""
    folder = None
    for place in _PLACES:
        with contextlib.suppress(OSError):
            folder = place / f"outlast-test-{os.getpid()}"
            folder.mkdir()
            (folder / "pids.max").write_text("max")
            break
    else:
        if folder is not None and folder.exists():
            folder.rmdir()
        pytest.skip("control groups for processes cannot be made here")
    yield folder
    until(lambda: (folder / "cgroup.procs").read_text() == "", "the control group to be empty")
    folder.rmdir()


def run_in(group: Path, limit: int, run: Run) -> subprocess.CompletedProcess[str]:
    (group / "pids.max").write_text(str(limit))
    command = f"echo $$ > {group}/cgroup.procs; exec {shlex.join(run.command)}"
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def test_a_limit_of_processes_is_named_and_no_traceback_is_shown(tmp_path: Path, group: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    codes = []
    for limit in (1, 2, 3, 4, 9, 32):
        done = run_in(group, limit, Run(tmp_path / f"run-{limit}", str(script)))
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr, (limit, done.stderr)
        if done.returncode:
            assert "Resource temporarily unavailable" in done.stderr, (limit, done.stderr)
        else:
            assert done.stdout == "hello\n", (limit, done.stderr)
    assert codes[0] == 69
    assert codes[-1] == 0
    assert set(codes) <= {0, 69}


@pytest.mark.parametrize("start", [(), ("--no-zygote",)], ids=["forked", "cold"])
def test_ranks_have_the_limit_of_open_files_that_the_user_set(tmp_path: Path, start: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, resource as r\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE), r.prlimit(os.getppid(), r.RLIMIT_NOFILE))\n"
    )
    run = Run(tmp_path / "run", str(script), options=start)
    command = f"ulimit -Sn 300; ulimit -Hn 4096; exec {shlex.join(run.command)}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.stdout == "(300, 4096) (4096, 4096)\n", done.stderr
