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


def without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("# ")]


def test_the_file_is_the_golden_one() -> None:
    assert without_comments(render(batch())) == without_comments(GOLDEN.read_text())


@pytest.mark.parametrize("save_seconds", [1.0, 200.0])
def test_the_lint_finds_nothing_in_it(save_seconds: float) -> None:
    assert lint(render(batch()), save_seconds) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"lead": 30.0}, ["--lead=30"]),
        ({"time": "7"}, ["--time=7", "420", "240"]),
        ({"time": "tomorrow"}, ["--time='tomorrow'"]),
        ({"nodes": 0, "lead": 30.0}, ["--nodes=0", "--lead=30"]),
        ({"directives": ("--signal=USR1@60",)}, ["--signal=USR1@60"]),
        ({"directives": ("mem=1G\nrm x",)}, ["mem=1G"]),
        ({"run_dir": "/shared/my runs"}, ["--run-dir=/shared/my runs"]),
    ],
)
def test_all_that_would_be_wrong_is_refused_at_once(changed: dict[str, object], named: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        render(batch(**changed))
    assert [one for one in named if one not in str(refusal.value)] == []


TIMES = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-0": 86400, "1-2:03:04": 93784, "UNLIMITED": None}


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_times_are_read_as_slurm_reads_them(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("words", "options", "added"),
    [
        *(((one, "train.py"), 1, ()) for one in ("--shutdown-timeout=5", "--ft-workers_stop_timeout")),
        (("train.py", "--shutdown-timeout=5"), 0, ("--ft-workers-stop-timeout=150",)),  # the script's own
    ],
)
def test_a_stop_timeout_is_added_unless_the_user_has_one(
    words: tuple[str, ...], options: int, added: tuple[str, ...]
) -> None:
    assert with_stop_timeout(words, options, 180.0) == (*added, *words)


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


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["submit", "--", "--run-dir=x", "-m", "x"], ExitCode.FAILED, "sbatch"),
        (["supervise", "--run-dir=x", "--", "train.py"], ExitCode.USAGE, "SLURM_JOB_ID"),
    ],
)
def test_what_is_missing_of_slurm_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: ExitCode,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["slurm", *words]) == code
    assert named in capsys.readouterr().err
