"""What a stranger or a broken disk puts where a job keeps its files: refused by name, never used.

A stranger is a process with a uid of its own, so these tests need root to become one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast import files
from outlast.checkpoint.content.digest import combined, commit_line, file_digest
from outlast.checkpoint.content.state import content_of, tensors_in
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, rank_files
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer_process import own, remove_abandoned
from outlast.errors import CheckpointMismatch, RunFolderBusy, RunFolderUnusable
from outlast.fields import FORMAT_VERSION
from outlast.health.agent.node_ledger import NodeLedger
from outlast.health.policy.ledger import Entry, What
from outlast.ipc.exchange import SystemClock
from outlast.launcher.output.logs import failure_of
from outlast.launcher.workers.processes import start_cold
from outlast.observe.run_folder import RunFolder
from outlast.preemption.worker import read_notice
from outlast.worker.bootstrap import append_to
from tests.support.ckpt_run import DOCUMENT, NAMES, STEPS, ckpt, make_run, restored
from tests.support.jobs import checkpointer, mounted
from tests.support.launching import DEADLINE, SCRIPTS, Run, running, until

EVENTFUL = Path(__file__).parents[1] / "observe" / "data" / "eventful.jsonl"
STRANGER, VICTIM = 4242, 4343
_RUN = [sys.executable, "-m", "outlast", "run"]
_HUGE = 5 << 30  # bytes of a sparse file
_MEMORY = 3 << 30  # bytes that a command may map

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")


def as_account(uid: int, act: Callable[[], object], groups: tuple[int, ...] = ()) -> None:
    """Do something in a process of another account."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the child must not go on with the tests
            os.write(2, f"as uid {uid}: {error!r}\n".encode())
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, f"what uid {uid} was to do failed"


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder in which everybody may make files, as in /tmp."""
    found = Path(f"/tmp/outlast-shared-{os.urandom(6).hex()}")
    found.mkdir()
    found.chmod(0o1777)
    yield found
    shutil.rmtree(found)


def run(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*_RUN, "--run-dir", str(folder), *options, str(SCRIPTS / "counting.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)


def of_job(folder: Path, run_id: str) -> Path:
    """Make a run folder by hand; return where its memory folder will be."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    return default_root(run_id, folder)


@needs_root
@pytest.mark.parametrize("launched", [True, False], ids=["launcher", "script"])
def test_a_memory_folder_that_a_stranger_made_first_is_refused(tmp_path: Path, launched: bool) -> None:
    root = of_job(tmp_path / "run", f"job-{os.getpid()}")
    victim = tmp_path / "victim"
    victim.write_text("mine")

    def lay_a_trap() -> None:
        os.umask(0)
        (root / "pool" / "0").mkdir(parents=True)
        (root / "pool" / "0" / "aaaa").symlink_to(victim)

    as_account(STRANGER, lay_a_trap)
    try:
        arguments = (str(tmp_path / "trace"), "30", "5")
        if launched:
            done = run(tmp_path / "run", *arguments)
            assert done.returncode == 73, done.stderr
        else:
            script = tmp_path / "script.py"
            script.write_text(
                "import sys, torch, outlast\n"
                "with outlast.start(run_dir=sys.argv[1], save_interval=5) as session:\n"
                "    session.restore(model=torch.nn.Linear(3, 3))\n"
                "    for step in session.steps(20): pass\n"
            )
            words = [sys.executable, str(script), str(tmp_path / "run")]
            done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
            assert done.returncode == 1
            assert "RunFolderUnusable" in done.stderr
        assert re.search(
            rf"{root}: a folder of root .* is expected; it belongs to uid {STRANGER}", done.stderr
        )
        assert victim.read_text() == "mine"
        assert sorted(path.name for path in root.iterdir()) == ["pool"]
        assert not (tmp_path / "trace").exists()
    finally:
        shutil.rmtree(root)


@needs_root
def test_a_stranger_in_the_place_that_is_tried_next_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    root = of_job(folder, f"job-{os.getpid()}")
    elsewhere = Path("/tmp") / root.name
    as_account(STRANGER, lambda: elsewhere.mkdir(mode=0o777))
    try:
        done = run(folder, str(tmp_path / "trace"), "10", "5")
        assert done.returncode == 0, done.stderr
        assert not list(elsewhere.iterdir())
    finally:
        elsewhere.rmdir()


@needs_root
@pytest.mark.parametrize("planted", ["link", "hard link", "fifo", "folder", "stranger"])
def test_what_is_planted_in_the_place_of_a_buffer_is_not_mapped(tmp_path: Path, planted: str) -> None:
    stage = Stage(tmp_path / "memory")
    stage.make()
    (stage.pool / "0").mkdir()
    victim, buffer = tmp_path / "victim", stage.pool / "0" / "aaaa"
    victim.write_text("mine")
    if planted == "link":
        buffer.symlink_to(victim)
    elif planted == "hard link":
        os.link(victim, buffer)
    elif planted == "fifo":
        os.mkfifo(buffer)
    elif planted == "folder":
        buffer.mkdir()
    else:
        buffer.write_text("theirs")
        os.chown(buffer, STRANGER, STRANGER)
    buffers = Buffers(stage, "session", rank_files(0, 1)[0], 2)
    with pytest.raises(RunFolderUnusable, match=r"a file of root .* is expected; it is a"):
        buffers.claim("step-000000001.g1", 4096, 1.0, lambda: None)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("planted", ["link", "hard link", "fifo"])
def test_what_is_planted_in_the_place_of_a_file_that_is_to_be_emptied_stays(
    tmp_path: Path, planted: str
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    plant = {"link": path.symlink_to, "hard link": path.hardlink_to, "fifo": lambda _: os.mkfifo(path)}
    plant[planted](victim)
    with pytest.raises(OSError, match="is expected"):
        files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.read_text() == "mine"
    path.unlink()
    path.write_text("old")
    os.close(files.open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert path.read_bytes() == b""


@needs_root
def test_a_private_folder_is_ours_closed_and_cannot_be_replaced(shared: Path) -> None:
    ours = shared / "base" / "folder"
    files.make_private(ours)
    assert stat.S_IMODE(os.stat(shared / "base").st_mode) == 0o700
    ours.chmod(0o750)
    with pytest.raises(RunFolderUnusable, match="its mode is 750"):
        files.make_private(ours)
    ours.chmod(0o700)
    (shared / "base").chmod(0o777)
    with pytest.raises(RunFolderUnusable, match=f"everybody may rename what is in {shared / 'base'}"):
        files.make_private(ours)
    (shared / "base").chmod(0o1777)
    files.make_private(ours)
    os.chown(shared / "base", STRANGER, STRANGER)
    with pytest.raises(RunFolderUnusable, match=f"on the way to it, belongs to uid {STRANGER}"):
        files.make_private(ours)
    as_account(STRANGER, lambda: (shared / "way").symlink_to("/dev/shm"))
    with pytest.raises(RunFolderUnusable, match=f"{shared / 'way'}, on the way to it, belongs to uid"):
        files.make_private(shared / "way" / f"outlast-{os.getpid()}")
    shutil.rmtree(f"/dev/shm/outlast-{os.getpid()}")


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_run_folder_that_a_stranger_made_where_everybody_may_is_refused(shared: Path, mode: int) -> None:
    as_account(STRANGER, lambda: (shared / "outlast-runs").mkdir(mode=mode))
    (shared / "outlast-runs").chmod(mode)
    done = run(shared / "outlast-runs" / "train", str(shared / "trace"), "10", "5")
    assert done.returncode == 73, done.stderr
    assert f"{shared / 'outlast-runs'} belongs to uid {STRANGER}" in done.stderr


@needs_root
@pytest.mark.parametrize("option", ["--run-dir", "--log-dir"])
@pytest.mark.parametrize("below", ["", "train"])
def test_nothing_is_made_in_a_folder_that_a_stranger_made_where_everybody_may(
    shared: Path, tmp_path: Path, option: str, below: str
) -> None:
    place = shared / "theirs"
    as_account(STRANGER, place.mkdir)
    place.chmod(0o777)
    done = run(tmp_path / "run", str(tmp_path / "trace"), "3", "5", options=(option, str(place / below)))
    assert done.returncode == 73, done.stderr
    assert f"{place} belongs to uid {STRANGER}" in done.stderr
    assert not list(place.iterdir())
    assert not (tmp_path / "trace").exists()


@needs_root
def test_logs_in_a_folder_in_which_everybody_may_rename_are_refused(shared: Path, tmp_path: Path) -> None:
    shared.chmod(0o777)
    option = ("--log-dir", str(shared))
    done = run(tmp_path / "run", str(tmp_path / "trace"), "3", "5", options=option)
    assert done.returncode == 73, done.stderr
    assert f"everybody may rename what is in {shared}" in done.stderr
    assert not list(shared.iterdir())
    shared.chmod(0o1777)
    done = run(tmp_path / "run", str(tmp_path / "trace"), "3", "5", options=option)
    assert done.returncode == 0, done.stderr
    assert list(shared.rglob("stdout.log"))


@needs_root
def test_a_node_ledger_in_a_folder_of_a_stranger_leaves_nothing_there(shared: Path) -> None:
    place = shared / "theirs"
    as_account(STRANGER, place.mkdir)
    place.chmod(0o777)
    said: list[str] = []
    NodeLedger(place / "ledger", "node", said.append).append(Entry(1.0, "node", What.RELEASE))
    assert f"{place} belongs to uid {STRANGER}" in "".join(said)
    assert not list(place.iterdir())


@pytest.mark.parametrize("start", ["zygote", "cold"])
def test_a_rank_does_not_follow_a_link_in_the_place_of_its_log(tmp_path: Path, start: str) -> None:
    victim, log = tmp_path / "victim", tmp_path / "stdout.log"
    victim.write_text("mine")
    log.symlink_to(victim)
    child = os.fork()
    if child == 0:  # the streams of the tests stay as they are
        code = 1
        try:
            if start == "zygote":
                append_to(str(log), None)
            else:
                start_cold(0, [sys.executable, "-c", "print('theirs')"], os.environ, (str(log), None))
        except OSError as error:
            code = 0 if error.errno == errno.ELOOP else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert victim.read_text() == "mine"


@needs_root
def test_a_run_folder_that_everybody_may_rename_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared / "open"
    place.mkdir()
    assert RunFolder(place / "fine").claim()
    place.chmod(0o777)
    for name in ("new", "fine"):
        with pytest.raises(RunFolderUnusable, match=f"everybody may rename what is in {place}"):
            RunFolder(place / name).claim()
    with pytest.raises(RunFolderUnusable, match=f"everybody may rename what is in {place}"):
        RunFolder(place / "inner" / "run").claim()
    place.chmod(0o1777)
    assert RunFolder(place / "new").claim()
    place.chmod(0o777)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert RunFolder(place / "of a pod").claim()


@needs_root
def test_a_run_folder_of_a_project_is_used_by_its_group(tmp_path: Path) -> None:
    """Its owner is another account, and the umask lets the group write: nobody else was given the place."""
    place = Path(f"/var/tmp/outlast-project-{os.urandom(6).hex()}")
    place.mkdir(mode=0o755)
    try:
        (place / "run").mkdir()
        os.chown(place / "run", STRANGER, STRANGER)
        (place / "run").chmod(0o2775)

        def claim() -> None:
            os.umask(0o002)
            folder = RunFolder(place / "run")
            assert folder.claim()
            folder.write(folder.job_state, {"format": 1})
            assert folder.recall() == {"format": 1}

        as_account(VICTIM, claim, groups=(STRANGER,))
        as_account(STRANGER, claim)
        with contextlib.suppress(RunFolderBusy):
            RunFolder(place / "run").claim()
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("file", ["lock", "run.json", "job_state.json", "ft_state.json", "events.jsonl"])
@pytest.mark.parametrize("kind", ["link", "fifo", "device"])
def test_what_is_no_file_in_a_run_folder_is_refused_and_nobody_waits(
    tmp_path: Path, file: str, kind: str
) -> None:
    folder = tmp_path / "run"
    of_job(folder, f"job-{os.getpid()}")
    path, victim = folder / file, tmp_path / "victim"
    victim.write_text("mine")
    path.unlink(missing_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    done = run(folder, str(tmp_path / "trace"), "3", "5")
    assert victim.read_text() == "mine"
    assert "Traceback" not in done.stderr
    if file == "ft_state.json":  # it is not needed to train
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 73, done.stderr
        assert f"{path}" in done.stderr or "run folder" in done.stderr
        assert "a regular file is expected, it is a" in done.stderr
        assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("kind", ["file", "fifo", "loop", "nowhere", "device"])
def test_what_is_no_folder_in_the_place_of_the_checkpoints_is_refused_before_a_rank_starts(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "run"
    of_job(folder, f"job-{os.getpid()}")
    path = folder / "checkpoints"
    if kind == "file":
        path.write_text("mine")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": path, "nowhere": tmp_path / "gone", "device": Path("/dev/zero")}[kind])
    done = run(folder, str(tmp_path / "trace"), "3", "5")
    assert done.returncode == 73, done.stderr
    assert f"{path}: " in done.stderr
    assert "a folder is expected" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "trace").exists()


def test_the_checkpoints_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    of_job(folder, f"job-{os.getpid()}")
    elsewhere.mkdir()
    (folder / "checkpoints").symlink_to(elsewhere)
    done = run(folder, str(tmp_path / "trace"), "10", "5")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in elsewhere.iterdir()]


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


def elsewhere_with_leftovers(folder: Path) -> dict[str, str]:
    """Make a folder of somebody else's, with files that a sweep of copies would remove; return its files."""
    (folder / ".tmp-theirs").mkdir(parents=True)
    (folder / ".trash-theirs").mkdir()
    (folder / ".tmp-theirs" / "file").write_text("theirs")
    return contents_of(folder)


def contents_of(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_text() if path.is_file() else "" for name, path in found.items()}


@pytest.mark.parametrize("launched", [True, False], ids=["launcher", "script"])
def test_a_link_in_the_place_of_a_training_is_refused(tmp_path: Path, launched: bool) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    of_job(folder, f"job-{os.getpid()}")
    before = elsewhere_with_leftovers(elsewhere)
    (folder / "checkpoints").mkdir()
    link = folder / "checkpoints" / "fold-0"
    link.symlink_to(elsewhere)
    script = [str(SCRIPTS / "folds.py"), "NAMED"]
    words = [*_RUN, "--run-dir", str(folder), *script] if launched else [sys.executable, *script]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, "OUTLAST_RUN_DIR": str(folder)},
    )
    assert done.returncode == (73 if launched else 1), done.stderr
    assert "RunFolderUnusable" in done.stderr
    assert str(link) in done.stderr
    assert "fold 0" not in done.stdout
    assert contents_of(elsewhere) == before
    done = ckpt("ls", link)
    assert (done.returncode, str(link) in done.stderr) == (73, True), done.stdout


def test_a_link_that_takes_the_place_of_a_training_is_not_followed(tmp_path: Path) -> None:
    """It came while the training went on."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "fold-0"
    before = elsewhere_with_leftovers(elsewhere)
    link.symlink_to(elsewhere)
    tier = DirectoryTier(link, linked=False)
    for act in (lambda: tier.begin(NAMES[0]), tier.make, lambda: tier.drop_unfinished("theirs")):
        with pytest.raises(OSError, match="symbolic link"):
            act()
    assert tier.sweep()
    assert contents_of(elsewhere) == before


def test_a_link_in_the_place_of_the_quarantine_is_not_followed(tmp_path: Path) -> None:
    contents = make_run(tmp_path / "run")
    copies, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    elsewhere_with_leftovers(elsewhere)
    (elsewhere / NAMES[0]).mkdir()
    before = contents_of(elsewhere)
    (copies / "quarantine").symlink_to(elsewhere)
    os.truncate(copies / NAMES[0] / MANIFEST, 3)
    for words in (("verify", "--all", "--quarantine"), ("quarantine", "--reason", "a test", NAMES[0])):
        done = ckpt(words[0], tmp_path / "run", *words[1:])
        assert done.returncode != 0, done.stdout
        assert str(copies / "quarantine") in done.stderr
    with pytest.raises(OSError, match="symbolic link"):
        DirectoryTier(copies).remember(NAMES[0], {})
    assert DirectoryTier(copies).quarantined() == {}
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])
    assert (copies / NAMES[0]).is_dir()
    assert contents_of(elsewhere) == before


TORN = ['{"generation": 3, "cop', "[]", "", '{"format": 9, "generation": 3}', '{"format": 1}', "\0" * 100]


@pytest.mark.parametrize("text", TORN)
@pytest.mark.parametrize("file", ["run.json", "job_state.json"])
def test_a_torn_state_of_the_run_is_refused_with_the_cure(tmp_path: Path, file: str, text: str) -> None:
    folder = tmp_path / "run"
    of_job(folder, f"job-{os.getpid()}")
    (folder / file).write_text(text)
    done = run(folder, str(tmp_path / "trace"), "3", "5")
    assert done.returncode == 73, done.stderr
    assert str(folder / file) in done.stderr
    assert "nothing was started" in done.stderr
    cure = "remove it to continue without it" if file == "job_state.json" else "write {"
    assert cure in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / file).read_text() == text
    assert not (tmp_path / "trace").exists()


def test_learned_timeouts_that_are_torn_are_dropped_with_a_line(tmp_path: Path) -> None:
    of_job(tmp_path / "run", f"job-{os.getpid()}")
    (tmp_path / "run" / "ft_state.json").write_text('{"current_timeouts": {')
    done = run(tmp_path / "run", str(tmp_path / "trace"), "3", "5")
    assert done.returncode == 0, done.stderr
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "ft_state.json: it is torn or no JSON" in events
    assert "learning timeouts again" in events


def test_a_lost_state_of_the_job_goes_on_with_younger_generations_and_says_so(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    with running(Run(tmp_path / "run", "counting.py", trace, "12", "5")) as first:
        assert first.finish() == 0, first.console()
    (tmp_path / "run" / "job_state.json").unlink()
    with running(Run(tmp_path / "run", "counting.py", trace, "20", "5")) as second:
        assert second.finish() == 0, second.console()
    started = [one["generation"] for one in second.records("generation_started")]
    assert started == [1, 2]
    assert "job_state.json is missing" in second.records("run_started")[-1]["reason"]
    (tmp_path / "run" / "run.json").unlink()
    done = run(tmp_path / "run", trace, "30", "5")
    assert (done.returncode, "of which run is not known" in done.stderr) == (73, True), done.stderr


@needs_root
@pytest.mark.parametrize(
    "room", ["nr_inodes=2", "nr_inodes=4", "nr_inodes=6", "nr_inodes=10", "size=4k", "size=12k"]
)
def test_a_disk_that_is_full_at_the_first_file_ends_the_launcher_in_a_sentence(
    tmp_path: Path, room: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", room, "tmpfs"):
        done = run(disk / "run", str(tmp_path / "trace"), "10", "5")
        assert done.returncode == 73, done.stderr
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


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
        words = [*_RUN, "--run-dir", str(disk / "run"), str(script)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 73, done.stderr
    assert f"{disk}/run/logs/gen-0001/rank-00000/stdout.log: No space left on device" in done.stderr
    assert "make room" in done.stderr
    assert done.stderr.count("FAULT") == 1


def test_a_memory_folder_in_which_no_saver_began_goes_with_the_next_launch(tmp_path: Path) -> None:
    """Its agent was killed between the two; one with a living owner or saver, or anything in it, stays."""
    base, kinds = Path("/dev/shm"), ("left", "owned", "saved", "full")
    roots = [default_root(f"{kind}-{os.getpid()}", tmp_path, base=str(base)) for kind in kinds]
    left, owned, saved, full = roots
    owner, *others = (own(root)[0] for root in (owned, left, saved, full))
    saver = os.open(saved / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(saver, fcntl.LOCK_EX)
    MemoryFolder(full).ask_to_flush()
    for other in others:  # from here on any launcher of this host may remove what nobody needs
        os.close(other)
    try:
        remove_abandoned(base)
        assert [root.exists() for root in roots] == [False, True, True, True]
    finally:
        os.close(owner)
        os.close(saver)
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)


def bounded(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``outlast ckpt`` with so much memory that no huge file can be read whole."""
    command = [sys.executable, "-m", "outlast", "ckpt", *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
    )


@pytest.mark.parametrize("file", [COMMIT, MANIFEST, DOCUMENT])
def test_a_huge_file_in_a_copy_is_not_read_and_the_copy_before_is_loaded(tmp_path: Path, file: str) -> None:
    contents = make_run(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / NAMES[0]
    os.truncate(newest / file, _HUGE)
    done = bounded("verify", tmp_path / "run", "--all")
    assert done.returncode == 65, done.stderr
    assert f"{_HUGE} bytes" in done.stdout + done.stderr
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])


def reseal(copy: Path) -> None:
    """Make the digests of a copy fit what its rank's JSON file says now, as a forger would."""
    manifest = json.loads((copy / MANIFEST).read_text())
    document = (copy / DOCUMENT).read_bytes()
    for entry in manifest["files"]:
        if entry["name"] == DOCUMENT:
            entry |= {"nbytes": len(document), "digest": file_digest(document)}
        else:
            entry["digest"] = combined(json.loads(document)["shard"]["digests"])
    text = json.dumps(manifest).encode()
    (copy / MANIFEST).write_bytes(text)
    (copy / COMMIT).write_bytes(commit_line(FORMAT_VERSION, file_digest(text)))


@pytest.mark.parametrize("part", [None, [0]], ids=["whole", "part"])
def test_a_world_of_a_billion_ranks_is_refused_at_once(tmp_path: Path, part: list[int] | None) -> None:
    contents = make_run(tmp_path / "run")
    copy = tmp_path / "run" / "checkpoints" / NAMES[0]
    manifest = json.loads((copy / MANIFEST).read_text()) | {"world_size": 10**9}
    if part:
        manifest |= {"part": part, "session": "s"}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    (copy / COMMIT).write_bytes(commit_line(FORMAT_VERSION, file_digest((copy / MANIFEST).read_bytes())))
    done = bounded("verify", tmp_path / "run", "--all")
    assert (done.returncode, "1000000000" in done.stdout + done.stderr) == (65, True), done.stdout
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])


@pytest.mark.parametrize("wrong", ["overlapping ranges", "bytes of another type", "another rank's"])
def test_verify_and_the_loader_agree_about_a_forged_copy(tmp_path: Path, wrong: str) -> None:
    contents = make_run(tmp_path / "run")
    copy = tmp_path / "run" / "checkpoints" / NAMES[0]
    document = json.loads((copy / DOCUMENT).read_text())
    entries = sorted(document["shard"]["tensors"].values(), key=lambda one: one["range"])
    first, second = (
        next((one, other) for one, other in itertools.pairwise(entries) if one["nbytes"] == other["nbytes"])
        if wrong == "overlapping ranges"
        else entries[:2]
    )
    if wrong == "overlapping ranges":
        second["range"] = first["range"]
    elif wrong == "bytes of another type":
        first["dtype"] = "float64" if first["dtype"] != "float64" else "float32"
    else:
        document["identity"]["rank"] = 1
    (copy / DOCUMENT).write_text(json.dumps(document))
    reseal(copy)
    done = ckpt("verify", tmp_path / "run", "--all")
    assert done.returncode == 65, done.stdout
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])


def two(seed: int) -> dict[str, torch.nn.Module]:
    torch.manual_seed(seed)
    return {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4)}


def trained(layers: dict[str, torch.nn.Module], order: Sequence[str], **also: object) -> dict[str, Any]:
    """Return a state whose optimizer has stepped the layers in an order."""
    wanted = [parameter for name in order for parameter in layers[name].parameters()]
    optimizer = torch.optim.AdamW(wanted, lr=0.1)
    sum(layer(torch.ones(4)).sum() for layer in layers.values()).backward()
    optimizer.step()
    return {**layers, "optimizer": optimizer, **also}


@pytest.mark.parametrize("named", [True, False], ids=["named", "bare"])
def test_an_optimizer_with_its_parameters_in_another_order_is_refused(tmp_path: Path, named: bool) -> None:
    """It knows them by number: moments of equal shapes would silently go to other parameters."""
    if named:
        one, other = trained(two(1), ("first", "second")), trained(two(2), ("second", "first"))
        expected = "its parameter 0 is first.weight float32.* in the checkpoint, second.weight float32"
    else:
        small, large = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
        one = {"optimizer": torch.optim.SGD([*small.parameters(), *large.parameters()])}
        other = {"optimizer": torch.optim.SGD([*large.parameters(), *small.parameters()])}
        expected = r"optimizer: its parameter 0 is float32\[2, 2\] in the checkpoint, float32\[3, 2\] here"
    assert checkpointer(tmp_path).save(1, one, "a test")
    before = [value.clone() for _, value in tensors_in({k: content_of(v) for k, v in other.items()})]
    with pytest.raises(CheckpointMismatch, match=expected):
        checkpointer(tmp_path, generation=2).restore(other)
    after = [value for _, value in tensors_in({k: content_of(v) for k, v in other.items()})]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_optimizer_whose_parameters_have_another_type_is_refused(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    assert checkpointer(tmp_path).save(1, {"optimizer": torch.optim.SGD(parameters)}, "a test")
    other = {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])}
    with pytest.raises(CheckpointMismatch, match=r"is float32\[3\] in the checkpoint, bfloat16\[3\] here"):
        checkpointer(tmp_path, generation=2).restore(other)


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("kind", ["bytes", "folder", "zeros", "nothing"])
def test_an_import_of_junk_is_refused_in_one_line(tmp_path: Path, kind: str, form: str) -> None:
    make_run(tmp_path / "run")
    junk = Path("/dev/zero") if kind == "zeros" else tmp_path / "junk"
    if kind == "bytes":
        junk.write_bytes(bytes(range(256)) * 16)
    elif kind == "folder":
        junk.mkdir()
        (junk / ".metadata").write_text("x")
    before = os.listdir(tmp_path / "run" / "checkpoints")
    done = ckpt("import", junk, "--format", form, "--to", tmp_path / "run", "--step", "77")
    assert done.returncode in (2, 65), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "nothing was written" in done.stderr
    assert str(junk) in done.stderr
    assert os.listdir(tmp_path / "run" / "checkpoints") == before


def test_an_error_file_and_a_notice_are_read_up_to_a_limit_and_never_waited_for(tmp_path: Path) -> None:
    error = tmp_path / "error.json"
    error.write_text("{}")
    os.truncate(error, _HUGE)
    assert failure_of(error, None) is None
    assert read_notice(str(tmp_path / "notice"), 30.0, SystemClock()) is None, "there is none"
    os.mkfifo(tmp_path / "notice")
    assert read_notice(str(tmp_path / "notice"), 30.0, SystemClock()) is not None


@pytest.mark.parametrize("content", [b"[" * 4000, b"9" * 400, "30".encode("utf-16"), b'{"time": 1}', b"NaN"])
def test_a_notice_that_says_no_time_is_a_notice_all_the_same(tmp_path: Path, content: bytes) -> None:
    clock, path = SystemClock(), tmp_path / "notice"
    path.write_bytes(content)
    begun = clock.monotonic()
    found = read_notice(str(path), 30.0, clock)
    assert found is not None
    assert begun - 1.0 <= found.ends <= clock.monotonic() + 30.0
