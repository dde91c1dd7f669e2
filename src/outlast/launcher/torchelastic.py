"""What torchrun's agent does besides starting ranks: file timers, events on the console, an error file.

A worker's ``torch.distributed.elastic.timer.FileTimerClient`` writes its requests into a FIFO, one JSON line
each; a negative time withdraws one. The agent serves it where ``TORCHELASTIC_ENABLE_FILE_TIMER=1``. torchrun
ends itself with a worker whose timer expires; here the worker is ended and the job recovers.

Sources: torch 2.13, elastic/timer/file_based_local_timer.py, elastic/agent/server/api.py
(``_construct_event``) and elastic/events/api.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.cluster.policy.messages import Ending
from outlast.errors import ExitCode, UsageError
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.output.screen import Console
from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.processes import Worker
from outlast.recovery.agent import RootCause, hand_over
from outlast.recovery.policy.events import Fault

_READ_BYTES = 1 << 16
_MOST = 4096  # timers in force; further ones are not taken


@dataclass(frozen=True)
class Timer:
    """One request: when it expires (wall time, as the client says it) and which signal ends the worker."""

    pid: int
    scope: str
    expires: float
    number: int


class FileTimers:
    """Takes requests from a FIFO; ``fileno()`` is readable when some wait.

    Args:
        path: of the FIFO; it is made here, and removed by :meth:`close`.

    Raises:
        UsageError: something else is at that path, or the FIFO cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISFIFO(os.lstat(path).st_mode):
                    raise UsageError(
                        f"TORCHELASTIC_TIMER_FILE={path}: exists and is no FIFO; nothing was started"
                    )
                os.unlink(path)
            os.mkfifo(path, 0o600)
            # opened for both: a FIFO without a writer would always be readable
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"TORCHELASTIC_TIMER_FILE={path}: {error.strerror}; nothing was started"
            ) from error
        self._rest = b""
        self._timers: dict[tuple[int, str], Timer] = {}

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._file

    def take(self) -> None:
        """Take the requests that have arrived; a line that makes no sense is passed over."""
        with contextlib.suppress(BlockingIOError):
            data = self._rest + os.read(self._file, _READ_BYTES)
            lines = data.split(b"\n")
            self._rest = lines.pop()[-_READ_BYTES:]
            for line in filter(None, lines):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._put(json.loads(line))

    def _put(self, request: dict[str, object]) -> None:
        pid, scope = int(str(request["pid"])), str(request["scope_id"])
        expires, number = float(str(request["expiration_time"])), int(str(request["signal"]))
        if expires < 0:
            self._timers.pop((pid, scope), None)
        elif math.isfinite(expires) and len(self._timers) < _MOST:
            self._timers[pid, scope] = Timer(pid, scope, expires, number)

    def deadline(self, now: float) -> float | None:
        """Return the monotonic time at which the first timer expires; None: there is none."""
        if not self._timers:
            return None
        return now + max(0.0, min(one.expires for one in self._timers.values()) - time.time())

    def expire(self, sessions: Iterable[int]) -> list[tuple[Timer, bool]]:
        """End the processes whose time is over; return their timers, and whether a signal was sent.

        Args:
            sessions: pids of workers; only they and what belongs to their sessions is ever signalled.
        """
        allowed, wall = frozenset(sessions), time.time()
        due = sorted(
            (one for one in self._timers.values() if one.expires <= wall), key=lambda one: one.expires
        )
        found: dict[int, tuple[Timer, bool]] = {}
        for timer in due:
            del self._timers[timer.pid, timer.scope]
            if timer.pid not in found and timer.number in signal.valid_signals():
                found[timer.pid] = (timer, _signalled(timer, allowed))
        for key in [key for key in self._timers if key[0] in found]:
            del self._timers[key]
        return list(found.values())

    def forget(self) -> None:
        """Drop all timers: the generation that asked for them is over."""
        self._timers.clear()

    def close(self) -> None:
        """Remove the FIFO."""
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _signalled(timer: Timer, sessions: frozenset[int]) -> bool:
    try:
        held = os.pidfd_open(timer.pid)
    except (OSError, OverflowError):  # it has ended meanwhile, or there is no such pid
        return False
    try:
        if os.getsid(timer.pid) not in sessions:
            return False
        signal.pidfd_send_signal(held, timer.number)
    except OSError:
        return False
    finally:
        os.close(held)
    return True


class ElasticEvents:
    """Shows when workers start and how they end, one JSON line each.

    Args:
        console: shows them.
        options: the command line.
        run_id: of the run.
    """

    def __init__(self, console: Console, options: LaunchOptions, run_id: str) -> None:
        self._console = console
        self._options = options
        self._run_id = run_id
        self._began = time.monotonic()
        self._on = options.event_log == "console"

    def started(self, generation: Generation) -> None:
        """Tell that the workers of a generation run."""
        for worker in generation.workers if self._on else ():
            self._tell("START", generation, worker)

    def ended(self, generation: Generation) -> None:
        """Tell how the workers of the last generation have ended."""
        for worker in generation.workers if self._on else ():
            state = (
                "TERMINATED" if worker.exit_code is None else "FAILED" if worker.exit_code else "SUCCEEDED"
            )
            self._tell(state, generation, worker)

    def over(self, generation: Generation | None, exit_code: int) -> None:
        """Tell that the agent has ended; as in torchrun, it succeeds also where workers have failed."""
        if self._on:
            self._tell("SUCCEEDED" if exit_code < 128 else "FAILED", generation)

    def _tell(self, state: str, generation: Generation | None, worker: Worker | None = None) -> None:
        group = None if generation is None else generation.assignment
        inner: dict[str, Any] = {
            "group_world_size": None if group is None else group.nodes,
            "entry_point": os.path.basename(self._options.script.target),
        }
        error = None
        if worker is not None and generation is not None:
            failed = state == "FAILED"
            inner |= {
                "local_rank": [worker.rank - generation.ranks.start],
                "role_rank": [worker.rank],
                "role_world_size": [generation.world_size],
                "exit_code": [worker.exit_code if failed else None],
                "worker_pid": [worker.pid if failed else None],
            }
            failure = generation.failure(worker.rank) if failed else None
            error = (
                json.dumps({"message": "<NONE>" if failure is None else failure.message}) if failed else None
            )
        metadata = {
            "run_id": self._run_id,
            "global_rank": None if worker is None else worker.rank,
            "group_rank": None if group is None else group.node_rank,
            "worker_id": None if worker is None else str(worker.pid),
            "role": self._options.world.role,
            "hostname": os.uname().nodename,
            "state": state,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": "outlast",
            "raw_error": error,
            "metadata": json.dumps(inner),
            "agent_restarts": 0 if generation is None else generation.number - 1,
            "duration_ms": None,
        }
        source = "AGENT" if worker is None else "WORKER"
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": 0,
            "metadata": metadata,
        }
        self._console.line(json.dumps(event))


_ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class Torchelastic:
    """Follows the generations of a job, and does for each what torchrun's agent does.

    Args:
        options: the command line.
        run_id: of the run.
        runtime: the runtime folder.
        console: where events are shown.
        inherited: this process's environment.

    Raises:
        UsageError: timers are wanted, and their FIFO cannot be made.
    """

    def __init__(
        self,
        options: LaunchOptions,
        run_id: str,
        runtime: Path,
        console: Console,
        inherited: Mapping[str, str],
    ) -> None:
        self._events = ElasticEvents(console, options, run_id)
        self._generation: Generation | None = None
        self._cause: RootCause | None = None
        wanted = inherited.get(_ENABLED) == "1"
        path = inherited.get(_TIMER_FILE) or str(runtime / "timers")
        self.timers = FileTimers(Path(path)) if wanted else None

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment has besides."""
        return {} if self.timers is None else {_TIMER_FILE: str(self.timers.path)}

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake up for requests of timers."""
        if self.timers is not None:
            selector.register(self.timers, selectors.EVENT_READ, self.timers)

    def deadline(self, now: float) -> float | None:
        """Return when the next timer expires; None: there is none."""
        return None if self.timers is None else self.timers.deadline(now)

    def tick(self, say: Callable[[str], None]) -> None:
        """Take requests for timers, and end the workers whose timers have expired."""
        if self.timers is None:
            return
        self.timers.take()
        workers = [] if self._generation is None else self._generation.living()
        for timer, sent in self.timers.expire(worker.pid for worker in workers):
            rank = next((f"rank {one.rank}, " for one in workers if one.pid == timer.pid), "")
            done = f"signal {timer.number} was sent" if sent else "it is no living worker: nothing is done"
            say(f"timer {timer.scope!r} of {rank}pid {timer.pid} has expired; {done}")

    def begun(self, generation: Generation) -> None:
        """Take note that workers were started; timers of those before them mean nothing any more."""
        self._generation = generation
        if self.timers is not None:
            self.timers.forget()
        self._events.started(generation)

    def failed(self, fault: Fault, generation: Generation | None) -> None:
        """Take note of a fault of this node; the latest one may be what the job ends with."""
        if generation is None or fault.rank not in generation.ranks or fault.generation != generation.number:
            return
        codes = {worker.rank: worker.exit_code for worker in generation.workers}
        self._cause = RootCause(
            fault.generation, generation.logs[fault.rank].error_file, codes.get(fault.rank) or 0, fault.reason
        )

    def stopped(self, generation: Generation | None) -> None:
        """Take note that the last generation is ended now."""
        if generation is not None:
            self._events.ended(generation)

    def over(self, ending: Ending, number: int) -> str:
        """Tell the scheduler how the job has ended; return what went wrong, "" when nothing did.

        Args:
            ending: of the job.
            number: of the last generation.
        """
        self._events.over(self._generation, ending.exit_code)
        if not ending.exit_code:
            return ""
        cause = self._cause
        if cause is not None and (cause.generation != number or ending.exit_code >= ExitCode.SIGNAL_BASE):
            cause = None
        return hand_over(settings.error_file(), cause, ending.reason)

    def close(self) -> None:
        """Remove the FIFO of the timers."""
        if self.timers is not None:
            self.timers.close()
