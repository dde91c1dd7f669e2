"""Logs of ranks: where they go, what the console shows of them while they grow, what a failure left there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.agent.logs import STDERR, STDOUT, Destination, Tails, failure_of, last_lines, plan
from outlast.agent.options import LogSpec

BOTH = STDOUT | STDERR


def where(spec: LogSpec, rank: int = 0, world: int = 2) -> Destination:
    return plan(spec, Path("/run/logs"), (7, rank, world), "default")


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

    def test_prefixes(self) -> None:
        assert where(LogSpec(), world=1).prefix == ""
        assert where(LogSpec(), rank=0).prefix != where(LogSpec(), rank=1).prefix
        assert where(LogSpec(tee="3"), rank=1).prefix == "[default1]:"
        assert (
            where(LogSpec(template="<${role_name} ${rank} ${local_rank} ${x}>"), 1).prefix
            == "<default 1 1 ${x}>"
        )

    def test_a_folder_of_its_own_can_be_named(self, tmp_path: Path) -> None:
        assert tmp_path in where(LogSpec(log_dir=str(tmp_path))).folder.parents


class Pipe:
    """Stands in for the console: ``follow`` writes into it, ``arrived`` reads without waiting."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)  # a console that is read takes whatever comes
        self.stream = open(writing, "w")  # noqa: SIM115 - the fixture closes it

    def arrived(self) -> bytes:
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
        self.stream.close()
        os.close(self._reading)


@pytest.fixture
def console() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def follow(console: Pipe, *paths: Path, prefix: str = "{}> ") -> Tails:
    tails = Tails()
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

    def test_bytes_that_are_no_text_pass(self, tmp_path: Path, console: Pipe) -> None:
        (tmp_path / "log").write_bytes(b"\xff\xfe\x00\n")
        follow(console, tmp_path / "log").pump()
        assert console.arrived() == b"0> \xff\xfe\x00\n"

    def test_a_line_without_an_end_takes_bounded_memory(self, tmp_path: Path, console: Pipe) -> None:
        (tmp_path / "log").write_bytes(b"x" * 300_000)
        tails = follow(console, tmp_path / "log", prefix="")
        shown = b""
        for _ in range(10):
            tails.pump()
            shown += console.arrived()
        assert shown.count(b"x") >= 200_000

    def test_a_closed_console_is_no_error(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"one\n" * 9)
        code = (
            "import sys; from pathlib import Path; from outlast.agent.logs import Destination, Tails\n"
            "import os; os.close(1); r, w = os.pipe(); os.dup2(w, 1); os.close(r)\n"
            "path = Path(sys.argv[1]); tails = Tails()\n"
            "tails.follow([Destination(path.parent, path, None, 1, '', path)])\n"
            "tails.pump(); tails.pump(); tails.finish(); print('ended well', file=sys.stderr)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, str(log)], stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        assert "ended well" in run.stderr, run.stderr


class TestFailures:
    def test_torchelastics_error_file(self, tmp_path: Path) -> None:
        path = tmp_path / "error.json"
        extra = {"py_callstack": "Traceback ...\nValueError: bad", "timestamp": "1"}
        path.write_text(json.dumps({"message": {"message": "ValueError: bad", "extraInfo": extra}}))
        found = failure_of(path, None)
        assert found is not None
        assert (found.message, found.traceback, found.exit_code) == (
            "ValueError: bad",
            extra["py_callstack"],
            0,
        )

    def test_its_old_format_with_a_text(self, tmp_path: Path) -> None:
        (tmp_path / "error.json").write_text('{"message": "ValueError: bad"}')
        found = failure_of(tmp_path / "error.json", None)
        assert found is not None
        assert found.message == found.traceback == "ValueError: bad"

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"message": {}}', '{"message": 3}', "\x00"])
    def test_one_that_makes_no_sense_leaves_the_log(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "error.json").write_text(text)
        (tmp_path / "stderr.log").write_text(TRACEBACK)
        found = failure_of(tmp_path / "error.json", tmp_path / "stderr.log")
        assert found is not None
        assert found.message in ("RuntimeError: boom", "3")

    def test_the_last_traceback_of_the_log(self, tmp_path: Path) -> None:
        chain = TRACEBACK + "\nDuring handling of the above exception, another exception occurred:\n\n"
        (tmp_path / "log").write_text(chain + TRACEBACK.replace("boom", "worse") + "some warning at exit\n")
        found = failure_of(tmp_path / "absent", tmp_path / "log")
        assert found is not None
        assert found.message == "RuntimeError: worse"
        assert found.traceback.startswith("Traceback")
        assert "warning" not in found.traceback

    def test_a_real_one(self, tmp_path: Path) -> None:
        (tmp_path / "x.py").write_text("class Odd(Exception): pass\ndef f(): raise Odd('here')\nf()\n")
        with open(tmp_path / "log", "wb") as log:
            subprocess.run([sys.executable, str(tmp_path / "x.py")], stderr=log, timeout=60, check=False)
        found = failure_of(tmp_path / "absent", tmp_path / "log")
        assert found is not None
        assert found.message in ("Odd: here", "__main__.Odd: here")

    def test_a_log_without_one(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("all is well\n")
        assert failure_of(tmp_path / "absent", tmp_path / "log") is None
        assert failure_of(tmp_path / "absent", tmp_path / "absent too") is None

    def test_the_last_lines_of_a_long_log(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("".join(f"line {at}\n" for at in range(9000)))
        assert last_lines(tmp_path / "log", 2) == ["line 8998", "line 8999"]
        assert last_lines(tmp_path / "absent", 2) == []


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ~~~~^^
RuntimeError: boom
"""
