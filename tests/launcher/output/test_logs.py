"""Logs of ranks: where they go, what the console shows of them while they grow, what a failure left there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.errors import RunFolderUnusable
from outlast.launcher.command.options import LogSpec
from outlast.launcher.output import file_thread
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.output.logs import (
    STDERR,
    STDOUT,
    Destination,
    Tails,
    failure_of,
    last_lines,
    plan,
    with_folder_of_run,
)
from outlast.launcher.output.screen import LOG_ROOM, Screen

BOTH = STDOUT | STDERR


def where(spec: LogSpec, rank: int = 0, world: int = 2) -> Destination:
    return plan(spec, Path("/run/logs"), (7, rank, rank, world), "default")


class TestPlan:
    def test_by_default_both_streams_go_to_files_and_are_shown(self) -> None:
        found = where(LogSpec(), rank=3, world=4)
        folder = Path("/run/logs/gen-0007/rank-00003")
        assert (found.stdout, found.stderr) == (folder / "stdout.log", folder / "stderr.log")
        assert (found.error_file, found.shown) == (folder / "error.json", BOTH)

    def test_zero_and_zero_leave_the_console_to_the_ranks(self) -> None:
        found = where(LogSpec(redirects="0", tee="0"))
        assert (found.stdout, found.stderr, found.shown) == (None, None, 0)

    @pytest.mark.parametrize(
        ("redirects", "tee", "files", "shown"),
        [("3", None, BOTH, 0), ("1", None, STDOUT, 0), (None, "2", STDERR, STDERR), ("1", "2", BOTH, STDERR)],
    )
    def test_streams_are_chosen_as_by_torchrun(
        self, redirects: str | None, tee: str | None, files: int, shown: int
    ) -> None:
        found = where(LogSpec(redirects, tee))
        assert (STDOUT if found.stdout else 0) | (STDERR if found.stderr else 0) == files
        assert found.shown == shown

    def test_a_map_names_ranks_and_the_others_get_nothing(self) -> None:
        spec = LogSpec(redirects="0:1,12:2")
        assert [
            (one.stdout is None, one.stderr is None) for one in (where(spec, rank) for rank in (0, 1, 12))
        ] == [
            (False, True),
            (True, True),
            (True, False),
        ]

    def test_a_filter_hides_ranks_and_keeps_their_files(self) -> None:
        found = where(LogSpec(only=(0,)), rank=1)
        assert found.stdout is not None
        assert found.shown == 0

    @pytest.mark.parametrize(
        ("spec", "stdout"),
        [(LogSpec("0", "0", only=(0,)), os.devnull), (LogSpec("1", only=(0,)), "stdout.log")],
    )
    def test_a_filter_hides_streams_that_would_be_inherited(self, spec: LogSpec, stdout: str) -> None:
        found = where(spec, rank=1)
        assert (str(found.stdout).endswith(stdout), found.stderr) == (True, Path(os.devnull))
        assert (where(spec, rank=0).stderr, found.shown) == (None, 0)

    def test_prefixes(self) -> None:
        assert where(LogSpec(), world=1).prefix == ""
        assert where(LogSpec(), rank=0).prefix != where(LogSpec(), rank=1).prefix
        assert where(LogSpec(tee="3"), rank=1).prefix == "[default1]:"
        assert (
            where(LogSpec(template="<${role_name} ${rank} ${local_rank} ${x}>"), 1).prefix
            == "<default 1 1 ${x}>"
        )

    def test_under_a_folder_of_ones_own_names_are_torchruns(self, tmp_path: Path) -> None:
        found = plan(LogSpec(log_dir=str(tmp_path)), Path("/run/logs"), (3, 5, 1, 8), "default")
        assert found.stdout == tmp_path / "attempt_2" / "1" / "stdout.log"
        assert found.error_file == tmp_path / "attempt_2" / "1" / "error.json"

    def test_dev_null_as_the_folder_leaves_the_console_to_the_ranks(self) -> None:
        found = where(LogSpec(tee="3", log_dir=os.devnull))
        assert (found.stdout, found.stderr, found.shown) == (None, None, 0)
        assert found.error_file == Path("/run/logs/gen-0007/rank-00000/error.json")
        assert where(LogSpec(tee="3", log_dir=os.devnull, only=(0,)), rank=1).stdout == Path(os.devnull)

    def test_two_runs_that_share_it_have_a_folder_each(self, tmp_path: Path) -> None:
        asked = LogSpec(log_dir=str(tmp_path / "logs"))
        found = [Path(with_folder_of_run(asked, "../run/1").log_dir) for _ in range(2)]
        assert found[0] != found[1]
        for folder in found:
            assert folder.parent == tmp_path / "logs"
            assert folder.name.startswith("run-1_")
            assert folder.is_dir()
        assert with_folder_of_run(LogSpec(), "run") == LogSpec()

    def test_one_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunFolderUnusable, match="--log-dir"):
            with_folder_of_run(LogSpec(log_dir=str(tmp_path / "file" / "logs")), "run")


class Pipe:
    """Stands in for the console: ``follow`` writes into it, ``arrived`` reads without waiting."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)  # a console that is read takes whatever comes
        self.stream = open(writing, "w", closefd=False)  # noqa: SIM115 - see close
        self.screen = Screen()

    def read(self) -> bytes:
        """Take a little, as a slow terminal does."""
        try:
            return os.read(self._reading, 1 << 16)
        except BlockingIOError:
            self.screen.wait(0.1)
            return b""

    def arrived(self) -> bytes:
        while self.screen.waiting:
            assert self.screen.wait(60)
        found = b""
        while True:
            try:
                chunk = os.read(self._reading, 1 << 16)
            except BlockingIOError:
                return found
            if not chunk:
                return found
            found += chunk

    def close(self) -> None:
        """Let nobody read any more; the descriptor stays: a writer's thread may still know its number."""
        self.screen.give_up()
        self.stream.close()
        os.close(self._reading)


@pytest.fixture
def console() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def follow(console: Pipe, *paths: Path, prefix: str = "{}> ", files: FileThread | None = None) -> Tails:
    tails = Tails(console.screen, files or FileThread(paths[0].parent))
    places = [
        Destination(path.parent, path, None, STDOUT, prefix.format(rank), path)
        for rank, path in enumerate(paths)
    ]
    with contextlib.redirect_stdout(console.stream):
        tails.follow(places)
    return tails


class TestTails:
    def test_a_line_is_shown_when_it_is_whole(self, tmp_path: Path, console: Pipe) -> None:
        path = tmp_path / "log"
        tails = follow(console, path)
        tails.pump()
        assert console.arrived() == b""
        with open(path, "ab", 0) as log:
            log.write(b"one\ntw")
            tails.pump()
            assert console.arrived() == b"0> one\n"
            log.write(b"o\n")
            tails.pump()
            assert console.arrived() == b"0> two\n"

    def test_the_end_shows_the_rest(self, tmp_path: Path, console: Pipe) -> None:
        (tmp_path / "log").write_bytes(b"one\nhalf")
        tails = follow(console, tmp_path / "log")
        tails.finish()
        assert console.arrived() == b"0> one\n0> half\n"
        assert not tails.active

    def test_lines_of_two_ranks_stay_whole(self, tmp_path: Path, console: Pipe, seed: int) -> None:
        dice = random.Random(seed)
        paths = [tmp_path / "0", tmp_path / "1"]
        texts = [
            b"".join(b"%d:%d:%s\n" % (rank, at, b"x" * dice.randrange(90)) for at in range(200))
            for rank in (0, 1)
        ]
        logs = [open(path, "ab", 0) for path in paths]  # noqa: SIM115 - both are open at the same time
        tails = follow(console, *paths)
        shown, left = b"", [texts[0], texts[1]]
        while any(left):
            rank = dice.randrange(2)
            size = dice.randrange(60)
            logs[rank].write(left[rank][:size])
            left[rank] = left[rank][size:]
            tails.pump()
            shown += console.arrived()
        tails.finish()
        shown += console.arrived()
        for log in logs:
            log.close()
        for rank in (0, 1):
            mine = [line[3:] for line in shown.splitlines(keepends=True) if line.startswith(b"%d> " % rank)]
            assert b"".join(mine) == texts[rank]
        assert len(shown.splitlines()) == 400

    def test_a_progress_bar_is_shown_while_it_grows(self, tmp_path: Path, console: Pipe) -> None:
        path = tmp_path / "log"
        tails = follow(console, path)
        with open(path, "ab", 0) as log:
            for written, shown in [
                (b"10%\r", b"0> 10%\r"),
                (b"20%\r", b"0> 20%\r"),
                (b"\nwindows\r\n", b"\n0> windows\r\n"),
                (b"\r 30%", b"\r"),
                (b"\r 40%", b"0>  30%\r"),
                (b"\n\n", b"0>  40%\n0> \n"),
            ]:
                log.write(written)
                tails.pump()
                assert console.arrived() == shown

    def test_what_a_slow_console_cannot_take_waits_in_the_file(self, tmp_path: Path, console: Pipe) -> None:
        lines = b"".join(b"%07d %s\n" % (at, b"x" * 90) for at in range(40_000))
        (tmp_path / "old").write_bytes(lines)
        (tmp_path / "new").write_bytes(b"the next generation\n")
        tails = follow(console, tmp_path / "old", prefix="")
        for _ in range(100):
            tails.pump()
        assert console.screen.waiting < LOG_ROOM + (1 << 17)
        tails.finish()
        assert tails.unshown > len(lines) // 2
        with contextlib.redirect_stdout(console.stream):
            tails.follow([Destination(tmp_path, tmp_path / "new", None, STDOUT, "", tmp_path)])
        shown = b""
        while len(shown) < len(lines) + 20:
            tails.pump()
            shown += console.read()
        assert shown == lines + b"the next generation\n"

    def test_a_carriage_return_at_the_start_of_a_line_gets_no_prefix(
        self, tmp_path: Path, console: Pipe
    ) -> None:
        (tmp_path / "log").write_bytes(b"".join(b"\rstep %d" % step for step in range(4)) + b"\ndone\n")
        follow(console, tmp_path / "log", prefix="0| ").pump()
        shown = console.arrived()
        assert b"0| 0|" not in shown.replace(b"\r", b"")
        assert shown == b"\r0| step 0\r0| step 1\r0| step 2\r0| step 3\n0| done\n"

    def test_long_lines_are_shown_as_they_are_and_nothing_comes_between(
        self, tmp_path: Path, console: Pipe
    ) -> None:
        line = b"x" * 3_000_000 + b"\n"
        for name in ("0", "1"):
            (tmp_path / name).write_bytes(b"a\n" + line + b"b\n")
        tails = follow(console, tmp_path / "0", tmp_path / "1")
        shown = b""
        while tails.unshown:
            tails.pump()
            shown += console.arrived()
        tails.finish()
        while tails.active:
            tails.pump()
        shown += console.arrived()
        found = shown.splitlines(keepends=True)
        assert len(found) == 6
        for rank in (b"0> ", b"1> "):
            mine = [one[3:] for one in found if one.startswith(rank)]
            assert mine == [b"a\n", line, b"b\n"]

    def test_shown_lines_with_certain_texts_are_copied(self, tmp_path: Path, console: Pipe) -> None:
        spec = LogSpec(tee="3", copied_stdout=("loss", "a,b"), log_dir=str(tmp_path))
        places = [plan(spec, tmp_path, (3, rank, rank, 2), "trainer") for rank in range(2)]
        for rank, place in enumerate(places):
            place.folder.mkdir(parents=True)
            assert place.stdout is not None
            place.stdout.write_bytes(b"loss %d\nother\nwith a,b\n" % rank)
        tails = Tails(console.screen, FileThread(tmp_path))
        with contextlib.redirect_stdout(console.stream):
            tails.follow(places)
        tails.finish()
        while tails.active:
            tails.pump()
        copied = (tmp_path / "attempt_2" / "filtered_stdout.log").read_text().splitlines()
        assert sorted(copied) == [
            *("[trainer0]:loss 0", "[trainer0]:with a,b", "[trainer1]:loss 1", "[trainer1]:with a,b")
        ]
        assert not (tmp_path / "attempt_2" / "filtered_stderr.log").exists()
        assert console.arrived().count(b"other") == 2

    def test_what_is_read_late_is_shown_once(
        self, tmp_path: Path, console: Pipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        do = file_thread._do
        monkeypatch.setattr(file_thread, "_do", lambda work: (time.sleep(0.02), do(work))[1])
        files = FileThread(tmp_path)
        (tmp_path / "log").write_bytes(b"one\ntwo\n")
        tails = follow(console, tmp_path / "log", files=files)
        files.wait = lambda errand, patience=0.0: errand.wait(0.0)  # type: ignore[method-assign]
        shown, deadline = b"", time.monotonic() + 60.0
        with open(tmp_path / "log", "ab", 0) as log:
            while shown.count(b"\n") < 3 and time.monotonic() < deadline:
                if shown.count(b"\n") == 2 and log.tell() < 9:
                    log.write(b"three\n")
                tails.pump()
                shown += console.arrived()
        tails.finish()
        while tails.active and time.monotonic() < deadline:
            tails.pump()
        assert shown + console.arrived() == b"0> one\n0> two\n0> three\n"

    def test_a_closed_console_is_no_error(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"one\n" * 9)
        code = (
            "import sys; from pathlib import Path\n"
            "from outlast.launcher.output.logs import Destination, Tails\n"
            "import os; os.close(1); r, w = os.pipe(); os.dup2(w, 1); os.close(r)\n"
            "from outlast.launcher.output.file_thread import FileThread\n"
            "from outlast.launcher.output.screen import Screen\n"
            "path = Path(sys.argv[1]); screen = Screen(); tails = Tails(screen, FileThread(path.parent))\n"
            "tails.follow([Destination(path.parent, path, None, 1, '', path)])\n"
            "tails.pump(); tails.pump(); tails.finish()\n"
            "while tails.active or screen.waiting: tails.pump(); assert screen.wait(60)\n"
            "print('ended well', file=sys.stderr)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, str(log)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=180,
            check=False,
        )
        assert "ended well" in run.stderr, run.stderr


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ~~~~^^
RuntimeError: boom
"""
CALLSTACK = "Traceback ...\nValueError: bad"
TORCHELASTICS = json.dumps(
    {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": CALLSTACK}}}
)
CHAIN = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n"
NOISE = "[rank1]:[W1121 10:00:00.1 ProcessGroupGloo.cpp:1] Warning: slow (function f)\n"
PREFIXED = "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()).replace(
    "    main", f"{NOISE}[rank1]:     main"
)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "log", "message"),
        [
            (TORCHELASTICS, "", "ValueError: bad"),
            ('{"message": "ValueError: bad"}', "", "ValueError: bad"),  # the old format
            *(
                (text, TRACEBACK, "RuntimeError: boom")
                for text in ("", "{", "[]", "{}", '{"message": {}}', "\x00")
            ),
            (
                "",
                CHAIN + TRACEBACK.replace("boom", "worse") + "some warning at exit\n",
                "RuntimeError: worse",
            ),
            ("", NOISE + PREFIXED + NOISE, "RuntimeError: boom"),
            ("", '  File "x.py", line 3\nall is well: 3\nSyntaxErrors: 0\n', None),  # a place in a file
            ("", "all is well\n", None),
        ],
    )
    def test_what_is_found(self, tmp_path: Path, error: str, log: str, message: str | None) -> None:
        (tmp_path / "error.json").write_text(error)
        (tmp_path / "log").write_text(log)
        found = failure_of(tmp_path / "error.json", tmp_path / "log")
        assert (found.message if found else None) == message
        if found and not error:
            assert found.traceback.startswith("Traceback")
            assert "arning" not in found.traceback.splitlines()[-1]
        assert failure_of(tmp_path / "absent", tmp_path / "absent too") is None

    def test_what_a_terminal_would_obey_is_left_out_and_lines_become_one(self, tmp_path: Path) -> None:
        colored = "\x1b[1;31mValueError\x1b[0m: \x1b]8;;http://x\x07bad\x1b]8;;\x1b\\ \x1b(Bvalue\r\x07\x9b2J"
        error = {"message": colored, "extraInfo": {"py_callstack": f"Traceback:\n\tline\n{colored}"}}
        (tmp_path / "error.json").write_text(json.dumps({"message": error}))
        (tmp_path / "log").write_text(f"Traceback (most recent call last):\n  line\n{colored}\n")
        for found in (failure_of(tmp_path / "error.json", None), failure_of(tmp_path, tmp_path / "log")):
            assert found is not None
            assert found.message == found.summary == "ValueError: bad value"
            assert found.traceback.splitlines()[-1] == "ValueError: bad value"
            assert "\x1b" not in found.traceback
        error = {"message": "CUDA error: x\n  line 2\r\n\nline\u20283", "extraInfo": {}}
        (tmp_path / "error.json").write_text(json.dumps({"message": error}))
        several = failure_of(tmp_path / "error.json", None)
        assert several is not None
        assert (several.message, several.summary) == ("CUDA error: x line 2 line 3", "CUDA error: x")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("class Odd(Exception): pass\ndef f(): raise Odd('here')\nf()\n", "Odd: here"),
            *((text, "Error: ") for text in ("def f(:\n", "if True:\npass\n", "if 1:\n  a=1\n\tb=2\n")),
        ],
    )
    def test_of_a_real_script(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "x.py").write_text(text)
        with open(tmp_path / "log", "wb") as log:
            subprocess.run([sys.executable, str(tmp_path / "x.py")], stderr=log, timeout=180, check=False)
        found = failure_of(tmp_path / "absent", tmp_path / "log")
        assert found is not None
        assert message in found.message

    def test_the_last_lines_of_a_long_log(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("".join(f"line {at}\n" for at in range(9000)))
        assert last_lines(tmp_path / "log", 2) == ["line 8998", "line 8999"]
        assert last_lines(tmp_path / "absent", 2) == []
