"""Evidence about a hang: stacks of every rank, what the kernel says of it, what its page says.

Each rank that was forked from the zygote answers STACK_SIGNAL with its Python stacks, from C
code, so it answers while it waits in a collective or holds the interpreter's lock. A rank that
does not answer (stopped, stuck in the kernel, started cold) is read from outside with py-spy
where that is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outlast.core.diagnosis import RankEvidence
from outlast.transport.processes import STACK_SIGNAL, cpu_seconds, state_of
from outlast.transport.pulse import Pulse

_LOOK = 0.005
_BUSY_SHARE = 0.3
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
_SPY_FRAME = re.compile(r"^\s{4}(?P<name>\S.*?) \((?P<file>[^)]*?)(?::(?P<line>\d+))?\)$")
_OUTERMOST = ("in <module>", "...")  # of the main thread, which comes last; a deep stack is cut off
_CAN_CATCH = ("R", "S")


@dataclass(frozen=True)
class Suspect:
    """A live rank to be looked at: its process, the file its stacks go to, its last pulse."""

    pid: int
    stacks: Path
    pulse: Pulse


def gather(suspects: Mapping[int, Suspect], folder: Path, patience: float) -> dict[int, RankEvidence]:
    """Look at every rank for at most ``patience`` seconds and leave what was found in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    before = {rank: cpu_seconds(one.pid) for rank, one in suspects.items()}
    states = {rank: state_of(one.pid) for rank, one in suspects.items()}
    sizes = {rank: _size(one.stacks) for rank, one in suspects.items()}
    asked = {rank: size for rank, size in sizes.items() if states[rank] in _CAN_CATCH and size >= 0}
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(suspects[rank].pid, STACK_SIGNAL)
    texts = _await_answers(suspects, asked, began + patience * 0.3)
    used = max(time.monotonic() - began, 0.1)
    _wait_until(began + 0.1)
    found: dict[int, RankEvidence] = {}
    for rank, one in suspects.items():
        text = texts.get(rank, "") or _ask_py_spy(one.pid, began + patience - time.monotonic())
        (folder / f"rank-{rank:05d}.txt").write_text(text or f"no stack: process state {states[rank]!r}\n")
        busy = (cpu_seconds(one.pid) - before[rank]) / used > _BUSY_SHARE
        found[rank] = RankEvidence(
            rank=rank,
            alive=bool(states[rank]) and states[rank] not in "ZX",
            process_state=states[rank].upper(),
            cpu_busy=busy,
            stack=frames_of(text),
            step=one.pulse.step,
            sections=tuple(name for name, _ in one.pulse.sections),
            last_beat=one.pulse.beat,
        )
    pages = {rank: asdict(one.pulse) for rank, one in suspects.items()}
    (folder / "pages.json").write_text(json.dumps(pages, indent=1))
    return found


def _await_answers(
    suspects: Mapping[int, Suspect], sizes: Mapping[int, int], deadline: float
) -> dict[int, str]:
    """Wait until each stack file has grown by the whole of the main thread, or the deadline."""
    texts: dict[int, str] = {}
    last = dict(sizes)
    pending = set(sizes)
    while pending and time.monotonic() < deadline:
        _wait_until(time.monotonic() + _LOOK)
        for rank in list(pending):
            size = _size(suspects[rank].stacks)
            if size > sizes[rank] and size == last[rank]:
                with open(suspects[rank].stacks) as file:
                    file.seek(sizes[rank])
                    texts[rank] = file.read()
                if texts[rank].rstrip().endswith(_OUTERMOST):
                    pending.discard(rank)
            last[rank] = size
    return texts


def _wait_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _ask_py_spy(pid: int, patience: float) -> str:
    """Return py-spy's dump of a process without stopping it, nothing where that is not possible."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None or patience <= 0.05:
        return ""
    try:
        answer = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=max(patience, 0.5),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


def frames_of(text: str) -> tuple[str, ...]:
    """Return the main thread's frames, innermost last, as ``file:function``.

    py-spy names it; faulthandler writes the newest thread first and the main thread last, whichever answered.
    """
    frames: list[str] = []
    named = False
    threads = re.split(r"(?m)^(?=Thread |Current thread )", text)
    for thread in threads:
        here = [f"{m['file']}:{m['name']}" for m in _FRAME.finditer(thread)]
        spied = [f"{m['file']}:{m['name']}" for line in thread.splitlines() if (m := _SPY_FRAME.match(line))]
        here = here or spied
        main = "MainThread" in thread
        if here and (main or not named):
            frames, named = here, main
    return tuple(reversed(frames))


def resume(pid: int) -> None:
    """Let a stopped process run again, so that a kill is all it has left to do."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
