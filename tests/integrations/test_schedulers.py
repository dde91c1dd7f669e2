"""What each scheduler reads from the environment, and which options of ``outlast run`` follow."""

from __future__ import annotations

import math

import pytest

from outlast.errors import ExitCode, UsageError
from outlast.integrations.schedulers import find, node_options
from outlast.ports import Allocation
from outlast.settings import allocation_variables, worker_context

SLURM = {"SLURM_JOB_ID": "4007", "SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "2", "SLURMD_NODENAME": "n2"}
POD = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "gpt-node-0-3"}
ENDS = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_END_TIME": "1000"}


@pytest.mark.parametrize(
    ("name", "environment", "expected"),
    [
        ("slurm", SLURM | ENDS, Allocation("4007", 3, 2, "n2", "10.0.0.1:29407", 1000.0)),
        ("slurm", {"SLURM_JOB_ID": "4007"}, Allocation("4007")),
        ("kubernetes", POD, Allocation("gpt-node-0", 0, 3)),
        ("ray", {"RAY_JOB_ID": "01000000"}, Allocation("01000000", 0)),
    ],
)
def test_an_allocation_is_read_from_the_environment(
    name: str, environment: dict[str, str], expected: Allocation
) -> None:
    assert find(name).detect(environment) == expected
    assert find(name).detect({}) is None


def test_options_and_exit_codes_follow_from_the_scheduler() -> None:
    assert node_options(Allocation("j")) == []
    assert node_options(Allocation("j", nodes=0, node_rank=3)) == ["--node-rank=3"]
    assert "--rdzv-endpoint=a:1" in node_options(Allocation("j", 2, 1, endpoint="a:1"))
    for name in ("kubernetes", "ray"):
        assert find(name).requeue(Allocation("j"), "why") == ExitCode.PREEMPTED


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pbs.*slurm, kubernetes, ray"):
        find("pbs")


def test_ranks_are_told_when_the_allocation_ends() -> None:
    assert allocation_variables(math.inf, 0.0) == {}
    told = allocation_variables(1000.0, 90.0)
    context = worker_context({**told, "SLURM_JOB_END_TIME": "2000"})
    assert (context.job_end_time, context.grace_period) == (1000, 90)
