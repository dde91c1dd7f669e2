"""Evidence about a hang: stacks of every rank, what the kernel says of it, what its page says.

A thread of each rank tells its stacks and how far it is in the order of collectives
(:mod:`outlast.worker.recorder`). Where it cannot, since another thread holds the interpreter's lock, or
since it is not there yet, a rank that was forked from the zygote answers STACK_SIGNAL with its stacks from
C code. A rank that does not answer either (stopped, stuck in the kernel, started cold) is read from outside
with py-spy where that is installed.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outlast.agent.facts import Count, call_of, count_of, is_traced, kernel_place, uses_gpu, worst_state
from outlast.core.collectives import GroupState
from outlast.core.diagnosis import RankEvidence, is_waiting
from outlast.core.doing import Facts, doing_of
from outlast.transport.processes import RECORDER_SIGNAL, STACK_SIGNAL, answer_of, state_of, wake_thread
from outlast.transport.pulse import Pulse

_LOOK = 0.005
_WINDOW = 0.1  # seconds in which processor time and input and output are measured
_ANSWER = 0.4  # seconds from the beginning of a look to the last answer about collectives
_BUSY_SHARE = 0.3
_IDLE_SHARE = 0.05  # of a processor: timers of libraries, gloo's own thread
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
_SPY_FRAME = re.compile(r"^\s{4}(?P<name>\S.*?) \((?P<file>[^)]*?)(?::(?P<line>\d+))?\)$")
_OUTERMOST = ("in <module>", "...")  # of the main thread, which comes last; a deep stack is cut off
_CAN_CATCH = ("R", "S")


@dataclass(frozen=True)
class Suspect:
    """A live rank to be looked at: its process, its pulse page, the file its stacks go to, its last pulse."""

    pid: int
    page: Path
    stacks: Path
    pulse: Pulse


class Looks:
    """What earlier looks at the same silence found; a rank that has pulsed since begins anew."""

    def __init__(self) -> None:
        self._last: dict[int, _Look] = {}
        self._stopped: frozenset[int] = frozenset()

    def continued(self, first: Mapping[int, str], last: Mapping[int, str]) -> frozenset[int]:
        """Return the ranks that were stopped, in the look before or as this one began, and run now.

        Args:
            first: process states as this look began.
            last: process states as it ended.
        """
        were = self._stopped.union(rank for rank, state in first.items() if state == "T")
        self._stopped = frozenset(rank for rank, state in last.items() if state == "T")
        return were.intersection(last) - self._stopped

    def compare(self, rank: int, now: _Look) -> tuple[int, bool]:
        """Return how often in a row a rank did nothing, this look included, and whether its stack moved."""
        before = self._last.get(rank)
        if before is None or before.pulse != now.pulse:
            now.steady, now.moved = int(now.quiet), False
        else:
            seconds = max(now.began - before.ended, 0.01)
            idle = now.gpu or now.before.ran - before.after.ran < _IDLE_SHARE * seconds
            still = idle and now.before.io == before.after.io and now.quiet
            now.steady = before.steady + 1 if still else 0
            now.moved = before.moved or now.stack != before.stack
        self._last[rank] = now
        return now.steady, now.moved


@dataclass
class _Look:
    """One look at one rank."""

    pulse: tuple[int, int, int]
    began: float
    before: Count
    ended: float = 0.0
    after: Count = field(default_factory=Count)
    gpu: bool = False
    quiet: bool = False
    stack: tuple[str, ...] = ()
    steady: int = 0
    moved: bool = False


def gather(
    suspects: Mapping[int, Suspect], keep: Callable[[str, str], object], patience: float, looks: Looks
) -> dict[int, RankEvidence]:
    """Look at every rank for at most ``patience`` seconds; ``keep`` gets the name and text of each file."""
    began = time.monotonic()
    seen = {rank: _first_look(one, began) for rank, one in suspects.items()}
    facts = {rank: _facts_before(one.pid) for rank, one in suspects.items()}
    states = {rank: state_of(one.pid) for rank, one in suspects.items()}
    _wait_until(began + _WINDOW)  # before anybody is asked: an answer costs processor time, too
    used = {rank: count_of(one.pid) for rank, one in suspects.items()}
    window = time.monotonic() - began
    asked_first = _ask(suspects, states)
    answers = {rank: _await_answer(path, at, began) for rank, (path, at) in asked_first.items()}
    sizes = {rank: _size(one.stacks) for rank, one in suspects.items() if answers.get(rank) is None}
    asked = {
        rank: size
        for rank, size in sizes.items()
        if states[rank] in _CAN_CATCH and size >= 0 and _writes_to(suspects[rank])
    }
    for rank in asked if patience else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(suspects[rank].pid, STACK_SIGNAL)
    texts = _await_answers(suspects, asked, time.monotonic() + patience * 0.3)
    states_after = {rank: worst_state(one.pid) for rank, one in suspects.items()}
    continued = looks.continued(states, states_after)
    found: dict[int, RankEvidence] = {}
    for rank, one in suspects.items():
        answer = answers.get(rank)
        text = (
            (answer.stacks if answer else "")
            or texts.get(rank, "")
            or _ask_py_spy(one.pid, began + patience - time.monotonic())
        )
        keep(f"rank-{rank:05d}.txt", text or f"no stack: process state {states[rank]!r}\n")
        stack, others = stacks_of(text)
        before, after = seen[rank].before, used[rank]
        ran = (after.ran - before.ran) / window
        share = ran + (after.queued - before.queued) / window
        known = replace(
            facts[rank],
            states=(*facts[rank].states, states_after[rank]),
            share=share,
            io=after.io - before.io,
            stack=stack,
            others=others,
            waiting=is_waiting(stack),
        )
        look = seen[rank]
        look.stack, look.gpu = stack, known.gpu
        look.quiet = not known.io and (known.gpu or ran < _IDLE_SHARE) and "D" not in known.states
        look.after, look.ended = count_of(one.pid), time.monotonic()
        steady, moved = looks.compare(rank, look)
        evidence = _evidence(rank, one, states[rank], known)
        evidence = replace(evidence, steady=steady, moved=moved, continued=rank in continued)
        found[rank] = replace(evidence, collectives=answer.groups if answer else None)
    pages = {rank: asdict(one.pulse) for rank, one in suspects.items()}
    keep("pages.json", json.dumps(pages, indent=1))
    return found


def _writes_to(suspect: Suspect) -> bool:
    """Say whether the process still holds its stacks file open.

    Its signal handler writes to a number, which may have become a file of the script's.
    """
    with contextlib.suppress(OSError):
        stacks = os.stat(suspect.stacks)
        for name in os.listdir(folder := f"/proc/{suspect.pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{name}"), stacks):
                    return True
    return False


def _evidence(rank: int, one: Suspect, state: str, known: Facts) -> RankEvidence:
    return RankEvidence(
        rank=rank,
        alive=bool(state) and state not in "ZX",
        process_state=state,
        cpu_busy=known.share > _BUSY_SHARE,
        stack=known.stack,
        step=one.pulse.step,
        sections=tuple(name for name, _ in one.pulse.sections),
        last_beat=one.pulse.beat,
        doing=doing_of(known),
        gpu=known.gpu,
    )


def _first_look(one: Suspect, now: float) -> _Look:
    pulse = one.pulse
    return _Look((pulse.generation, pulse.beats, len(pulse.sections)), now, count_of(one.pid))


def _facts_before(pid: int) -> Facts:
    """Return what the kernel says before the process is asked for anything."""
    return Facts(
        states=(worst_state(pid),),
        traced=is_traced(pid),
        call=call_of(pid),
        kernel=kernel_place(pid),
        gpu=uses_gpu(pid),
    )


@dataclass(frozen=True)
class _Answer:
    """What a rank's own thread said: stacks of all threads, and how far it is in each group."""

    stacks: str
    groups: tuple[GroupState, ...]


def _ask(suspects: Mapping[int, Suspect], states: Mapping[int, str]) -> dict[int, tuple[Path, float]]:
    """Ask each rank that can answer; return the file of the answer, and when it was asked."""
    asked: dict[int, tuple[Path, float]] = {}
    for rank, one in suspects.items():
        if one.pulse.listener and states[rank] in _CAN_CATCH:
            now = time.monotonic()
            if wake_thread(one.pid, one.pulse.listener, RECORDER_SIGNAL):
                asked[rank] = (Path(answer_of(str(one.page))), now)
    return asked


def _await_answer(path: Path, asked_at: float, began: float) -> _Answer | None:
    """Return a rank's answer; None when there is none in time: its interpreter's lock may be held."""
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            answer = json.loads(path.read_text())
            if answer["at"] >= asked_at:
                return _Answer(str(answer["stacks"]), tuple(map(_group, answer["groups"])))
        if time.monotonic() > began + _ANSWER:
            return None
        time.sleep(_LOOK)


def _group(told: Mapping[str, Any]) -> GroupState:
    return GroupState(
        group=str(told["group"]),
        ranks=tuple(map(int, told["ranks"])),
        entered=int(told["entered"]),
        pending=int(told["pending"]),
        operations=tuple((int(number), str(name)) for number, name in told["operations"]),
    )


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
    """Return the main thread's frames, innermost last, as ``file:function``."""
    return stacks_of(text)[0]


def stacks_of(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the main thread's frames, and those of each other thread, innermost last.

    py-spy names the main thread; faulthandler writes the newest thread first and the main thread last,
    whichever answered.
    """
    found: list[tuple[str, ...]] = []
    main: int | None = None
    for thread in re.split(r"(?m)^(?=Thread |Current thread )", text):
        here = [f"{m['file']}:{m['name']}" for m in _FRAME.finditer(thread)]
        spied = [f"{m['file']}:{m['name']}" for line in thread.splitlines() if (m := _SPY_FRAME.match(line))]
        if here or spied:
            if "MainThread" in thread and main is None:
                main = len(found)
            found.append(tuple(reversed(here or spied)))
    if not found:
        return (), ()
    first = found.pop(-1 if main is None else main)
    return first, tuple(found)


def resume(pid: int) -> None:
    """Let a stopped process run again, so that a kill is all it has left to do."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
