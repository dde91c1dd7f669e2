"""What Slurm's programs are asked, what is read from them, and how their children are waited for."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from outlast.integrations.slurm import commands
from outlast.integrations.slurm.commands import Child, JobStatus, Noted, SlurmError, parse_status
from outlast.integrations.slurm.supervise import meeting, read_notes, srun_command


def test_a_process_with_more_than_1024_files_open_waits_for_its_child() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, most[0]), most[1]))
    held = [os.dup(2) for _ in range(1100)]
    try:
        with Noted() as noted:
            assert Child((sys.executable, "-c", "raise SystemExit(7)")).wait(noted, 60.0) == 7
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUNNING|1:00\n", JobStatus("RUNNING", False)),
        *((f"COMPLETING|{left}\n", JobStatus("COMPLETING", True)) for left in ("0:00", "INVALID", "-0:07")),
        *((f"RUNNING|{left}\n", JobStatus("RUNNING", False)) for left in ("UNLIMITED", "1-02:03:04")),
        ("", JobStatus("", False)),
    ],
)
def test_the_state_of_a_job_is_read(text: str, expected: JobStatus) -> None:
    assert parse_status(text) == expected


def test_a_question_to_slurm_is_answered_or_refused_also_while_the_job_is_ended() -> None:
    with pytest.raises(SlurmError, match=r"sh -c .*4.*no such job.*a job"):
        commands.call(("sh", "-c", "echo no such job >&2; exit 4"), "a job")
    assert commands.call(("sh", "-c", "kill -TERM $$; echo still here"), "words") == "still here\n"


def test_one_agent_a_node_is_started() -> None:
    variables = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8"}
    found = srun_command(variables, Path("/n"), ["-l"], ["t.py"])
    assert found[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=0", "--no-kill", "-l"} < set(found)
    assert found[-6:] == ["slurm", "step", "--notes", "/n", "--", "t.py"]


def test_several_nodes_meet_where_the_batch_step_runs() -> None:
    variables = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "4007", "SLURMD_NODENAME": "node2"}
    found = meeting({**variables, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, "job1")
    assert {"--nnodes=3", "--rdzv-endpoint=10.0.0.1:29407", "--rdzv-id=job1"} < set(found)
    assert "--node-name=node2" in found
    assert meeting({"SLURM_JOB_NUM_NODES": "1"}, "run") == []


def test_torn_notes_are_none(tmp_path: Path) -> None:
    (tmp_path / "node-00000.json").write_text('{"node": "a", "exit_code": 0, "signals": [15]}')
    (tmp_path / "node-00001.json").write_text('{"node": "b", "exit')
    (tmp_path / "node-00002.json").write_text('{"node": "c"}')
    assert [(end.node, end.signals) for end in read_notes(tmp_path)] == [("a", (15,))]
