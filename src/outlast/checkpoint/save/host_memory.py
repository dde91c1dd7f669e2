"""How many buffers the ranks of a node may make: one sum for the node against what limits its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outlast.ipc.limits import available_memory, memory_room

LEAST = 2  # buffers of a rank: the newest copy, and the next one
RESERVE = 256 << 20  # bytes that a rank, and the writer for it, may allocate later
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs and ramfs, from linux/magic.h
_FILES, _GROUP, _HOST = "file system", "control group", "host"
_CURES = {
    _FILES: "enlarge /dev/shm (docker run --shm-size; Kubernetes: sizeLimit of its volume)",
    _GROUP: "raise the memory limit of the container",
    _HOST: "take a node with more free memory",
}


@dataclass(frozen=True)
class Demand:
    """What the ranks of a node need in its memory.

    Args:
        ranks: how many.
        state: bytes of one state of all of them.
        more: buffers that each rank has besides those of ``checkpoints.buffers``.
        held: bytes of one state of the other ranks whose replicas this node holds.
    """

    ranks: int
    state: int
    more: int = 0
    held: int = 0

    def bytes_of(self, buffers: int) -> int:
        """Return the bytes for so many buffers."""
        return self.state * (buffers + self.more) + 2 * self.held

    def least(self, rooms: Mapping[str, int], buffers: int) -> tuple[int, str]:
        """Return what the nearest limit leaves beside so many buffers (< 0: too little), and its name."""
        nbytes = self.bytes_of(buffers)
        reserve = min(nbytes, RESERVE * self.ranks)  # small buffers are not refused because of it
        return min((room - nbytes - reserve * (limit != _FILES), limit) for limit, room in rooms.items())

    def buffers_in(self, rooms: Mapping[str, int], most: int) -> int:
        """Return how many buffers, at most ``most``, a rank may make; 0: there is no room for two."""
        return next((each for each in range(most, LEAST - 1, -1) if self.least(rooms, each)[0] >= 0), 0)

    def formula(self, buffers: int) -> str:
        """Return the bytes for so many buffers, and how they are computed."""
        held = f" + 2 x {_gib(self.held)} of replicas" if self.held else ""
        return (
            f"{_gib(self.bytes_of(buffers))} ({self.ranks} rank(s) x {buffers + self.more} buffers x"
            f" {_gib(self.state / self.ranks)}{held})"
        )


def rooms_of(
    folder: Path, process: Path = Path("/proc/self"), meminfo: Path = Path("/proc/meminfo")
) -> dict[str, int]:
    """Return the bytes that a memory folder may have by each limit, those that it has already included.

    Pages of a file system in memory count against the limits of the control group and are no free memory.

    Args:
        folder: on a disk, its file system is the only limit.
        process: folder of this process under /proc.
        meminfo: what the host tells of its memory.

    Raises:
        OSError: the folder cannot be read.
    """
    found = os.statvfs(folder)
    rooms = {_FILES: found.f_bavail * found.f_frsize}
    if is_memory(folder):
        rooms |= {_GROUP: memory_room(process), _HOST: available_memory(meminfo)}
    used = _allocated(folder)
    return {limit: room + used for limit, room in rooms.items() if room >= 0}


def room_beside(folder: Path) -> int:
    """Return the bytes that a memory folder may have beside those that it has.

    Raises:
        OSError: the folder cannot be read.
    """
    return min(rooms_of(folder).values()) - _allocated(folder)


def shortage(demand: Demand, rooms: Mapping[str, int], buffers: int) -> str:
    """Return why a node cannot have as many buffers as are set, and which setting changes that."""
    _, limit = demand.least(rooms, buffers)
    found = ", ".join(f"{one} {_gib(room)}" for one, room in rooms.items())
    cures = [_CURES[limit], *(["set checkpoints.replication = false"] if demand.held else [])]
    fit = demand.buffers_in(rooms, buffers)
    if fit:
        cures.append(f"set checkpoints.buffers = {fit}")
    return (
        f"{buffers} buffers need {demand.formula(buffers)}, more than the {limit} has room for ({found};"
        f" of memory up to {_gib(RESERVE)} a rank are reserved): {', or '.join(cures)}"
    )


def is_memory(folder: Path) -> bool:
    """Return whether a folder is on a file system in memory."""
    found = (ctypes.c_long * 32)()  # struct statfs, which begins with the type, has 15 words
    return ctypes.CDLL(None).statfs(os.fsencode(folder), found) == 0 and found[0] in _MEMORY_FILE_SYSTEMS


def _allocated(root: Path) -> int:
    """Return the bytes of the pages of the files in a folder: older buffers are used again."""
    found: dict[int, int] = {}  # by inode: files have several names
    for folder, _, entries in os.walk(root):
        for file in entries:
            with contextlib.suppress(OSError):  # the writer moves them meanwhile
                status = os.lstat(os.path.join(folder, file))
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
