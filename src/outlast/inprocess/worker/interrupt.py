"""Interruption of a resilient function: a thread that listens to the agent, and a signal that raises.

The thread aborts the collective that the main thread waits in, then has a signal raise there. The agent sends
the same signal itself, since the main thread may hold the interpreter in a call that only a signal ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from outlast.errors import UsageError
from outlast.inprocess.barrier import INTERRUPT_SIGNAL, Line, Message

_LOG = logging.getLogger("outlast")
_SOON = 0.1  # seconds until what waits is woken once more: a collective may have begun meanwhile
_SPINS = (
    3  # looks in a row at which a thread that may wait for a device has not moved: more than NCCL's abort
)
_AGAIN = 1.0  # seconds until an interrupt that code of the user's has swallowed is raised once more


class Restart(BaseException):
    """Raised in the training function to interrupt it for an in-process restart of all ranks."""


class _Here:
    """The line of this process."""

    line: GateLine | None = None


def check() -> None:
    """Raise if a resilient function of this process has to be left; elsewhere do nothing.

    Raises:
        Restart: it has to.
    """
    if _Here.line is not None and threading.current_thread() is threading.main_thread():
        _Here.line.check()


class GateLine:
    """This rank's connection to the barrier; created on the main thread, which is interrupted.

    Args:
        path: of the gate.
        abort: wakes what waits in a collective; called on another thread.

    Raises:
        UsageError: this is not the main thread, or there is no agent.
    """

    def __init__(self, path: str, abort: Callable[[str], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("outlast.resilient: the function must be called on the main thread")
        try:
            self._line = Line(path)
        except OSError as error:
            raise UsageError(
                f"outlast.resilient: the re-entry barrier of the agent {path} does not answer: {error}"
            ) from error
        self._abort = abort
        self._main = threading.get_ident()
        self._armed = False
        self._left = threading.Event()
        self._called = threading.Event()
        self._held = threading.RLock()
        self._at_it = threading.Lock()
        self._thrown = False
        self._raised = False
        self._depth = 0
        self._due = ""
        self._wanted = 0
        self._doors: queue.Queue[Message] = queue.Queue()  # see preemption/worker
        self.generation = 0
        _Here.line = self
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)
        threading.Thread(target=self._listen, name="gate", daemon=True).start()

    def say(self, what: str, **more: Any) -> None:
        """Report the state of this rank to the agent."""
        self._line.say({"say": what, "generation": self.generation, **more})

    def arm(self) -> None:
        """Enable interrupts.

        Raises:
            Restart: one has come already.
        """
        with self._at_it:  # what still goes on for the generation before ends first
            self._left.clear()
            self._armed = True
        if self._wanted > self.generation:
            raise Restart(self._due)

    def disarm(self) -> None:
        """Disable interrupts: the function has been left."""
        self._armed = False
        self._left.set()
        if self._thrown:
            self._thrown = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), None)

    def hold(self) -> None:
        """Begin a block that must not be interrupted; blocks nest."""
        self._held.acquire()
        self._depth += 1

    def unhold(self) -> None:
        """End such a block.

        Raises:
            Restart: an interrupt has come meanwhile.
        """
        self._depth -= 1
        self._held.release()
        if self._depth == 0 and self._has_to_leave:
            raise Restart(self._due)

    def wait(self, seconds: float) -> Message | None:
        """Return the next message of the agent; None: there was none in time."""
        try:
            return self._doors.get(timeout=seconds)
        except queue.Empty:
            return None

    def entered(self, generation: int) -> None:
        """Record the generation of this rank."""
        self.generation, self._due = generation, ""
        if self._wanted <= generation:
            self._called.clear()

    def called(self, seconds: float) -> str:
        """Return why the agent interrupts this rank; empty: it does not within this number of seconds."""
        return self._due if self._called.wait(seconds) else ""

    @property
    def _has_to_leave(self) -> bool:
        """Whether the function is on, of a generation that is over; a late signal finds it is not."""
        return self._armed and self._wanted > self.generation

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.check()

    def check(self) -> None:
        """Raise if the function has to be left; on the main thread.

        Raises:
            Restart: it has to.
        """
        if self._has_to_leave and self._depth == 0:
            self._raised = True
            raise Restart(self._due)

    def _listen(self) -> None:
        while (message := self._line.hear()) is not None:
            if message.get("say") == "interrupt":
                self._due, self._wanted = str(message["reason"]), int(message["generation"])
                self._called.set()
                if self._armed:
                    with self._held:
                        self._interrupt()
            self._doors.put(message)
        self._doors.put({"say": "gone"})

    def _interrupt(self) -> None:
        """Abort and raise until the function has been left, or the agent kills this process."""
        still = 0
        while self._strike(self._abort_and_signal):
            if self._left.wait(_SOON) or not self._strike(lambda: self._abort(self._due)):
                return
            before = _motion(self._main)
            if self._left.wait(_AGAIN):
                return
            still = still + 1 if _motion(self._main) == before else 0
            if still >= (
                _SPINS if _uses_device() else 1
            ):  # not in Python, where the signal would have raised
                self.say("stuck", place=_place(self._main))
            if not self._strike(self._throw) or self._left.wait(_AGAIN):
                return

    def _strike(self, do: Callable[[], None]) -> bool:
        """Act on the function if it has to be left; never on the next call."""
        with self._at_it:
            if self._has_to_leave:
                try:
                    do()
                except Exception:  # noqa: BLE001 - a thread that ends leaves this rank at the gate
                    _LOG.exception("outlast.resilient: an interrupt failed; retrying")
            return self._has_to_leave

    def _abort_and_signal(self) -> None:
        """Signal the main thread, and wake what it waits in.

        A collective of NCCL that is aborted returns with undefined data and no error: the signal is there
        before, so that nothing is done with them.
        """
        self._raised = False
        signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
        self._abort(self._due)
        if not self._raised:  # the main thread was in a block that holds interrupts, or began to wait since
            signal.pthread_kill(self._main, INTERRUPT_SIGNAL)

    def _throw(self) -> None:
        self._thrown = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), ctypes.py_object(Restart))


def _place(thread: int) -> str:
    """Return the innermost Python frame of a thread, as file:line:function."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}:{frame.f_code.co_name}"


def _uses_device() -> bool:
    """Say whether this process has used a GPU, for which a thread may wait without sleeping."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _motion(main: int) -> tuple[str, str]:
    """Return what tells whether the main thread goes on.

    Its state, and the processor time that it has used; with a GPU, its place in Python, since a wait for a
    device spins.
    """
    if _uses_device():
        frame = sys._current_frames().get(main)
        return ("device", "" if frame is None else f"{id(frame)} {frame.f_lasti}")
    with open(f"/proc/self/task/{os.getpid()}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (
        (fields[0], f"{fields[11]} {fields[12]}") if fields[0] == "S" else (fields[0], f"{time.monotonic()}")
    )
