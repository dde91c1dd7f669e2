"""Evidence about a hang: stacks of every rank, its process state from the kernel, and its heartbeat page.

A thread of each rank reports its stacks and its position in the order of collectives
(:mod:`outlast.hang.worker.flight_recorder`). If that thread cannot run, because another one holds the
interpreter's lock or it was not started yet, a rank that was forked from the zygote answers STACK_SIGNAL with
its stacks from C code. A rank that does not answer either (stopped, stuck in the kernel, started cold) is
read from outside with py-spy, if installed. The kernel reports states, processor time, input and output, and
the system call of each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from outlast import files
from outlast.hang.policy.diagnosis import SHORTEST, RankEvidence, is_waiting
from outlast.hang.policy.rank_state import Call, Facts, GroupState, doing_of
from outlast.ipc.heartbeat_page import RankHeartbeat
from outlast.ipc.processes import (
    RECORDER_SIGNAL,
    STACK_SIGNAL,
    answer_of,
    children_of,
    cpu_seconds,
    state_of,
    wake_thread,
)
from outlast.launcher.output.file_thread import FileThread
from outlast.stragglers.policy.measuring import SAMPLER

_NS = 1e9
# Numbers of system calls by machine; "file" are those that read, write or sync a descriptor.
_CALLS = {
    "x86_64": {
        "file": (0, 1, 17, 18, 19, 20, 74, 75, 277, 295, 296, 327, 328),
        "socket": (42, 43, 45, 47, 288, 299),
        "sleep": (35, 230),
        "child": (61, 247),
        "poll": (7, 271),
        "select": (23, 270),
    },
    "aarch64": {
        "file": (63, 64, 65, 66, 67, 68, 69, 70, 82, 83, 84, 286, 287),
        "socket": (202, 203, 207, 212, 242, 243),
        "sleep": (101, 115),
        "child": (95, 260),
        "poll": (73,),
        "select": (72,),
    },
}
_HERE = _CALLS.get(platform.machine(), {})
_OPENED = FileThread("files that ranks have open")  # on file systems that may hang
_ASK = 0.1  # seconds
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class Count:
    """Resources that a process has used so far.

    Args:
        ran: seconds on a processor.
        queued: seconds that it waited for one: on a busy host a rank may get little.
        io: bytes read and written.
    """

    ran: float = 0.0
    queued: float = 0.0
    io: int = 0


def count_of(pid: int) -> Count:
    """Return the resources that the process has used so far."""
    return Count(*_processor(pid), _io(pid))


def _processor(pid: int) -> tuple[float, float]:
    """Return seconds on a processor and in its queue, of all threads."""
    ran = queued = 0
    try:
        for thread in set(os.listdir(f"/proc/{pid}/task")) - _samplers(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                words = file.read().split()
                ran, queued = ran + int(words[0]), queued + int(words[1])
    except (OSError, ValueError, IndexError):
        ran = 0
    return (ran / _NS, queued / _NS) if ran else (cpu_seconds(pid), 0.0)


def _samplers(pid: int) -> set[str]:
    """Return the threads of the process that only look at it, and use resources while the script does not."""
    found = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/comm") as file:
                if file.read().strip() == SAMPLER:
                    found.add(thread)
    return found


def _io(pid: int) -> int:
    """Return the bytes that the process has read and written, without those of its sampler."""
    ours = sum(_bytes_in(f"/proc/{pid}/task/{thread}/io") for thread in _samplers(pid))
    return max(0, _bytes_in(f"/proc/{pid}/io") - ours)


def _bytes_in(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    except (OSError, IndexError, ValueError):
        return 0


def worst_state(pid: int) -> str:
    """Return the state of the main thread, or D when any thread waits in the kernel uninterruptibly."""
    state = state_of(pid)
    if state not in ("S", "R"):
        return state
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"D":
                    return "D"
    return state


def is_traced(pid: int) -> bool:
    """Say whether a debugger or tracer is attached to the process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"TracerPid:"):
                return line.split()[1] != b"0"
    return False


def kernel_place(pid: int) -> str:
    """Return the kernel's function in which the main thread sleeps; "" if unknown."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        found = file.read().strip()
        return "" if found == "0" else found
    return ""


def call_of(pid: int) -> Call:
    """Return the system call that the main thread is in, if it is a known one."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
        number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):
        return Call.NONE
    if number in _HERE.get("file", ()):
        return _kind_of(pid, arguments[0])
    if number in _HERE.get("socket", ()):
        return Call.SOCKET
    if number in _HERE.get("child", ()):
        return Call.CHILD
    only_time = number in _HERE.get("select", ()) and arguments[0] == 0
    only_time |= number in _HERE.get("poll", ()) and arguments[1] == 0
    if number in _HERE.get("sleep", ()) or only_time:
        return Call.SLEEP
    return Call.NONE


def _kind_of(pid: int, descriptor: int) -> Call:
    """Return the kind of a descriptor of the process."""
    place = f"/proc/{pid}/fd/{descriptor}"
    try:
        target = os.readlink(place)
    except OSError:
        return Call.NONE
    if target.startswith("socket:"):
        return Call.SOCKET
    if target.startswith("pipe:"):
        return Call.CHILD if any(children_of(pid)) else Call.NONE
    if not target.startswith("/"):
        return Call.NONE
    mode = _OPENED.ask(lambda: _mode_of(place), stat.S_IFREG, _ASK)  # one that does not answer is a file
    return Call.FILE if stat.S_ISREG(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode) else Call.NONE


def _mode_of(place: str) -> int:
    try:
        return os.stat(place).st_mode
    except OSError:
        return 0


def uses_gpu(pid: int) -> bool:
    """Say whether the process has opened a GPU."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(_GPU_FILES):
                    return True
    return False


_MOST_BYTES = 4 << 20  # of an answer or of stacks
_MOST_GROUPS, _MOST_RANKS, _MOST_OPERATIONS = 1024, 1 << 16, 64
_MOST_THREADS, _MOST_FRAMES, _MOST_CHARACTERS = 256, 200, 400  # of stacks that are looked at
_MOST = 1 << 53  # of a rank or of a collective's number
_LOOK = 0.005
_WINDOW = 0.1  # seconds in which processor time and input and output are measured
_ANSWER = 0.4  # seconds from the beginning of a look to the last answer about collectives
_BUSY_SHARE = 0.3
_IDLE_SHARE = 0.05  # of a processor: timers of libraries, gloo's own thread
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
_OUTERMOST = ("in <module>", "...")  # of the main thread, which comes last; a deep stack is cut off
_CAN_CATCH = ("R", "S")


@dataclass(frozen=True)
class Suspect:
    """A living rank to examine: its process, its heartbeat page, its stacks file, its last heartbeat."""

    pid: int
    page: Path
    stacks: Path
    heartbeat: RankHeartbeat


class Looks:
    """Results of earlier looks at the same silence; reset for a rank with a new heartbeat."""

    def __init__(self) -> None:
        self._last: dict[int, _Look] = {}
        self._stopped: frozenset[int] = frozenset()

    def continued(self, first: Mapping[int, str], last: Mapping[int, str]) -> frozenset[int]:
        """Return the ranks that were stopped at the last look or as this one began, and run now.

        Args:
            first: process states as this look began.
            last: process states as it ended.
        """
        were = self._stopped.union(rank for rank, state in first.items() if state == "T")
        self._stopped = frozenset(rank for rank, state in last.items() if state == "T")
        return were.intersection(last) - self._stopped

    def compare(self, rank: int, now: _Look) -> tuple[int, bool]:
        """Return in how many consecutive looks a rank was idle, and whether its stack changed.

        A rank that has entered another collective has done something, however little: it may have come out of
        a pause just now, and the collective that all ranks are in now is not over yet. A look right after
        another one, because the time of another rank is over, proves nothing and is not counted.
        """
        before = self._last.get(rank)
        if before is None or before.heartbeat != now.heartbeat:
            now.steady, now.moved = int(now.quiet), False
        elif now.began < before.ended + SHORTEST:
            return before.steady, before.moved
        else:
            seconds = max(now.began - before.ended, 0.01)
            idle = now.gpu or now.before.ran - before.after.ran < _IDLE_SHARE * seconds
            still = idle and now.before.io == before.after.io and now.quiet and now.is_where(before)
            now.steady = before.steady + 1 if still else 0
            now.moved = before.moved or now.stack != before.stack
        self._last[rank] = now
        return now.steady, now.moved


@dataclass
class _Look:
    """One look at one rank."""

    heartbeat: tuple[int, int, int]
    began: float
    before: Count
    ended: float = 0.0
    after: Count = field(default_factory=Count)
    gpu: bool = False
    quiet: bool = False
    stack: tuple[str, ...] = ()
    waiting: bool = False
    groups: tuple[GroupState, ...] | None = None
    steady: int = 0
    moved: bool = False

    def is_where(self, before: _Look) -> bool:
        """Say whether the rank has entered no other collective since an earlier look, as far as is known."""
        unknown = self.groups is None or before.groups is None
        return self.waiting == before.waiting and (unknown or self.groups == before.groups)


def gather(
    suspects: Mapping[int, Suspect], keep: Callable[[str, str], object], patience: float, looks: Looks
) -> dict[int, RankEvidence]:
    """Examine every rank for at most ``patience`` seconds; ``keep`` gets the name and text of each file."""
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
        look.waiting, look.groups = known.waiting, answer.groups if answer else None
        look.quiet = not known.io and (known.gpu or ran < _IDLE_SHARE) and "D" not in known.states
        look.after, look.ended = count_of(one.pid), time.monotonic()
        steady, moved = looks.compare(rank, look)
        evidence = _evidence(rank, one, states[rank], known)
        evidence = replace(evidence, steady=steady, moved=moved, continued=rank in continued)
        found[rank] = replace(evidence, collectives=look.groups)
    pages = {rank: asdict(one.heartbeat) for rank, one in suspects.items()}
    keep("pages.json", json.dumps(pages, indent=1))
    return found


def _writes_to(suspect: Suspect) -> bool:
    """Say whether the process still holds its stacks file open.

    Its signal handler writes to a descriptor that the script may have reused.
    """
    with contextlib.suppress(OSError):
        stacks = os.path.join(os.path.realpath(suspect.stacks.parent), suspect.stacks.name)
        for name in os.listdir(folder := f"/proc/{suspect.pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}") == stacks:
                    return True
    return False


def _evidence(rank: int, one: Suspect, state: str, known: Facts) -> RankEvidence:
    return RankEvidence(
        rank=rank,
        alive=bool(state) and state not in "ZX",
        process_state=state,
        cpu_busy=known.share > _BUSY_SHARE,
        stack=known.stack,
        step=one.heartbeat.step,
        sections=tuple(name for name, _ in one.heartbeat.sections),
        last_beat=one.heartbeat.beat,
        doing=doing_of(known),
        gpu=known.gpu,
    )


def _first_look(one: Suspect, now: float) -> _Look:
    heartbeat = one.heartbeat
    return _Look((heartbeat.generation, heartbeat.beats, len(heartbeat.sections)), now, count_of(one.pid))


def _facts_before(pid: int) -> Facts:
    """Return the state from the kernel, before any signal is sent to the process."""
    return Facts(
        states=(worst_state(pid),),
        traced=is_traced(pid),
        call=call_of(pid),
        kernel=kernel_place(pid),
        gpu=uses_gpu(pid),
    )


@dataclass(frozen=True)
class _Answer:
    """The answer of a rank's thread: stacks of all threads, and its position in each group."""

    stacks: str
    groups: tuple[GroupState, ...]


def _ask(suspects: Mapping[int, Suspect], states: Mapping[int, str]) -> dict[int, tuple[Path, float]]:
    """Ask each rank that can answer; return the file of the answer, and when it was asked."""
    asked: dict[int, tuple[Path, float]] = {}
    for rank, one in suspects.items():
        if one.heartbeat.listener and states[rank] in _CAN_CATCH:
            now = time.monotonic()
            if wake_thread(one.pid, one.heartbeat.listener, RECORDER_SIGNAL):
                asked[rank] = (Path(answer_of(str(one.page))), now)
    return asked


def _await_answer(path: Path, asked_at: float, began: float) -> _Answer | None:
    """Return a rank's answer; None on a timeout: its interpreter's lock may be held."""
    while True:
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
        ):
            answer = json.loads(files.read_whole(path, _MOST_BYTES))
            if answer["at"] >= asked_at:
                return _Answer(str(answer["stacks"]), tuple(map(_group, answer["groups"][:_MOST_GROUPS])))
        if time.monotonic() > began + _ANSWER:
            return None
        time.sleep(_LOOK)


def _group(told: Mapping[str, Any]) -> GroupState:
    return GroupState(
        group=str(told["group"])[:_MOST_CHARACTERS],
        ranks=tuple(map(_number, told["ranks"][:_MOST_RANKS])),
        entered=_number(told["entered"]),
        pending=_number(told["pending"]),
        operations=tuple(
            (_number(number), str(name)[:_MOST_CHARACTERS])
            for number, name in told["operations"][:_MOST_OPERATIONS]
        ),
    )


def _number(told: object) -> int:
    """Return a number of an answer.

    Raises:
        ValueError: it is none.
    """
    if type(told) is not int or not 0 <= told < _MOST:
        raise ValueError(f"{told!r:.40} is no number of a rank or a collective")
    return told


def _await_answers(
    suspects: Mapping[int, Suspect], sizes: Mapping[int, int], deadline: float
) -> dict[int, str]:
    """Wait until each stack file has the complete main thread, or the deadline."""
    texts: dict[int, str] = {}
    last = dict(sizes)
    pending = set(sizes)
    while pending and time.monotonic() < deadline:
        _wait_until(time.monotonic() + _LOOK)
        for rank in list(pending):
            size = _size(suspects[rank].stacks)
            if size > sizes[rank] and size == last[rank]:
                texts[rank] = _text_after(suspects[rank].stacks, sizes[rank])
                if texts[rank].rstrip().endswith(_OUTERMOST):
                    pending.discard(rank)
            last[rank] = size
    return texts


def _wait_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def _text_after(path: Path, at: int) -> str:
    """Return what a rank has added to its stacks file."""
    try:
        descriptor = files.open_regular(path)
    except OSError:
        return ""
    try:
        return os.pread(descriptor, _MOST_BYTES, at).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _ask_py_spy(pid: int, patience: float) -> str:
    """Return py-spy's dump of a process without stopping it; "" if that fails."""
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


def _spied(line: str) -> str:
    """Return the frame that a line of py-spy names, as ``file:function``; "": it names none."""
    name, _, place = line.rpartition(" (")
    if (
        len(line) > _MOST_CHARACTERS
        or not place.endswith(")")
        or not name[:4].isspace()
        or not name[4:].strip()
    ):
        return ""
    file, colon, number = place[:-1].rpartition(":")
    return f"{file if colon and number.isdecimal() else place[:-1]}:{name.strip()}"


def stacks_of(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the main thread's frames, and those of each other thread, innermost last, as ``file:function``.

    py-spy names the main thread; faulthandler writes the newest thread first and the main thread last,
    whichever answered.
    """
    found: list[tuple[str, ...]] = []
    main: int | None = None
    for thread in re.split(r"(?m)^(?=Thread |Current thread )", text)[-_MOST_THREADS:]:
        told = islice(_FRAME.finditer(thread), _MOST_FRAMES)
        here = [f"{m['file']}:{m['name']}"[:_MOST_CHARACTERS] for m in told]
        spied = [] if here else list(islice(filter(None, map(_spied, thread.splitlines())), _MOST_FRAMES))
        if here or spied:
            if "MainThread" in thread and main is None:
                main = len(found)
            found.append(tuple(reversed(here or spied)))
    if not found:
        return (), ()
    first = found.pop(-1 if main is None else main)
    return first, tuple(found)
