"""How ranks end, and starts that fail: what is a fault and whose, and what is waited out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run, running

ONE = ("--nproc-per-node", "1")

ALONE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(40):
    if step == 20 and os.environ["RANK"] == "1":
        sys.exit()
    dist.all_reduce(torch.ones(3))
"""
ALL = """
import torch, torch.distributed as dist
import outlast
dist.init_process_group("gloo")
with outlast.start() as session:
    session.restore(model=torch.nn.Linear(2, 2))
    for step in session.steps(60):
        if step == 20:
            break
"""


def test_a_rank_that_leaves_while_others_go_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    options = ("--nproc-per-node", "3", "--max-restarts", "0")
    with running(Run(tmp_path / "run", str(tmp_path / "alone.py"), options=options)) as run:
        assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("error", 1), fault


def test_the_end_of_a_loop_that_all_ranks_left_early_names_the_step(tmp_path: Path) -> None:
    (tmp_path / "all.py").write_text(ALL)
    with running(Run(tmp_path / "run", str(tmp_path / "all.py"), options=("--nproc-per-node", "2"))) as run:
        assert run.finish() == 0, run.console()
    (ended,) = run.records("run_ended")
    assert re.findall(r"\d+", ended["reason"]) == ["20", "60"]


# NCCL's watchdog ends a rank that has waited for another one

WATCHED = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        sys.stderr.write(
            "[rank0]:[E1123 ProcessGroupNCCL.cpp:685] [Rank 0] WHAT collective operation"
            " timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 ms\\n"
        )
        os.abort()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("what", "kind", "rank"), [("Watchdog caught", "hang", -1), ("An assertion found a", "crash", 0)]
)
def test_a_rank_that_the_watchdog_aborts_is_not_the_culprit_and_another_is(
    tmp_path: Path, what: str, kind: str, rank: int
) -> None:
    (tmp_path / "train.py").write_text(WATCHED.replace("WHAT", what))
    with running(Run(tmp_path / "run", str(tmp_path / "train.py"), options=("--nproc-per-node=2",))) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == (kind, rank)
    assert ("SeqNum=7" in fault["reason"]) is (kind == "hang")


# Starts that fail because something outside of the program is away for a while


def test_an_outage_at_a_restart_is_waited_out_whatever_fails_because_of_it(tmp_path: Path) -> None:
    """A missing module is final only where the program never trained."""
    with running(Run(tmp_path / "run", "outage.py", "40", "ImportError", "OSError", "-", options=ONE)) as run:
        assert run.finish() == 0, run.console()
    actions = run.records("action_taken")
    assert [one["action"] for one in actions] == ["restart-in-job"] * 3 + ["stop"]
    assert [one["wait"] for one in actions] == [0.0, 2.0, 2.0, 0.0], actions
    for action, following in zip(actions, run.records("generation_started")[1:], strict=False):
        assert following["clock"] >= action["clock"] + action["wait"]
    assert len(run.records("loaded")) == 1


@pytest.mark.long
def test_a_signal_ends_the_wait_for_a_start(tmp_path: Path) -> None:
    with running(Run(tmp_path / "run", "outage.py", "40", "OSError", options=ONE)) as run:
        run.until(lambda: any(one["wait"] >= 10 for one in run.records("action_taken")))
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143, run.console()
    assert len(run.records("generation_started")) == 3


# A control group's memory limit kills a rank: the fault says so, and the launcher lives on

LIMIT = 400 << 20
HIERARCHIES = (  # folder, its limit, and the files that take a limit of swap
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
)


@pytest.fixture
def group() -> Iterator[Path]:
    """Give a control group with a limit of memory, made for this test."""
    for root, limit, swap in HIERARCHIES:
        found = root / f"outlast-test-{uuid.uuid4().hex[:8]}"
        try:
            found.mkdir()
        except OSError:
            continue
        try:
            (found / limit).write_text(str(LIMIT))
        except OSError:
            found.rmdir()
            continue
        with suppress(OSError):  # not every kernel counts swap
            (found / swap).write_text(str(LIMIT) if "memsw" in swap else "0")
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
    assert "kernel" in fault["evidence"]
    assert [one["generation"] for one in run.records("generation_started")] == [1, 2]
    assert os.path.isdir(group)


# The end of a process, whatever torch's threads are at

KEEPS_A_GROUP = """
import sys
import torch
import torch.distributed as dist
import outlast

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = dist.group.WORLD  # as a device mesh keeps it
with outlast.start(sys.argv[1]) as session:
    session.restore(model=torch.nn.Linear(2, 2))
sys.setswitchinterval(1000.0)
values = torch.ones(100_000)
dist.all_reduce(values, async_op=True)
for _ in range(3_000_000):  # meanwhile gloo's thread waits for the interpreter's lock
    pass
"""


@pytest.mark.long
def test_a_thread_of_gloo_that_lets_go_late_does_not_abort_a_rank_that_is_done(tmp_path: Path) -> None:
    for number in range(3):  # without the wait at exit each aborts in five of six tries
        command = [sys.executable, "-c", KEEPS_A_GROUP, str(tmp_path / f"run-{number}")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=95, check=False)
        assert ended.returncode == 0, ended.stderr
