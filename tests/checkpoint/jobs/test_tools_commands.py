"""``outlast ckpt``: what it says of real copies, what it finds in them, and what it converts."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.tools import upkeep
from outlast.checkpoint.tools.commands import main
from outlast.checkpoint.tools.listing import find, items
from outlast.errors import ExitCode, UsageError
from outlast.fields import FORMAT_VERSION
from outlast.ipc.exchange import StoreExchange
from outlast.observe.run_folder import RunFolder
from tests.support.ckpt_run import (
    DOCUMENT,
    KEEP_ALL,
    NAMES,
    RUN_ID,
    TENSORS,
    ckpt,
    content,
    flip,
    lines,
    make_run,
    restored,
)
from tests.support.jobs import DEADLINE, Job, checkpointer, mounted, save_steps, together


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    root = tmp_path_factory.mktemp("made") / "run"
    return root, make_run(root)


@pytest.fixture
def run(made: tuple[Path, dict[int, bytes]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def test_copies_are_listed_the_newest_first_wherever_they_lie(run: Path) -> None:
    facts = {"where", "state", "step", "generation", "world_size", "run_id", "created", "nbytes"}
    assert ckpt("quarantine", run, NAMES[1], "--reason", "the loss\x1b[2J rose").returncode == 0
    (run / "checkpoints" / ".tmp-x").mkdir()
    found = lines("ls", run)
    assert [one["name"] for one in found] == NAMES
    assert all(facts <= one.keys() for one in found)
    assert [one["where"] for one in found] == ["local", "quarantine", "local", "local"]
    assert [one["quarantine_reason"] for one in found] == [None, "the loss\x1b[2J rose", None, None]
    for one in found:
        files = [path for path in Path(str(one["folder"])).iterdir() if path.name.startswith("rank-")]
        assert one["nbytes"] == sum(path.stat().st_size for path in files) > 0
    assert lines("ls", run / "checkpoints") == found
    told = ckpt("ls", run)
    assert [line.split()[0] for line in told.stdout.splitlines()[1:5]] == NAMES
    assert "\x1b" not in told.stdout
    assert f"quarantine/{NAMES[1]} was set aside: the loss" in told.stdout


def test_a_training_with_a_name_belongs_to_its_run(run: Path) -> None:
    copies = run / "checkpoints"
    mine = copies / "fold-0"
    copies.rename(run / "fold-0")
    copies.mkdir()
    (run / "fold-0").rename(mine)
    assert lines("ls", run) == []
    assert str(mine) in ckpt("ls", run).stdout
    assert str(mine) in ckpt("verify", run, "--all").stdout
    assert [one["name"] for one in lines("ls", mine)] == NAMES
    holder = RunFolder(run)
    holder.claim()
    try:
        refused = ckpt("quarantine", mine, NAMES[0], "--reason", "a test")
    finally:
        holder.release()
    assert refused.returncode == ExitCode.RUN_FOLDER_BUSY
    assert (mine / NAMES[0]).is_dir()
    assert ckpt("quarantine", mine, NAMES[0], "--reason", "a test").returncode == 0


@pytest.mark.parametrize("aside", [False, True])
def test_where_no_copy_is_that_is_said_also_of_a_verification(
    aside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.claim()
    folder.release()
    folder.checkpoints.mkdir()
    if aside:
        (folder.checkpoints / "quarantine" / NAMES[0]).mkdir(parents=True)
    assert main(["verify", str(tmp_path), "--json"]) == ExitCode.OK
    assert capsys.readouterr().out == ""
    assert main(["verify", str(tmp_path)]) == ExitCode.OK
    verified = capsys.readouterr().out
    assert f"no copy is in {folder.checkpoints}" in verified
    assert ("quarantine" in verified) is aside
    assert main(["ls", str(tmp_path)]) == ExitCode.OK
    assert (capsys.readouterr().out == verified) is not aside


def test_what_cannot_be_believed_is_listed_with_the_reason(run: Path) -> None:
    tier = run / "checkpoints"
    os.truncate(tier / NAMES[0] / TENSORS, 100)
    newer = commit_line(FORMAT_VERSION + 1, file_digest((tier / NAMES[1] / MANIFEST).read_bytes()))
    (tier / NAMES[1] / COMMIT).write_bytes(newer)
    (tier / NAMES[2] / MANIFEST).unlink()
    found = lines("ls", run)
    assert [one["state"] for one in found] == ["damaged", "incompatible", "damaged", "whole"]
    assert "100 bytes" in str(found[0]["reason"])
    assert found[0]["created"] is not None
    assert [found[1]["created"], found[2]["created"]] == [None, None]
    text = ckpt("ls", run).stdout
    assert f"{NAMES[1]} is incompatible: COMMIT: written in format {FORMAT_VERSION + 1}" in text
    assert f"{NAMES[2]} is damaged: MANIFEST.json: a regular file expected" in text


def test_a_folder_of_copies_without_a_run_is_taken_and_another_run_is_pointed_out(
    run: Path, tmp_path: Path
) -> None:
    save_steps(run / "checkpoints", 50, run_id="stranger", settings=KEEP_ALL)
    text = ckpt("ls", run).stdout
    assert f"{copy_name(50, 1)} was written by run 'stranger', this is run {RUN_ID!r}" in text
    for command in ("show", "verify"):
        done = ckpt(command, run, copy_name(50, 1))
        assert done.returncode == 65, done.stdout
        assert f"written by run 'stranger', this is run {RUN_ID!r}" in done.stdout
    alone = Path(shutil.copytree(run / "checkpoints", tmp_path / "alone"))
    assert ckpt("verify", alone, "--all").returncode == 0
    assert [one["name"] for one in lines("ls", alone)] == [copy_name(50, 1), *NAMES]
    done = ckpt("prune", alone, "--keep-last-n", "1")
    assert (done.returncode, "copies of several runs" in done.stderr) == (2, True)
    done = ckpt("prune", run, "--keep-last-n", "1")
    assert done.returncode == 0, done.stderr
    assert f"{copy_name(50, 1)} is not counted and stays: of run 'stranger'" in done.stdout
    assert sorted(os.listdir(run / "checkpoints")) == [NAMES[0], copy_name(50, 1)]


def test_a_copy_is_shown_with_its_files_and_tensors(run: Path) -> None:
    (said,) = lines("show", run, NAMES[0], "--tensors")
    manifest = json.loads((run / "checkpoints" / NAMES[0] / MANIFEST).read_bytes())
    assert said["files"] == manifest["files"]
    assert (said["run_id"], said["parallelism"]) == (RUN_ID, {})
    with safe_open(run / "checkpoints" / NAMES[0] / TENSORS, "pt") as stored:
        expected = {key: stored.get_slice(key).get_shape() for key in stored.keys()}  # noqa: SIM118
    found = {one["tensor"]: one for one in said["tensors"]}
    assert {key: one["shape"] for key, one in found.items()} == expected
    assert len(expected) > 10
    one = found["model.0.weight"]
    assert (one["dtype"], one["shape"], one["global_shape"], one["nbytes"]) == (
        "float32",
        [8, 8],
        [8, 8],
        256,
    )
    text = ckpt("show", run, NAMES[0], "--tensors").stdout
    assert all(key in text for key in expected)
    assert manifest["files"][0]["digest"] in text
    assert "model.0.weight" not in ckpt("show", run, NAMES[0]).stdout


def test_tensors_are_not_shown_from_bytes_that_are_not_as_committed(run: Path) -> None:
    document = run / "checkpoints" / NAMES[0] / DOCUMENT
    before = document.read_bytes()
    document.write_bytes(before.replace(b'"dtype":"float32"', b'"dtype":"float16"', 1))
    assert document.read_bytes() != before
    done = ckpt("show", run, NAMES[0], "--tensors")
    assert (done.returncode, done.stdout) == (65, "")
    assert DOCUMENT in done.stderr
    os.truncate(run / "checkpoints" / NAMES[1] / DOCUMENT, 10)
    done = ckpt("show", run, NAMES[1])
    assert (done.returncode, "10 bytes found" in done.stdout) == (65, True)


@pytest.mark.parametrize("file", [TENSORS, DOCUMENT, MANIFEST, COMMIT])
def test_one_flipped_bit_in_any_file_is_found_and_set_aside(
    file: str, run: Path, made: tuple[Path, dict[int, bytes]]
) -> None:
    assert ckpt("verify", run, "--all").returncode == 0
    flip(run / "checkpoints" / NAMES[0] / file, 30)
    done = ckpt("verify", run)
    assert done.stdout == ckpt("verify", run, "--all").stdout
    assert done.returncode == 65, done.stderr
    verdicts = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(verdicts) == NAMES
    assert verdicts.pop(NAMES[0]).startswith(f"damaged: {file}")
    assert all(verdict.startswith("sound, ") for verdict in verdicts.values())
    assert ckpt("verify", run, *NAMES[1:]).returncode == 0
    found = lines("verify", run, NAMES[0], "--quarantine")
    assert [one["moved_to"] for one in found] == [f"quarantine/{NAMES[0]}"]
    note = json.loads((run / f"checkpoints/quarantine/{NAMES[0]}.reason.json").read_bytes())
    assert (note["name"], note["file"], note["reason"]) == (NAMES[0], file, found[0]["reason"])
    assert ckpt("verify", run, "--all").returncode == 0
    assert ckpt("verify", run, f"quarantine/{NAMES[0]}").returncode == 65
    assert restored(run) == (3, made[1][3])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damage_in_any_rank_is_found_though_ranks_are_read_in_parts(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(exchange: StoreExchange) -> bool:
        return checkpointer(tmp_path, exchange=exchange).save(3, Job(exchange.rank).state, "a test")

    assert together(3, part) == [True, True, True]
    monkeypatch.setattr(upkeep, "_PARTS", 2)
    (item,) = items(find(str(tmp_path)))
    read: list[int] = []
    sound = upkeep.read_all(item, read.append)
    assert (sound.copy.state.value, len(read)) == ("whole", 2)
    assert sound.nbytes is not None
    assert abs(sum(read) - sound.nbytes) <= len(read)
    flip(tmp_path / item.name / rank_files(rank, 3)[0])
    found = upkeep.read_all(item, read.append).copy
    assert found.damage is not None
    assert found.damage.file == rank_files(rank, 3)[0]


def test_what_a_user_gets_wrong_is_said_with_what_there_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    wrong: list[tuple[tuple[str | Path, ...], str]] = [
        (("show", run, "step-7"), f"'step-7' is no copy in {run / 'checkpoints'}; there are: {NAMES[0]}, "),
        (("verify", run, NAMES[0], "../run.json"), "is no copy"),
        (("verify", run, NAMES[0], "--all"), "either names of copies or --all"),
        (("ls", tmp_path / "other"), "neither run.json nor a copy"),
        (("ls", tmp_path / "nowhere"), "no such folder"),
        (("ls", "s3://bucket/prefix"), "folders only"),
        (("prune", run, "--keep-last-n", "0"), "no whole number of at least 1"),
        (("export", run, NAMES[0], "--format", "hf", "--to", "x", "--object", "a", "--object", "b"), "one"),
        (("import", tmp_path / "x.pt", "--format", "torch", "--to", run, "--step", "7"), "no such file"),
        (("import", __file__, "--format", "torch", "--to", tmp_path, "--step", "7"), "neither run.json"),
        (("frobnicate", run), "invalid choice"),
    ]
    before = content(tmp_path)
    for words, expected in wrong:
        done = ckpt(*words)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert expected in done.stderr, words
        assert "Traceback" not in done.stderr
    assert content(tmp_path) == before


def test_a_file_system_that_refuses_and_a_run_that_is_not_known_end_with_73(run: Path) -> None:
    (run / "checkpoints" / "quarantine").write_text("in the way")
    done = ckpt("quarantine", run, NAMES[0], "--reason", "x")
    assert (done.returncode, "quarantine" in done.stderr) == (73, True)
    assert "Traceback" not in done.stderr
    (run / "checkpoints" / "quarantine").unlink()
    (run / "run.json").write_text("{")
    done = ckpt("prune", run, "--keep-last-n", "1")
    assert (done.returncode, "does not say which run" in done.stderr) == (73, True)
    assert (run / "run.json").read_text() == "{"


def test_nothing_of_it_imports_torch_but_conversion(run: Path) -> None:
    words = [
        ["ls", str(run)],
        ["ls", str(run), "--json"],
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
        "    assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys(), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(run: Path) -> None:
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "outlast", "ckpt", "verify", str(run), NAMES[0]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=DEADLINE, check=False)
    os.close(terminal)
    shown = os.read(reader, 1 << 16)
    os.close(reader)
    assert done.returncode == 0
    assert b"KiB" in shown
    assert done.stdout.decode().startswith(f"{NAMES[0]}: sound, ")
    assert b"\x1b" not in done.stdout
    assert ckpt("verify", run, NAMES[0]).stderr == ""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["export", "RUN", NAMES[0], "--format", "dcp", "--to", "OUT"], b"writing"),
        (["prune", "RUN", "--keep-last-n", "1"], b"KiB"),
    ],
)
def test_other_long_commands_show_that_they_work(
    words: list[str], shown: bytes, run: Path, tmp_path: Path
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "outlast", "ckpt", *(places.get(one, one) for one in words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=DEADLINE, check=False)
    os.close(terminal)
    found = os.read(reader, 1 << 16)
    os.close(reader)
    assert done.returncode == 0, found
    assert shown in found
    assert b"\x1b" not in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "outlast", "ckpt", "ls", str(run), "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP warns that it works alone
def test_what_is_exported_is_imported_again_and_goes_on(
    run: Path, tmp_path: Path, made: tuple[Path, dict[int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), NAMES[0], "--format", "hf", "--to", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert main(["export", str(run), NAMES[0], "--format", "dcp", "--to", str(tmp_path / "dcp")]) == 0
    kinds = ["--kind", "optimizer=AdamW", "--kind", "scheduler=CosineAnnealingLR"]
    words = [
        "import",
        str(tmp_path / "dcp"),
        "--format",
        "dcp",
        "--to",
        str(tmp_path / "new"),
        "--step",
        "40",
    ]
    assert main([*words, *kinds]) == 0
    assert "newer" not in capsys.readouterr().out
    run_id = json.loads((tmp_path / "new" / "run.json").read_text())["run_id"]
    assert restored(tmp_path / "new", run_id) == (40, made[1][40])
    with pytest.raises(UsageError, match="already"):
        main([*words, *kinds])
    words[5], words[7] = str(run), "5"
    assert main([*words, *kinds]) == 0
    assert f"{NAMES[0]} is newer" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize(
    ("form", "room"), [("hf", "nr_inodes=2"), ("dcp", "nr_inodes=2"), ("dcp", "size=4k")]
)
def test_an_export_to_a_full_disk_says_so(run: Path, tmp_path: Path, form: str, room: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", room, "tmpfs"):
        done = ckpt("export", run, NAMES[0], "--format", form, "--to", disk / "out")
        assert done.returncode == 73, done.stderr
        assert "No space left on device" in done.stderr
        assert str(disk) in done.stderr
        assert "Traceback" not in done.stderr
        assert list(disk.iterdir()) == []


def test_damage_is_not_exported(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints" / NAMES[0] / TENSORS)
    done = ckpt("export", run, NAMES[0], "--format", "hf", "--to", tmp_path / "hf")
    assert (done.returncode, (tmp_path / "hf").exists()) == (65, False), done.stderr
    assert TENSORS in done.stderr
