"""The stand-in for libnvidia-ml, compiled once for each process; tests skip where there is no compiler."""

from __future__ import annotations

import functools
import importlib.util
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.health.agent.telemetry.collector import CollectorSettings
from outlast.health.agent.telemetry.process import CollectorProcess
from outlast.health.policy.telemetry import DeviceSample, Sample, Silence
from tests.support.launching import until

INTERVAL, TIMEOUT = 0.2, 1.0  # of the collectors below; a busy host holds up a healthy call, too

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
VARIABLE = "NVML_STAND_IN"


@functools.cache
def folder(old_driver: bool = False) -> Path:
    """Return a folder for LD_LIBRARY_PATH with the stand-in."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc, gcc), and the stand-in for libnvidia-ml is in C")
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("the package nvidia-ml-py is not installed")
    place = Path(tempfile.mkdtemp(prefix="nvml-stand-in-"))
    flags = ["-DOLD_DRIVER"] if old_driver else []
    target = place / "libnvidia-ml.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        *flags,
        "-o",
        str(target),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    return place


class StandIn:
    """The stand-in's state file, and the environment under which it is used.

    Args:
        where: a folder for the state file.
        old_driver: it lacks the functions that newer drivers have.
    """

    def __init__(self, where: Path, old_driver: bool = False) -> None:
        self.path = where / "nvml-state"
        self._lines: dict[tuple[int, str], str] = {}
        self.environment = {"LD_LIBRARY_PATH": str(folder(old_driver)), VARIABLE: str(self.path)}
        self.processes = where / "nvml-state.processes"
        self.freed = where / "nvml-state.freed"
        self.write()

    def computes(self, device: int, pid: int) -> None:
        """Have a process hold memory of a device from now on."""
        with self.processes.open("a") as file:
            file.write(f"{device} {pid}\n")

    def put(self, device: int, **values: object) -> None:
        """Set fields of a device, or of the library (-1); None removes one."""
        for name, value in values.items():
            if value is None:
                self._lines.pop((device, name), None)
            else:
                self._lines[device, name] = str(value)
        self.write()

    def write(self) -> None:
        """Replace the state file in one step."""
        text = "".join(f"{device} {name} {value}\n" for (device, name), value in self._lines.items())
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        os.replace(temporary, self.path)


def installed(one: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name, value in one.environment.items():
        monkeypatch.setenv(name, value)
    return one


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
