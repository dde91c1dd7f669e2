"""Memory, processes and processors that the host and its control groups leave to a process.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # version 1 writes the largest number of pages for "no limit"
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_PROCESSES = (("pids.max", "pids.current"),)
_CACHE = ("", "total_")  # of version 2 and 1; counted as used, and given back before a process is killed


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that the host can give to processes without swapping, -1 where it does not tell."""
    found = _fields(meminfo).get("MemAvailable:")
    return -1 if found is None else int(found.split()[0]) * 1024


def memory_room(process: Path = Path("/proc/self")) -> int:
    """Return the bytes to the nearest memory limit, -1 where there is none.

    Args:
        process: folder of the process under /proc.
    """
    return _room("memory", _MEMORY, process)


def process_room(process: Path = Path("/proc/self")) -> int:
    """Return how many processes and threads may still be started, -1 where nothing limits them."""
    return _room("pids", _PROCESSES, process)


def processor_limit(process: Path = Path("/proc/self")) -> float:
    """Return the processors that the lowest CPU limit of the control groups allows; 0: no limit."""
    limits = []
    for folder in _folders("cpu", process):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota < 0:
            with contextlib.suppress(OSError, ValueError):  # "max 100000": no limit
                quota, period = map(int, (folder / "cpu.max").read_text().split())
        if quota > 0 and period > 0:
            limits.append(quota / period)
    return min(limits, default=0.0)


def processors(process: Path = Path("/proc/self")) -> int:
    """Return how many processors this process may use: its affinity, within the groups' CPU limits."""
    count, limit = len(os.sched_getaffinity(0)), processor_limit(process)
    return min(count, math.ceil(limit)) if limit else count


def oom_kills(process: Path = Path("/proc/self")) -> int:
    """Return how many processes of this group the kernel has killed because memory was full; 0 if unknown."""
    for folder in _folders("memory", process):
        for name in ("memory.events", "memory.oom_control"):
            kills = _fields(folder / name).get("oom_kill")
            if kills is not None:
                return int(kills)
    return 0


def _room(controller: str, files: tuple[tuple[str, str], ...], process: Path) -> int:
    rooms = [
        max(0, limit - max(0, used - _cache(folder) * (controller == "memory")))
        for folder in _folders(controller, process)
        for most, now in files
        if (limit := _number(folder / most)) >= 0 and (used := _number(folder / now)) >= 0
    ]
    return min(rooms, default=-1)


def _folders(controller: str, process: Path) -> Iterator[Path]:
    """Yield the folder of the process's group and those above it, for each hierarchy in use."""
    try:
        mounts = (process / "mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        place, _, kind = line.partition(" - ")
        file_system, *_, flags = kind.split()
        version_2 = file_system == "cgroup2"
        if not version_2 and not (file_system == "cgroup" and controller in flags.split(",")):
            continue
        root, mount = (PurePosixPath(field) for field in place.split()[3:5])
        for _, controllers, path in groups:
            if controllers == "" if version_2 else controller in controllers.split(","):
                group = PurePosixPath(path)
                below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
                for one in (below, *below.parents):
                    yield Path(mount / one)


def _number(file: Path) -> int:
    try:
        found = int(file.read_text())
    except (OSError, ValueError):  # "max", or a file that this version does not have
        return -1
    return found if found < _UNLIMITED else -1


def _cache(folder: Path) -> int:
    found = _fields(folder / "memory.stat")
    kinds = ("active_file", "inactive_file")
    return max(sum(int(found.get(prefix + kind, 0)) for kind in kinds) for prefix in _CACHE)


def _fields(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(None, 1) for line in lines)
