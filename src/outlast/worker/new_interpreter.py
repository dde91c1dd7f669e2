"""Restarts a forked rank as a new interpreter, where its script could not get the modules imported ahead."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from outlast import settings
from outlast.hang.worker import heartbeat
from outlast.ipc.control import Reporter
from outlast.ipc.processes import children_of
from outlast.observe.policy import codec
from outlast.recovery.policy.events import StartedAgain
from outlast.worker.preloading import Difference, Hidden

_PROGRAM = Path(__file__).with_name("cold.py")


@dataclass(frozen=True)
class Beginning:
    """How this rank's script was started.

    Args:
        kind, target: the program.
        args: its arguments.
        environment: of the script at its start.
        stdout, stderr, stacks, heartbeat: of the rank's seat.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: str | None
    stderr: str | None
    stacks: str
    heartbeat: str


class Rank:
    """The state of this process at the start of its script, to which :meth:`differs` may return.

    Args:
        beginning: how the script was started.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._pid = os.getpid()
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = _ignored()

    def differs(self, found: Difference) -> None:
        """Restart if other ranks have not noticed this one yet; else warn that the variable has no effect."""
        why = self._obstacle()
        if why:
            sys.stderr.write(
                f"[outlast] {found}: this has no effect, because it was imported before the script began and"
                f" {why}; set it at the beginning of the script, or start with --no-zygote\n"
            )
            return
        self._tell(found)
        self._begin_again()

    def _obstacle(self) -> str:
        if os.getpid() != self._pid:
            return "this is a child process"
        torch = sys.modules.get("torch")
        if torch is None:
            return ""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return "the rank has a process group already"
        if torch.cuda.is_initialized():
            return "the rank uses CUDA already"
        return "the rank has made steps already" if heartbeat.attach(None).beats else ""

    def _tell(self, found: Difference) -> None:
        """Tell the agent; the values go into a private file, not into the event log."""
        context = settings.worker_context()
        if not context.control_path:
            return
        name = f"environment-{context.generation}-{context.rank}.json"
        with contextlib.suppress(OSError):  # the next generation reports it again
            path = Path(context.control_path).with_name(name)
            path.write_text(json.dumps(dict(found.variables)))
        Reporter(context.control_path).send(
            codec.encode(
                StartedAgain(
                    time.time(),
                    time.monotonic(),
                    context.generation,
                    context.rank,
                    tuple(sorted(found.variables)),
                    str(found),
                    found.package if found.learned else "",
                )
            )
        )

    def _begin_again(self) -> NoReturn:
        beginning = self._beginning
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for pid in list(children_of(self._pid)):  # the script will start them again
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.chdir(self._folder)
        os.umask(self._umask)
        for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(which, 0)
        if signal.getsignal(signal.SIGINT) is not None:  # only the main thread can change handlers
            with contextlib.suppress(ValueError):
                for number in _ignored() - self._ignored:
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        told = {
            "kind": beginning.kind,
            "stdout": beginning.stdout,
            "stderr": beginning.stderr,
            "stacks": beginning.stacks,
            "heartbeat": beginning.heartbeat,
        }
        command = [sys.executable, "-u", str(_PROGRAM), json.dumps(told), beginning.target, *beginning.args]
        os.execve(sys.executable, command, dict(beginning.environment))


def _ignored() -> set[signal.Signals]:
    return {one for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN}


def serve(hidden: Hidden, expected: Mapping[str, str], seat: Mapping[str, str], beginning: Beginning) -> None:
    """Serve hidden modules to the script when it imports them."""
    hidden.serve(expected, Rank(beginning).differs, seat)
    atexit.register(hidden.give_up)  # atexit functions import as usual
