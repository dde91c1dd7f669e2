"""The agent's hold on its collector: start, read without blocking, end one that hangs, start another one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from outlast.health.agent.telemetry.collector import CollectorSettings
from outlast.health.policy.device_memory import LISTING, Listing, listing_of
from outlast.health.policy.telemetry import DeviceSample, Notice, Sample, Silence, from_line
from outlast.ipc.processes import Child, cannot_start, start, state_of

_PROGRAM = (  # without the folder of the script, whose modules must not shadow any of ours
    "import sys; sys.path[:1] = []; from outlast.health.agent.telemetry.collector import main; "
    "main(*sys.argv[1:])"
)
_SHORTEST, _LONGEST = 1.0, 60.0  # seconds until the next start; doubled by each end within _STEADY
_STEADY = 300.0
_QUIET = 30.0  # seconds without a sign of life; a collector writes each second
_HUNG = 3  # timeouts of one call of the driver, after which another process tries
_MOST_PASSED = 1.0  # seconds that count between two looks: the agent itself may have been stopped
_BYTES = 1 << 20  # that are read at a time
_LINE_BYTES = 1 << 16


class CollectorProcess:
    """One collector at a time; ``fileno()`` is readable when samples wait, and stays the same.

    Args:
        settings: of the first collector; the next ones go on where it ended.
    """

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self._questions, self._asker = os.pipe2(os.O_CLOEXEC)
        for end in (self._reader, self._asker):
            os.set_blocking(end, False)
        self._listing: Listing | None = None
        self._process: Child | None = None
        self._rest = b""
        self._heard = False
        self._start_at = self._started = self._looked = 0.0
        self._pause = 0.0
        self._quiet = 0.0
        self._reports = 0
        self._killed = False

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._reader

    @property
    def pid(self) -> int:
        """The collector's process, 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def has_read_devices(self) -> bool:
        """Whether NVML is the source, and there is a device."""
        return self._settings.source == "nvml" and bool(self._settings.known)

    def ask(self, number: int) -> bool:
        """Ask which processes compute on the devices; say whether there is a collector that may answer."""
        if self._process is None or self._killed:
            return False
        try:
            os.write(self._asker, f"{number}\n".encode())
        except BlockingIOError:
            return False
        return True

    def answer(self) -> Listing | None:
        """Return the newest answer that :meth:`read` has found, once."""
        found, self._listing = self._listing, None
        return found

    def deadline(self) -> float:
        """Return the monotonic time at which to call :meth:`read` next at the latest."""
        return self._start_at if self._process is None else self._looked + _MOST_PASSED

    def read(self, now: float) -> list[Sample]:
        """Return what has arrived until ``now`` (monotonic); start a collector where none runs."""
        found = list(self._arrived())
        passed, self._looked = min(now - self._looked, _MOST_PASSED), now
        self._quiet = 0.0 if found or self._heard else self._quiet + passed
        self._heard = False
        if self._process is None:
            if now >= self._start_at:
                found += self._start(now)
        elif self._process.poll() is not None:
            found.append(self._ended(now))
        else:
            found += self._look_at(found)
        return found

    def _look_at(self, found: list[Sample]) -> list[Sample]:
        """Kill a collector that hangs; report one that is quiet, and one that does not die."""
        hung = _HUNG * self._settings.call_timeout + 2 * self._pause  # a slow driver gets longer each time
        if self._quiet < _QUIET * (1 + self._reports):
            silent = (one for one in found if isinstance(one, Silence) and one.what.startswith("NVML:"))
            if not self._killed and any(one.seconds >= hung for one in silent):
                self._kill()
            return []
        self._reports += 1
        stopped = state_of(self.pid) in ("T", "t")
        why = (
            "it was killed and does not end, as it is blocked in the kernel" if self._killed else "no sample"
        )
        if not self._killed:
            self._kill()
            if stopped:
                return [self._notice(f"the collector (pid {self.pid}) was stopped; it is started again")]
        return [Silence(time.time(), self._settings.node, self._quiet, f"collector: {why}")]

    def _start(self, now: float) -> list[Sample]:
        words = (self._settings.to_json(), str(self._writer), str(os.getpid()))
        self._started, self._quiet, self._reports, self._killed = now, 0.0, 0, False
        try:
            self._process = Child(
                start(
                    [sys.executable, "-c", _PROGRAM, *words],
                    stdin=self._questions,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[self._writer],
                    start_new_session=True,
                )
            )
        except OSError as error:
            self._wait(now)
            return [self._notice(cannot_start("the collector of telemetry", error))]
        if not self._settings.begun:
            self._settings = replace(self._settings, begun=now)
        return []

    def _ended(self, now: float) -> Notice:
        why = "was killed, as a call did not come back" if self._killed else "has ended"
        if self._process is not None:
            self._process.close()
        self._process = None
        self._wait(now)
        pause = self._start_at - now
        return self._notice(f"the collector of telemetry {why}; another one starts in {pause:.0f} s")

    def _wait(self, now: float) -> None:
        steady = now - self._started > _STEADY
        self._pause = _SHORTEST if steady or not self._pause else min(2 * self._pause, _LONGEST)
        self._start_at = now + self._pause

    def _notice(self, text: str) -> Notice:
        return Notice(time.time(), self._settings.node, text)

    def _arrived(self) -> Iterator[Sample]:
        """Yield the samples in the pipe; take note of devices, and of the place in the kernel log."""
        try:
            data = os.read(self._reader, _BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest[-_LINE_BYTES:] + data).split(b"\n")
        for line in lines:
            self._heard = True
            if line.strip().lstrip(b"-").isdigit():
                self._settings = replace(self._settings, position=int(line))
                continue
            with contextlib.suppress(ValueError):  # a collector was killed within a line
                if line.startswith(LISTING):
                    self._listing = listing_of(line)
                    continue
                sample = from_line(line)
                if isinstance(sample, DeviceSample) and not sample.error and sample.uuid:
                    self._settings.known[sample.uuid] = sample.index
                yield sample

    def _kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def close(self) -> None:
        """End the collector; one that is blocked in the kernel is not waited for."""
        if self._process is not None:
            self._kill()
            self._process.wait(1.0)
            self._process.close()
        for end in (self._reader, self._writer, self._questions, self._asker):
            os.close(end)
