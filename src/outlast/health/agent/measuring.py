"""The measurements of a preflight that need no torch; each may block as long as the kernel does.

How fast bytes cross between two nodes: one connection, both ways, one after the other.

Both sides prove that they know the token, as savers do. Every chunk is digested on both sides and Python sits
in between, so the number is what one connection of a saver would get. It is no measure of RDMA or of NCCL.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import queue
import resource
import secrets
import socket
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from outlast.checkpoint.replica.frames import (
    CHUNK_BYTES,
    Channel,
    Kind,
    PeerError,
    PeerRefused,
    Refusal,
    address_text,
)
from outlast.checkpoint.replica.handshake import Party, greet
from outlast.checkpoint.replica.listener import Listener, Reception
from outlast.cluster.rpc.handshake import new_nonce
from outlast.errors import UsageError
from outlast.health.agent import devices
from outlast.health.policy import (
    Address,
    Bandwidth,
    Clock,
    Devices,
    Folder,
    Memory,
    OpenFiles,
    Port,
    Processes,
    SharedMemory,
)
from outlast.launcher.workers import processes as control_groups

PROBE = ".preflight-"
_PROBE_BYTES = 4096
_LOOKS = 100_000  # at a clock until it counts as stopped: tens of milliseconds, where one is a microsecond
_MOST_FILES = 1000  # of the run folder whose times are read
_MONOTONIC = {"CLOCK_MONOTONIC": time.CLOCK_MONOTONIC, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}
_STA_UNSYNC = 0x40
_TIME_ERROR = 5


def folder(role: str, path: Path) -> Folder:
    """Look at the file system of a folder, or of the nearest one above it that exists."""
    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    read_only = bool(found.f_flag & os.ST_RDONLY)
    free = found.f_bavail * found.f_frsize
    files = found.f_favail if found.f_files else -1
    return Folder(role, str(place), free, files, read_only, "" if read_only else _write(place))


def _write(place: Path) -> str:
    """Write, sync and read back a small file; return what went wrong, and leave nothing behind."""
    path = place / f"{PROBE}{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    content = secrets.token_bytes(_PROBE_BYTES)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"a file cannot be made: {error.strerror}"
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
        return f"of a file of {_PROBE_BYTES} bytes {written} could be written"
    return "" if back == content else "a file that was written and synced reads back as other bytes"


def shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory:
    """Look at the file system in which pulse pages and staged checkpoints are."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return SharedMemory(str(path), 0, 0, error.strerror or str(error))
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return SharedMemory(str(path), size, free, _write(path))


def memory(ranks: int) -> Memory:
    """Read how much memory is free, for this node and for this process's control groups."""
    available = -1
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                available = int(value.split()[0]) * 1024
    return Memory(available, control_groups.memory_room(), ranks)


def port(number: int) -> Port:
    """Listen on a port of every address for a moment."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", number), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return Port(number, "another process has it" if taken else os.strerror(error.errno or 0))
    return Port(number)


def address(host: str) -> Address:
    """Resolve a name and see which of its addresses are this node's: those that a socket can be bound to."""
    try:
        listed = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return Address(host, error=f"does not resolve: {error.strerror}")
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
    return Address(host, tuple(own), tuple(foreign), loopback)


def clock(run_dir: Path) -> Clock:
    """Look at the clocks: whether they go on, what the kernel says of its reference, and the newest file."""
    return Clock(time.time(), _newest(run_dir), _stopped(), _synchronised())


def _newest(run_dir: Path) -> float:
    newest = 0.0
    try:
        with os.scandir(run_dir) as entries:
            for entry, _ in zip(entries, range(_MOST_FILES), strict=False):
                if not entry.name.startswith(PROBE):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return newest  # a new run, or a file that is gone again
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
    """``struct timex`` of 64-bit Linux; zeroed, it asks and sets nothing. Source: adjtimex(2)."""

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


def open_files() -> OpenFiles:
    """Read the soft limit of open files."""
    return OpenFiles(_soft(resource.RLIMIT_NOFILE))


def processes(ranks: int) -> Processes:
    """Work out how many processes and threads may still be started; RLIMIT_NPROC does not bind root."""
    room = math.inf
    most = _soft(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and most != math.inf:
        room = max(0, most - _threads_of(os.getuid()))
    grouped = control_groups.process_room()
    return Processes(min(room, grouped) if grouped >= 0 else room, ranks)


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


def gpus(nproc_per_node: str, expected: int, environment: Mapping[str, str]) -> Devices:
    """Count the GPUs and compare with what ``--nproc-per-node`` asks for."""
    found = devices.gpu_count(environment)
    try:
        ranks = devices.rank_count(nproc_per_node, environment)
    except ValueError as error:
        return Devices(found, 0, expected, f"--nproc-per-node {nproc_per_node}: {error}")
    if nproc_per_node == "cpu" and expected < 0:
        return Devices(0, ranks, expected)
    return Devices(found, ranks, expected)


CHUNKS = 64  # of 1 MiB: more than the buffers on the way, half a second at 1 Gbit/s
MOST_CHUNKS = 4096
_AGAIN = 0.1  # seconds between two tries to reach a node that does not listen yet


def measure(address: tuple[str, int], token: str, deadline: float, chunks: int = CHUNKS) -> Bandwidth:
    """Send ``chunks`` MiB to a node that runs :func:`serve` and take as many from it.

    Whatever goes wrong is the measurement's error; nothing is raised.

    Args:
        address: host and port.
        token: what both sides know.
        deadline: monotonic time at which it has failed.
        chunks: 1 to ``MOST_CHUNKS``.
    """
    peer = address_text(address)
    began = time.monotonic()
    try:
        with _connect(address, deadline) as connection:
            channel = Channel(connection, peer, _left(deadline))
            greet(channel, Party(new_nonce(), token))
            channel.send_json(Kind.REQUEST, {"op": "bandwidth", "chunks": chunks})
            channel.receive(Kind.ANSWER)
            channel.doing = "measuring the bandwidth"
            sent = _send(channel, chunks, deadline)
            received = _receive(channel, chunks, deadline)
    except socket.gaierror as error:
        return Bandwidth(peer, error=f"the name does not resolve: {error.strerror}", seconds=_since(began))
    except (PeerError, OSError) as error:
        return Bandwidth(peer, error=str(error), seconds=_since(began))
    return Bandwidth(peer, sent, received, seconds=_since(began))


def serve(address: tuple[str, int], token: str, deadline: float) -> Bandwidth:
    """Wait for one node that measures, and return what it looks like from here.

    Who cannot prove the token, or breaks off, is sent away; nobody has to wait for that.

    Raises:
        UsageError: there is no token and others than this host could connect.
        OSError: the address cannot be used.
    """
    began = time.monotonic()
    family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    if not token and not ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise UsageError(
            f"{address_text(address)}: other hosts can connect, so a token is expected; none given"
        )
    measured: queue.SimpleQueue[Bandwidth] = queue.SimpleQueue()
    said = ["nobody connected"]
    party = Party(new_nonce(), token)
    reception = Reception(
        lambda: party,
        lambda hello, _: party.check(hello),
        lambda channel: measured.put(_serve(channel, deadline)),
        said.append,
    )
    listener = Listener(socket.create_server((str(place[0]), address[1]), family=family), reception)
    try:
        return measured.get(timeout=_left(deadline))
    except queue.Empty:
        failed = said[-1]
    finally:
        listener.close()
    waited = f"{failed}; waited {_since(began):.0f} s"
    return Bandwidth(f"port {address[1]}", error=waited, seconds=_since(began))


def _serve(channel: Channel, deadline: float) -> Bandwidth:
    began = time.monotonic()
    channel.timeout = _left(deadline)
    request = channel.receive_json(Kind.REQUEST)
    chunks = request.get("chunks")
    if request.get("op") != "bandwidth" or type(chunks) is not int or not 0 < chunks <= MOST_CHUNKS:
        raise PeerRefused(
            Refusal.MALFORMED, f"1 to {MOST_CHUNKS} chunks expected, {str(request)[:100]} found"
        )
    channel.send_json(Kind.ANSWER, {})
    channel.doing = "measuring the bandwidth"
    received = _receive(channel, chunks, deadline)
    sent = _send(channel, chunks, deadline)
    return Bandwidth(channel.peer, sent, received, seconds=_since(began))


def _send(channel: Channel, chunks: int, deadline: float) -> float:
    """Send chunks, wait until all have been taken, and return the bytes/s."""
    content = os.urandom(CHUNK_BYTES)
    began = time.monotonic()
    for _ in range(chunks):
        channel.timeout = _left(deadline)
        channel.send_chunk(memoryview(content))
    channel.receive(Kind.ANSWER, deadline)
    return chunks * CHUNK_BYTES / _since(began)


def _receive(channel: Channel, chunks: int, deadline: float) -> float:
    """Take chunks, say so, and return the bytes/s."""
    into = memoryview(bytearray(CHUNK_BYTES))
    began = time.monotonic()
    for _ in range(chunks):
        channel.timeout = _left(deadline)
        channel.receive_chunk(into, "bandwidth", 0)
    rate = chunks * CHUNK_BYTES / _since(began)
    channel.send_json(Kind.ANSWER, {})
    return rate


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, _left(deadline))
        except ConnectionRefusedError:
            if time.monotonic() + _AGAIN >= deadline:
                raise
            time.sleep(_AGAIN)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _since(began: float) -> float:
    return max(1e-9, time.monotonic() - began)
