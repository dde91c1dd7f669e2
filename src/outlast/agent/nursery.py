"""Where workers come from: forked from the zygote, or started cold where that cannot be.

The next store host is asked for while the present generation runs, so that a restart waits for
nothing but the forks. A zygote that dies is replaced; one that cannot fork safely, does not
answer, or died twice in a row makes this launcher start cold, and the log says why.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from outlast.agent.generation import Generation, Meeting, Surroundings
from outlast.agent.options import ScriptKind, StartKind
from outlast.agent.zygote import Zygote

IMPORT_PATIENCE = 600.0  # a cold import of torch and of preloaded modules from a slow file system
FORK_PATIENCE = 30.0
_ZYGOTES = 2  # tries without a successful fork in between


class Mode(Enum):
    """What the nursery is waiting for."""

    IMPORTING = "the zygote imports torch"
    IDLE = "ready to fork"
    FORKING = "the zygote forks a generation"
    COLD = "workers are started as plain subprocesses"


class Nursery:
    """Starts generations of workers.

    Args:
        around: the launcher's options and folders.
        selector: the zygote's socket is registered here, with this object as its data.
        say: told why something is started cold or again.
    """

    def __init__(
        self, around: Surroundings, selector: selectors.BaseSelector, say: Callable[[str], None]
    ) -> None:
        self._around = around
        self._selector = selector
        self._say = say
        self._zygote: Zygote | None = None
        self._tries = 0
        self._wanted: tuple[int, tuple[str, ...]] | None = None
        self._forking: Generation | None = None
        self._store: Meeting | None = None
        self._waits_until = 0.0
        self.cold_reason = ""
        self.mode = Mode.COLD
        self.hosts: set[int] = set()
        self._open()

    def _open(self) -> None:
        """Start a zygote, or settle for cold starts."""
        options = self._around.options
        if options.start is StartKind.COLD:
            self._go_cold("--no-zygote was given")
        elif options.script.kind is ScriptKind.COMMAND:
            self._go_cold("--no-python: the program is not a Python script")
        elif self._tries >= _ZYGOTES:
            self._go_cold(f"the zygote ended {self._tries} times before it had forked a worker")
        else:
            self._tries += 1
            kind = "module" if options.script.kind is ScriptKind.MODULE else "file"
            program = (kind, options.script.target, options.script.args)
            self._zygote = Zygote(program, self._around.base, options.preload)
            self._selector.register(self._zygote, selectors.EVENT_READ, self)
            self.mode, self._waits_until = Mode.IMPORTING, time.monotonic() + IMPORT_PATIENCE

    @property
    def pid(self) -> int:
        """The zygote's process, 0 when there is none."""
        return 0 if self._zygote is None else self._zygote.pid

    def deadline(self) -> float | None:
        """Return when patience with the zygote ends."""
        return self._waits_until if self.mode in (Mode.IMPORTING, Mode.FORKING) else None

    def request(self, number: int, avoid: Sequence[str]) -> Generation | None:
        """Ask for a generation; it is returned here or by a later :meth:`answers` or :meth:`tick`."""
        self._wanted = (number, tuple(avoid))
        return self._proceed()

    def answers(self) -> Generation | None:
        """Read what the zygote says; return a generation whose workers have been forked."""
        if self._zygote is None:
            return None
        found = self._zygote.answers()
        if found is None:
            return self._lost("ended")
        started = None
        for answer in found:
            started = self._take(answer) or started
        return started

    def tick(self, now: float) -> Generation | None:
        """Give up on a zygote that does not answer."""
        limit = self.deadline()
        if limit is None or now < limit:
            return None
        return self._lost(f"did not answer while {self.mode.value}")

    def _take(self, answer: dict[str, Any]) -> Generation | None:
        if "ready" in answer:
            if answer["obstacle"]:
                self._go_cold(answer["obstacle"])
            else:
                self.mode = Mode.IDLE
                self._order_store()
        elif "store" in answer:
            self.hosts.add(answer["store"])
            self._store = Meeting(answer["port"], answer["store"])
        elif "workers" in answer and self._forking is not None:
            generation, self._forking = self._forking, None
            generation.adopt(answer["workers"])
            self.mode, self._tries = Mode.IDLE, 0
            self._order_store()
            return generation
        return self._proceed()

    def _proceed(self) -> Generation | None:
        """Start the generation that was asked for if everything it needs is there."""
        if self._wanted is None:
            return None
        number, avoid = self._wanted
        if self.mode is Mode.COLD:
            self._wanted = None
            generation = Generation(number, self._around, Meeting(_free_port()), avoid)
            generation.start_cold(self.cold_reason)
            return generation
        if self.mode is Mode.IDLE and self._store is not None and self._zygote is not None:
            self._wanted = None
            meeting, self._store = self._store, None
            self._forking = Generation(number, self._around, meeting, avoid)
            self.mode, self._waits_until = Mode.FORKING, time.monotonic() + FORK_PATIENCE
            try:
                self._zygote.order({"order": "spawn", "ranks": self._forking.seats()})
            except OSError:
                return self._lost("ended")
        return None

    def _order_store(self) -> None:
        if self._zygote is not None and self._store is None:
            with contextlib.suppress(OSError):
                self._zygote.order({"order": "store"})

    def _lost(self, how: str) -> Generation | None:
        """Replace the zygote; a generation that it owed is asked for again."""
        forking, self._forking = self._forking, None
        if forking is not None:
            self._wanted = (forking.number, forking.avoid)
            forking.discard()
        self._say(f"the zygote {how}; running workers are not touched")
        self._drop()
        self._open()
        return self._proceed()

    def _go_cold(self, why: str) -> None:
        self._drop()
        self.mode, self.cold_reason = Mode.COLD, why
        self._say(f"workers start cold: {why}")

    def _drop(self) -> None:
        if self._zygote is not None:
            self._selector.unregister(self._zygote)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._zygote.pid, signal.SIGKILL)
            self._zygote.close()
            self._zygote = None
        self._store = None

    def retire_host(self, meeting: Meeting) -> None:
        """End the store host of a generation that is over."""
        if meeting.host_pid in self.hosts:
            self.hosts.discard(meeting.host_pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(meeting.host_pid, signal.SIGKILL)

    def close(self) -> None:
        """End the zygote and every store host."""
        self._drop()
        for pid in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.hosts.clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
