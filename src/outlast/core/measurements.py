"""What a preflight measures of a node; a measurement that could not be taken carries the error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Check(str, Enum):
    """What is looked at; the values are the names of ``--skip``."""

    DISK = "disk"
    MEMORY = "memory"
    SHARED_MEMORY = "shm"
    PORTS = "ports"
    ADDRESS = "address"
    CLOCK = "clock"
    OPEN_FILES = "open-files"
    PROCESSES = "processes"
    DEVICES = "devices"
    TORCH = "torch"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"


@dataclass(frozen=True)
class Folder:
    """A folder of the run, or the nearest one above it that exists.

    Args:
        role: "run folder" or "checkpoint folder".
        free: bytes that this user may still write.
        files: files that may still be made; -1: the file system does not count them.
        error: why a small file could not be written, synced and read back; empty: it was.
    """

    role: str
    path: str
    free: int
    files: int
    read_only: bool
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Free memory of this node and of this process's control groups.

    Args:
        available: bytes that the kernel would give without swapping; -1: not known.
        room: bytes to the nearest limit of a control group; -1: there is none.
        ranks: that will share it.
    """

    available: int
    room: int
    ranks: int
    seconds: float = 0.0


@dataclass(frozen=True)
class SharedMemory:
    """The file system for shared memory; ``error``: why nothing can be written there."""

    path: str
    size: int
    free: int
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Port:
    """A port that the node will listen on; ``error``: why it cannot."""

    number: int
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Address:
    """The name under which other nodes will call this one.

    Args:
        own: its addresses that belong to this node.
        foreign: those that do not.
        loopback: whether all own ones are reached from this node only.
        error: why it was not resolved.
    """

    host: str
    own: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    loopback: bool = False
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Clock:
    """The clocks of this node.

    Args:
        wall: seconds since 1970.
        newest: latest change of a file in the run folder; 0: it has none.
        stopped: names of the monotonic clocks that do not go on.
        synchronised: whether the kernel says that its clock follows a reference; None: it does not say.
    """

    wall: float
    newest: float = 0.0
    stopped: tuple[str, ...] = ()
    synchronised: bool | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class OpenFiles:
    """The soft limit of open files of a process."""

    most: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Processes:
    """How many processes and threads may still be started, by the nearest of the limits; inf: any number."""

    room: float
    ranks: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Devices:
    """The GPUs that the kernel shows and CUDA_VISIBLE_DEVICES leaves.

    Args:
        found: their number.
        ranks: of this node.
        expected: how many there must be; -1: as many as ranks, or none at all.
        error: why ``--nproc-per-node`` cannot be met.
    """

    found: int
    ranks: int
    expected: int = -1
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Torch:
    """How the import of torch went, in a process of its own; ``error``: that it did not end well."""

    version: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Compute:
    """What a device made of products and patterns that are known.

    Args:
        device: "cpu" or "cuda:0".
        model: its name.
        free, total: bytes of its memory; 0: that of the node, which another check looks at.
        tested: bytes that patterns were written to.
        problems: one text for each wrong product or pattern, or what it failed with.
    """

    device: str
    model: str
    free: int
    total: int
    tested: int
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Bandwidth:
    """How fast bytes went to another node and came from there, in bytes/s; ``error``: that they did not."""

    peer: str
    sent: float = 0.0
    received: float = 0.0
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NoAnswer:
    """A check that was not done in time, or failed in a way that it does not know."""

    check: Check
    what: str
    seconds: float = 0.0


Measurement = (
    Folder | Memory | SharedMemory | Port | Address | Clock | OpenFiles | Processes | Devices | Torch
    | Compute | Bandwidth | NoAnswer
)  # fmt: skip
