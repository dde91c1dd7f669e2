"""What the control groups of this process leave it: memory and processes, in version 1 and version 2.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # version 1 writes the largest number of pages for "no limit"
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_PROCESSES = (("pids.max", "pids.current"),)
_CACHE = ("inactive_file", "total_inactive_file")  # counted as used, and given back before anybody is killed


def memory_room(process: Path = Path("/proc/self")) -> int:
    """Return the bytes to the nearest memory limit, -1 where there is none.

    Args:
        process: folder of the process under /proc.
    """
    return _room("memory", _MEMORY, process)


def process_room(process: Path = Path("/proc/self")) -> int:
    """Return how many processes and threads may still be started, -1 where nothing limits them."""
    return _room("pids", _PROCESSES, process)


def oom_kills(process: Path = Path("/proc/self")) -> int:
    """Return how many processes of this group the kernel has killed for want of memory; 0 if unknown."""
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
    """Yield the folder of the process's group and those above it, for each hierarchy that counts."""
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
    return max(int(found.get(name, 0)) for name in _CACHE)


def _fields(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(None, 1) for line in lines)
