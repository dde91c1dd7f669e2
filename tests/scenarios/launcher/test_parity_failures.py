"""What becomes of a launch whose ranks fail: exit codes, restarts, error files, signals, timers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import is_gone, until
from tests.support.parity import LAUNCHERS, SCRIPTS, command, environment, launch, skip_without

pytestmark = [pytest.mark.timeout(420), pytest.mark.long]
SCRIPT = str(SCRIPTS / "parity_note.py")
TWO = ("--nproc-per-node=2", "--standalone", "--monitor-interval=0.1")


@LAUNCHERS
def test_a_failure(launcher: str, tmp_path: Path) -> None:
    """One restart was allowed, and rank 1 fails again and again."""
    (tmp_path / "error.json").write_text("of a run before")
    words = ("--max-restarts=1", "--log-dir=logs", "-r", "3", SCRIPT)
    does = ("rank=1", "says=the root cause", "exit=3", "others_sleep=60")
    variables = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    failed = launch(launcher, tmp_path, *TWO, *words, *does, variables=variables)
    assert failed.code != 0
    assert {note["environment"]["TORCHELASTIC_RESTART_COUNT"] for note in failed.notes()} == {"0", "1"}
    for attempt in range(2):
        logs = failed.logs() / f"attempt_{attempt}"
        assert sorted(path.name for path in logs.iterdir()) == ["0", "1"]
        assert {path.name for path in (logs / "1").iterdir()} == {"stdout.log", "stderr.log", "error.json"}
        message = json.loads((logs / "1" / "error.json").read_text())["message"]["message"]
        assert message == "ValueError: the root cause"
        assert not (logs / "0" / "error.json").exists()
    assert all(is_gone(note["pid"]) for note in failed.notes())
    copied = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (copied["message"], copied["errorCode"]) == ("ValueError: the root cause", 3)
    assert copied["extraInfo"] == {"py_callstack": "a\nb", "timestamp": "7"}


@LAUNCHERS
def test_a_rank_that_a_signal_ends_is_named(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, *TWO, "--max-restarts=0", SCRIPT, "rank=0", "signal=SIGSEGV")
    assert done.code != 0
    assert "SIGSEGV" in done.stderr
    assert all(is_gone(note["pid"]) for note in done.notes())


@LAUNCHERS
def test_an_exception_is_told_with_its_traceback(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, *TWO, "--max-restarts=0", SCRIPT, "rank=1", "raise=the reason")
    assert done.code != 0
    assert done.stderr.count("Traceback (most recent call last)") >= 1
    assert "RuntimeError: the reason" in done.stderr
    if launcher == "outlast":
        assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr


@LAUNCHERS
def test_a_restart_may_succeed(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, *TWO, "--max-restarts=3", SCRIPT, "exit=1", "until_attempt=1")
    assert done.code == 0, done.stderr
    attempts = [note["environment"]["TORCHELASTIC_RESTART_COUNT"] for note in done.notes()]
    assert attempts in (["0", "0", "1", "1"], ["0", "1", "1"])


@LAUNCHERS
def test_a_programs_exit_code_is_its_own(launcher: str, tmp_path: Path) -> None:
    done = launch(
        launcher,
        tmp_path,
        *("--standalone", "--max-restarts=0", SCRIPT, "exit=75", "says=give me back"),
        variables={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")},
    )
    assert done.code == 1, done.stderr
    assert json.loads((tmp_path / "error.json").read_text())["message"]["errorCode"] == 75


@LAUNCHERS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_to_the_launcher_ends_everything(
    launcher: str, number: signal.Signals, tmp_path: Path
) -> None:
    words = command(launcher, tmp_path, *TWO, "--max-restarts=0", SCRIPT, "sleep=120")
    with started(words, tmp_path) as process:
        until(lambda: len(list(tmp_path.glob("note-*.json"))) == 2, "both ranks to start")
        pids = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("note-*.json")]
        process.send_signal(number)
        assert process.wait(60) != 0
        until(lambda: all(map(is_gone, pids)), "the ranks to end")


@contextlib.contextmanager
def started(words: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "console", "wb") as console:
        process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=environment(**variables),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@LAUNCHERS
def test_a_worker_that_does_not_release_its_timer_is_ended(launcher: str, tmp_path: Path) -> None:
    words = ("--max-restarts=0", SCRIPT, "rank=1", "timer=1", "sleep=120", "others_sleep=120")
    timed = launch(launcher, tmp_path, *TWO, *words, variables={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    try:
        (file,) = {note["environment"]["TORCHELASTIC_TIMER_FILE"] for note in timed.notes()}
        assert file.startswith("/")
        assert timed.code != 0
        (pid,) = [note["pid"] for note in timed.notes() if note["environment"]["RANK"] == "1"]
        until(lambda: is_gone(pid), "the rank to end")
        assert not (tmp_path / "slept-1").exists()
    finally:
        for note in timed.notes():  # torchrun ends itself as well, and leaves the other rank behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(note["pid"], signal.SIGKILL)


@LAUNCHERS
def test_a_timer_that_is_released_ends_nobody(launcher: str, tmp_path: Path) -> None:
    variables = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "timers")}
    words = ("--standalone", "--max-restarts=0", SCRIPT, "timer=0.3", "released=1", "sleep=1.5")
    done = launch(launcher, tmp_path, *words, variables=variables)
    assert done.code == 0, done.stderr
    (note,) = done.notes()
    assert note["environment"]["TORCHELASTIC_TIMER_FILE"] == str(tmp_path / "timers")
    assert not (tmp_path / "timers").exists()


@LAUNCHERS
def test_events_are_told_on_the_console(launcher: str, tmp_path: Path) -> None:
    skip_without(launcher, "--event-log-handler")
    words = ("--max-restarts=0", "--event-log-handler=console", SCRIPT, "rank=1", "exit=5")
    done = launch(launcher, tmp_path, *TWO, *words)
    found = [
        json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"name": "torchelastic')
    ]
    worker = [
        (one["metadata"]["global_rank"], one["metadata"]["state"])
        for one in found
        if one["source"] == "WORKER"
    ]
    assert sorted(worker[:2]) == [(0, "START"), (1, "START")]
    assert (1, "FAILED") in worker
    wanted = {"state": "FAILED", "global_rank": 1}
    (event,) = [one for one in found if wanted.items() <= one["metadata"].items()]
    inner = json.loads(event["metadata"]["metadata"])
    assert inner["local_rank"] == [1]
    if launcher == "outlast" or "exit_code" in inner:  # torch 2.9 does not tell it
        assert inner["exit_code"] == [5]
    assert event["metadata"].keys() >= {"run_id", "worker_id", "role", "hostname", "agent_restarts"}


@LAUNCHERS
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--no-python", "/nonexistent"], 66),
        (["--module", "--no-python", "true"], 2),
        (["--nproc-per-node=unknown", SCRIPT], 2),
        (["--nnodes=2:1", SCRIPT], 2),
        (["no-such-script.py"], 66),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else str(value),
)
def test_nonsense_fails(launcher: str, words: list[str], code: int, tmp_path: Path) -> None:
    done = launch(
        launcher,
        tmp_path,
        *words,
        variables={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")},
    )
    assert done.code == (code if launcher == "outlast" else 1), done.stderr
    if launcher == "outlast":
        assert "Traceback" not in done.stderr
        assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].endswith(
            done.stderr.removeprefix("outlast run: ").rstrip("\n")
        )


def test_a_second_launch_of_a_script_in_one_folder_runs_too(tmp_path: Path) -> None:
    words = [*command("outlast", tmp_path, "--no-zygote", "--max-restarts=0")]
    words = [word for word in words if word not in ("--run-dir", str(tmp_path / "run"))]
    (tmp_path / "second").mkdir()
    with started([*words, SCRIPT, "sleep=120"], tmp_path) as first:
        until((tmp_path / "note-0-0.json").exists, "the first launch to start its rank")
        again = subprocess.run(
            [*words, SCRIPT],
            cwd=tmp_path,
            env=environment(PARITY_FOLDER=str(tmp_path / "second")),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert first.poll() is None
        named = subprocess.run(
            [*words, "--run-dir", "outlast-runs/parity_note", SCRIPT],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    assert again.returncode == 0, again.stderr
    assert "outlast-runs/parity_note" in again.stderr
    assert sorted(os.listdir(tmp_path / "outlast-runs")) == ["parity_note", "parity_note-2"]
    assert named.returncode == 64, named.stderr
