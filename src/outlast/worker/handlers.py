"""Signals that say that the job ends, and the processes that they must not end.

A signal is written into a pipe by the interpreter's own C handler (``signal.set_wakeup_fd``), so it is heard
by a thread also while the main thread sits in a collective that never returns. Whatever handler was there
before is called as well, but for Python's own of SIGINT: KeyboardInterrupt would end the rank before it has
saved. Processes that this one forks get back what was there; those of multiprocessing,
such as the workers of a DataLoader, live through signals that their parent did not send.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterable
from multiprocessing import util
from types import FrameType
from typing import Any

from outlast.transport.descriptors import set_apart

_WAKE = 0


class Handlers:
    """Takes signals; to be installed once a process, on its main thread.

    Args:
        names: of the signals.
        shield: let child processes of multiprocessing live through them.
    """

    def __init__(self, names: Iterable[str], shield: bool) -> None:
        self.numbers = frozenset(signal.Signals[name].value for name in names)
        self._shield = shield
        self._reader, self._writer = map(set_apart, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._owner = os.getpid()

    def install(self) -> None:
        """Take the place of the handlers that are there.

        Raises:
            ValueError: this is not the main thread.
        """
        self._before = {number: signal.signal(number, self._take) for number in sorted(self.numbers)}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave_to_child)
        if self._shield:
            util.register_after_fork(self, Handlers._shield_child)

    def release(self) -> None:
        """Put the old handlers back, where nobody else has replaced these meanwhile."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, before)
        found = signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)
        if found not in (self._writer, -1):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        self._before = {}

    def ignore(self) -> None:
        """Heed nothing any more; a process that ends would get back the default actions, which kill it."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._write(number)  # a loop of asyncio may have taken the place of the pipe
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _write(self, number: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes((number,)))

    def wake(self) -> None:
        """End a wait in :meth:`wait`; from any thread."""
        self._write(_WAKE)

    def wait(self, seconds: float) -> list[int]:
        """Return the signals that have arrived; after so many seconds, or when anything wakes it."""
        select.select([self._reader], [], [], seconds)
        try:
            found = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        if self._wakeup_before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, found.replace(bytes((_WAKE,)), b""))
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
        nothing; a thread takes them.
        """
        if os.getpid() == self._owner or not self._before:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(
            target=_heed_parent, args=(self.numbers, os.getppid()), name="signals", daemon=True
        ).start()


def _heed_parent(numbers: frozenset[int], parent: int) -> None:
    while True:
        found = signal.sigwaitinfo(numbers)
        if found.si_pid == parent:  # it ends this process, as multiprocessing does
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {found.si_signo})
            os.kill(os.getpid(), found.si_signo)
