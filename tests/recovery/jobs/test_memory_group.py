"""A control group's memory limit kills a rank: the fault says so, and the launcher lives on."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run, running

_LIMIT = 400 << 20
_HIERARCHIES = (  # folder, its limit, and the files that take a limit of swap
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
)


@pytest.fixture
def group() -> Iterator[Path]:
    """Give a control group with a limit of memory, made for this test."""
    for root, limit, swap in _HIERARCHIES:
        found = root / f"outlast-test-{uuid.uuid4().hex[:8]}"
        try:
            found.mkdir()
        except OSError:
            continue
        try:
            (found / limit).write_text(str(_LIMIT))
        except OSError:
            found.rmdir()
            continue
        with suppress(OSError):  # not every kernel counts swap
            (found / swap).write_text(str(_LIMIT) if "memsw" in swap else "0")
        yield found
        end = time.monotonic() + 20.0
        while found.exists() and time.monotonic() < end:
            with suppress(OSError):  # its last process is on its way out
                found.rmdir()
            time.sleep(0.05)
        return
    pytest.skip("no control group of memory can be made here (root, and a hierarchy that is writable)")


def test_a_rank_that_a_memory_limit_kills_is_named_with_the_cause(tmp_path: Path, group: Path) -> None:
    options = ("--nproc-per-node", "2", "--no-python", "--preflight", "off")
    run = Run(tmp_path / "run", sys.executable, str(SCRIPTS / "hungry.py"), options=options)
    inside = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
    run.command = ["/bin/sh", "-c", inside, "sh", *run.command]
    with running(run):
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("crash", 1)
    assert "killed by the kernel (out of memory)" in fault["reason"]
    assert [one["generation"] for one in run.records("generation_started")] == [1, 2]
    assert os.path.isdir(group)
