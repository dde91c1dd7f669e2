"""Samples of the thread that trains: how much of its time is computing, loading data, or waiting for ranks.

A thread of the rank wakes up every 5 to 50 ms and looks where the training thread is, by its Python
frames, and how long it ran since the last look, by the kernel's counts for that thread. Nothing is wrapped or
patched, so the script's results cannot change. The counts tell a thread that waits from one that computes; a
thread that is ready to run and has no processor counts as computing, because its rank is slow then.

What counts as waiting for other ranks:

- blocked in a frame of ``torch.distributed`` or of DDP, or in a call of a method ``wait``;
- blocked in ``backward`` itself, where DDP waits for its all-reduce. With CUDA the backward pass runs on
  another thread, so this does not count there.

A script that sleeps, or waits for storage, in its own code is computing, in other words: busy.
"""

from __future__ import annotations

import contextlib
import dis
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from enum import Enum, auto
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from outlast.stragglers.policy.measuring import SAMPLER, Doing

if TYPE_CHECKING:
    from outlast.ipc.heartbeat_page import HeartbeatPage

EVERY = 0.005  # mean seconds between two looks, where the steps are short
SHARE = 0.008  # of a processor that looks may take; a look takes 0.03 ms, on a busy host more
SLOWEST = 0.05
LOOKS_A_STEP = 20
_FRAMES = 64  # innermost frames that are looked at
_GAP = 3.0  # a look that comes later than so many periods says nothing about where the thread ran
_MOST_CODES = 10_000
_COLLECTIVES = (
    *("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py"),
    "/torch/distributed/nn/functional.py",
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


class _Frame(Enum):
    PLAIN = auto()
    LOADER = auto()  # torch.utils.data
    COLLECTIVE = auto()  # calls of torch.distributed that start a collective
    HOOK = auto()  # a communication hook of DDP
    PARALLEL = auto()  # DDP, FSDP and others, which call the model, too
    BACKWARD = auto()


def frame_kind(code: CodeType) -> _Frame:
    """Return what a frame's code tells of its thread."""
    path = code.co_filename.replace(os.sep, "/")
    if "/torch/utils/data/" in path:
        return _Frame.LOADER
    if path.endswith(_COLLECTIVES):
        return _Frame.COLLECTIVE
    if "/torch/distributed/" in path or "/torch/nn/parallel/" in path:
        return _Frame.PARALLEL
    if code.co_name == "_engine_run_backward" and "/torch/autograd/" in path:
        return _Frame.BACKWARD
    if code.co_argcount == 2 and code.co_varnames[1] == "bucket":  # hook(state, bucket), as torch's documents
        return _Frame.HOOK
    return _Frame.PLAIN


class Frames:
    """Reads what a thread does from its frames; remembers what it found of each code object."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, _Frame] = {}
        self._calls: dict[CodeType, frozenset[int]] = {}

    def doing(self, frame: FrameType | None, cuda: bool) -> tuple[Doing, Doing]:
        """Return what a thread does while it runs, and while it is blocked.

        Args:
            frame: the innermost one of the thread.
            cuda: this process uses CUDA.
        """
        innermost, depth = frame, 0
        while frame is not None and depth < _FRAMES:
            kind = self._kind(frame.f_code)
            if kind is _Frame.LOADER:
                return Doing.LOADING, Doing.LOADING
            if kind in (_Frame.COLLECTIVE, _Frame.HOOK):
                waits = kind is _Frame.COLLECTIVE and (depth == 0 or self._waits(innermost))
                return Doing.COMMUNICATING, Doing.WAITING if waits else Doing.COMMUNICATING
            if depth == 0 and (kind is _Frame.PARALLEL or (kind is _Frame.BACKWARD and not cuda)):
                return Doing.COMPUTING, Doing.WAITING
            frame, depth = frame.f_back, depth + 1
        waiting = Doing.WAITING if self._waits(innermost) else Doing.COMPUTING
        return Doing.COMPUTING, waiting

    def _kind(self, code: CodeType) -> _Frame:
        kind = self._kinds.get(code)
        if kind is None:
            if len(self._kinds) >= _MOST_CODES:
                self._kinds.clear()
            kind = self._kinds[code] = frame_kind(code)
        return kind

    def _waits(self, frame: FrameType | None) -> bool:
        """Say whether a frame calls a method ``wait`` that is written in C, as that of a collective."""
        if frame is None or frame.f_code.co_filename.startswith(_STDLIB):
            return False
        code = frame.f_code
        calls = self._calls.get(code)
        if calls is None:
            if len(self._calls) >= _MOST_CODES:
                self._calls.clear()
            calls = self._calls[code] = _calls_of_wait(code)
        return frame.f_lasti in calls


def _calls_of_wait(code: CodeType) -> frozenset[int]:
    """Return the offsets of a frame's latest instruction while it is in a call of a method ``wait``."""
    found: set[int] = set()
    latest, called_at = "", -1
    for one in dis.get_instructions(code):
        if called_at >= 0:
            found.update(range(called_at, one.offset, 2))  # with the caches of the call
            called_at = -1
        if one.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            latest = str(one.argval)
        elif one.opname.startswith("CALL"):
            called_at = one.offset if latest == "wait" else -1
            latest = ""
    return frozenset(found)


class Running:
    """How long a thread of this process has run, or was ready to; seconds.

    Args:
        ident: of the thread, as Python numbers it.
        native: as the kernel does.
    """

    def __init__(self, ident: int, native: int) -> None:
        self._clock = time.pthread_getcpuclockid(ident)
        self._path = f"/proc/self/task/{native}/schedstat"
        if not os.path.exists(self._path):  # a kernel without scheduler statistics
            self._path = ""

    def read(self) -> float:
        """Return the seconds up to now.

        No descriptor is kept: a script may close all that it does not know, and use their numbers.
        """
        if not self._path:
            return time.clock_gettime(self._clock)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            ran, ready, _ = os.read(descriptor, 96).split()
        finally:
            os.close(descriptor)
        return (int(ran) + int(ready)) * 1e-9


class Sampler(threading.Thread):
    """Adds up what the thread that makes it does, by open section.

    Args:
        page: tells which section is open.
    """

    def __init__(self, page: HeartbeatPage) -> None:
        super().__init__(name=SAMPLER, daemon=True)
        self.period = EVERY
        self.looks = 0  # since the last call of take
        self._sums: dict[int, dict[Doing, float]] = {}
        self.failure = ""
        self._page = page
        self._thread = threading.get_ident()
        self._running = Running(self._thread, threading.get_native_id())
        self._frames = Frames()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Start; the thread takes no signal that is the script's."""
        kept = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)

    def close(self) -> None:
        """Stop after the present look."""
        self._closed.set()

    def take(self) -> dict[int, dict[Doing, float]]:
        """Return the seconds since the last call, by slot of the innermost open section; -1: none."""
        taken, self._sums, self.looks = self._sums, {}, 0
        return {slot: dict(spent) for slot, spent in list(taken.items())}

    def run(self) -> None:
        """Look until closed; what fails ends the samples, not the training."""
        try:
            _name_this_thread()
            draws = random.Random()  # its own; with equal pauses looks and steps could fall into step
            before, ran_before = time.monotonic(), self._running.read()
            looks, began = 0, time.thread_time()
            while not self._closed.is_set():
                cost = (time.thread_time() - began) / max(1, looks)
                time.sleep(max(self.period, cost / SHARE) * draws.uniform(0.5, 1.5))
                looks += 1
                now, ran = time.monotonic(), self._running.read()
                self._look(now - before, ran - ran_before)
                before, ran_before = now, ran
        except Exception as error:  # noqa: BLE001 - timing that fails is missing; training is not touched
            self.failure = f"{type(error).__name__}: {error}"

    def _look(self, passed: float, ran: float) -> None:
        frame = sys._current_frames().get(self._thread)
        busy, blocked = self._frames.doing(frame, _uses_cuda())
        del frame  # else it would keep the locals of the script alive
        ran = min(max(ran, 0.0), passed)
        self.looks += 1
        sums = self._sums.setdefault(self._page.innermost, {})
        late = passed > _GAP * self.period and busy is not Doing.LOADING
        running = Doing.COMPUTING if late else busy
        sums[running] = sums.get(running, 0.0) + ran
        sums[blocked] = sums.get(blocked, 0.0) + passed - ran


def _name_this_thread() -> None:
    """Give this thread its name in the kernel: what it reads and computes is no progress of the script."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(SAMPLER)


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())
