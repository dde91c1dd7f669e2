"""The host: network ports, memory, load, CPU time that the hypervisor took, and the disk of the run folder.

Sources: sysfs-class-infiniband and sysfs-class-net of the kernel's Documentation/ABI, and proc(5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from outlast.health.policy.telemetry import MOST_PORTS, HostSample, Port, Sample

_FILE_BYTES = 1 << 16
_STEAL, _FIELDS = 7, 8  # of the line "cpu" of /proc/stat: user nice system idle iowait irq softirq steal
_VIRTUAL = "virtual"
Value = TypeVar("Value")


class Disk:
    """The file system of a folder; a call to one on the network may take for ever, so it has its own thread.

    Args:
        folder: on it.
    """

    name = "disk"
    starting = False

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._found: tuple[float, int, int] | None = None
        self.doing = (0, "")

    def sample(self, now: float) -> Sequence[Sample]:
        """Look; what was found is part of the next sample of the host."""
        del now
        self.doing = (self.doing[0] + 1, self._folder)
        try:
            found = os.statvfs(self._folder)
        except OSError:
            self._found = None
            return ()
        sizes = (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
        self._found = (time.monotonic(), *sizes)
        return ()

    def newest(self, within: float) -> tuple[int | None, int | None]:
        """Return bytes free and in total, as found in the last so many seconds."""
        found = self._found
        if found is None or time.monotonic() - found[0] > within:
            return None, None
        return found[1], found[2]


class Host:
    """The host.

    Args:
        node: its name.
        disk: of the run folder.
        interval: seconds between two readings; an older one of the disk is not used.
        root: for tests, a folder with ``proc`` and ``sys``.
    """

    name = "host"
    starting = False

    def __init__(self, node: str, disk: Disk, interval: float, root: Path = Path("/")) -> None:
        self._node = node
        self._disk = disk
        self._fresh = 3 * interval
        self._proc, self._class = root / "proc", root / "sys" / "class"
        self._ticks: tuple[int, int] | None = None
        self._problems: list[str] = []
        self.doing = (0, "")

    def sample(self, now: float) -> Sequence[Sample]:
        """Return one sample; what could not be read is None in it, and named in its ``error``."""
        self._problems = []
        available, total = self._try("memory", self._memory) or (None, None)
        free, size = self._disk.newest(self._fresh)
        sample = HostSample(
            *(now, self._node, self._try("network", self._ports) or (), free, size),
            memory_available=available,
            memory_total=total,
            cpu_steal=self._try("processors", self._steal),
            load=self._try("load", lambda: float(_text(self._proc / "loadavg").split()[0])),
            error="; ".join(self._problems),
        )
        return [sample]

    def _try(self, what: str, read: Callable[[], Value]) -> Value | None:
        self.doing = (self.doing[0] + 1, what)
        try:
            return read()
        except (OSError, ValueError, IndexError, KeyError) as error:
            self._problems.append(f"{what}: {error}")
            return None

    def _memory(self) -> tuple[int | None, int | None]:
        lines = (line.partition(":") for line in _text(self._proc / "meminfo").splitlines())
        found = {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.split()}
        return found.get("MemAvailable"), found.get("MemTotal")

    def _steal(self) -> float | None:
        """Return the share since the last reading; None: the first one, or counters that went back."""
        ticks = [int(word) for word in _text(self._proc / "stat").partition("\n")[0].split()[1:]]
        steal, total = ticks[_STEAL], sum(ticks[:_FIELDS])
        before, self._ticks = self._ticks, (steal, total)
        if before is None or total <= before[1] or steal < before[0]:
            return None
        return min(1.0, (steal - before[0]) / (total - before[1]))

    def _ports(self) -> tuple[Port, ...]:
        found = []
        for device in _names(self._class / "infiniband"):
            for number in _names(self._class / "infiniband" / device / "ports"):
                port = self._class / "infiniband" / device / "ports" / number
                state = _optional(port / "state")
                up = None if state is None else state.startswith("4")  # "4: ACTIVE"
                found.append(Port(f"{device}/{number}", up, _number(port / "counters" / "link_downed")))
        for name in _names(self._class / "net"):
            port = self._class / "net" / name
            if _VIRTUAL in os.path.realpath(port):  # loopback, bridges, containers
                continue
            state = _optional(port / "operstate")
            up = None if state in (None, "unknown") else state == "up"
            found.append(Port(name, up, _number(port / "carrier_down_count")))
        return tuple(found[:MOST_PORTS])


def _names(folder: Path) -> list[str]:
    """Return the entries of a folder that may not be there."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_FILE_BYTES).decode(errors="replace")


def _optional(path: Path) -> str | None:
    """Return a line of sysfs; None: it is not there, or its driver does not answer."""
    try:
        return _text(path).strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _optional(path)
    return int(text) if text is not None and text.isdecimal() else None
