"""Run kinds of pauses and hangs (bench/hang_kinds.py), one launcher each, and check what it reported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hang_kinds import Kind, hangs, pauses
from peers import figures

JOB = Path(__file__).resolve().parent / "hang_kinds.py"
BUSY = [sys.executable, "-c", "while True: pass"]
LOOK = 0.05
PATIENCE = 240.0
# The same for all kinds: the only timeout that is fixed is that of a section which one kind opens, and the
# patience with ranks that compute is to a pause what 300 s are to one of a minute or two.
OPTIONS = (
    "--max-restarts=0",
    "--ft-rank-section-timeouts=evaluation:120",
)


def choose(text: str) -> dict[str, Kind]:
    """Return the chosen kinds: all, pauses, hangs, or names separated by commas.

    Raises:
        SystemExit: a name is unknown.
    """
    every = {**pauses(), **hangs()}
    named = {"all": every, "pauses": pauses(), "hangs": hangs()}.get(text)
    if named is not None:
        return named
    unknown = sorted(set(text.split(",")) - set(every))
    if unknown:
        raise SystemExit(f"no kind is called {', '.join(unknown)}; there are {', '.join(every)}")
    return {name: every[name] for name in text.split(",")}


def play_all(kinds: dict[str, Kind], seconds: float, side_by_side: int, lines: figures.Lines) -> int:
    """Run kinds, several at a time; return how many had a wrong result."""
    alone = [name for name in kinds if kinds[name].outside in ("load", "freeze")]
    together = [name for name in kinds if name not in alone]
    records: list[dict[str, object]] = []

    def played(record: dict[str, object]) -> None:
        records.append(record)
        lines.write(record)
        figures.say(_line(record))

    with ThreadPoolExecutor(side_by_side) as pool:
        for record in pool.map(lambda name: play(name, kinds[name], seconds), together):
            played(record)
    for name in alone:
        played(play(name, kinds[name], seconds))
    wrong = sum(not (record["right"] or record.get("skipped")) for record in records)
    lines.write(summary(records))
    figures.say(json.dumps(summary(records)))
    return wrong


def _line(record: dict[str, object]) -> str:
    judged = "right" if record["right"] else "skipped" if record.get("skipped") else "WRONG"
    return f"{judged:7} {record['kind']}: {record['said']}"


def summary(records: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the numbers of pauses convicted, hangs found and culprits named."""
    real = [one for one in records if one["hang"]]
    healthy = [one for one in records if not one["hang"] and not one.get("skipped")]
    return {
        "record": "summary",
        "pauses": len(healthy),
        "false_convictions": sum(bool(one["convicted"]) for one in healthy),
        "pauses_that_failed_otherwise": sum(not one["right"] and not one["convicted"] for one in healthy),
        "skipped": sum(bool(one.get("skipped")) for one in records),
        "hangs": len(real),
        "found": sum(bool(one["convicted"]) for one in real),
        "culprit_right": sum(bool(one["right"]) for one in real),
        "loadavg": os.getloadavg(),
    }


def play(name: str, kind: Kind, seconds: float) -> dict[str, object]:
    """Run one kind; return its result."""
    with tempfile.TemporaryDirectory(prefix=f"hang-{name}-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        with contextlib.ExitStack() as stack:
            if kind.outside == "freeze" and not _mount(folder, stack):
                return {**_said(name, kind), "skipped": True, "said": "no loop device can be mounted here"}
            if kind.outside == "gdb" and shutil.which("gdb") is None:
                return {**_said(name, kind), "skipped": True, "said": "no gdb"}
            command = [sys.executable, "-m", "outlast", "run", f"--nproc-per-node={kind.ranks}"]
            patience = f"--ft-busy-rank-timeout={4 * seconds:g}"
            command += [*OPTIONS, patience, f"--run-dir={folder / 'run'}", str(JOB), name, str(seconds), text]
            with open(folder / "output.txt", "wb") as output:
                job = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            stack.callback(_end, job)
            return _watch(job, folder, name, kind, seconds)


def _said(name: str, kind: Kind) -> dict[str, object]:
    return {"record": "kind", "kind": name, "hang": kind.hang, "right": False, "convicted": False, "said": ""}


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.send_signal(signal.SIGCONT)
        job.terminate()
    try:
        job.wait(30)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _watch(
    job: subprocess.Popen[bytes], folder: Path, name: str, kind: Kind, seconds: float
) -> dict[str, object]:
    deadline = time.monotonic() + PATIENCE + 20 * seconds
    played = 0.0
    while job.poll() is None and time.monotonic() < deadline:
        if not played and (folder / "playing").exists():
            played = time.monotonic()
            if kind.outside:
                with _done_to_it(job.pid, folder, kind.outside, seconds):
                    (folder / "go").touch()
        if any(one["kind"] == "fault_seen" for one in _records(folder)):
            break
        time.sleep(LOOK)
    faults = [one for one in _records(folder) if one["kind"] == "fault_seen"]
    record = {**_said(name, kind), "loadavg": os.getloadavg()[0]}
    if not faults:
        output = (folder / "output.txt").read_text(errors="replace")
        record["right"] = not kind.hang and job.poll() == 0
        notes = [one["reason"] for one in _records(folder) if "not taken for hung" in one.get("reason", "")]
        record["said"] = notes[-1] if notes else "nothing" if record["right"] else output[-600:]
        return record
    fault = faults[0]
    hung = fault["fault"] == "hang"
    return record | {
        "convicted": hung,
        "named": fault["rank"],
        "right": kind.hang and hung and fault["rank"] in kind.culprits,
        "basis": fault["evidence"].get("found by", ""),
        "found_after": time.monotonic() - played if played else None,
        "said": fault["reason"],
    }


def _records(folder: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / "run" / "events.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _ranks(folder: Path) -> list[int]:
    started = [one for one in _records(folder) if one["kind"] == "generation_started"]
    return list(started[-1]["pids"])  # type: ignore[call-overload]


@contextlib.contextmanager
def _done_to_it(agent: int, folder: Path, what: str, seconds: float) -> Iterator[None]:
    """Act on the job for some seconds, until after it continues."""
    if what == "section":
        yield
        return
    if what == "load":
        loops = [subprocess.Popen(BUSY) for _ in range(4 * (os.cpu_count() or 1))]
        yield
        time.sleep(2 * seconds)
        for loop in loops:
            loop.kill()
            loop.wait()
        return
    if what == "freeze":
        disk = str(folder / "disk")
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        yield
        time.sleep(seconds)
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
        return
    ranks = _ranks(folder)
    if what == "gdb":
        held = ["gdb", "-batch", "-nx", "-ex", f"shell sleep {seconds}", "-ex", "detach", "-p", str(ranks[1])]
        with subprocess.Popen(
            held, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        ):
            yield
        return
    if what == "limit":
        yield
        _limit(ranks[1], seconds)
        return
    stopped = {
        "stop": ranks[1:2],
        "suspend-ranks": ranks,
        "suspend": [agent, *ranks],
        "saver": _savers(agent) if what == "saver" else [],
    }[what]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    yield
    if what == "stop":
        return
    time.sleep(seconds)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


def _limit(pid: int, seconds: float) -> None:
    """Let a process run 15 % of the time, by the signals of cpulimit(1)."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it was found hung
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.085)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.015)


def _savers(agent: int) -> list[int]:
    found = []
    for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
        if b"outlast.checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(child)
    return found


def _mount(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Mount a small file system that can be frozen; say whether that is possible here."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)]):
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return False
        except FileNotFoundError:
            return False
    stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
    stack.callback(subprocess.run, ["fsfreeze", "--unfreeze", str(disk)], capture_output=True, check=False)
    return True
