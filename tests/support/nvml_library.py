"""The stand-in for libnvidia-ml, compiled once for each process; tests skip where there is no compiler."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

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
