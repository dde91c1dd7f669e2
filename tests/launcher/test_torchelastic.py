"""What torchrun's agent does besides starting ranks: timers, the error file of the launcher, binding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.checkpoint.tiers.memory_folder import default_root
from outlast.errors import UsageError
from outlast.launcher.output.logs import failure_of
from outlast.launcher.torchelastic import FileTimers
from outlast.launcher.workers import processes
from outlast.observe.report import report
from outlast.recovery.agent import RootCause, hand_over


def ask(timers: FileTimers, pid: int, expires: float, number: int = signal.SIGKILL, scope: str = "a") -> None:
    request = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expires, "signal": int(number)}
    with open(timers.path, "w") as file:
        file.write(json.dumps(request) + "\n")
    timers.take()


class TestTimers:
    def test_a_worker_whose_time_is_over_gets_the_signal(self, tmp_path: Path) -> None:
        timers = FileTimers(tmp_path / "timers")
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as worker:
            ask(timers, worker.pid, time.time() - 1)
            ((timer, sent),) = timers.expire([worker.pid])
            assert (timer.scope, sent) == ("a", True)
            assert worker.wait(60) == -signal.SIGKILL
        assert timers.deadline(0.0) is None
        timers.close()
        assert not timers.path.exists()

    def test_one_that_is_released_in_time_gets_none(self, tmp_path: Path) -> None:
        timers = FileTimers(tmp_path / "timers")
        ask(timers, os.getpid(), time.time() + 60)
        assert 50 < (timers.deadline(0.0) or 0) < 61
        ask(timers, os.getpid(), -1)
        assert timers.deadline(0.0) is None
        timers.close()

    def test_a_process_that_is_no_worker_is_never_signalled(self, tmp_path: Path) -> None:
        timers = FileTimers(tmp_path / "timers")
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
            ask(timers, stranger.pid, time.time() - 1)
            assert [sent for _, sent in timers.expire([os.getpid()])] == [False]
            assert stranger.poll() is None
            stranger.kill()
        timers.close()

    @pytest.mark.parametrize(
        "line", ["", "no JSON", "[]", "{}", '{"pid": "x"}', '{"pid": 1e99}', "[" * 5000, "x" * 200_000]
    )
    def test_lines_that_make_no_sense_are_passed_over(self, tmp_path: Path, line: str) -> None:
        timers = FileTimers(tmp_path / "timers")
        writer = os.open(timers.path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, line.encode()[:60_000] + b"\n")
        os.close(writer)
        timers.take()
        ask(timers, 1, time.time() + 60)
        assert timers.deadline(0.0) is not None
        timers.close()

    def test_a_file_of_the_user_is_not_removed(self, tmp_path: Path) -> None:
        (tmp_path / "timers").write_text("mine")
        with pytest.raises(UsageError, match="timers"):
            FileTimers(tmp_path / "timers")
        assert (tmp_path / "timers").read_text() == "mine"


class TestErrorFile:
    def test_a_signal_leaves_its_reason_and_the_exit_code(self, tmp_path: Path) -> None:
        cause = RootCause(1, tmp_path / "absent", -9, "rank 0 was terminated by signal 9 (SIGKILL)")
        assert hand_over(str(tmp_path / "error"), cause, "restarts used") == ""
        found = json.loads((tmp_path / "error").read_text())["message"]
        assert (found["message"], found["errorCode"]) == ("rank 0 was terminated by signal 9 (SIGKILL)", -9)
        assert int(found["extraInfo"]["timestamp"]) > 0

    def test_text_of_an_old_format_is_copied_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "rank").write_text('{"message": "a text", "timestamp": 7}')
        hand_over(str(tmp_path / "error"), RootCause(1, tmp_path / "rank", 1, "a reason"), "")
        assert json.loads((tmp_path / "error").read_text()) == {"message": "a text", "timestamp": 7}

    def test_what_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        assert str(tmp_path / "no") in hand_over(str(tmp_path / "no" / "error"), None, "a reason")
        assert hand_over("", None, "a reason") == ""


def test_a_long_message_is_kept_short(tmp_path: Path) -> None:
    text = "x" * 400_000
    message = {"message": f"ValueError: {text}", "extraInfo": {"py_callstack": f"Traceback\n  {text}\n"}}
    (tmp_path / "error").write_text(json.dumps({"message": message}))
    found = failure_of(tmp_path / "error", None)
    assert found is not None
    assert max(map(len, (found.message, found.traceback, found.summary))) < 3000


def test_a_process_and_its_threads_are_bound(tmp_path: Path) -> None:
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
        " print('ready', flush=True); time.sleep(60)"
    )
    cpu = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        processes.bind(process.pid, [cpu])
        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) == 2
        assert all(os.sched_getaffinity(int(thread)) == {cpu} for thread in threads)
        process.kill()
    processes.bind(process.pid, [cpu])  # it has ended: nothing to do


def test_a_report_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UsageError, match="FIFO"):
        report(tmp_path, as_json=False)


@pytest.mark.parametrize("run_id", ["../../../tmp/x", "x" * 300, "a/b", "\n"])
def test_a_run_id_does_not_leave_the_folder_of_the_memory_tier(tmp_path: Path, run_id: str) -> None:
    found = default_root(run_id, tmp_path / "run", base=str(tmp_path))
    assert found.parent == tmp_path
    found.mkdir()


def test_an_error_file_that_is_a_fifo_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "error"
    os.mkfifo(fifo)
    trouble = hand_over(str(fifo), None, "restarts used")
    assert f"TORCHELASTIC_ERROR_FILE={fifo}" in trouble
