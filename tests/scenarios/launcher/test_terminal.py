"""A launcher under a real terminal: what its ranks see of it, and what comes out of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faulty import needs_fuse, with_faults
from tests.support.launching import DEADLINE, Run, until

pytestmark = pytest.mark.timeout(420)

SEES = """
import os, sys, time
size = tuple(os.get_terminal_size(1)) if os.isatty(1) else None
print(f"sees {sys.stdout.isatty()} {sys.stderr.isatty()} {size}")
print("partial", end="", flush=True)
print("\\x1b[31mto stderr\\x1b[0m", file=sys.stderr, flush=True)
if len(sys.argv) > 1:
    while tuple(os.get_terminal_size(1)) == size:
        time.sleep(0.01)
    print("now", tuple(os.get_terminal_size(1)), flush=True)
    time.sleep(600)
"""


class OnTerminal:
    """A launcher whose three streams are a terminal of its own, which it leads."""

    def __init__(self, run: Run) -> None:
        self.master, slave = os.openpty()
        self.resize(33, 111)
        self.process = subprocess.Popen(
            run.command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - it starts no threads
        )
        os.close(slave)
        self.shown = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self) -> str:
        os.set_blocking(self.master, False)
        with contextlib.suppress(OSError):  # nothing more for now, or the launcher has gone
            while chunk := os.read(self.master, 65536):
                self.shown += chunk
        return self.shown.decode(errors="replace")

    def sees(self, text: str) -> None:
        until(lambda: text in self.read(), lambda: f"{text!r} in {self.read()!r}")

    def finish(self) -> int:
        end = time.monotonic() + DEADLINE
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
            time.sleep(0.01)
        assert self.process.returncode is not None, self.read()
        self.read()
        return self.process.returncode


@contextlib.contextmanager
def on_terminal(run: Run) -> Iterator[OnTerminal]:
    found = OnTerminal(run)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.send_signal(signal.SIGKILL)
            found.process.wait()
        os.close(found.master)


def run_of(folder: Path, *options: str, args: tuple[str, ...] = ()) -> Run:
    script = folder / "train.py"
    script.write_text(SEES)
    return Run(folder / "run", str(script), *args, options=options)


@pytest.mark.parametrize(
    "start", [(), pytest.param(("--no-zygote",), marks=pytest.mark.long)], ids=["zygote", "cold"]
)
def test_one_rank_has_a_terminal_and_its_logs(tmp_path: Path, start: tuple[str, ...]) -> None:
    with on_terminal(run_of(tmp_path, *start)) as found:
        assert found.finish() == 0, found.shown
    assert "sees True True (111, 33)\r\npartial" in found.shown.decode()
    assert "\x1b[31mto stderr\x1b[0m\r\n" in found.shown.decode()
    assert [path.read_text() for path in tmp_path.rglob("stdout.log")] == [
        "sees True True (111, 33)\npartial"
    ]
    assert [path.read_text() for path in tmp_path.rglob("stderr.log")] == ["\x1b[31mto stderr\x1b[0m\n"]


def test_a_partial_line_is_shown_and_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    with on_terminal(run_of(tmp_path, args=("waits",))) as found:
        found.sees("partial")
        found.resize(44, 55)
        found.sees("now (55, 44)")
        os.write(found.master, b"\x03")
        assert found.finish() == 128 + signal.SIGINT, found.shown


@pytest.mark.parametrize(
    ("options", "terminals"),
    [(("--redirects=0",), 2), (("--local-ranks-filter=1",), 1), ((), 0)],
    ids=["nothing is kept", "one rank is shown", "lines have a prefix"],
)
def test_several_ranks(tmp_path: Path, options: tuple[str, ...], terminals: int) -> None:
    with on_terminal(run_of(tmp_path, "--nproc-per-node=2", *options)) as found:
        assert found.finish() == 0, found.shown
    shown = found.shown.decode()
    assert shown.count("sees True True (111, 33)") == terminals
    for rank in range(2):
        assert (f"{rank}| sees False False None" in shown) is (not options)
    assert bool(list(tmp_path.rglob("stdout.log"))) is (options != ("--redirects=0",))


FAILS = """
import os, sys, time
print("50 %", end="", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.stderr = open("/dev/null", "w")  # no traceback ends the line
raise ValueError("\\x1b[31mred\\x1b[0m \\x07 bell")
"""


def test_a_message_begins_a_line_and_quotes_no_controls(tmp_path: Path) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(FAILS)
    run = Run(tmp_path / "run", str(script), str(go), options=("--max-restarts=0",))
    with on_terminal(run) as found:
        found.sees("50 %")
        go.touch()
        assert found.finish() == 1, found.shown
    messages = [line for line in found.shown.decode().splitlines() if "[outlast]" in line and "red" in line]
    assert messages, found.shown
    assert [line for line in messages if not line.startswith("[outlast]")] == []
    (fault,) = run.records("fault_seen")
    assert [one for one in (*messages, fault["reason"], fault["signature"]) if not one.isprintable()] == []


WRITES = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1]).exists():
    print("goes on", flush=True)
    time.sleep(0.05)
"""


@needs_fuse
def test_the_launcher_does_not_wait_for_the_file_system_of_a_log(tmp_path: Path) -> None:
    behind, mounted, switch, end = (tmp_path / one for one in ("behind", "mounted", "hangs", "end"))
    behind.mkdir()
    mounted.mkdir()
    (tmp_path / "train.py").write_text(WRITES)
    run = Run(mounted / "run", str(tmp_path / "train.py"), str(end))
    run.command = with_faults(run.command, behind, mounted, switch)
    with on_terminal(run) as found:
        try:
            found.sees("goes on")
            before = found.shown.count(bytes(run.folder))
            switch.touch()
            until(lambda: found.read().count(str(run.folder)) > before, found.read, deadline=60.0)
        finally:
            switch.unlink(missing_ok=True)
        end.touch()
        assert found.finish() == 0, found.shown


TRAINS = """
import os, time, torch, outlast
model = torch.nn.Linear(2, 2)
with outlast.start() as session:
    session.restore(model=model)
    for step in session.steps(60):
        if step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
        time.sleep(0.06)
print("the last line")
"""


IN_THE_BACKGROUND = ["bash", "-m", "-c", '"$@" & wait $!', "bash"]


@pytest.mark.parametrize(
    ("options", "before"),
    [((), []), (("--redirects=3",), []), pytest.param((), IN_THE_BACKGROUND, marks=pytest.mark.long)],
    ids=["shown", "written elsewhere", "in the background"],
)
def test_a_status_line_tells_step_and_restarts_and_leaves_nothing_behind(
    tmp_path: Path, options: tuple[str, ...], before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if not before:
        monkeypatch.setenv("COLUMNS", "20")  # the terminal has more
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    run = Run(tmp_path / "run", str(script), options=options)
    run.command[:0] = before
    is_shown = not options and not before
    with on_terminal(run) as found:
        assert found.finish() == 0, found.shown
    shown = found.shown.decode()
    told = re.findall(r"\r\x1b\[K\[outlast\] [^\r]*?(\d+)\D+60([^\r]*)", shown)
    assert bool(told) == is_shown
    left = shown.rpartition("\n")[2].replace("\x1b[K", "\0").rpartition("\0")  # what was not erased
    assert (left[0].endswith("\r") or left[0].endswith("\0")) == is_shown
    assert left[2] == ""
    if told:
        assert any(re.search(r"\b1\b", rest) for _, rest in told), shown
