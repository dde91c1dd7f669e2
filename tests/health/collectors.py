"""A collector of telemetry and what it has reported so far."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path

from outlast.health.agent.telemetry.collector import CollectorSettings
from outlast.health.agent.telemetry.process import CollectorProcess
from outlast.health.policy.telemetry import DeviceSample, Sample, Silence
from tests.support.launching import until

INTERVAL, TIMEOUT = 0.2, 1.0  # a busy host holds up a healthy call, too


class Node:
    """A collector and what it has said so far."""

    def __init__(self, where: Path, source: str = "nvml") -> None:
        self.kernel_log = where / "kernel.log"
        self.kernel_log.touch()
        self.said: list[Sample] = []
        self.collector = CollectorProcess(
            CollectorSettings("here", source, INTERVAL, TIMEOUT, str(self.kernel_log), str(where))
        )

    def log(self, line: str) -> None:
        with self.kernel_log.open("a") as file:
            file.write(line + "\n")

    def look(self) -> list[Sample]:
        """Read once; return what was said."""
        select.select([self.collector], [], [], 0.05)
        found = self.collector.read(time.monotonic())
        self.said += found
        return found

    def wait(self, wanted: Callable[[Sample], bool], what: str) -> Sample:
        """Return the first sample from now on that is wanted."""

        def first() -> Sample | None:
            return next((one for one in self.look() if wanted(one)), None)

        found: Sample = until(first, lambda: f"{what}; said were {self.said[-5:]}")
        return found

    def device(self, index: int, *, error: bool = False) -> DeviceSample:
        """Return the next sample of a device, with or without an error."""

        def wanted(one: Sample) -> bool:
            return isinstance(one, DeviceSample) and one.index == index and bool(one.error) == error

        found = self.wait(wanted, f"device {index}, {'with' if error else 'without'} an error")
        assert isinstance(found, DeviceSample)
        return found

    def fresh(self, index: int) -> DeviceSample:
        """Return a sample of a device whose reading began after this call."""
        after = time.time()
        found = self.wait(
            lambda one: isinstance(one, DeviceSample) and one.index == index and one.time > after,
            f"a fresh sample of device {index}",
        )
        assert isinstance(found, DeviceSample)
        return found

    def silence(self) -> Silence:
        found = self.wait(lambda one: isinstance(one, Silence), "a silence")
        assert isinstance(found, Silence)
        return found
