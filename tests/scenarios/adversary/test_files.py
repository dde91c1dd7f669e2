"""What a stranger or a broken disk puts where a job keeps its files: refused with its path, never used.

A stranger is a process with a uid of its own, so some of these tests need root to become one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.accounts import STRANGER, as_account, shared_folder
from tests.support.launching import DEADLINE, SCRIPTS, Run, running, until
from tests.support.mounts import mounted, needs_root

RUN = [sys.executable, "-m", "outlast", "run"]
EVENTFUL = Path(__file__).parents[2] / "observe" / "data" / "eventful.jsonl"
UNUSABLE = 73


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


def command(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(words[1:], DEADLINE, environment)


def run(folder: Path, trace: Path, *options: str, steps: int = 3) -> subprocess.CompletedProcess[str]:
    words = [*RUN, "--run-dir", str(folder), *options]
    return command([*words, str(SCRIPTS / "counting.py"), str(trace), str(steps), "5"])


def refused(done: subprocess.CompletedProcess[str], *names: object) -> None:
    """Check that a launcher refused what has these names, and showed no traceback."""
    assert done.returncode == UNUSABLE, done.stderr
    assert all(str(name) in done.stderr for name in names), done.stderr
    assert "Traceback" not in done.stderr


def of_job(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": f"job-{os.getpid()}", "format": 1}))
    return folder


def contents_of(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_text() if path.is_file() else "" for name, path in found.items()}


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_run_folder_that_a_stranger_made_where_everybody_may_is_refused(shared: Path, mode: int) -> None:
    place = shared / "outlast-runs"
    as_account(STRANGER, lambda: place.mkdir(mode=mode))
    place.chmod(mode)
    refused(run(place / "train", shared / "trace"), place, STRANGER)


@needs_root
@pytest.mark.parametrize("option", ["--run-dir", "--log-dir"])
@pytest.mark.parametrize("below", ["", "train"])
def test_nothing_is_made_in_a_folder_of_a_stranger(
    shared: Path, tmp_path: Path, option: str, below: str
) -> None:
    place = shared / "theirs"
    as_account(STRANGER, place.mkdir)
    place.chmod(0o777)
    refused(run(tmp_path / "run", tmp_path / "trace", option, str(place / below)), place, STRANGER)
    assert not list(place.iterdir())
    assert not (tmp_path / "trace").exists()


@needs_root
def test_logs_in_a_folder_in_which_everybody_may_rename_are_refused(shared: Path, tmp_path: Path) -> None:
    shared.chmod(0o777)
    refused(run(tmp_path / "run", tmp_path / "trace", "--log-dir", str(shared)), shared)
    assert not list(shared.iterdir())
    shared.chmod(0o1777)
    done = run(tmp_path / "run", tmp_path / "trace", "--log-dir", str(shared))
    assert done.returncode == 0, done.stderr
    assert list(shared.rglob("stdout.log"))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *((file, kind) for file in ("lock", "run.json", "job_state.json") for kind in ("link", "fifo")),
        ("ft_state.json", "fifo"),
        *(("events.jsonl", kind) for kind in ("link", "fifo", "device")),
    ],
)
def test_what_is_no_file_in_a_run_folder_is_not_used_and_nobody_waits(
    tmp_path: Path, file: str, kind: str
) -> None:
    path, victim = of_job(tmp_path / "run") / file, tmp_path / "victim"
    victim.write_text("mine")
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else victim)
    done = run(tmp_path / "run", tmp_path / "trace")
    assert victim.read_text() == "mine"
    if file == "ft_state.json":  # it is not needed to train
        assert done.returncode == 0, done.stderr
    else:
        refused(done, tmp_path / "run")
        assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("kind", ["file", "fifo", "loop", "nowhere", "device"])
def test_what_is_no_folder_in_the_place_of_the_checkpoints_is_refused(tmp_path: Path, kind: str) -> None:
    path = of_job(tmp_path / "run") / "checkpoints"
    if kind == "file":
        path.write_text("mine")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": path, "nowhere": tmp_path / "gone", "device": Path("/dev/zero")}[kind])
    done = run(tmp_path / "run", tmp_path / "trace")
    refused(done, path)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "trace").exists()


@pytest.mark.long
def test_the_checkpoints_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (of_job(tmp_path / "run") / "checkpoints").symlink_to(elsewhere)
    done = run(tmp_path / "run", tmp_path / "trace", steps=10)
    assert done.returncode == 0, done.stderr
    assert list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("words", "planted"),
    [
        ("metrics run --textfile out.prom", ".out.prom.$$"),
        ("chaos telemetry healthy --state-file out.prom", "out.prom.$$"),
    ],
    ids=["metrics", "state file"],
)
def test_a_file_is_not_written_under_a_name_that_a_pid_gives_away(
    tmp_path: Path, words: str, planted: str
) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out.prom"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    shutil.copy(EVENTFUL, tmp_path / "run" / "events.jsonl")
    command = f"ln -s victim {planted}; exec {sys.executable} -m outlast {words}"  # exec keeps the pid
    with subprocess.Popen(["sh", "-c", command], cwd=tmp_path) as writer:
        try:
            until(out.exists, "the file is written")
            assert (victim.read_text(), out.is_symlink()) == ("mine", False)
        finally:
            writer.kill()


@pytest.mark.parametrize(
    "launched", [True, pytest.param(False, marks=pytest.mark.long)], ids=["launcher", "script"]
)
def test_a_link_in_the_place_of_a_training_is_refused(tmp_path: Path, launched: bool) -> None:
    folder, elsewhere = of_job(tmp_path / "run"), tmp_path / "elsewhere"
    for name in (".tmp-theirs", ".trash-theirs"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "file").write_text("theirs")
    before = contents_of(elsewhere)
    link = folder / "checkpoints" / "fold-0"
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    script = [str(SCRIPTS / "folds.py"), "NAMED"]
    launch = [*RUN, "--run-dir", str(folder)] if launched else [sys.executable]
    done = command([*launch, *script], OUTLAST_RUN_DIR=str(folder))
    assert done.returncode == (UNUSABLE if launched else 1), done.stderr
    assert "RunFolderUnusable" in done.stderr
    assert str(link) in done.stderr
    assert "fold 0" not in done.stdout
    assert contents_of(elsewhere) == before
    refused(command([sys.executable, "-m", "outlast", "ckpt", "ls", str(link)]), link)


TORN = ['{"generation": 3, "cop', "[]", "", '{"format": 9, "generation": 3}', '{"format": 1}', "\0" * 100]


@pytest.mark.parametrize("text", TORN)
@pytest.mark.parametrize("file", ["run.json", "job_state.json"])
def test_a_torn_state_of_the_run_is_refused_and_stays(tmp_path: Path, file: str, text: str) -> None:
    path = of_job(tmp_path / "run") / file
    path.write_text(text)
    refused(run(tmp_path / "run", tmp_path / "trace"), path)
    assert path.read_text() == text
    assert not (tmp_path / "trace").exists()


def test_learned_timeouts_that_are_torn_are_dropped_with_a_note(tmp_path: Path) -> None:
    torn = of_job(tmp_path / "run") / "ft_state.json"
    torn.write_text('{"current_timeouts": {')
    job = Run(tmp_path / "run", "counting.py", str(tmp_path / "trace"), "3", "5")
    with running(job):
        assert job.finish() == 0, job.console()
    assert any(torn.name in one["reason"] for one in job.records("note"))


@pytest.mark.long
def test_a_lost_state_of_the_job_goes_on_with_younger_generations(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    with running(Run(tmp_path / "run", "counting.py", trace, "12", "5")) as first:
        assert first.finish() == 0, first.console()
    (tmp_path / "run" / "job_state.json").unlink()
    with running(Run(tmp_path / "run", "counting.py", trace, "20", "5")) as second:
        assert second.finish() == 0, second.console()
    assert [one["generation"] for one in second.records("generation_started")] == [1, 2]
    assert "job_state.json" in second.records("run_started")[-1]["reason"]
    (tmp_path / "run" / "run.json").unlink()
    refused(run(tmp_path / "run", tmp_path / "trace", steps=30), tmp_path / "run")


@needs_root
@pytest.mark.parametrize("room", ["nr_inodes=2", "nr_inodes=4", "nr_inodes=6", "nr_inodes=10", "size=4k"])
def test_a_disk_that_is_full_at_the_first_file_ends_the_launcher_without_a_traceback(
    tmp_path: Path, room: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", room, "tmpfs"):
        refused(run(disk / "run", tmp_path / "trace", steps=10), "No space left on device")


@needs_root
def test_a_disk_that_is_full_when_a_rank_prints_ends_the_job_with_its_path(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "try:\n"
        f"    open({str(disk / 'fill')!r}, 'wb', 0).write(bytes(12 << 20))\n"
        f"    open({str(disk / 'rest')!r}, 'wb', 0).write(bytes(1 << 20))\n"
        "except OSError:\n"
        "    pass\n"
        "print('hello', flush=True)\n"
    )
    with mounted(disk, "-t", "tmpfs", "-o", "size=12m", "tmpfs"):
        done = command([*RUN, "--run-dir", str(disk / "run"), str(script)])
    refused(done, disk / "run/logs/gen-0001/rank-00000/stdout.log", "No space left on device")
    assert done.stderr.count("FAULT") == 1
