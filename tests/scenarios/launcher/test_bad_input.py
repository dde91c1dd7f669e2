"""What a user or a file system gets wrong: a clear error, a documented exit code, nothing lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run, running

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@contextlib.contextmanager
def small_disk(path: Path, size: str = "2m") -> Iterator[None]:
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def outlast_run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outlast", "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    done = outlast_run("--run-dir", str(tmp_path / "run"), str(tmp_path / "nowhere.py"))
    assert (done.returncode, "nowhere.py" in done.stderr) == (66, True), done.stderr
    assert not (tmp_path / "run").exists()


def test_an_event_log_that_cannot_be_written_any_more_is_reported_once(tmp_path: Path) -> None:
    with running(Run(tmp_path / "run", "counting.py", str(tmp_path / "trace"), "4000", "1000")) as run:
        run.wait_step(2)
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "link").replace(tmp_path / "run" / "events.jsonl")  # a log that is missing is made anew
        run.until(lambda: "events.jsonl" in run.console())
        assert run.process is not None
        run.process.terminate()
        run.finish()
        assert sum("events.jsonl" in line for line in run.console().splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_unknown_options_are_named_with_the_nearest_ones(tmp_path: Path) -> None:
    done = outlast_run("--nproc-per-nod3=2", "--max-restart5=1", str(SCRIPTS / "counting.py"))
    assert done.returncode == 2, done.stderr
    assert "--nproc-per-node" in done.stderr
    assert "--max-restarts" in done.stderr


def test_a_shell_script_names_its_run_folder_in_a_folder_of_any_name_and_an_option_behind_it_is_named(
    tmp_path: Path,
) -> None:
    folder = tmp_path / os.fsdecode(b"not-utf-8-\xe9")
    folder.mkdir()
    (folder / "one.sh").write_text("exit 0\n")
    done = outlast_run("--no-python", "sh", "one.sh", "--max-restarts", "2", folder=folder)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder / "outlast-runs") == ["one"]
    assert "--max-restarts" in done.stderr


def test_a_tier_of_an_unknown_scheme_ends_the_launcher_at_once(tmp_path: Path) -> None:
    config, run = tmp_path / "config.toml", tmp_path / "run"
    config.write_text('[checkpoints]\nglobal_url = "vault://archive/gpt"\n')
    done = outlast_run("--run-dir", str(run), "--config", str(config), str(SCRIPTS / "counting.py"))
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in ("vault", "s3", "s3a", "gs"))
    assert not run.exists()


def test_a_memory_folder_that_cannot_be_made_ends_the_launcher_at_once(tmp_path: Path) -> None:
    base, config = tmp_path / "memory", tmp_path / "config.toml"
    config.write_text(f'[checkpoints]\nnon_persistent_local_ckpt_dir = "{base}"\n')
    base.write_text("a file")
    words = ("--run-dir", str(tmp_path / "run"), "--config", str(config))
    done = outlast_run(*words, str(SCRIPTS / "counting.py"))
    assert done.returncode == 73, done.stderr
    assert str(base) in done.stderr
    assert "Traceback" not in done.stderr


@needs_mount
def test_a_folder_that_cannot_be_written_ends_the_launcher_at_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        done = outlast_run("--run-dir", str(tmp_path / "disk" / "run"), str(SCRIPTS / "counting.py"))
    assert done.returncode == 73, done.stderr
    assert "Read-only file system" in done.stderr


@needs_mount
def test_a_disk_that_fills_up_ends_the_job_and_nothing_is_lost(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        folder = tmp_path / "disk" / "run"
        arguments = (str(tmp_path / "trace"), "100000", "10", "fill@0@25@1", str(tmp_path / "disk" / "fill"))
        config = tmp_path / "config.toml"
        config.write_text("[checkpoints]\nmax_failed_seconds = 0\n")
        options = ("--nproc-per-node", "2", "--config", str(config))
        run = Run(folder, "counting.py", *arguments, options=options)
        run.output = tmp_path / "console"
        with running(run):
            assert run.finish() == 74, run.console()
        assert "No space left on device" in run.console()
        assert not list((folder / "checkpoints").glob(".tmp-*"))
        (tmp_path / "disk" / "fill").unlink()
        arguments = (str(tmp_path / "trace"), "200", "10")
        again = Run(folder, "counting.py", *arguments, options=("--nproc-per-node", "2"))
        with running(again):
            assert again.finish() == 0, again.console()
        assert again.records("loaded")[-1]["step"] >= 20


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--no-zygote",), marks=pytest.mark.long)], ids=["zygote", "cold"]
)
def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import sys, torch, outlast\n"
        "model = torch.nn.Linear(int(sys.argv[1]), 2)\n"
        "with outlast.start(save_interval=5) as session:\n"
        "    session.restore(model=model)\n"
        "    for step in session.steps(10): pass\n"
    )
    with running(Run(tmp_path / "run", str(script), "3")) as run:
        assert run.finish() == 0, run.console()
    before = sorted((run.folder / "checkpoints").iterdir())
    with running(Run(tmp_path / "run", str(script), "4", options=options)) as other:
        assert other.finish() == 65, other.console()
    assert "weight" in other.console()
    assert sorted((run.folder / "checkpoints").iterdir()) == before
