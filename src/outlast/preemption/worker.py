"""A process's part in giving its job back: signals, end times and notice files in, saves and the exit out.

A thread takes the signals and the time, so that a deadline is kept whatever the main thread does. It works
until the process ends, also when the state is durable: a script that hangs on its way out is ended. Nothing
here imports torch, so it can be in place before torch is.

A signal is written into a pipe by the interpreter's own C handler (``signal.set_wakeup_fd``), so the thread
also hears it while the main thread is in a collective that never returns. The handler that was there before
is called as well, except for Python's own for SIGINT: KeyboardInterrupt would end the rank before it has
saved. Processes that this one forks get the earlier handlers back; those of multiprocessing, such as the
workers of a DataLoader, ignore signals that their parent did not send.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import datetime
import json
import logging
import math
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import util
from types import FrameType
from typing import Any, NoReturn, Protocol

from outlast import files, settings
from outlast.config import ASSUMED_LEAD, PreemptionOptions
from outlast.errors import ExitCode, UsageError
from outlast.hang.worker import heartbeat
from outlast.ipc.control import Pipe, file_of, still_ours
from outlast.ipc.exchange import SystemClock
from outlast.ports import Clock
from outlast.preemption.policy import (
    Broken,
    Decision,
    Event,
    Notice,
    Order,
    Preempted,
    Signal,
    Voted,
)

_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}  # the system call, which libc does not offer
_SIGINFO_BYTES = 128
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_ENDS_A_CALL = signal.SIGRTMAX  # glibc and the JVM take the lowest of the realtime signals
_MOST = 4096  # bytes of a pipe that are read at a time


class Handlers:
    """Takes signals; to be installed once a process, on its main thread.

    Args:
        names: of the signals.
        shield: let child processes of multiprocessing live through them.
    """

    def __init__(self, names: Iterable[str], shield: bool) -> None:
        self.numbers = frozenset(signal.Signals[name].value for name in names)
        self._shield = shield
        self._signals = Pipe()
        # Apart from it: what another thread takes from it must not let the listener sleep on.
        self._alarm = Pipe()
        self._missed: collections.deque[int] = collections.deque()  # while the script had closed the pipe
        self._before: dict[int, Any] = {}
        self._wakeup = self._wakeup_before = -1
        self._on_main = _PENDING(self._wake_by_new_pipe)
        self._wakeup_file: tuple[int, int] | None = None
        self._owner = os.getpid()

    def install(self) -> None:
        """Take the place of the handlers that are there.

        Raises:
            ValueError: this is not the main thread.
        """
        self._before = {number: signal.signal(number, self._take) for number in sorted(self.numbers)}
        self._wakeup = self._signals.writer
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._wakeup_file = file_of(self._wakeup_before)
        os.register_at_fork(after_in_child=self._leave_to_child)
        if self._shield:
            util.register_after_fork(self, Handlers._shield_child)

    def release(self) -> None:
        """Put the old handlers back, where nobody else has replaced these meanwhile."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before)
        self._before = {}
        theirs = file_of(self._wakeup_before) if self._wakeup_before >= 0 else None
        before = self._wakeup_before if theirs is not None and theirs == self._wakeup_file else -1
        found = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        if found not in (self._wakeup, -1) and file_of(found) is not None:
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    def ignore(self) -> None:
        """Heed nothing any more; a process that ends would get back the default actions, which kill it."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._signals.write(bytes((number,))):  # asyncio's wakeup descriptor may be in its place
            self._missed.append(number)
            self.wake()
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def wake(self) -> None:
        """End the wait in :meth:`wait`, or the next one; from any thread."""
        self._alarm.write(b"\0")

    def wait(self, seconds: float) -> list[int]:
        """Return the signals that have arrived; after so many seconds, or when anything wakes it.

        Only one thread waits.
        """
        signals, alarm = self._signals, self._alarm
        with still_ours(signals.reader, signals.file) as one, still_ours(alarm.reader, alarm.file) as other:
            if one is not None and other is not None and signals.whole and alarm.whole:
                files.readable([one, other], seconds)  # also ends where a writing end is closed
        alarm.read(_MOST)
        if not (signals.whole and alarm.whole):
            self._renew()
        return self.taken()

    def _renew(self) -> None:
        """Make pipes in the place of those that the script has closed."""
        old = (self._signals, self._alarm)
        try:
            fresh = Pipe(), Pipe()
        except OSError:  # no descriptor is left now
            threading.Event().wait(_TURN)
            return
        self._signals, self._alarm = fresh
        for pipe in old:
            pipe.close()
        ctypes.pythonapi.Py_AddPendingCall(self._on_main, None)

    def _wake_by_new_pipe(self, _: int | None) -> int:
        """On the main thread, where alone it may be done: let the interpreter write into the new pipe."""
        with contextlib.suppress(ValueError, OSError):
            if self._before:
                found = signal.set_wakeup_fd(self._signals.writer, warn_on_full_buffer=False)
                if found not in (self._wakeup, -1):  # of a loop of asyncio
                    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
                self._wakeup = self._signals.writer
        return 0

    def taken(self) -> list[int]:
        """Return the signals that have arrived and that nobody has taken yet; from any thread."""
        found = self._signals.read(_MOST)
        with contextlib.suppress(IndexError):
            while True:
                found += bytes((self._missed.popleft(),))
        if found and self._wakeup_before >= 0:
            with still_ours(self._wakeup_before, self._wakeup_file) as own, contextlib.suppress(OSError):
                if own is not None:
                    os.write(own, found)
        return [number for number in found if number in self.numbers]

    def _leave_to_child(self) -> None:
        """In a forked child: be as if there were nothing of all this."""
        if os.getpid() == self._owner or not self._before:
            return
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _shield_child(self) -> None:
        """In a child of multiprocessing: heed a signal only if the parent has sent it.

        The signals stay blocked in all threads, so handlers that are set later, as torch's workers do, change
        nothing; a thread takes them. Another signal then ends the system call in which the main thread may
        be: Python runs handlers nowhere else.
        """
        if os.getpid() == self._owner or not self._before:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        if signal.getsignal(_ENDS_A_CALL) is signal.SIG_DFL:
            signal.signal(_ENDS_A_CALL, lambda *_: None)
        parent, main = os.getppid(), threading.get_ident()
        threading.Thread(
            target=_heed_parent, args=(self.numbers, parent, main), name="signals", daemon=True
        ).start()


def _heed_parent(numbers: frozenset[int], parent: int, main: int) -> None:
    while True:
        found = signal.sigwaitinfo(numbers)
        if found.si_pid == parent:  # it ends this process, as multiprocessing does
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {found.si_signo})
            _repeat(found)
            if callable(signal.getsignal(_ENDS_A_CALL)):
                signal.pthread_kill(main, _ENDS_A_CALL)


def _repeat(found: signal.struct_siginfo) -> None:
    """Send a signal to this thread as its sender did: torch's workers end quietly only by their parent's."""
    number = _TGSIGQUEUEINFO.get(os.uname().machine)
    fields = (found.si_signo, found.si_errno, found.si_code, found.si_pid, found.si_uid)
    info = struct.pack("3i4x2i", *fields).ljust(_SIGINFO_BYTES, b"\0")
    if number is None or ctypes.CDLL(None).syscall(
        number, os.getpid(), threading.get_native_id(), found.si_signo, info
    ):
        os.kill(os.getpid(), found.si_signo)


def scheduled_end(job_end_time: int, clock: Clock) -> float:
    """Return when the scheduler ends the job, by the monotonic clock; infinite: it did not say.

    Args:
        job_end_time: Slurm's SLURM_JOB_END_TIME, seconds since the epoch; 0: not set.
        clock: of this host.
    """
    return clock.monotonic() + job_end_time - clock.wall() if job_end_time else math.inf


def read_notice(path: str, lead: float, clock: Clock) -> Notice | None:
    """Return the notice that a file is, None while it is not there.

    Args:
        path: of the file. Its content may be empty, a number of seconds that are left, or JSON with a
            ``time`` like AWS' spot/instance-action; anything else, and what cannot be read, counts as empty.
        lead: seconds that are left where it does not say.
        clock: of this host.
    """
    try:
        made, text = os.stat(path).st_mtime, ""
    except OSError:
        return None
    with (
        contextlib.suppress(OSError),
        open(files.open_regular(path, follow=True), encoding="utf-8", errors="replace") as file,
    ):
        text = file.read(4096).strip()
    now, wall = clock.monotonic(), clock.wall()
    left = _left(text, wall)
    return Notice(f"notice file {path}", now + (lead - max(0.0, wall - made) if left is None else left))


def _left(text: str, wall: float) -> float | None:
    try:
        said = json.loads(text)
        if isinstance(said, dict):
            at = datetime.datetime.fromisoformat(str(said["time"]).replace("Z", "+00:00"))
            return at.timestamp() - wall
        left = float(said)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return max(0.0, left) if math.isfinite(left) else None


_LOG = logging.getLogger("outlast")
_TURN = 0.1  # seconds between two looks once there is something to look for
_FILE_TURN = 1.0  # AWS asks for five, and gives two minutes
_IDLE = 60.0
_CHILD_KILLED = "killed by signal"  # torch's words for a worker of a DataLoader
_SKEW = 1.0  # seconds between a scheduler's first signal and its last
_FLUSH_PATIENCE = 0.5  # seconds for what the script printed, when the process is ended


class Saving(Protocol):
    """What a session that can save hands over."""

    @property
    def tiers(self) -> Sequence[str]:
        """Where a save can go, from the tier that outlives most to the quickest."""
        ...

    @property
    def busy(self) -> bool:
        """Whether news are expected."""
        ...

    def news(self, now: float) -> Sequence[Event]:
        """Return what has become of saves since the last call."""
        ...

    def flush(self) -> None:
        """Bring what is staged to disk without the other ranks."""
        ...

    @property
    def preempted(self) -> Callable[[], None]:
        """What is called when this process is told to end."""
        ...

    def tell(self, text: str) -> None:
        """Write a line into the event log."""
        ...


class PreemptionHandler:
    """Hears notices, asks the decider and does what it says.

    Args:
        options: of the user.
        context: what the environment says about the job.
    """

    def __init__(self, options: PreemptionOptions, context: settings.WorkerContext) -> None:
        self.options = options
        self.exit_code = int(ExitCode.OK)
        self.first_signal = 0
        self.asked = False
        self._pid = os.getpid()
        self._rank = context.rank
        self._heartbeat_path = context.heartbeat_path
        self._lead = float(context.grace_period or options.preempt_time or ASSUMED_LEAD)
        self._granted = float(context.grace_period)
        self._clock = SystemClock()
        self._ends = scheduled_end(context.job_end_time, self._clock)
        self._handlers = Handlers(options.exit_signals, options.enable_exit_handler_for_data_loader)
        self._saving: Saving | None = None
        self._decider = Preempted(options, {"local": math.inf}, self._granted)
        self._heard: list[tuple[Event, float]] = []
        self._lock = threading.RLock()
        # Not SimpleQueue: a signal at the very end of a timeout makes it wait for ever (CPython 3.11).
        self._orders: queue.Queue[Decision] = queue.Queue()
        self._cooperates = self._flushes = False
        self._over = math.inf
        self._released = self._failed = False

    def install(self) -> None:
        """Put the handlers in place and begin to listen; on the main thread."""
        self._handlers.install()
        atexit.register(self._leave)
        threading.Thread(target=self._listen, name="preemption", daemon=True).start()

    def release(self) -> None:
        """Put the old handlers back, unless a notice has come: then the process ends by its deadline."""
        self.look()
        if self.asked or self.exit_code:
            return
        self._released = True
        self._handlers.release()
        self._handlers.wake()

    def _leave(self) -> None:
        """Let a signal that comes again not change the exit code; at exit, on the main thread."""
        if self.listens and (self.asked or self.exit_code):
            self._handlers.ignore()

    @property
    def listens(self) -> bool:
        """Whether signals are heeded in this process; not in one that it forked."""
        return not self._released and self._pid == os.getpid()

    def left(self, now: float) -> float:
        """Return the seconds until the job is expected to end; infinite: nobody asked for it."""
        return self._decider.expected - now if self.asked else math.inf

    def limit(self, now: float) -> float:
        """Return the seconds until this process must have exited; infinite: there is no limit."""
        return self._decider.deadline - now if self.asked else math.inf

    def equip(self, saving: Saving) -> None:
        """Take over what saves; notices that came before are not forgotten."""
        with self._lock:
            self._saving = saving
            self._decider = Preempted(self.options, dict.fromkeys(saving.tiers, math.inf), self._granted)
            for event, at in self._heard:
                self._decider.handle(event, at)
        self._announce()

    def unequip(self) -> None:
        """Let go of what saves: its session is over."""
        with self._lock:
            self._saving = None

    def wake(self) -> None:
        """Look for news now."""
        self._handlers.wake()

    def look(self) -> None:
        """Take what has arrived; from any thread."""
        with self._lock:
            if self._took(self._handlers.taken()):
                self.wake()  # the listener must not sleep past the deadline

    def _took(self, numbers: Sequence[int]) -> bool:
        for number in numbers:
            self.first_signal = self.first_signal or number
            self._handle(Signal(number, self._rank))
        return bool(numbers)

    def agreed(self, voted: Voted) -> Iterator[Decision]:
        """Yield the saves that all ranks make after the step of a vote, until the state is durable."""
        with self._lock:
            self._cooperates = True
            self._handle(voted)
        while not self.exit_code:
            try:
                yield self._orders.get(timeout=_TURN)
            except queue.Empty:
                self.wake()

    def resign(self, reason: str, limit: float = math.inf) -> None:
        """Take note that nothing is left to be saved; the process ends by its deadline.

        Args:
            reason: for the log.
            limit: seconds until then on another rank, of which this one has heard.
        """
        with self._lock:
            self.exit_code = int(ExitCode.PREEMPTED)
            self._over = min(self._ends_itself(), self._clock.monotonic() + limit)
            heartbeat.attach(self._heartbeat_path or None).give_back()
            self._tell(reason)
        self.wake()

    def broken(self, reason: str) -> None:
        """End this process once what is staged is durable; return if no notice came, or nothing is staged.

        A scheduler signals process after process, so where a signal killed a child, this waits for its own.

        Args:
            reason: why training cannot go on.
        """
        with children_end_quietly():
            killed = _CHILD_KILLED in reason or _a_child_was_killed()
            expected = self._clock.monotonic() + (_SKEW if killed else 0.0)
            self.look()
            while not self.asked and self._clock.monotonic() < expected:
                threading.Event().wait(_TURN)
                self.look()
            with self._lock:
                self._take_news(self._clock.monotonic())
                self._handle(Broken(reason))
            while self._flushes:
                self.wake()
                threading.Event().wait(_TURN)

    def _handle(self, event: Event) -> None:
        now = self._clock.monotonic()
        if isinstance(event, (Signal, Notice)):
            self._heard.append((event, now))
        for decision in self._decider.handle(event, now):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision.order:
            case Order.VOTE:
                self.asked = True
                self._tell(decision.reason)
                self._announce()
            case Order.SAVE:
                self._tell(decision.reason)
                self._orders.put(decision)
            case Order.FLUSH:
                self._tell(decision.reason)
                self._flushes = True
                if self._saving is not None:
                    self._saving.flush()
            case Order.EXIT:
                self._exit(decision)
            case Order.WARN:
                self._tell(decision.reason)
            case Order.NONE:
                pass

    def _announce(self) -> None:
        """Let the launcher know that this process saves and exits by itself, and ask the other ranks to."""
        if self.asked:
            heartbeat.attach(self._heartbeat_path or None).leave(self._decider.deadline)
            if self._saving is not None:
                self._saving.preempted()

    def _exit(self, decision: Decision) -> None:
        if decision.exit_code == ExitCode.PREEMPTED:
            heartbeat.attach(self._heartbeat_path or None).give_back()
        if not (self._cooperates and decision.exit_code == ExitCode.PREEMPTED):
            self._end(decision.exit_code, decision.reason)
        self._over = self._ends_itself()
        self._tell(decision.reason)
        self.exit_code = decision.exit_code

    def _ends_itself(self) -> float:
        """Return when a process whose state is safe, or is the script's own, is ended by this thread."""
        return self._decider.deadline - self.options.margin / 2

    def _tell(self, text: str) -> None:
        _LOG.warning("%s", text)
        if self._saving is not None:
            self._saving.tell(text)

    def _end(self, code: int, reason: str) -> NoReturn:
        self._tell(reason)
        flushing = threading.Thread(target=_flush_streams, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_PATIENCE)
        os._exit(code)

    def _listen(self) -> None:
        while not self._released:
            numbers = self._handlers.wait(self._patience())
            with self._lock:
                self._took(numbers)
                try:
                    self._turn(self._clock.monotonic())
                except Exception:  # noqa: BLE001 - the thread that hears SIGTERM must go on
                    if not self._failed:
                        _LOG.exception(
                            "preemption: what has come cannot be looked at; signals are still heeded"
                        )
                    self._failed = True

    def _patience(self) -> float:
        saving = self._saving
        if self.asked or self.exit_code or (saving is not None and saving.busy) or self._cooperates:
            return _TURN
        if self.options.notice_file:
            return _FILE_TURN
        return max(0.0, min(_IDLE, self._ends - self._lead - self._clock.monotonic()))

    def _turn(self, now: float) -> None:
        if now >= self._over:
            self._end(self.exit_code, "the state is durable, but the script did not end in time: it is ended")
        for notice in self._notices(now):
            self._handle(notice)
        self._take_news(now)
        for decision in self._decider.tick(now):
            self._carry_out(decision)

    def _take_news(self, now: float) -> None:
        if self._saving is not None:
            for event in self._saving.news(now):
                self._handle(event)

    def _notices(self, now: float) -> Iterator[Notice]:
        if now >= self._ends - self._lead or (self.asked and math.isfinite(self._ends)):
            ends, self._ends = self._ends, math.inf
            yield Notice("Slurm's end time", ends)
        if self.options.notice_file and not self.asked:
            found = read_notice(self.options.notice_file, self._lead, self._clock)
            if found is not None:
                yield found


@contextlib.contextmanager
def children_end_quietly() -> Iterator[None]:
    """Let no handler run for children that end: torch's raises when a worker of a DataLoader has died."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _a_child_was_killed() -> bool:
    """Say whether a signal killed a child that nobody has waited for yet; leaves it to be waited for."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_KILLED
    return False


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


class _Here:
    """What this process has installed, and what its script wants."""

    current: PreemptionHandler | None = None
    options = PreemptionOptions()


def install(options: PreemptionOptions | None = None) -> PreemptionHandler | None:
    """Return what listens in this process, put in place if nothing does; None: it is off, or must not be.

    Args:
        options: of the script; None: those of the last call that named any. The launcher's win.

    Raises:
        UsageError: an option makes no sense, or the process listens already, with other options.
    """
    current, context = _Here.current, settings.worker_context()
    wanted = settings.in_force(options or _Here.options, "preemption", context)
    if current is not None and current.listens:
        if options is not None and wanted != current.options:
            raise UsageError(
                "preemption: this process listens for signals already, with other options; name them once,"
                " where it begins to"
            )
        return current
    _Here.options = options or _Here.options
    problems = wanted.problems()
    if problems:
        raise UsageError(f"preemption: {'; '.join(problems)}")
    if not wanted.enable_exit_handler or threading.current_thread() is not threading.main_thread():
        return None
    found = _Here.current = PreemptionHandler(wanted, context)
    found.install()
    return found


def heeded() -> frozenset[int]:
    """Return the signals that :func:`install` would have this process heed; empty: it is off."""
    wanted = settings.in_force(_Here.options, "preemption", settings.worker_context())
    if wanted.problems() or threading.current_thread() is not threading.main_thread():
        return frozenset()
    return frozenset(signal.Signals[name].value for name in wanted.notices)


def unequip() -> None:
    """Let go of the session that saves for what listens in this process: it is over."""
    if _Here.current is not None:
        _Here.current.unequip()
