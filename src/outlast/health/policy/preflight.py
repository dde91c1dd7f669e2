"""The limits of a preflight: one small function for each check compares what was measured with its bound.

Nothing is measured here. A function takes numbers, or the error that measuring them ended with, and returns
findings. A node about which something could not be found out is as unfit as one that fails a check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from outlast.errors import UsageError

MIB = 1 << 20
GIB = 1 << 30
OLDEST_CLOCK = 1_721_779_200.0  # 2024-07-24, when torch 2.4 came out, the oldest that outlast runs with
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40}


class Check(str, Enum):
    """What is checked; the values are the names of ``--skip``."""

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


class Level(str, Enum):
    """What a failed check means for the node."""

    ERROR = "error"  # it does not join
    WARNING = "warning"  # it joins


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Args:
        ok: whether the check passed.
        found, expected: in words, with units.
        seconds: that the measurement took.
        level: what it means if the check failed.
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


Findings = list[Finding]


@dataclass(frozen=True)
class Preflight:
    """Limits; a node that is beyond one of them does not join.

    Args:
        disk_free: bytes free where the run folder and the checkpoints are; enough for logs and small
            states, since the size of a checkpoint is not known before the first one.
        disk_files: files that can still be created there, where the file system counts them.
        memory_per_rank: bytes free for each rank, for the import of torch and its first tensors.
        shm_size: bytes of /dev/shm; 1 GiB is what NCCL's troubleshooting guide gives a container
            (``--shm-size=1g``), whose default is 64 MiB.
        shm_free: bytes free of it, for the heartbeat pages, NCCL's buffers and the first staging buffers.
        open_files: soft RLIMIT_NOFILE; 1024 is Linux's default.
        processes_per_rank: processes and threads for each rank; torch, NCCL and data loaders start dozens.
        clock_tolerance: seconds that a file of the run folder may be in the future; NTP keeps a network
            within a second, but file servers write their own time.
        device_free: share of a GPU's memory that is free; the driver takes a few percent, a process
            of an earlier job far more.
        bandwidth: bytes/s from and to another node, over one connection; 80 % of 1 Gbit/s.

    Raises:
        UsageError: a limit is negative or not a number.
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
        UsageError: there is no such limit, or the value is not a number.
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


def no_answer(check: Check, why: str, seconds: float = 0.0) -> Findings:
    """Return the finding for a check that was not done in time, or failed in an unexpected way."""
    return [Finding(check, False, why, "an answer in time", seconds)]


def disk(where: str, free: int, files: int, limits: Preflight, error: str = "") -> Findings:
    """Check a folder.

    Args:
        where: its role and path.
        free: bytes that this user may still write.
        files: files that may still be created; -1: the file system does not count them.
        limits: of the preflight.
        error: why a small file could not be written, synced and read back; empty: it was.
    """
    if error:
        expected = "a file that can be written, synced and read"
        return [Finding(Check.DISK, False, f"{where}: {error}", expected)]
    least = f"at least {in_bytes(limits.disk_free)}"
    found = [Finding(Check.DISK, free >= limits.disk_free, f"{where}: {in_bytes(free)} free", least)]
    if 0 <= files < limits.disk_files:
        room = f"{where}: room for {files} more files"
        found.append(Finding(Check.DISK, False, room, f"at least {limits.disk_files}"))
    return found


def memory(available: int, room: int, ranks: int, limits: Preflight) -> Findings:
    """Check the memory for the ranks.

    Args:
        available: bytes that the kernel would give without swapping; -1: not known.
        room: bytes to the nearest limit of a control group; -1: there is no limit.
        ranks: that share it.
        limits: of the preflight.
    """
    needed = limits.memory_per_rank * ranks
    expected = f"at least {in_bytes(needed)} for {ranks} rank(s)"
    free = f"{in_bytes(available)} free" if available >= 0 else "free memory is not known (/proc/meminfo)"
    found = [Finding(Check.MEMORY, available >= needed, free, expected)]
    if room >= 0:
        below = f"{in_bytes(room)} below the limit of a control group"
        found.append(Finding(Check.MEMORY, room >= needed, below, expected))
    return found


def shared_memory(path: str, size: int, free: int, limits: Preflight, error: str = "") -> Findings:
    """Check the file system for shared memory; ``error``: why it cannot be written."""
    check = Check.SHARED_MEMORY
    if error:
        return [Finding(check, False, f"{path}: {error}", "a file system in memory that can be written")]
    hint = f"at least {in_bytes(limits.shm_size)}; a container gets it with --shm-size"
    least = f"at least {in_bytes(limits.shm_free)}"
    return [
        Finding(check, size >= limits.shm_size, f"{path}: {in_bytes(size)} in size", hint),
        Finding(check, free >= limits.shm_free, f"{path}: {in_bytes(free)} free", least),
    ]


def port(number: int, error: str = "") -> Findings:
    """Check a port that the node will listen on; ``error``: why it cannot."""
    found = f"port {number}: {error or 'free'}"
    return [Finding(Check.PORTS, not error, found, "a port that can be listened on")]


def address(
    host: str, own: Sequence[str], foreign: Sequence[str] = (), loopback: bool = False, error: str = ""
) -> Findings:
    """Check the name under which other nodes will connect to this one.

    Args:
        host: the name.
        own: its addresses that belong to this node.
        foreign: its other addresses.
        loopback: whether all own ones are loopback addresses; this is a warning.
        error: why the name was not resolved.
    """
    if foreign:
        error = error or f"resolves to addresses of another host: {', '.join(foreign)}"
    error = error or ("" if own else "no address")
    found = f"{host}: {error or ', '.join(own)}"
    if loopback and not error:
        found += ", which no other node reaches"
    level = Level.ERROR if error else Level.WARNING
    ok = not error and not loopback
    return [Finding(Check.ADDRESS, ok, found, "a name whose addresses are this node's", level=level)]


def clock(
    wall: float,
    limits: Preflight,
    newest: float = 0.0,
    stopped: Sequence[str] = (),
    synchronised: bool | None = None,
) -> Findings:
    """Check the clocks.

    Args:
        wall: seconds since 1970.
        limits: of the preflight.
        newest: latest change of a file in the run folder; 0: it has none.
        stopped: names of the monotonic clocks that stand still.
        synchronised: whether the kernel's clock follows a reference; None: the kernel does not say.
    """
    findings = []
    if stopped:
        found = f"{', '.join(stopped)} stand still"
        findings.append(Finding(Check.CLOCK, False, found, "clocks that advance"))
    earliest = max(OLDEST_CLOCK, newest - limits.clock_tolerance)
    if wall < OLDEST_CLOCK:
        found = f"the clock is {(OLDEST_CLOCK - wall) / 86400:.0f} days before torch 2.4"
    elif wall < earliest:
        found = f"the clock is {newest - wall:.0f} s behind the newest file of the run folder"
    else:
        found = "the clock is not behind the files of the run folder"
    expected = f"no more than {limits.clock_tolerance:.0f} s behind"
    findings.append(Finding(Check.CLOCK, wall >= earliest, found, expected))
    if synchronised is not None:
        found = "the kernel's clock follows " + ("a reference" if synchronised else "no reference")
        findings.append(Finding(Check.CLOCK, synchronised, found, "NTP or PTP", level=Level.WARNING))
    return findings


def open_files(most: float, limits: Preflight) -> Findings:
    """Check the soft limit of open files of a process."""
    expected = f"at least {limits.open_files} (ulimit -n)"
    return [Finding(Check.OPEN_FILES, most >= limits.open_files, f"{most:.0f} per process", expected)]


def processes(room: float, ranks: int, limits: Preflight) -> Findings:
    """Check how many processes and threads may still be started; inf: any number."""
    needed = limits.processes_per_rank * ranks
    found = "any number" if room == math.inf else f"{room:.0f} more may be started"
    expected = f"at least {needed} for {ranks} rank(s) (ulimit -u, pids.max)"
    return [Finding(Check.PROCESSES, room >= needed, found, expected)]


def devices(count: int, ranks: int, expected: int = -1, error: str = "") -> Findings:
    """Check the number of GPUs.

    Args:
        count: GPUs that the kernel shows and CUDA_VISIBLE_DEVICES leaves.
        ranks: of this node.
        expected: how many there must be; -1: as many as ranks, or none.
        error: why ``--nproc-per-node`` cannot be met.
    """
    if error:
        return [Finding(Check.DEVICES, False, error, "as many ranks as --nproc-per-node asks for")]
    if expected >= 0:
        return [Finding(Check.DEVICES, count == expected, f"{count} GPU(s)", f"{expected} (--gpus)")]
    found = f"{count} GPU(s) for {ranks} rank(s)"
    return [Finding(Check.DEVICES, not 0 < count < ranks, found, "one for each rank, or none at all")]


def torch(version: str, seconds: float, error: str = "") -> Findings:
    """Check how the import of torch ended in a separate process."""
    found = error or f"torch {version}, imported in {seconds:.1f} s"
    return [Finding(Check.TORCH, not error, found, "an import of torch that succeeds", seconds)]


def compute(
    device: str, memory: tuple[int, int, int], problems: Sequence[str], limits: Preflight
) -> Findings:
    """Check the products and memory patterns of a device.

    Args:
        device: "cpu", or "cuda:0" with its model.
        memory: bytes that are free, in total (0: not looked at here), and tested with patterns.
        problems: one text for each wrong product or pattern, or the error of the test.
        limits: of the preflight.
    """
    free, total, tested = memory
    said = "; ".join(problems) or f"right products, {in_bytes(tested)} kept their patterns"
    expected = "the known products, and memory that keeps what was written"
    findings = [Finding(Check.COMPUTE, not problems, f"{device}: {said}", expected)]
    if total > 0:
        share = free / total
        found = f"{device}: {share:.0%} of {in_bytes(total)} free"
        least = f"at least {limits.device_free:.0%}; another process holds the rest"
        findings.append(Finding(Check.COMPUTE, share >= limits.device_free, found, least))
    return findings


def bandwidth(peer: str, sent: float, received: float, limits: Preflight, error: str = "") -> Findings:
    """Check how fast bytes went to another node and came from there, in bytes/s."""
    least = f"at least {limits.bandwidth / 1e6:.0f} MB/s"
    if error:
        return [Finding(Check.BANDWIDTH, False, f"{peer}: {error}", least)]
    return [
        Finding(Check.BANDWIDTH, rate >= limits.bandwidth, f"{rate / 1e6:.0f} MB/s {way} {peer}", least)
        for way, rate in (("to", sent), ("from", received))
    ]
