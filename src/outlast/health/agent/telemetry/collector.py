"""The collector: a process that reads devices and host, one thread for each source.

A driver that hangs blocks the thread of its source and nothing else. The main thread writes samples to the
pipe as lines of JSON, and reports calls that have not come back (:class:`Silence`). Each second it writes the
place in the kernel log up to which it has read, a whole number, also as a sign of life.

The seconds of a silence are counted in ticks of the main thread, less the time for which the blocked thread
waited for a processor. So neither a stopped process, a host under load nor a clock that jumps looks like a
driver that hangs.

A number on the standard input is a question: which processes compute on the devices? The answer is a
:class:`Listing` with this number.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from outlast.health.agent.telemetry.host import Disk, Host
from outlast.health.agent.telemetry.kernel_log import KernelLog
from outlast.health.agent.telemetry.nvml import Computing, Nvml
from outlast.health.agent.telemetry.recorded import Recorded
from outlast.health.agent.telemetry.simulated import Simulated
from outlast.health.policy import simulation
from outlast.health.policy.device_memory import Listing
from outlast.health.policy.options import REPLAY, SIMULATE
from outlast.health.policy.telemetry import Notice, Sample, Silence, TelemetrySource, to_line
from outlast.ipc.processes import die_with_parent

TICK = 0.25
_ALIVE_EVERY = 1.0
_STARTING = 6  # times the timeout, for the first call of a driver
_JUMP = 2.0  # seconds between two readings by which the wall clock differs from the monotonic one
_WAITING = 4096  # samples that wait for the pipe
_QUESTIONS = 1 << 16  # bytes: all that a pipe holds


@dataclass(frozen=True)
class CollectorSettings:
    """What a collector is told on its command line.

    Args:
        node: name of the node.
        source: "nvml", "replay:FILE" or "simulate:SCENARIO".
        interval: seconds between two readings.
        call_timeout: seconds after which a call counts as silent.
        kernel_log: where XIDs are read from, and ``position``, from where on (:class:`KernelLog`).
        folder: the disk to watch.
        known: devices that an earlier collector has read: uuid and index.
        begun: monotonic seconds at which a replay or scenario began in an earlier collector; 0: in none.
    """

    node: str
    source: str
    interval: float
    call_timeout: float
    kernel_log: str
    folder: str
    position: int = -1
    known: dict[str, int] = field(default_factory=dict)
    begun: float = 0.0

    def to_json(self) -> str:
        """Return it as a word of a command line."""
        return json.dumps(asdict(self))


class Caller(threading.Thread):
    """Makes calls that may not come back.

    Args:
        source: makes them, and says which.
    """

    def __init__(self, source: TelemetrySource | Computing) -> None:
        super().__init__(name=source.name, daemon=True)
        self.source = source
        self.calling = False

    def waited(self) -> float:
        """Return the seconds for which this thread has waited for a processor, in all."""
        try:
            with open(f"/proc/self/task/{self.native_id}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


class Answering(Caller):
    """Answers the questions on the standard input; of several that wait, the newest.

    Args:
        computing: lists the processes.
        found: takes the answers.
    """

    def __init__(self, computing: Computing, found: queue.Queue[Sample | Listing]) -> None:
        super().__init__(computing)
        self._computing = computing
        self._found = found

    def run(self) -> None:
        """Answer until nobody can ask any more."""
        while words := os.read(0, _QUESTIONS).split():
            self.calling = True
            try:
                pids, problem = self._computing.pids()
            except Exception as error:  # noqa: BLE001 - whoever has asked needs an answer
                pids, problem = set(), f"the processes: {type(error).__name__}: {error}"
            self.calling = False
            self._found.put(Listing(int(words[-1]), tuple(sorted(pids)), problem))


class Runner(Caller):
    """Calls a source at an interval and hands on what it returns.

    Args:
        source: reads.
        node: for notices.
        interval: seconds from the beginning of one reading to that of the next.
        found: takes what was read.
    """

    def __init__(
        self, source: TelemetrySource, node: str, interval: float, found: queue.Queue[Sample | Listing]
    ) -> None:
        super().__init__(source)
        self._reads = source
        self._node = node
        self._said = ""
        self._interval = interval
        self._found = found

    def run(self) -> None:
        """Read for ever."""
        while True:
            began = time.monotonic()
            self.calling = True
            samples = self._sample()
            self.calling = False
            for sample in samples:
                self._found.put(sample)
            time.sleep(max(0.0, began + self._interval - time.monotonic()))

    def _sample(self) -> Sequence[Sample]:
        try:
            return self._reads.sample(time.time())
        except Exception as error:  # noqa: BLE001 - one source that fails must not end the others
            why = f"{self.source.name}: {self.source.doing[1]}: {type(error).__name__}: {error}"
            told, self._said = self._said, why
            return [] if told == why else [Notice(time.time(), self._node, f"{why}; tried again")]


class Watch:
    """Finds a call that does not come back.

    Args:
        runner: makes the calls.
        timeout: seconds for one call.
        node: for the report.
    """

    def __init__(self, runner: Caller, timeout: float, node: str) -> None:
        self._runner = runner
        self._timeout = timeout
        self._node = node
        self._call: tuple[int, str] = (-1, "")
        self._silent = self._waited = 0.0
        self._reports = 0

    def tick(self, passed: float, now: float) -> Silence | None:
        """Count ``passed`` seconds; return a report at the timeout, and again after each further one."""
        runner, call = self._runner, self._runner.source.doing
        if not runner.calling or call != self._call:
            self._call, self._silent, self._reports = call, 0.0, 0
            self._waited = runner.waited()
            return None
        self._silent += min(passed, 2 * TICK)
        silent = self._silent - (runner.waited() - self._waited)
        timeout = self._timeout * (_STARTING if runner.source.starting else 1)
        if silent < timeout + self._reports * self._timeout:
            return None
        self._reports += 1
        return Silence(now, self._node, round(silent, 2), f"{runner.source.name}: {call[1]}")


class Collector:
    """Runs the sources and writes to a pipe until that closes."""

    def __init__(self, settings: CollectorSettings, pipe: int) -> None:
        self._settings = settings
        self._pipe = pipe
        self._found: queue.Queue[Sample | Listing] = queue.Queue(_WAITING)
        node, interval = settings.node, settings.interval
        addresses: dict[str, int] = {}
        sources: list[tuple[TelemetrySource, float]] = []
        answering: list[Caller] = []
        name, _, rest = settings.source.partition(":")
        if f"{name}:" == REPLAY:
            sources.append((Recorded(Path(rest), node, settings.begun), min(interval, TICK)))
        elif f"{name}:" == SIMULATE:
            sources.append((Simulated(simulation.parse(rest), node, settings.begun), interval))
        else:
            disk, devices = Disk(settings.folder), Nvml(node, settings.known, addresses)
            answering.append(Answering(Computing(devices), self._found))
            sources += [
                (devices, interval),
                (disk, interval),
                (Host(node, disk, interval), interval),
            ]
        self._log = KernelLog(settings.kernel_log, node, addresses, settings.position)
        sources.insert(
            0, (self._log, min(interval, _ALIVE_EVERY))
        )  # first: what it has not begun to read is old
        runners = [Runner(source, node, every, self._found) for source, every in sources]
        self._runners = [*runners, *answering]
        self._watches = [Watch(runner, settings.call_timeout, node) for runner in self._runners]
        self._offset = time.time() - time.monotonic()

    def run(self) -> NoReturn:
        """Read, report and write for ever; a closed pipe ends the process."""
        self._write("\n")  # an earlier collector may have been killed within a line
        for runner in self._runners:
            runner.start()
        ticked, alive = time.monotonic(), 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._found.get(timeout=TICK)
                self._write((found.to_line() if isinstance(found, Listing) else to_line(found)) + "\n")
            now = time.monotonic()
            if now - ticked < TICK:
                continue
            for watch in self._watches:
                if silence := watch.tick(now - ticked, time.time()):
                    self._write(to_line(silence) + "\n")
            ticked = now
            if now - alive >= _ALIVE_EVERY:
                alive = now
                self._look_at_the_clock()
                self._write(f"{self._log.position}\n")

    def _look_at_the_clock(self) -> None:
        offset = time.time() - time.monotonic()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) > _JUMP:
            text = f"the wall clock jumped by {jump:+.1f} s; times of samples before and after do not compare"
            self._write(to_line(Notice(time.time(), self._settings.node, text)) + "\n")

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._pipe, data) :]
        except BrokenPipeError:
            os._exit(0)


def main(settings: str, pipe: str, parent: str) -> NoReturn:
    """Run a collector for the process ``parent``, which has the other end of ``pipe``."""
    die_with_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Collector(CollectorSettings(**json.loads(settings)), int(pipe)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
