"""A process's part in giving its job back: signals and time in, what the decider orders out.

A thread takes the signals and the time, so that a deadline is kept whatever the main thread does. It stays
armed until the process ends, also when the state is durable: a script that hangs on its way out is ended.
Nothing here imports torch, so it can be in place before that.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

from outlast import settings
from outlast.core.config import ASSUMED_LEAD, Preemption
from outlast.core.errors import ExitCode, UsageError
from outlast.core.preemption import (
    Broken,
    Decision,
    Event,
    Notice,
    Order,
    Preempted,
    Signal,
    Tier,
    Voted,
)
from outlast.transport.clock import SystemClock
from outlast.worker import liveness
from outlast.worker.handlers import Handlers
from outlast.worker.notices import read_notice, scheduled_end

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

    def tell(self, text: str) -> None:
        """Write a line into the event log."""
        ...


class GivingBack:
    """Hears notices, asks the decider and does what it says.

    Args:
        options: of the user.
        context: what the environment says about the job.
    """

    def __init__(self, options: Preemption, context: settings.WorkerContext) -> None:
        self.options = options
        self.exit_code = int(ExitCode.OK)
        self.first_signal = 0
        self.asked = False
        self._pid = os.getpid()
        self._rank = context.rank
        self._pulse_path = context.pulse_path
        self._lead = float(context.grace_period or options.preempt_time or ASSUMED_LEAD)
        self._granted = float(context.grace_period)
        self._clock = SystemClock()
        self._ends = scheduled_end(context.job_end_time, self._clock)
        self._handlers = Handlers(options.exit_signals, options.enable_exit_handler_for_data_loader)
        self._saving: Saving | None = None
        self._decider = Preempted(options, (Tier("local"),), self._granted)
        self._heard: list[tuple[Event, float]] = []
        self._lock = threading.RLock()
        # Not SimpleQueue: a signal at the very end of a timeout makes it wait for ever (CPython 3.11).
        self._orders: queue.Queue[Decision] = queue.Queue()
        self._cooperates = self._flushes = False
        self._over = math.inf
        self._released = False

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
            self._decider = Preempted(self.options, [Tier(name) for name in saving.tiers], self._granted)
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
            for number in self._handlers.wait(0.0):
                self.first_signal = self.first_signal or number
                self._handle(Signal(number, self._rank))

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
            self._over = min(self._decider.deadline, self._clock.monotonic() + limit)
            liveness.attach(self._pulse_path or None).give_back()
            self._tell(reason)
        self.wake()

    def tell_of(self, event: Event) -> None:
        """Tell the decider what the main thread knows."""
        with self._lock:
            self._handle(event)

    def broken(self, reason: str) -> None:
        """End this process once what is staged is durable; return if no notice came, or nothing is staged.

        Args:
            reason: why training cannot go on. A child that a signal killed speaks of one to come: a scheduler
                signals process after process.
        """
        expected = self._clock.monotonic() + (_SKEW if _CHILD_KILLED in reason else 0.0)
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
        """Let the launcher know that this process saves and exits by itself."""
        if self.asked:
            liveness.attach(self._pulse_path or None).leave(self._decider.deadline)

    def _exit(self, decision: Decision) -> None:
        if decision.exit_code == ExitCode.PREEMPTED:
            liveness.attach(self._pulse_path or None).give_back()
        if not (self._cooperates and decision.exit_code == ExitCode.PREEMPTED):
            self._end(decision.exit_code, decision.reason)
        self._over = self._decider.deadline - self.options.margin / 2
        self._tell(decision.reason)
        self.exit_code = decision.exit_code

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
                for number in numbers:
                    self.first_signal = self.first_signal or number
                    self._handle(Signal(number, self._rank))
                self._turn(self._clock.monotonic())

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


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


class _Here:
    """What this process has installed, and what its script wants."""

    current: GivingBack | None = None
    options = Preemption()


def install(options: Preemption | None = None) -> GivingBack | None:
    """Return what listens in this process, put in place if nothing does; None: it is off, or must not be.

    Args:
        options: of the script; None: those of the last call that named any. The launcher's win.

    Raises:
        UsageError: an option makes no sense.
    """
    current = _Here.current
    if current is not None and current.listens:
        return current
    context = settings.worker_context()
    _Here.options = options or _Here.options
    wanted = replace(_Here.options, **context.preemption)
    problems = wanted.problems()
    if problems:
        raise UsageError(f"preemption: {'; '.join(problems)}")
    if not wanted.enable_exit_handler or threading.current_thread() is not threading.main_thread():
        return None
    found = _Here.current = GivingBack(wanted, context)
    found.install()
    return found


def unequip() -> None:
    """Let go of the session that saves for what listens in this process: it is over."""
    if _Here.current is not None:
        _Here.current.unequip()
