"""``outlast ckpt``: what it says of real copies, what it finds in them, and what it changes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support.launching import DEADLINE
from tests.support.mounts import mounted, needs_root
from tests.support.saved_steps import (
    DIGESTS,
    DOCUMENT,
    FILES,
    TENSORS,
    content,
    flip,
    made,
    name_of,
    outlast,
    restored,
    said,
)

STEPS = (1, 2, 3, 40)
NAMES = [name_of(step) for step in reversed(STEPS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, made(run, *STEPS, keep_last_n=9)


@pytest.fixture
def run(whole: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def ckpt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return outlast("ckpt", *words)


def code(*words: str | Path) -> int:
    return ckpt(*words).returncode


def lines(*words: str | Path) -> list[dict[str, Any]]:
    done = ckpt(*words, "--json")
    assert done.stderr == ""
    return said(done.stdout)


def run_id(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["run_id"])


def test_copies_are_listed_the_newest_first_wherever_they_lie(run: Path) -> None:
    facts = {"where", "state", "step", "generation", "world_size", "run_id", "created", "nbytes"}
    assert code("quarantine", run, NAMES[1], "--reason", "the loss\x1b[2J rose") == 0
    (run / "checkpoints" / ".tmp-x").mkdir()
    found = lines("ls", run)
    assert [one["name"] for one in found] == NAMES
    assert all(facts <= one.keys() for one in found)
    assert [one["where"] for one in found] == ["local", "quarantine", "local", "local"]
    assert [one["quarantine_reason"] for one in found] == [None, "the loss\x1b[2J rose", None, None]
    for one in found:
        files = [path for path in Path(one["folder"]).iterdir() if path.name.startswith("rank-")]
        assert one["nbytes"] == sum(path.stat().st_size for path in files) > 0
    told = ckpt("ls", run / "checkpoints").stdout
    assert [line.split()[0] for line in told.splitlines()[1:5]] == NAMES
    assert ("\x1b" in told, f"quarantine/{NAMES[1]}" in told) == (False, True)


def test_what_cannot_be_believed_is_listed_with_its_file(run: Path) -> None:
    copies = run / "checkpoints"
    os.truncate(copies / NAMES[0] / TENSORS, 100)
    (copies / NAMES[2] / "MANIFEST.json").unlink()
    found = lines("ls", run)
    assert [one["state"] for one in found] == ["damaged", "whole", "damaged", "whole"]
    assert [file in str(found[at]["reason"]) for at, file in ((0, TENSORS), (2, "MANIFEST.json"))] == [
        True
    ] * 2
    assert (found[0]["created"] is None, found[2]["created"]) == (False, None)


def test_a_folder_without_a_run_is_taken_and_another_runs_copy_is_pointed_out(
    run: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    made(stranger, 50)
    shutil.copytree(stranger / "checkpoints" / name_of(50), run / "checkpoints" / name_of(50))
    for command in ("show", "verify"):
        done = ckpt(command, run, name_of(50))
        assert done.returncode == 65, done.stdout
        assert all(run_id(one) in done.stdout for one in (run, stranger))
    alone = Path(shutil.copytree(run / "checkpoints", tmp_path / "alone"))
    assert code("verify", alone, "--all") == 0
    assert [one["name"] for one in lines("ls", alone)] == [name_of(50), *NAMES]
    assert code("prune", alone, "--keep-last-n", "1") == 2
    done = ckpt("prune", run, "--keep-last-n", "1")
    assert (done.returncode, name_of(50) in done.stdout) == (0, True), done.stderr
    assert sorted(os.listdir(run / "checkpoints")) == [NAMES[0], name_of(50)]


def test_a_training_with_a_name_belongs_to_its_run(run: Path) -> None:
    copies, mine = run / "checkpoints", run / "checkpoints" / "fold-0"
    copies.rename(run / "fold-0")
    copies.mkdir()
    (run / "fold-0").rename(mine)
    assert lines("ls", run) == []
    assert str(mine) in ckpt("ls", run).stdout
    shown = ckpt("verify", run, "--all").stdout
    assert str(mine) in shown
    assert str(copies) in shown.replace(str(mine), "")  # no copy is there
    assert [one["name"] for one in lines("ls", mine)] == NAMES
    with locked(run / "lock"):
        assert code("quarantine", mine, NAMES[0], "--reason", "a test") == 64
    assert (mine / NAMES[0]).is_dir()
    assert code("quarantine", mine, NAMES[0], "--reason", "a test") == 0


def test_a_copy_is_shown_with_its_files_and_tensors(run: Path) -> None:
    (shown,) = lines("show", run, NAMES[0], "--tensors")
    manifest = json.loads((run / "checkpoints" / NAMES[0] / "MANIFEST.json").read_bytes())
    assert (shown["run_id"], shown["parallelism"]) == (run_id(run), {})
    assert [(one["name"], one["digest"]) for one in shown["files"]] == list(
        zip((TENSORS, DIGESTS, DOCUMENT), (manifest["own"][0][at] for at in (1, 2, 4)), strict=True)
    )
    with safe_open(run / "checkpoints" / NAMES[0] / TENSORS, "pt") as stored:
        expected = {key: stored.get_slice(key).get_shape() for key in stored.keys()}  # noqa: SIM118
    found = {one["tensor"]: one for one in shown["tensors"]}
    assert {key: one["shape"] for key, one in found.items()} == expected
    assert len(expected) > 10
    one = found["model.0.weight"]
    assert (one["dtype"], one["global_shape"], one["nbytes"]) == ("float32", [8, 8], 256)
    text = ckpt("show", run, NAMES[0], "--tensors").stdout
    assert all(word in text for word in (*expected, manifest["own"][0][1]))
    document = run / "checkpoints" / NAMES[0] / DOCUMENT
    document.write_bytes(document.read_bytes().replace(b'"dtype":"float32"', b'"dtype":"float16"', 1))
    done = ckpt("show", run, NAMES[0], "--tensors")
    assert (done.returncode, done.stdout, DOCUMENT in done.stderr) == (65, "", True), "not from other bytes"


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_in_any_file_is_found_and_set_aside(
    file: str, run: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    flip(run / "checkpoints" / NAMES[0] / file, 30 * 8)
    done = ckpt("verify", run)
    verdicts = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert (done.returncode, list(verdicts)) == (65, NAMES), done.stderr
    assert file in verdicts[NAMES[0]]
    (found,) = lines("verify", run, NAMES[0], "--quarantine")
    assert found["moved_to"] == f"quarantine/{NAMES[0]}"
    note = json.loads((run / f"checkpoints/quarantine/{NAMES[0]}.reason.json").read_bytes())
    assert (note["name"], note["file"], note["reason"]) == (NAMES[0], file, found["reason"])
    assert code("verify", run, "--all") == 0
    assert code("verify", run, f"quarantine/{NAMES[0]}") == 65
    assert code("export", run, f"quarantine/{NAMES[0]}", "--format", "hf", "--to", run.parent / "hf") != 0
    assert restored(run)[run]["content"] == whole[1][3]


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no copy": (("show", "RUN", "step-7"), NAMES[0]),
    "a way up": (("verify", "RUN", NAMES[0], "../run.json"), "../run.json"),
    "names and all": (("verify", "RUN", NAMES[0], "--all"), "--all"),
    "no run": (("ls", "OTHER"), "run.json"),
    "no folder": (("ls", "OTHER/nowhere"), "nowhere"),
    "a URL": (("ls", "s3://bucket/prefix"), "s3://bucket/prefix"),
    "keeps none": (("prune", "RUN", "--keep-last-n", "0"), "--keep-last-n"),
    "two objects": (
        ("export", "RUN", NAMES[0], "--format", "hf", "--to", "x", "--object", "a", "--object", "b"),
        "--object",
    ),
    "no file": (("import", "OTHER/x.pt", "--format", "torch", "--to", "RUN", "--step", "7"), "x.pt"),
    "no run to import to": (
        ("import", __file__, "--format", "torch", "--to", "OTHER", "--step", "7"),
        "run.json",
    ),
    "no command": (("frobnicate", "RUN"), "frobnicate"),
}


def test_what_a_user_gets_wrong_is_named_and_changes_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    before = content(tmp_path)
    for case, (words, named) in WRONG.items():
        given = [one.replace("RUN", str(run)).replace("OTHER", str(tmp_path / "other")) for one in words]
        done = ckpt(*given)
        assert (done.returncode, done.stdout, named in done.stderr) == (2, "", True), (case, done.stderr)
        assert "Traceback" not in done.stderr
    assert content(tmp_path) == before


def test_a_file_system_that_refuses_and_a_run_that_is_not_known_end_with_73(run: Path) -> None:
    (run / "checkpoints" / "quarantine").write_text("in the way")
    done = ckpt("quarantine", run, NAMES[0], "--reason", "x")
    assert (done.returncode, "quarantine" in done.stderr, "Traceback" in done.stderr) == (73, True, False)
    (run / "checkpoints" / "quarantine").unlink()
    (run / "run.json").write_text("{")
    assert code("prune", run, "--keep-last-n", "1") == 73
    assert (run / "run.json").read_text() == "{"


def test_nothing_of_it_imports_torch_but_conversion(run: Path) -> None:
    words = [
        ["ls", str(run)],
        ["show", str(run), NAMES[0], "--tensors"],
        ["verify", str(run), "--all", "--quarantine"],
        ["quarantine", str(run), NAMES[0], "--reason", "x"],
        ["release", str(run), NAMES[0]],
        ["prune", str(run), "--keep-last-n", "1"],
    ]
    program = (
        "import sys\nfrom outlast import cli\n"
        f"for words in {words!r}:\n"
        "    assert cli.main(['ckpt', *words]) == 0, words\n"
        "    assert not {'torch', 'numpy'} & sys.modules.keys(), words\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "RUN", NAMES[0]),
        ("export", "RUN", NAMES[0], "--format", "dcp", "--to", "OUT"),
        ("prune", "RUN", "--keep-last-n", "1"),
    ],
    ids=lambda words: words[0],
)
def test_on_a_terminal_alone_a_long_command_shows_that_it_works(
    words: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "outlast", "ckpt", *(places.get(one, one) for one in words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=DEADLINE, check=False)
    os.close(terminal)
    shown = os.read(reader, 1 << 16)
    os.close(reader)
    assert (done.returncode, shown != b"", b"\x1b" in done.stdout) == (0, True, False)
    if words[0] == "verify":
        assert ckpt("verify", run, NAMES[0]).stderr == ""


def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "outlast", "ckpt", "ls", str(run), "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_is_exported_is_imported_again_and_goes_on(
    run: Path, tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    assert code("export", run, NAMES[0], "--format", "hf", "--to", tmp_path / "hf") == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert code("export", run, NAMES[0], "--format", "dcp", "--to", tmp_path / "dcp") == 0
    kinds = ("--kind", "optimizer=AdamW", "--kind", "scheduler=CosineAnnealingLR")
    new = tmp_path / "new"
    words = ("import", tmp_path / "dcp", "--format", "dcp", "--to", new, "--step", "40", *kinds)
    assert code(*words) == 0
    assert restored(new)[new]["content"] == whole[1][40]
    assert code(*words) == 2, "it is there already"
    done = ckpt("import", tmp_path / "dcp", "--format", "dcp", "--to", run, "--step", "5", *kinds)
    assert (done.returncode, NAMES[0] in done.stdout) == (0, True), "it is newer than what was imported"


@needs_root
@pytest.mark.parametrize(("form", "room"), [("hf", "nr_inodes=2"), ("dcp", "size=4k")])
def test_an_export_to_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, form: str, room: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", room, "tmpfs"):
        done = ckpt("export", run, NAMES[0], "--format", form, "--to", disk / "out")
        assert (done.returncode, os.listdir(disk)) == (73, []), done.stderr
        assert ("No space left on device" in done.stderr, str(disk) in done.stderr) == (True, True)


def test_old_copies_are_removed_and_the_rest_stays_as_it_was(run: Path) -> None:
    assert code("quarantine", run, NAMES[3], "--reason", "a test") == 0
    before = content(run)
    done = ckpt("prune", run, "--keep-last-n", "1", "--dry-run")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [NAMES[2], NAMES[1]]
    assert content(run) == before
    assert code("prune", run, "--keep-last-n", "1", "--keep-ancestors", "1") == 0
    (gone,) = {name for name in NAMES[:3] if not (run / "checkpoints" / name).exists()}
    assert content(run) == {path: octets for path, octets in before.items() if gone not in path}
    assert code("prune", run, "--keep-last-n", "1") == 0
    assert sorted(os.listdir(run / "checkpoints")) == ["quarantine", NAMES[0]]


def test_nothing_is_removed_on_the_word_of_a_damaged_copy(run: Path) -> None:
    flip(run / "checkpoints" / NAMES[0] / TENSORS)
    before = content(run)
    done = ckpt("prune", run, "--keep-last-n", "1")
    assert (done.returncode, NAMES[0] in done.stderr) == (65, True)
    assert content(run) == before


def test_a_copy_goes_to_the_quarantine_and_comes_back_as_it_was(run: Path) -> None:
    before = content(run / "checkpoints")
    assert code("quarantine", run, NAMES[0], "--reason", "the loss rose") == 0
    assert restored(run)[run]["restored"] == 3
    again = ckpt("quarantine", run, NAMES[0], "--reason", "x")
    assert (again.returncode, "the loss rose" in again.stderr) == (2, True)
    assert code("release", run, NAMES[0]) == 0
    assert content(run / "checkpoints") == before
    assert code("release", run, NAMES[0]) == 2
    assert restored(run)[run]["restored"] == 40


def test_a_damaged_copy_stays_in_quarantine(run: Path) -> None:
    assert code("quarantine", run, NAMES[0], "--reason", "a test") == 0
    flip(run / "checkpoints" / "quarantine" / NAMES[0] / TENSORS)
    before = content(run)
    done = ckpt("release", run, NAMES[0])
    assert (done.returncode, TENSORS in done.stderr) == (65, True)
    assert content(run) == before


def test_two_copies_of_one_name_are_told_apart(run: Path) -> None:
    aside = run / "checkpoints" / "quarantine"
    for reason in ("first", "second"):
        assert code("quarantine", run, NAMES[0], "--reason", reason) == 0
        if reason == "first":
            shutil.copytree(aside / NAMES[0], run / "checkpoints" / NAMES[0])
    (other,) = (path.name for path in aside.iterdir() if "~" in path.name and path.is_dir())
    assert [one["state"] for one in lines("ls", run)] == ["whole"] * 5
    assert code("verify", run, f"quarantine/{other}", NAMES[1]) == 0
    assert code("release", run, other) == 0
    assert (run / "checkpoints" / NAMES[0] / "COMMIT").exists()
    assert not (aside / f"{other}.reason.json").exists()
    assert code("release", run, f"quarantine/{NAMES[0]}") == 2


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a run does that goes on."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def test_a_live_run_is_looked_at_and_not_changed(run: Path) -> None:
    assert code("quarantine", run, NAMES[3], "--reason", "a test") == 0
    flip(run / "checkpoints" / NAMES[2] / TENSORS)
    before = content(run)
    changes = [
        ("prune", run, "--keep-last-n", "1"),
        ("quarantine", run, NAMES[0], "--reason", "x"),
        ("release", run, NAMES[3]),
        ("verify", run, "--all", "--quarantine"),
        ("import", run / "run.json", "--format", "torch", "--to", run, "--step", "7"),
    ]
    with locked(run / "lock"):
        for words in changes:
            done = ckpt(*words)
            assert (done.returncode, done.stdout) == (64, ""), (words, done.stderr)
        assert content(run) == before
        assert [code("ls", run), code("show", run, NAMES[1]), code("verify", run, "--all")] == [0, 0, 65]
        assert code("prune", run, "--keep-last-n", "1", "--dry-run") == 0
    assert code("verify", run, "--all", "--quarantine") == 65
    assert code("verify", run, "--all") == 0
