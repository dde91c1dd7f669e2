"""What a stranger or a broken disk puts where a job keeps its files: refused by name, never used.

A stranger is a process with a uid of its own, so these tests need root to become one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast import files
from outlast.checkpoint.content.state import content_of, tensors_in
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, rank_files
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.writer_process import own, remove_abandoned
from outlast.errors import CheckpointMismatch, RunFolderBusy, RunFolderUnusable
from outlast.health.agent.node_ledger import NodeLedger
from outlast.health.policy.ledger import Entry, What
from outlast.ipc.exchange import SystemClock
from outlast.launcher.output.logs import failure_of
from outlast.launcher.workers.processes import start_cold
from outlast.observe.run_folder import RunFolder
from outlast.preemption.worker import read_notice
from outlast.worker.bootstrap import append_to
from tests.support.accounts import STRANGER, VICTIM, as_account, shared_folder
from tests.support.ckpt_run import DIGESTS, DOCUMENT, NAMES, STEPS, ckpt, make_run, restored
from tests.support.forging import forge, rewrite
from tests.support.jobs import checkpointer
from tests.support.launching import DEADLINE, SCRIPTS
from tests.support.mounts import needs_root

_RUN = [sys.executable, "-m", "outlast", "run"]
_HUGE = 5 << 30  # bytes of a sparse file
_MEMORY = 3 << 30  # bytes that a command may map


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as found:
        yield found


def run(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*_RUN, "--run-dir", str(folder), *options, str(SCRIPTS / "counting.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)


def of_job(folder: Path, run_id: str) -> Path:
    """Make a run folder by hand; return where its memory folder will be."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    return default_root(run_id, folder)


@needs_root
@pytest.mark.parametrize(
    "launched", [True, pytest.param(False, marks=pytest.mark.long)], ids=["launcher", "script"]
)
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
        assert re.search(rf"{root}: .*{STRANGER}", done.stderr)
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
    with pytest.raises(RunFolderUnusable, match="step-000000001"):
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
    with pytest.raises(OSError, match=str(path)):
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
    with pytest.raises(RunFolderUnusable, match=f"{ours}.*750"):
        files.make_private(ours)
    ours.chmod(0o700)
    (shared / "base").chmod(0o777)
    with pytest.raises(RunFolderUnusable, match=f"{shared / 'base'}"):
        files.make_private(ours)
    (shared / "base").chmod(0o1777)
    files.make_private(ours)
    os.chown(shared / "base", STRANGER, STRANGER)
    with pytest.raises(RunFolderUnusable, match=f"{shared / 'base'}.*{STRANGER}"):
        files.make_private(ours)
    as_account(STRANGER, lambda: (shared / "way").symlink_to("/dev/shm"))
    with pytest.raises(RunFolderUnusable, match=f"{shared / 'way'}.*{STRANGER}"):
        files.make_private(shared / "way" / f"outlast-{os.getpid()}")
    shutil.rmtree(f"/dev/shm/outlast-{os.getpid()}")


@needs_root
def test_a_node_ledger_in_a_folder_of_a_stranger_leaves_nothing_there(shared: Path) -> None:
    place = shared / "theirs"
    as_account(STRANGER, place.mkdir)
    place.chmod(0o777)
    said: list[str] = []
    NodeLedger(place / "ledger", "node", said.append).append(Entry(1.0, "node", What.RELEASE))
    assert str(place) in "".join(said)
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
        with pytest.raises(RunFolderUnusable, match=str(place)):
            RunFolder(place / name).claim()
    with pytest.raises(RunFolderUnusable, match=str(place)):
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


def elsewhere_with_leftovers(folder: Path) -> dict[str, str]:
    """Make a folder of somebody else's, with files that a sweep of copies would remove; return its files."""
    (folder / ".tmp-theirs").mkdir(parents=True)
    (folder / ".trash-theirs").mkdir()
    (folder / ".tmp-theirs" / "file").write_text("theirs")
    return contents_of(folder)


def contents_of(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_text() if path.is_file() else "" for name, path in found.items()}


def test_a_link_that_takes_the_place_of_a_training_is_not_followed(tmp_path: Path) -> None:
    """It came while the training went on."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "fold-0"
    before = elsewhere_with_leftovers(elsewhere)
    link.symlink_to(elsewhere)
    tier = DirectoryTier(link, linked=False)
    for act in (lambda: tier.begin(NAMES[0]), tier.make):
        with pytest.raises(OSError, match=str(tmp_path)):
            act()
    assert tier.sweep()
    assert tier.sweep("theirs", only=True)
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
    with pytest.raises(OSError, match=str(tmp_path)):
        DirectoryTier(copies).remember(NAMES[0], {})
    assert DirectoryTier(copies).quarantined() == {}
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])
    assert (copies / NAMES[0]).is_dir()
    assert contents_of(elsewhere) == before


def test_a_memory_folder_in_which_no_saver_began_goes_with_the_next_launch(tmp_path: Path) -> None:
    """Its agent was killed between the two; one with a living owner or saver, or anything in it, stays."""
    base, kinds = Path("/dev/shm"), ("left", "owned", "saved", "full")
    roots = [default_root(f"{kind}-{os.getpid()}", tmp_path, base=str(base)) for kind in kinds]
    left, owned, saved, full = roots
    owner, *others = (own(root)[0] for root in (owned, left, saved, full))
    saver = os.open(saved / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(saver, fcntl.F_OFD_SETLK, lock)  # as of another process
    MemoryFolder(full).ask_to_flush()
    (left / "members.json").touch()  # of a rank that came when its writer had ended
    MemoryFolder(left).listen().close()  # of a writer that could start no thread
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


@pytest.mark.parametrize("file", [COMMIT, MANIFEST, DIGESTS, DOCUMENT])
def test_a_huge_file_in_a_copy_is_not_read_and_the_copy_before_is_loaded(tmp_path: Path, file: str) -> None:
    contents = make_run(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / NAMES[0]
    os.truncate(newest / file, _HUGE)
    done = bounded("verify", tmp_path / "run", "--all")
    assert done.returncode == 65, done.stderr
    assert str(_HUGE) in done.stdout + done.stderr
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])


@pytest.mark.parametrize("part", [None, [0]], ids=["whole", "part"])
def test_a_world_of_a_billion_ranks_is_refused_at_once(tmp_path: Path, part: list[int] | None) -> None:
    contents = make_run(tmp_path / "run")
    copy = tmp_path / "run" / "checkpoints" / NAMES[0]
    changes = {"world_size": 10**9, **({"part": part, "session": "s"} if part else {})}
    rewrite(copy, lambda manifest: manifest.update(changes))
    done = bounded("verify", tmp_path / "run", "--all")
    assert (done.returncode, "1000000000" in done.stdout + done.stderr) == (65, True), done.stdout
    assert restored(tmp_path / "run") == (STEPS[-2], contents[STEPS[-2]])


@pytest.mark.parametrize("wrong", ["other bytes than the file's", "bytes of another type", "another rank's"])
def test_verify_and_the_loader_agree_about_a_forged_copy(tmp_path: Path, wrong: str) -> None:
    contents = make_run(tmp_path / "run")
    copy = tmp_path / "run" / "checkpoints" / NAMES[0]

    def change(document: Any, _: Any) -> None:
        first = next(one for one in document["tensors"].values() if one["shape"])
        if wrong == "other bytes than the file's":
            first["shape"] = [first["shape"][0] + 1, *first["shape"][1:]]
        elif wrong == "bytes of another type":
            first["dtype"] = "float64" if first["dtype"] != "float64" else "float32"
        else:
            document["identity"]["rank"] = 1

    forge(copy, change)
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


def sgd(*parameters: torch.nn.Parameter) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(parameters)}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (
            lambda: trained(two(1), ("first", "second")),
            lambda: trained(two(2), ("second", "first")),
            r"first\.weight.*second\.weight",
        ),
        (
            lambda: sgd(zeros(2, 2), zeros(3, 2)),
            lambda: sgd(zeros(3, 2), zeros(2, 2)),
            r"float32\[2, 2\].*float32\[3, 2\]",
        ),
        (
            lambda: sgd(zeros(3)),
            lambda: sgd(zeros(3, dtype=torch.bfloat16)),
            r"float32\[3\].*bfloat16\[3\]",
        ),
    ],
    ids=["named", "bare", "type"],
)
def test_an_optimizer_with_other_parameters_in_its_places_is_refused(
    tmp_path: Path, one: Callable[[], dict[str, Any]], other: Callable[[], dict[str, Any]], names: str
) -> None:
    """It knows them by number: moments of equal shapes would silently go to other parameters."""
    assert checkpointer(tmp_path).save(1, one(), "a test")
    state = other()
    before = [value.clone() for _, value in tensors_in({k: content_of(v) for k, v in state.items()})]
    with pytest.raises(CheckpointMismatch, match=names):
        checkpointer(tmp_path, generation=2).restore(state)
    after = [value for _, value in tensors_in({k: content_of(v) for k, v in state.items()})]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("kind", "form"), [("bytes", "torch"), ("zeros", "torch"), ("folder", "dcp"), ("nothing", "dcp")]
)
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
