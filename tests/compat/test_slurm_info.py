"""What a script learns of its job, by KempnerForge's names, and what is read from Slurm's programs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outlast import compat
from outlast.errors import UsageError
from outlast.integrations.slurm import commands
from outlast.integrations.slurm.commands import JobStatus, SlurmError, parse_status
from outlast.integrations.slurm.supervise import meeting, read_notes, srun_command

VARIABLES = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NAME": "gpt",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_PARTITION": "gpu",
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*VARIABLES, "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_outside_of_slurm(job: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert compat.get_slurm_info() is None
    assert not compat.is_slurm_job()
    assert not compat.is_slurm_requeue()
    with caplog.at_level(logging.INFO):
        compat.log_job_info()
    assert caplog.messages == ["Not running under SLURM"]


def test_a_first_allocation(job: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        job.setenv(name, value)
    expected = compat.SLURMInfo("123", "gpt", "node[1-2]", 2, 4, 0, "gpu", None)
    assert compat.get_slurm_info() == expected
    assert compat.is_slurm_job()
    assert not compat.is_slurm_requeue()


def test_a_requeued_array_task(job: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in {**VARIABLES, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "5"}.items():
        job.setenv(name, value)
    info = compat.get_slurm_info()
    assert info is not None
    assert (info.restart_count, info.array_task_id, info.is_requeued) == (2, "5", True)
    with caplog.at_level(logging.INFO):
        compat.log_job_info()
    assert caplog.messages == [
        "SLURM job: id=123, name=gpt, nodes=2, tasks/node=4, partition=gpu, restart_count=2",
        "Job was requeued (restart #2) — will auto-resume",
    ]


def test_only_the_job_id_is_needed_and_a_wrong_number_is_named(job: pytest.MonkeyPatch) -> None:
    job.setenv("SLURM_JOB_ID", "9")
    assert compat.get_slurm_info() == compat.SLURMInfo("9", "", "", 1, 1, 0, "", None)
    job.setenv("SLURM_RESTART_COUNT", "many")
    with pytest.raises(UsageError, match="SLURM_RESTART_COUNT='many'"):
        compat.get_slurm_info()


def test_resume_paths_of_kempnerforge(tmp_path: Path) -> None:
    assert compat.resolve_resume_path(str(tmp_path / "absent")) is None
    for step in (9, 10, 100):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "step_x").mkdir()
    assert compat.resolve_resume_path(str(tmp_path)) is None, "none of them was finished"
    for step in (9, 10):
        (tmp_path / f"step_{step}" / ".metadata").touch()
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_10"
    (tmp_path / "latest").symlink_to("step_9")
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_9"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_100")
    assert compat.resolve_resume_path(str(tmp_path)) == tmp_path / "step_10"


def test_a_copy_without_commit_is_no_resume_path(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000000120.g1").mkdir(parents=True)
    assert compat.resolve_resume_path(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUNNING|1:00\n", JobStatus("RUNNING", False)),
        ("COMPLETING|0:00\n", JobStatus("COMPLETING", True)),
        ("COMPLETING|INVALID\n", JobStatus("COMPLETING", True)),
        ("COMPLETING|-0:07\n", JobStatus("COMPLETING", True)),
        ("RUNNING|UNLIMITED\n", JobStatus("RUNNING", False)),
        ("RUNNING|1-02:03:04\n", JobStatus("RUNNING", False)),
        ("", JobStatus("", False)),
    ],
)
def test_the_state_of_a_job_is_read(text: str, expected: JobStatus) -> None:
    assert parse_status(text) == expected


def test_what_slurm_refuses_is_told_with_what_was_expected() -> None:
    with pytest.raises(SlurmError, match=r"sh -c .*: exit code 4 \(no such job\); expected a job"):
        commands.call(("sh", "-c", "echo no such job >&2; exit 4"), "a job")


def test_the_end_of_a_job_does_not_cut_off_a_question_to_slurm() -> None:
    assert commands.call(("sh", "-c", "kill -TERM $$; echo still here"), "words") == "still here\n"


def test_one_agent_a_node_is_started() -> None:
    found = srun_command(
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8"}, Path("/n"), ["-l"], ["t.py"]
    )
    assert found[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=0", "--no-kill", "-l"} < set(found)
    assert found[-6:] == ["slurm", "step", "--notes", "/n", "--", "t.py"]


def test_one_node_needs_no_meeting_point() -> None:
    assert meeting({"SLURM_JOB_NUM_NODES": "1"}, "run") == []


def test_several_nodes_meet_where_the_batch_step_runs() -> None:
    variables = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "4007", "SLURMD_NODENAME": "node2"}
    found = meeting({**variables, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, "job1")
    assert {"--nnodes=3", "--rdzv-endpoint=10.0.0.1:29407", "--rdzv-id=job1", "--node-name=node2"} < set(
        found
    )


def test_torn_notes_are_none(tmp_path: Path) -> None:
    (tmp_path / "node-00000.json").write_text('{"node": "a", "exit_code": 0, "signals": [15]}')
    (tmp_path / "node-00001.json").write_text('{"node": "b", "exit')
    (tmp_path / "node-00002.json").write_text('{"node": "c"}')
    assert [(end.node, end.signals) for end in read_notes(tmp_path)] == [("a", (15,))]
