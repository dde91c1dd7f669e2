"""The batch file that is submitted: its text, what is refused, and that the lint finds nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast import cli
from outlast.errors import ExitCode, UsageError
from outlast.integrations.agent_command import with_stop_timeout
from outlast.integrations.slurm.batch import BatchFile, render, seconds_of
from outlast.integrations.slurm.lint import lint

GOLDEN = Path(__file__).parent / "data" / "submitted.sbatch"


def batch(**changed: object) -> BatchFile:
    fields: dict[str, object] = {
        "command": with_stop_timeout(("--run-dir=/shared/gpt", "train.py", "two words"), 1, 240.0),
        "run_dir": "/shared/gpt",
        "python": "/opt/python",
        "name": "gpt",
        "nodes": 2,
        "time": "1-00:00:00",
        "lead": 240.0,
        "directives": ("partition=gpu", "--gpus-per-node=8"),
        "setup": ("module load cuda",),
        "srun": ("--label",),
    }
    return BatchFile(**{**fields, **changed})  # type: ignore[arg-type]


def test_the_file_is_the_golden_one() -> None:
    assert render(batch()) == GOLDEN.read_text()


@pytest.mark.parametrize("save_seconds", [1.0, 200.0])
def test_the_lint_finds_nothing_in_it(save_seconds: float) -> None:
    assert lint(render(batch()), save_seconds) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"lead": 30.0}, "--lead=30: expected 60 or more"),
        ({"time": "7"}, "--time=7: 420 s, and the signal comes 240 s"),
        ({"time": "tomorrow"}, "--time='tomorrow': expected minutes"),
        ({"nodes": 0}, "--nodes=0: expected a positive number"),
        ({"directives": ("--signal=USR1@60",)}, "--signal=USR1@60: the file says that already"),
        ({"directives": ("mem=1G\nrm x",)}, "expected one line"),
        ({"run_dir": "/shared/my runs"}, "--run-dir=/shared/my runs: a space"),
    ],
)
def test_what_would_be_wrong_is_refused(changed: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=r".") as refusal:
        render(batch(**changed))
    assert expected in str(refusal.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(UsageError) as refusal:
        render(batch(lead=30.0, nodes=0))
    assert "--lead=30" in str(refusal.value)
    assert "--nodes=0" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:03:04", 93784),
        ("UNLIMITED", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "option", ["--shutdown-timeout=5", "--ft-workers_stop_timeout", "--shutdown_timeout"]
)
def test_a_stop_timeout_of_the_users_own_is_kept(option: str) -> None:
    command = (option, "train.py")
    assert with_stop_timeout(command, 1, 180.0) == command


def test_an_option_of_the_script_is_not_the_launchers() -> None:
    found = with_stop_timeout(("train.py", "--shutdown-timeout=5"), 0, 180.0)
    assert found == ("--ft-workers-stop-timeout=150", "train.py", "--shutdown-timeout=5")


def test_a_dry_run_prints_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(["slurm", "submit", "--dry-run", "--", "--nproc-per-node=gpu", "train.py"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert f"--run-dir {tmp_path}/outlast-runs/train " in text
    assert text.endswith("--nproc-per-node=gpu --ft-workers-stop-timeout=150 train.py\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], ExitCode.USAGE),
        (["--", "absent.py"], ExitCode.SCRIPT_NOT_FOUND),
        (["--", "--no-such-option", "x.py"], ExitCode.USAGE),
        (["--", "--max-restarts=many", "x.py"], ExitCode.USAGE),
        (["--max-no-progress=0", "--", "-m", "x"], ExitCode.USAGE),
        (["--setup=srun sleep 1", "--", "-m", "x"], ExitCode.OK),
        (["--nodes=3", "--", "--nnodes=2", "-m", "x"], ExitCode.USAGE),
        (["--nodes=1", "--", "--nnodes=2:4", "-m", "x"], ExitCode.USAGE),
        (["--nodes=3", "--", "--nnodes=2", "--spares=1", "-m", "x"], ExitCode.OK),
        (["--nodes=3", "--", "-m", "x"], ExitCode.OK),
    ],
)
def test_a_wrong_command_line_is_refused_on_the_login_node(words: list[str], code: ExitCode) -> None:
    assert cli.main(["slurm", "submit", "--dry-run", *words]) == code


def test_without_slurm_the_message_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--", "--run-dir", str(tmp_path / "run"), "-m", "x"]
    assert cli.main(["slurm", "submit", *words]) == ExitCode.FAILED
    assert "sbatch: no such program in PATH; expected the id of a new job" in capsys.readouterr().err


def test_supervise_outside_of_a_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["slurm", "supervise", "--run-dir=x", "--", "train.py"]) == ExitCode.USAGE
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err
