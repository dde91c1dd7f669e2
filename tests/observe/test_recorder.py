"""The event log under full disks, kills and company: real files, real processes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.observe.policy import codec
from outlast.observe.recorder import CUT, LINE_BYTES, Recorder, fit, latest, read
from outlast.recovery.policy.events import (
    ActionTaken,
    FaultSeen,
    Note,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    TimeoutsLearned,
)


def progress(step: int) -> Progress:
    return Progress(1000.0 + step, float(step), 1, step)


def fault(reason: str = "", **evidence: str) -> FaultSeen:
    return FaultSeen(1.0, 1.0, 1, "hang", "n01", 3, 120, 0.5, reason, "hang in step", evidence)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writes come up short, then fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_was_recorded_is_read(path: Path) -> None:
    records: list[Record] = [progress(1), fault("silent", stacks="a\nb"), RunEnded(2.0, 2.0, 1, 9, 0, "done")]
    recorder = Recorder(path)
    for record in records:
        recorder.record(record)
    recorder.close()
    log = read(path)
    assert (log.records, log.unknown, log.skipped, recorder.lost) == (tuple(records), (), 0, 0)
    assert path.read_bytes().count(b"\n") == len(records)


def test_a_second_recorder_goes_on_behind_the_first(path: Path) -> None:
    for step in (1, 2):
        Recorder(path).record(progress(step))
    assert read(path).records == (progress(1), progress(2))


@pytest.mark.parametrize("tail", [b'{"v":1,"kind":"progress","ti', b"\0" * 300, b"\xff\xfe", b"{"])
def test_a_torn_last_line_costs_only_itself(path: Path, tail: bytes) -> None:
    Recorder(path).record(progress(1))
    with open(path, "ab") as file:
        file.write(tail)
    recorder = Recorder(path)
    recorder.record(progress(2))
    recorder.record(progress(3))
    log = read(path)
    assert (log.records, log.skipped) == ((progress(1), progress(2), progress(3)), 1)
    lines = path.read_bytes().split(b"\n")
    assert lines[1:] == [tail, *(codec.encode(progress(step)).encode() for step in (2, 3)), b""]


def test_a_line_right_behind_a_torn_one_is_found(path: Path) -> None:
    recorder = Recorder(path)
    recorder.record(progress(1))
    with open(path, "ab") as file:
        file.write(codec.encode(fault('the text {"v":1,"kind":"note"} of a user'))[:-40].encode())
    recorder.record(progress(2))
    log = read(path)
    assert (log.records, log.skipped) == ((progress(1), progress(2)), 1)


def test_lines_of_a_newer_version_are_kept_apart(path: Path) -> None:
    path.write_text('{"v":1,"kind":"evicted"}\n\n{"v":9,"kind":"note"}\n' + codec.encode(progress(1)) + "\n")
    log = read(path)
    assert [one.kind for one in log.unknown] == ["evicted", "note"]
    assert (log.records, log.skipped) == ((progress(1),), 0)


def test_separators_inside_of_texts_end_no_line(path: Path) -> None:
    text = "a\r\nb\u2028c\x85d\x1ee"
    path.write_bytes(codec.encode(Note(1.0, 1.0, 1, text)).encode() + b"\n")
    raw = json.dumps({**json.loads(codec.encode(Note(2.0, 2.0, 1, text)))}, ensure_ascii=False)
    with open(path, "ab") as file:
        file.write(raw.encode() + b"\n")
    assert [note.reason for note in read(path).records if isinstance(note, Note)] == [text, text]


def test_lost_lines_are_counted_and_told_by_the_first_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "later" / "events.jsonl"
    recorder = Recorder(path)
    for step in (1, 2):
        recorder.record(progress(step))
    assert recorder.lost == 2
    path.parent.mkdir()
    for step in (3, 4):
        recorder.record(progress(step))
    note, *others = read(path).records
    assert isinstance(note, Note)
    assert (note.clock, others) == (3.0, [progress(3), progress(4)])
    assert re.search("2.*No such file or directory", note.reason)
    assert recorder.lost == 2


def test_a_disk_that_is_full_within_a_line_tears_that_line_only(path: Path) -> None:
    recorder = Recorder(path)
    recorder.record(progress(1))
    with file_size_limit(path.stat().st_size + 20):
        recorder.record(progress(2))
        recorder.record(progress(3))
    assert recorder.lost == 2
    recorder.record(progress(4))
    log = read(path)
    first, note, last = log.records
    assert (first, last, log.skipped) == (progress(1), progress(4), 1)
    assert isinstance(note, Note)
    assert re.search("2.*File too large", note.reason)


def test_no_log_is_written_into_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        recorder = Recorder(tmp_path / name)
        recorder.record(RunEnded(1.0, 1.0, 1, 1, 0, ""))
        assert recorder.lost == 1
    assert not (tmp_path / "victim").exists()


def test_what_cannot_be_encoded_is_counted(path: Path) -> None:
    recorder = Recorder(path)
    recorder.record(Note(1.0, 1.0, 1, path))  # type: ignore[arg-type]
    recorder.record(progress(1))
    first, second = read(path).records
    assert isinstance(first, Note)
    assert "PosixPath" in first.reason
    assert second == progress(1)


def test_a_log_that_was_removed_begins_anew(path: Path) -> None:
    recorder = Recorder(path)
    recorder.record(progress(1))
    path.unlink()
    recorder.record(progress(2))
    assert read(path).records == (progress(2),)


def test_a_descriptor_closed_by_somebody_else_costs_one_line(path: Path) -> None:
    recorder = Recorder(path)
    recorder.record(progress(1))
    with os.scandir("/proc/self/fd") as found:
        mine = [int(one.name) for one in found if os.path.realpath(one.path) == str(path.resolve())]
    os.close(mine[0])
    recorder.record(progress(2))
    recorder.record(progress(3))
    assert [record for record in read(path).records if isinstance(record, Progress)] == [
        progress(1),
        progress(3),
    ]
    assert recorder.lost == 1


SYNCING = """
import sys
from outlast.observe.policy import codec
from outlast.observe.recorder import Recorder
recorder = Recorder(sys.argv[1])
for line in sys.stdin:
    recorder.record(codec.decode(line))
"""


def test_what_must_outlive_a_power_loss_is_synced_and_nothing_else(path: Path, tmp_path: Path) -> None:
    durable = [
        ActionTaken(1.0, 1.0, 1, "stop", 1, "newest", ""),
        Saved(1.0, 1.0, 1, 1, "x", 1, 0.1, ""),
        RunEnded(1.0, 1.0, 1, 1, 0, ""),
    ]
    lines = "".join(codec.encode(one) + "\n" for one in [progress(1), fault(), *durable])
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-e", "trace=write,fdatasync,fsync", "-o", str(trace)]
    if (
        shutil.which("strace") is None
        or subprocess.run([*strace, "true"], timeout=180, check=False).returncode
    ):
        pytest.skip("strace is not installed, or may not trace")
    command = [*strace, sys.executable, "-c", SYNCING, str(path)]
    subprocess.run(command, input=lines, text=True, timeout=180, check=True)
    calls = [line.split(None, 1)[1] for line in trace.read_text().splitlines() if "(" in line]
    kinds = [call.split("(")[0] for call in calls if '{\\"v\\"' in call or "sync" in call]
    assert kinds == [
        "write",
        "write",
        "write",
        "fdatasync",
        "fsync",
        "write",
        "fdatasync",
        "write",
        "fdatasync",
    ]


APPENDING = """
import os, sys
from outlast.recovery.policy.events import Note
from outlast.observe.recorder import Recorder
recorder = Recorder(sys.argv[1])
sys.stdin.read(1)
for number in range(int(sys.argv[3])):
    recorder.record(Note(0.0, float(number), int(sys.argv[2]), "x" * (number * 37 % 3900)))
sys.exit(recorder.lost)
"""


def test_processes_that_append_together_tear_no_line(path: Path) -> None:
    writers, lines = 4, 400
    running = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDING, str(path), str(writer), str(lines)], stdin=subprocess.PIPE
        )
        for writer in range(writers)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert [process.wait(timeout=180) for process in running] == [0] * writers
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    log = read(path)
    assert (log.skipped, len(log.records)) == (0, writers * lines)
    for writer in range(writers):
        assert [one.clock for one in log.records if one.generation == writer] == list(range(lines))


def test_a_long_line_is_cut_where_it_is_missed_least() -> None:
    record = fault("the reason" * 200, stacks="s" * 100_000, pages="short")
    line = fit(record)
    cut = codec.decode(line.decode())
    assert isinstance(cut, FaultSeen)
    assert len(line) < LINE_BYTES
    assert cut.evidence["stacks"] == "s" * 1024 + CUT
    assert (cut.reason, cut.evidence["pages"]) == ("the reason" * 200, "short")
    fits = fault("r" * 1000, stacks="s" * 2500)
    assert codec.decode(fit(fits).decode()) == fits
    learned = TimeoutsLearned(
        1.0, 1.0, 1, {f"section {number}": float(number) for number in range(500)}, "r" * 5000
    )
    found = codec.decode(fit(learned).decode())
    assert isinstance(found, TimeoutsLearned)
    assert found.timeouts == learned.timeouts, "numbers and names are never cut"


LONG = st.text(max_size=3000) | st.integers(0, 20_000).map(lambda count: "\U0001f525" * count)


@given(st.lists(LONG, max_size=300), LONG)
def test_every_fault_and_every_command_fits(texts: list[str], reason: str) -> None:
    evidence = {f"rank {number}": text for number, text in enumerate(texts)}
    start = RunStarted(1.0, 1.0, 1, "id", "n01", 1, "boot", tuple(texts), 8, reason)
    for record in (fault(reason, **evidence), start):
        line = fit(record)
        assert len(line) < LINE_BYTES
        found = codec.decode(line.decode())
        assert type(found) is type(record)


@given(
    starts=st.lists(st.integers(0, 40), max_size=4),
    count=st.integers(0, 41),
    size=st.integers(0, 400),
    block=st.integers(1, 3000),
)
def test_the_latest_record_of_a_kind_is_found_from_the_end(
    starts: list[int], count: int, size: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.touch()
    recorder = Recorder(path)
    for number in range(count):
        recorder.record(progress(number))
        if number in starts:
            recorder.record(RunStarted(1.0, 1.0, number, "r", "n", 1, "b", ("x" * size, str(number)), 1, ""))
    wanted = max((one for one in starts if one < count), default=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.observe.recorder._BLOCK", block)
        found = latest(path, RunStarted)
    assert (None if found is None else found.command[1]) == (None if wanted is None else str(wanted))


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    ("kinds", "wanted"), [("", None), ("rs", 0), ("srr", None), ("rsrss", 2), ("rsrr", 0)]
)
def test_the_latest_record_in_front_of_one_of_another_kind_is_found(
    kinds: str, wanted: int | None, block: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(path)
    recorder.record(progress(0))
    for number, kind in enumerate(kinds):
        start = RunStarted(1.0, 1.0, number, "r", "n", 1, "b", ("t.py",), 1, "")
        recorder.record(start if kind == "r" else Saved(1.0, 1.0, number, 1, "step-1", 1, 0.1, "due"))
    monkeypatch.setattr("outlast.observe.recorder._BLOCK", block)
    found = latest(path, RunStarted, before=Saved)
    assert (None if found is None else found.generation) == wanted
