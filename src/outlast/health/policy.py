"""What a node must show before it joins a job: limits, findings, and the sentence for the record.

Nothing is measured here. A measurement that could not be taken is a measurement too: it carries the error,
and a node about which something could not be found out is as unfit as one that failed.

What a preflight measures of a node; a measurement that could not be taken carries the error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from outlast.errors import UsageError


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


MIB = 1 << 20
GIB = 1 << 30
OLDEST_CLOCK = 1_721_779_200.0  # 2024-07-24, when torch 2.4 came out, the oldest that outlast runs with
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40}


class Level(str, Enum):
    """What a finding that is not well means for the node."""

    ERROR = "error"  # it does not join
    WARNING = "warning"  # it joins, and somebody should look


@dataclass(frozen=True)
class Preflight:
    """Limits; a node that is beyond one of them does not join.

    Args:
        disk_free: bytes free where the run folder and the checkpoints are; room for logs and small
            states, as the size of a checkpoint is not known before the first one.
        disk_files: files that can still be made there, where the file system counts them.
        memory_per_rank: bytes free for each rank, for the import of torch and its first tensors.
        shm_size: bytes of /dev/shm; 1 GiB is what NCCL's troubleshooting guide gives a container
            (``--shm-size=1g``), whose default is 64 MiB.
        shm_free: bytes free of it, for the pulse pages, NCCL's buffers and the first staging buffers.
        open_files: soft RLIMIT_NOFILE; 1024 is Linux's own default, and less was set by somebody.
        processes_per_rank: processes and threads for each rank; torch, NCCL and data loaders start dozens.
        clock_tolerance: seconds that a file of the run folder may seem to come from the future; NTP
            keeps a network within a second, and file servers write their own time.
        device_free: share of a GPU's memory that is free; the driver's own is some percent, and a
            process that was left behind holds far more.
        bandwidth: bytes/s from and to another node, over one connection; 80 % of 1 Gbit/s.

    Raises:
        UsageError: a limit is negative or no number.
    """

    disk_free: int = GIB
    disk_files: int = 1000
    memory_per_rank: int = GIB // 2
    shm_size: int = GIB
    shm_free: int = GIB // 4
    open_files: int = 1024
    processes_per_rank: int = 64
    clock_tolerance: float = 60.0
    device_free: float = 0.9
    bandwidth: float = 1e8

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not 0 <= value < math.inf:
                raise UsageError(f"limit {spec.name}: a number of at least 0 expected, {value} found")
        if self.device_free > 1:
            raise UsageError(f"limit device_free: a share from 0 to 1 expected, {self.device_free} found")


CHECK_OF_LIMIT = {
    "disk_free": Check.DISK,
    "disk_files": Check.DISK,
    "memory_per_rank": Check.MEMORY,
    "shm_size": Check.SHARED_MEMORY,
    "shm_free": Check.SHARED_MEMORY,
    "open_files": Check.OPEN_FILES,
    "processes_per_rank": Check.PROCESSES,
    "clock_tolerance": Check.CLOCK,
    "device_free": Check.COMPUTE,
    "bandwidth": Check.BANDWIDTH,
}


def with_limit(limits: Preflight, text: str) -> Preflight:
    """Return the limits with one changed by NAME=VALUE; a size may end in KiB, MiB, GiB, TiB, k, M or G.

    Raises:
        UsageError: there is no such limit, or the value is no number.
    """
    name, _, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in CHECK_OF_LIMIT:
        raise UsageError(f"--limit {text}: known limits are {', '.join(CHECK_OF_LIMIT)}; nothing was checked")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--limit {text}: expected NAME=VALUE, as in shm_size=512MiB; nothing was checked")
    number = float(match[1]) * _UNITS[match[2]]
    whole = isinstance(getattr(limits, name), int)
    changed: dict[str, Any] = {name: int(number) if whole and math.isfinite(number) else number}
    return replace(limits, **changed)


@dataclass(frozen=True)
class Finding:
    """What came out of a check.

    Args:
        ok: whether it is as expected.
        found, expected: both in words, with units.
        seconds: that the measurement took.
        level: what it means where it is not ok.
    """

    check: Check
    ok: bool
    found: str
    expected: str
    seconds: float = 0.0
    level: Level = Level.ERROR

    @property
    def excludes(self) -> bool:
        """Say whether the node must not join because of it."""
        return not self.ok and self.level is Level.ERROR

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**self.__dict__, "check": self.check.value, "level": self.level.value}


def judge(measurements: Iterable[Measurement], limits: Preflight) -> tuple[Finding, ...]:
    """Compare measurements with limits; each gives one finding or more, in the same order."""
    return tuple(
        replace(finding, seconds=one.seconds)
        for one in measurements
        for finding in _RULES[type(one)](one, limits)
    )


def unfit(findings: Sequence[Finding]) -> str:
    """Return why the node must not join, all failures in one sentence; empty: it may."""
    return "; ".join(
        f"{one.check.value}: {one.found} ({one.expected} expected)" for one in findings if one.excludes
    )


def in_bytes(count: float) -> str:
    """Return a number of bytes in the unit in which it is read best."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} bytes"


def _folder(one: Folder, limits: Preflight) -> Iterator[Finding]:
    where = f"{one.role} {one.path}"
    if one.read_only or one.error:
        found = "a read-only file system" if one.read_only else one.error
        yield Finding(Check.DISK, False, f"{where}: {found}", "a file that can be written, synced and read")
        return
    enough = one.free >= limits.disk_free
    yield Finding(
        Check.DISK, enough, f"{where}: {in_bytes(one.free)} free", f"at least {in_bytes(limits.disk_free)}"
    )
    if 0 <= one.files < limits.disk_files:
        yield Finding(
            Check.DISK, False, f"{where}: room for {one.files} more files", f"at least {limits.disk_files}"
        )


def _memory(one: Memory, limits: Preflight) -> Iterator[Finding]:
    needed = limits.memory_per_rank * one.ranks
    expected = f"at least {in_bytes(needed)} for {one.ranks} rank(s)"
    if one.available < 0:
        yield Finding(Check.MEMORY, False, "free memory is not known (/proc/meminfo)", expected)
    else:
        yield Finding(Check.MEMORY, one.available >= needed, f"{in_bytes(one.available)} free", expected)
    if one.room >= 0:
        found = f"{in_bytes(one.room)} below the limit of a control group"
        yield Finding(Check.MEMORY, one.room >= needed, found, expected)


def _shared_memory(one: SharedMemory, limits: Preflight) -> Iterator[Finding]:
    check = Check.SHARED_MEMORY
    if one.error:
        yield Finding(check, False, f"{one.path}: {one.error}", "a file system in memory that can be written")
        return
    hint = f"at least {in_bytes(limits.shm_size)}; a container gets it with --shm-size"
    yield Finding(check, one.size >= limits.shm_size, f"{one.path}: {in_bytes(one.size)} in size", hint)
    least = f"at least {in_bytes(limits.shm_free)}"
    yield Finding(check, one.free >= limits.shm_free, f"{one.path}: {in_bytes(one.free)} free", least)


def _port(one: Port, _: Preflight) -> Iterator[Finding]:
    found = f"port {one.number}: {one.error or 'free'}"
    yield Finding(Check.PORTS, not one.error, found, "a port that can be listened on")


def _address(one: Address, _: Preflight) -> Iterator[Finding]:
    expected = "a name whose addresses are this node's"
    if one.error or one.foreign or not one.own:
        found = one.error or (
            f"leads elsewhere, to {', '.join(one.foreign)}" if one.foreign else "no address"
        )
        yield Finding(Check.ADDRESS, False, f"{one.host}: {found}", expected)
        return
    found = f"{one.host}: {', '.join(one.own)}"
    if one.loopback:
        yield Finding(
            Check.ADDRESS, False, f"{found}, which no other node reaches", expected, level=Level.WARNING
        )
    else:
        yield Finding(Check.ADDRESS, True, found, expected)


def _clock(one: Clock, limits: Preflight) -> Iterator[Finding]:
    if one.stopped:
        yield Finding(Check.CLOCK, False, f"{', '.join(one.stopped)} stand still", "clocks that go on")
    earliest = max(OLDEST_CLOCK, one.newest - limits.clock_tolerance)
    if one.wall < OLDEST_CLOCK:
        found = f"the clock is {(OLDEST_CLOCK - one.wall) / 86400:.0f} days before torch 2.4"
    elif one.wall < earliest:
        found = f"the clock is {one.newest - one.wall:.0f} s behind the newest file of the run folder"
    else:
        found = "the clock is not behind the files of the run folder"
    expected = f"no more than {limits.clock_tolerance:.0f} s behind"
    yield Finding(Check.CLOCK, one.wall >= earliest, found, expected)
    if one.synchronised is not None:
        found = "the kernel's clock follows " + ("a reference" if one.synchronised else "no reference")
        yield Finding(Check.CLOCK, one.synchronised, found, "NTP or PTP", level=Level.WARNING)


def _open_files(one: OpenFiles, limits: Preflight) -> Iterator[Finding]:
    expected = f"at least {limits.open_files} (ulimit -n)"
    yield Finding(Check.OPEN_FILES, one.most >= limits.open_files, f"{one.most:.0f} a process", expected)


def _processes(one: Processes, limits: Preflight) -> Iterator[Finding]:
    needed = limits.processes_per_rank * one.ranks
    found = "any number" if one.room == math.inf else f"{one.room:.0f} more may be started"
    expected = f"at least {needed} for {one.ranks} rank(s) (ulimit -u, pids.max)"
    yield Finding(Check.PROCESSES, one.room >= needed, found, expected)


def _devices(one: Devices, _: Preflight) -> Iterator[Finding]:
    if one.error:
        yield Finding(Check.DEVICES, False, one.error, "as many ranks as --nproc-per-node asks for")
    elif one.expected >= 0:
        right = one.found == one.expected
        yield Finding(Check.DEVICES, right, f"{one.found} GPU(s)", f"{one.expected} (--gpus)")
    else:
        found = f"{one.found} GPU(s) for {one.ranks} rank(s)"
        yield Finding(
            Check.DEVICES, not 0 < one.found < one.ranks, found, "one for each rank, or none at all"
        )


def _torch(one: Torch, _: Preflight) -> Iterator[Finding]:
    found = one.error or f"torch {one.version}, imported in {one.seconds:.1f} s"
    yield Finding(Check.TORCH, not one.error, found, "an import of torch that ends")


def _compute(one: Compute, limits: Preflight) -> Iterator[Finding]:
    where = f"{one.device} ({one.model})" if one.model else one.device
    expected = "the known products, and memory that keeps what was written"
    said = "; ".join(one.problems) or f"right products, {in_bytes(one.tested)} kept their patterns"
    yield Finding(Check.COMPUTE, not one.problems, f"{where}: {said}", expected)
    if one.total > 0:
        share = one.free / one.total
        found = f"{where}: {share:.0%} of {in_bytes(one.total)} free"
        least = f"at least {limits.device_free:.0%}; another process holds the rest"
        yield Finding(Check.COMPUTE, share >= limits.device_free, found, least)


def _bandwidth(one: Bandwidth, limits: Preflight) -> Iterator[Finding]:
    least = f"at least {limits.bandwidth / 1e6:.0f} MB/s"
    if one.error:
        yield Finding(Check.BANDWIDTH, False, f"{one.peer}: {one.error}", least)
        return
    for way, rate in (("to", one.sent), ("from", one.received)):
        found = f"{rate / 1e6:.0f} MB/s {way} {one.peer}"
        yield Finding(Check.BANDWIDTH, rate >= limits.bandwidth, found, least)


def _no_answer(one: NoAnswer, _: Preflight) -> Iterator[Finding]:
    yield Finding(one.check, False, one.what, "an answer in time")


_RULES: dict[type, Callable[[Any, Preflight], Iterator[Finding]]] = {
    Folder: _folder,
    Memory: _memory,
    SharedMemory: _shared_memory,
    Port: _port,
    Address: _address,
    Clock: _clock,
    OpenFiles: _open_files,
    Processes: _processes,
    Devices: _devices,
    Torch: _torch,
    Compute: _compute,
    Bandwidth: _bandwidth,
    NoAnswer: _no_answer,
}
