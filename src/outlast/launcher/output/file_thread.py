"""A thread for the files of the run folder, which may be on a file system that hangs.

A file server that does not answer blocks its readers and writers for minutes. If that blocked the agent's
loop, the node would be taken for lost. So this thread reads and writes for the loop, in order. The loop waits
for an answer for a moment, which is enough on a file system that works. All waits of one turn of the loop
together are no longer than one of them: on a busy file system the rest is done behind the loop. While it does
not answer, at most the newest content of each replaced file and a bounded number of other requests wait.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

PATIENCE = 0.5  # seconds that the loop waits in one turn: pings come twice a second
SAID_AFTER = 2.0  # seconds without an answer after which that is said
ROOM = 10_000  # things that wait; more are dropped and counted
_IDLE = 60.0

T = TypeVar("T")


class Errand(Generic[T]):
    """Something that was handed over, and what it returned."""

    def __init__(self, what: Callable[[], T]) -> None:
        self._what = what
        self._found: list[T] = []
        self._over = threading.Event()
        self.dropped = False

    def run(self) -> None:
        """Do it."""
        try:
            self._found.append(self._what())
        finally:
            self._over.set()

    def drop(self) -> None:
        """Do it never."""
        self.dropped = True
        self._over.set()

    def wait(self, patience: float) -> bool:
        """Wait until it is over; say whether it is."""
        return self._over.wait(patience)

    def result(self, otherwise: T) -> T:
        """Return what it returned; something else when it raised, or is not over."""
        return self._found[0] if self._found else otherwise


class FileThread:
    """Does things in the order in which they were handed over; a daemon, so it keeps no process alive.

    Args:
        folder: whose file system it is, for what is said.
    """

    def __init__(self, folder: object) -> None:
        self.dropped = 0
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._numbers = itertools.count()
        self._busy_since: float | None = None
        self._said_since: float | None = None
        self._thread: threading.Thread | None = None
        self._waited = 0.0  # seconds, in this turn of the loop

    def turn(self) -> None:
        """Begin a turn of the loop: it may wait again."""
        self._waited = 0.0

    def hand(self, what: Callable[[], object], key: Hashable = None, patience: float = PATIENCE) -> bool:
        """Hand something over; say whether it was done within a time.

        Args:
            what: what it returns or raises is not looked at.
            key: whatever waits under the same one is not done any more; None: all is done.
            patience: seconds; less when the file system does not answer already.
        """
        errand = self._queue(what, key)
        return self.wait(errand, patience) and not errand.dropped

    def wait(self, errand: Errand[T], patience: float = PATIENCE) -> bool:
        """Wait for something that was handed over, for what is left of a time in this turn."""
        left = 0.0 if self.hangs(PATIENCE) else max(0.0, patience - self._waited)
        began = time.monotonic()
        done = errand.wait(left)
        self._waited += time.monotonic() - began
        return done

    def _queue(self, what: Callable[[], T], key: Hashable = None) -> Errand[T]:
        errand = Errand(what)
        with self._changed:
            place = next(self._numbers) if key is None else (key,)
            if len(self._waiting) >= ROOM and place not in self._waiting:
                self.dropped += 1
                errand.drop()
                return errand
            self._waiting.pop(place, None)
            self._waiting[place] = errand.run
            if self._thread is None and not self._start():
                del self._waiting[place]
                _do(errand.run)
                return errand
            self._changed.notify_all()
        return errand

    def ask(self, what: Callable[[], T], default: T, patience: float = PATIENCE) -> T:
        """Return what something returns; a default when it raises or is not done in time.

        Nothing is asked of a file system that does not answer already, or when this turn may wait no more.
        """
        errand = self.begin(what) if self._waited < patience else None
        if errand is None or not self.wait(errand, patience):
            return default
        return errand.result(default)

    def begin(self, what: Callable[[], T]) -> Errand[T] | None:
        """Hand over what is awaited later; None: the file system does not answer already."""
        return None if self.hangs(PATIENCE) else self._queue(what)

    def _start(self) -> bool:
        """Start the thread; say whether the system allows one more."""
        thread = threading.Thread(target=self._serve, name="files", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of processes, which whatever is started next names
            return False
        self._thread = thread
        return True

    def hangs(self, longer_than: float) -> bool:
        """Say whether something has been on its way for longer than a time."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > longer_than

    def trouble(self) -> str:
        """Return what is to be said about the file system, once: that it hangs, or answers again."""
        since = self._busy_since
        if self._said_since is None and since is not None and self.hangs(SAID_AFTER):
            self._said_since = since
            return (
                f"the file system of {self._folder} has not answered for {time.monotonic() - since:.0f} s;"
                f" the job goes on, and up to {ROOM} records of the event log wait in memory"
            )
        if self._said_since is not None and since != self._said_since:
            waited = time.monotonic() - self._said_since
            self._said_since = None
            lost = f"; {self.dropped} records were dropped" if self.dropped else ""
            return f"the file system of {self._folder} answers again after {waited:.0f} s{lost}"
        return ""

    def settle(self, patience: float) -> bool:
        """Wait until all is done, for a time at most; say whether it is."""
        errand = self._queue(_nothing)
        return errand.wait(patience) and not errand.dropped

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                self._busy_since = None
                while not self._waiting:
                    self._changed.wait(_IDLE)
                _, work = self._waiting.popitem(last=False)
                self._busy_since = time.monotonic()
            _do(work)


class Latest(Generic[T]):
    """Reads something now and then; what was read is taken when it is there.

    Args:
        files: reads it.
        read: returns it.
    """

    def __init__(self, files: FileThread, read: Callable[[], T]) -> None:
        self._files = files
        self._read = read
        self._found: list[T] = []

    def ask(self, patience: float = PATIENCE) -> None:
        """Have it read."""
        self._files.hand(lambda: self._found.append(self._read()), self, patience)

    def take(self) -> list[T]:
        """Return what was read since the last call, the newest only; nothing: it was not read."""
        found, self._found = self._found, []
        return found[-1:]


def _nothing() -> None:
    return None


def _do(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001 - what was handed over says itself what fails
        return
