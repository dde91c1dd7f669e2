"""The checks of a preflight that need no torch; each may block as long as the kernel does."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from outlast.health.agent import devices
from outlast.health.policy import preflight as policy
from outlast.health.policy.preflight import Findings, Preflight
from outlast.ipc.limits import available_memory, memory_room, process_room

PROBE = ".preflight-"
_PROBE_BYTES = 4096
_LOOKS = 100_000  # readings of a clock until it counts as stopped: tens of milliseconds
_MOST_FILES = 1000  # of the run folder whose times are read
_MONOTONIC = {"CLOCK_MONOTONIC": time.CLOCK_MONOTONIC, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}
_STA_UNSYNC = 0x40
_TIME_ERROR = 5


def folder(role: str, path: Path, limits: Preflight) -> Findings:
    """Check the file system of a folder, or of the nearest one above it that exists."""
    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    files = found.f_favail if found.f_files else -1
    error = "a read-only file system" if found.f_flag & os.ST_RDONLY else _write(place)
    return policy.disk(f"{role} {place}", free, files, limits, error)


def _write(place: Path) -> str:
    """Write, sync and read back a small file; return what went wrong, and leave nothing behind."""
    path = place / f"{PROBE}{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    content = secrets.token_bytes(_PROBE_BYTES)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"a file cannot be created: {error.strerror}"
    try:
        written = os.write(descriptor, content)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        back = os.pread(descriptor, _PROBE_BYTES, 0)
    except OSError as error:
        return f"a file of {_PROBE_BYTES} bytes cannot be written and synced: {error.strerror}"
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    if written < _PROBE_BYTES:
        return f"only {written} of {_PROBE_BYTES} bytes could be written"
    return "" if back == content else "a file that was written and synced reads back with other content"


def shared_memory(limits: Preflight, path: Path = Path("/dev/shm")) -> Findings:
    """Check the file system in which heartbeat pages and staged checkpoints are."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return policy.shared_memory(str(path), 0, 0, limits, error.strerror or str(error))
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return policy.shared_memory(str(path), size, free, limits, _write(path))


def memory(ranks: int, limits: Preflight) -> Findings:
    """Check how much memory is free, on this node and in this process's control groups."""
    return policy.memory(available_memory(), memory_room(), ranks, limits)


def port(number: int) -> Findings:
    """Listen on a port of every address for a moment."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", number), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return policy.port(number, "in use by another process" if taken else os.strerror(error.errno or 0))
    return policy.port(number)


def address(host: str) -> Findings:
    """Resolve a name and check which addresses are this node's: those that a socket can be bound to."""
    try:
        listed = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return policy.address(host, (), error=f"does not resolve: {error.strerror}")
    own: dict[str, None] = {}
    foreign: dict[str, None] = {}
    for family, kind, protocol, _, place in listed:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(place)
                own[str(place[0])] = None
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                foreign[str(place[0])] = None
    loopback = all(name == "::1" or name.startswith("127.") for name in own)
    return policy.address(host, tuple(own), tuple(foreign), loopback)


def clock(run_dir: Path, limits: Preflight) -> Findings:
    """Check whether the clocks advance, follow a reference, and are not behind the newest file."""
    return policy.clock(time.time(), limits, _newest(run_dir), _stopped(), _synchronised())


def _newest(run_dir: Path) -> float:
    newest = 0.0
    try:
        with os.scandir(run_dir) as entries:
            for entry, _ in zip(entries, range(_MOST_FILES), strict=False):
                if not entry.name.startswith(PROBE):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return newest  # a new run, or a file that was removed meanwhile
    return newest


def _stopped() -> tuple[str, ...]:
    before = {name: time.clock_gettime_ns(number) for name, number in _MONOTONIC.items()}
    for _ in range(_LOOKS):
        for name in [one for one in before if time.clock_gettime_ns(_MONOTONIC[one]) > before[one]]:
            del before[name]
        if not before:
            break
    return tuple(before)


class _Timex(ctypes.Structure):
    """``struct timex`` of 64-bit Linux; zeroed, it only reads. Source: adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("numbers", ctypes.c_long * 4),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def _synchronised() -> bool | None:
    state = _Timex()
    answer = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    if answer < 0:
        return None
    return answer != _TIME_ERROR and not state.status & _STA_UNSYNC


def open_files(limits: Preflight) -> Findings:
    """Check the soft limit of open files."""
    return policy.open_files(_soft(resource.RLIMIT_NOFILE), limits)


def processes(ranks: int, limits: Preflight) -> Findings:
    """Check how many processes and threads may still be started; RLIMIT_NPROC does not bind root."""
    room = math.inf
    most = _soft(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and most != math.inf:
        room = max(0, most - _threads_of(os.getuid()))
    grouped = process_room()
    return policy.processes(min(room, grouped) if grouped >= 0 else room, ranks, limits)


def _soft(name: int) -> float:
    soft, _ = resource.getrlimit(name)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _threads_of(user: int) -> int:
    count = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                try:
                    if entry.stat().st_uid == user:
                        count += len(os.listdir(f"/proc/{entry.name}/task"))
                except OSError:
                    continue  # it has ended
    return count


def gpus(nproc_per_node: str, expected: int, environment: Mapping[str, str]) -> Findings:
    """Count the GPUs and compare with what ``--nproc-per-node`` asks for."""
    try:
        ranks = devices.rank_count(nproc_per_node, environment)
    except ValueError as error:
        return policy.devices(0, 0, expected, f"--nproc-per-node {nproc_per_node}: {error}")
    unused = nproc_per_node == "cpu" and expected < 0
    return policy.devices(0 if unused else devices.gpu_count(environment), ranks, expected)
