"""Abort of every pending collective of this process, so that its process groups can be destroyed.

``ProcessGroup.abort()`` does nothing for gloo: a rank whose peer has stopped, or has left, waits until the
group's timeout. So gloo's connections are shut down here. Every rank does that itself: its peers are woken
only if they wait for this very rank, which in a ring not all of them do.

A peer that begins to send as its connection breaks loses that message without an error (gloo,
``Pair::sendAsyncMode``) and waits until the group's timeout. Connections that were shut down therefore stay
open, by a duplicated descriptor, until every rank has left its function (:func:`close_kept`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outlast import settings
from outlast._torch_compat import abort_nccl, forget_half_made_groups, groups_by_backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOP = "gloo_tcp_loop"  # the name gloo gives to the thread that serves a device's sockets
_LOOP_WAITS = (64, 10)  # events, milliseconds: what that thread asks of epoll (gloo, transport/tcp/loop.cc)
_SEEN_WITHIN = 1.0  # seconds: it is there nearly all the time, unless the processors are crowded
_SPINS_AFTER = 0.02  # seconds until a thread that does not wait is taken for one that spins
_EDGE = 0x8000_0000  # EPOLLET, as the kernel shows it
_NAMELESS_WITHIN = 0.05
_NCCL_WITHIN = 10.0  # seconds: ncclCommAbort takes about 0.5 s, and more with many kernels in flight
_QUIET = 0.004  # seconds without a byte, after which all that can be done without the missing rank is done
_SETTLED_WITHIN = 0.03
# Seconds; gloo needs 0.01 s. A send that gloo's thread begins as its connection breaks is never told (gloo,
# Pair::sendAsyncMode): the group then goes when its timeout is over, and not before.
_DROPPED_WITHIN = 0.25
_CONNECTED_WITHIN = 0.25  # seconds; to a port of this process
_ENDED_WITHIN = 0.25  # seconds; of groups that were just let go of, 0.03 s was the longest on a busy host

_under_way: set[threading.Event] = set()  # aborts that go on: each refers to all groups until it is over
_going: list[threading.Thread] = []  # they let go of a group, and have not come back yet
_kept: list[socket.socket] = []  # connections that were shut down, and stay open for the sake of the peers
_outlived: list[socket.socket] = []  # the same, of groups that were destroyed since
_left: set[str] = set()  # threads of gloo that were there when it was looked last


@dataclass(frozen=True)
class Woken:
    """The result of one backend's abort: the connections that it shut down, and its failures in words."""

    connections: int = 0
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Aborted:
    """The result of an abort.

    ``groups`` are the process groups that torch knew of, by name; ``connections`` were shut down (fewer than
    there were where peers had closed theirs already); it took ``seconds``. ``failed`` says in words what may
    not have been woken: empty when nothing is known to be left.
    """

    reason: str
    groups: tuple[str, ...]
    connections: int
    seconds: float
    failed: tuple[str, ...]

    def __str__(self) -> str:
        """Say it in one line."""
        done = f"{len(self.groups)} groups, {self.connections} connections in {self.seconds * 1e3:.1f} ms"
        return f"aborted ({self.reason}): {done}" + "".join(f"; {one}" for one in self.failed)


@dataclass(frozen=True)
class Remaining:
    """gloo devices that are there although every group was destroyed, each a thread and some files.

    ``waiting`` counts groups that nothing refers to, and that gloo does not let go yet; where it is 0,
    something in this process still refers to a group.
    """

    devices: int
    waiting: int

    @property
    def why(self) -> str:
        """Say in words what keeps them."""
        if self.waiting:
            return (
                f"{self.waiting} process groups, which nothing refers to, wait in gloo for a message that was"
                " lost in the abort, until their timeout"
            )
        return "something outside of it refers to a process group, and every restart will leave as many more"


class Backend(Protocol):
    """Wakes what is pending in one kind of process group; ``name`` is the backend's name in torch."""

    name: str

    def abort(self, groups: Sequence[ProcessGroup]) -> Woken:
        """Wake whatever waits in these groups, all groups of that kind; never wait for a peer."""
        ...


class Gloo:
    """Shuts down the TCP connections of every gloo device in this process, and no other socket.

    A device has one thread, which waits in epoll for its sockets. The kernel says which epoll that is
    (``/proc/self/task/*/syscall``) and what is in it (``/proc/self/fdinfo``), so nothing is guessed from
    ports or from the order in which files were opened, and groups made at any time, by anybody, are found.
    Listening sockets are left alone: gloo ends the process when it cannot accept.

    Limits: Linux; gloo's transports tcp and tcp_tls. gloo forgets a rank that waits for a message that is
    half written or half read when its connection closes (``Pair::signalException``): the abort lets others
    finish first, but one to a rank that was stopped in the middle of it is waited for until the timeout.

    A group that is still being made may wait for a peer to connect that has left. There is no connection to
    shut down, so each rank's connection is made here, to the device's own port, and ended. The wait for the
    address of a peer that never came ends with the store.
    """

    name = "gloo"

    def abort(self, groups: Sequence[ProcessGroup]) -> Woken:
        """Shut down the connections of all devices, of groups that torch has forgotten, too."""
        _close(_outlived)  # a rank that was in a newer group has left the older ones
        epolls, failed = _gloo_epolls(expected=bool(groups))
        _let_settle(epolls)
        connections = sum(_shut_down(fd, inode) for epoll in epolls for fd, inode in _sockets_in(epoll))
        if len(epolls) > len(groups):  # torch learns of a group when it is complete
            _connect_for_absent_peers(epolls, settings.worker_context().world_size)
        return Woken(connections, tuple(failed))


# The watchdog of ProcessGroupNCCL ends the process a minute after the error of a peer, also if the group was
# aborted meanwhile; it sleeps four times the third value before. NVRx asks for the last two (known issues).
_LIVING_ON = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "NCCL_NVLS_ENABLE": "0",
}
_LAUNCHERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # what torchrun, and outlast run as it, set by default


def to_outlive_watchdog(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to set so that NCCL's watchdog does not end this process; what the user has set stays.

    Args:
        variables: the environment, before a process group is created.
    """
    return {
        name: value
        for name, value in _LIVING_ON.items()
        if variables.get(name) in (None, _LAUNCHERS.get(name))
    }


class Nccl:
    """Aborts the communicators of every NCCL group, each in a thread of its own, as one may wait for another.

    It needs the variables of :func:`to_outlive_watchdog`.
    """

    name = "nccl"

    def abort(self, groups: Sequence[ProcessGroup]) -> Woken:
        """Abort them; one that has not come back in time is named and not waited for."""
        errors: dict[str, str] = {}

        def one(group: ProcessGroup) -> None:
            try:
                abort_nccl(group)
            except Exception as error:  # noqa: BLE001 - told to the caller, whatever NCCL says
                errors[group.group_name] = f"NCCL group {group.group_name} was not aborted: {error}"

        threads = {g.group_name: threading.Thread(target=one, args=(g,), daemon=True) for g in groups}
        for thread in threads.values():
            thread.start()
        end = time.monotonic() + _NCCL_WITHIN
        for name, thread in threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                errors[name] = f"NCCL group {name} is still being aborted after {_NCCL_WITHIN:.0f} s"
        return Woken(0, tuple(errors.values()))


BACKENDS: tuple[Backend, ...] = (Gloo(), Nccl())


def abort_process_groups(reason: str, backends: Sequence[Backend] = BACKENDS) -> Aborted:
    """Wake every collective, send and receive that is pending in this process, from whatever thread.

    What waits raises in the thread that waits, within milliseconds, and so does whatever uses these groups
    later. Groups of a backend that is not among ``backends`` are named in ``Aborted.failed``.
    """
    over = threading.Event()
    _under_way.add(over)
    try:
        return _abort_all(reason, backends)
    finally:
        _under_way.discard(over)
        over.set()


def _abort_all(reason: str, backends: Sequence[Backend]) -> Aborted:
    begin = time.monotonic()
    found = groups_by_backend()
    failed = [
        f"{len(groups)} groups of backend {name} have no way to be aborted"
        for name, groups in found.items()
        if name not in {backend.name for backend in backends}
    ]
    connections = 0
    for backend in backends:
        woken = backend.abort(found.get(backend.name, ()))
        connections += woken.connections
        failed += woken.failed
    names = tuple(sorted({group.group_name for groups in found.values() for group in groups}))
    return Aborted(reason, names, connections, time.monotonic() - begin, tuple(failed))


def close_kept() -> None:
    """Close the connections that an abort kept open; call it when every rank has aborted."""
    _close(_outlived)
    _close(_kept)


def _close(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


def destroy_process_groups() -> None:
    """Destroy every process group after an abort, and after those that other threads are at.

    A group lives on while something refers to it: a DDP model, a ``DeviceMesh``, a ``Work``, the traceback of
    the error that the collective raised, an abort on another thread. Drop those first, and collect garbage;
    aborts are waited for here, no longer than NCCL may take.
    """
    import torch.distributed as dist

    end = time.monotonic() + _NCCL_WITHIN
    for over in tuple(_under_way):
        over.wait(max(0.0, end - time.monotonic()))
    if dist.is_available() and dist.is_initialized():
        held = [group for groups in groups_by_backend().values() for group in groups]
        dist.destroy_process_group()
        _drop_at_once(held)
    forget_half_made_groups()
    _outlived.extend(_kept)
    _kept.clear()


def _drop_at_once(held: list[ProcessGroup]) -> None:
    """Empty the list, each entry in a thread of its own: a gloo device waits 10 ms for its thread to end."""
    threads = [threading.Thread(target=held.pop, daemon=True) for _ in held]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _DROPPED_WITHIN
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    _going.extend(threads)


def devices_left() -> Remaining:
    """Return what is left of destroyed groups, once that which is just ending has had the time to.

    A thread is listed for a moment after it was joined, and the last reference may be another thread's that
    lets go of it now. What was there the last time is not waited for again.
    """
    end = time.monotonic() + _ENDED_WITHIN
    while (found := device_threads()) - _left and time.monotonic() < end:
        time.sleep(0.001)
    _left.clear()
    _left.update(found)
    _going[:] = [thread for thread in _going if thread.is_alive()]
    return Remaining(len(found), len(_going) if found else 0)


def device_threads() -> set[str]:
    """Return the threads of this process that serve a gloo device, one each, by their ids."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            if _read(f"/proc/self/task/{thread}/comm").strip() == _LOOP:
                found.add(thread)
    return found


def _gloo_epolls(expected: bool) -> tuple[set[int], list[str]]:
    """The epoll of each gloo device; and what was not found.

    A thread waits for its epoll nearly all the time. It does not while a socket has data that belong to a
    collective which another connection's end has ended: gloo leaves them there, and the thread spins.
    """
    epolls, waiting = set(), device_threads()
    if expected and not waiting:
        epolls = _epolls_of_nameless_loops()
        return epolls, [] if epolls else ["no thread of gloo was found, so no connection of it"]
    now = time.monotonic()
    end, spins = now + _SEEN_WITHIN, now + _SPINS_AFTER
    while waiting:
        for thread in tuple(waiting):
            found = _epoll_of(thread)
            if found is not None:
                waiting.remove(thread)
                epolls.add(found)
        now = time.monotonic()
        if not waiting or now > end:
            break
        if now > spins:
            busy = _epolls_nobody_waits_for() - epolls
            if len(busy) == len(waiting):
                return epolls | busy, []
            spins = now + _SPINS_AFTER
        time.sleep(0.0005)
    left = sorted(waiting & device_threads())
    return epolls, [f"the connections of gloo's thread {one} were not found" for one in left]


def _epolls_of_nameless_loops() -> set[int]:
    """The epolls of gloo in a torch that does not name its threads (2.4), told by how they are waited for."""
    epolls = set()
    end = time.monotonic() + _NAMELESS_WITHIN
    while time.monotonic() < end:
        found = {_epoll_of(thread, _LOOP_WAITS) for thread in os.listdir("/proc/self/task")}
        epolls |= {one for one in found if one is not None and any(map(_listens, _sockets_in(one)))}
        time.sleep(0.002)
    return epolls


def _epolls_nobody_waits_for() -> set[int]:
    """The epolls that are gloo's by what they hold, and for which no thread waits now.

    gloo registers a listening socket, its own pipe and connections, level-triggered, with pointers of its
    own. libuv and Python register the number of the descriptor; gRPC is edge-triggered.
    """
    held = {_epoll_of(thread) for thread in os.listdir("/proc/self/task")}
    found = set()
    for epoll in map(int, os.listdir("/proc/self/fd")):
        if epoll not in held and _is_epoll(epoll):
            of_gloo = all(data != fd and not events & _EDGE for fd, _, events, data in _registered(epoll))
            if of_gloo and any(map(_listens, _sockets_in(epoll))):
                found.add(epoll)
    return found


def _is_epoll(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]"
    return False


def _epoll_of(thread: str, arguments: tuple[int, ...] = ()) -> int | None:
    """The epoll that a thread waits for, with these last arguments; None if it does something else."""
    try:
        words = _read(f"/proc/self/task/{thread}/syscall").split()
        fd, *others = (int(word, 16) for word in words[1:5]) if len(words) > 4 else (-1,)
    except OSError:
        return None
    return fd if _is_epoll(fd) and tuple(others)[len(others) - len(arguments) :] == arguments else None


def _sockets_in(epoll: int) -> Iterator[tuple[int, int]]:
    """Files registered with an epoll: number and inode; none when it has gone, with its group."""
    for fd, inode, _, _ in _registered(epoll):
        yield fd, inode


def _registered(epoll: int) -> Iterator[tuple[int, int, int, int]]:
    """Files registered with an epoll: number, inode, events, and what whoever registered it wants back."""
    try:
        lines = _read(f"/proc/self/fdinfo/{epoll}").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("tfd:"):
            parts = line.replace(":", " ").split()
            words = dict(zip(parts[::2], parts[1::2], strict=True))
            yield int(words["tfd"]), int(words["ino"], 16), int(words["events"], 16), int(words["data"], 16)


def _let_settle(epolls: set[int]) -> None:
    """Wait while data moves: gloo wakes nobody for a message that is half written or half read (pair.cc)."""
    before, end = None, time.monotonic() + _SETTLED_WITHIN
    while time.monotonic() < end:
        moved = [_moved(*place) for epoll in epolls for place in _sockets_in(epoll)]
        if moved == before:
            return
        before = moved
        time.sleep(_QUIET)


def _moved(fd: int, inode: int) -> bytes:
    """What the kernel has counted: bytes acknowledged, and received (from byte 120 of struct tcp_info)."""
    with _opened(fd, inode) as connection, contextlib.suppress(OSError):
        if connection:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:]
    return b""


def _shut_down(fd: int, inode: int) -> bool:
    """Shut a connection down for reading: gloo then closes it, and wakes all that waits for it.

    Writing stays possible at both ends, for the reason that the module gives.
    """
    with _opened(fd, inode) as connection, contextlib.suppress(OSError):  # the peer has closed it already
        if connection and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            own = connection.dup()
            try:
                connection.shutdown(socket.SHUT_RD)
            except OSError:
                own.close()
                return False
            _kept.append(own)
            return True
    return False


def _connect_for_absent_peers(epolls: set[int], world_size: int) -> None:
    """Make and end the connection that a peer owes to each pair of the devices.

    gloo numbers the pairs of a device, or has the ranks for numbers. The peer that connects sends the number
    as an ``ssize_t`` (gloo, transport/tcp/listener.cc); one that nobody waits for is kept with the device.
    """
    for place in (place for epoll in epolls for place in _sockets_in(epoll) if _listens(place)):
        with _opened(*place) as listening, contextlib.suppress(OSError):  # the device has just gone
            if listening is None:
                continue
            for number in range(world_size):
                with socket.socket(listening.family) as connection:
                    connection.settimeout(_CONNECTED_WITHIN)
                    connection.connect(listening.getsockname())
                    connection.sendall(struct.pack("=q", number))


def _listens(place: tuple[int, int]) -> bool:
    with _opened(*place) as connection:
        return connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@contextlib.contextmanager
def _opened(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """The socket behind a number, by a number of our own; None if it is another file now."""
    try:
        own = os.dup(fd)
    except OSError:
        yield None
        return
    status = os.fstat(own)
    if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
        with socket.socket(fileno=own) as connection:
            yield connection
    else:
        os.close(own)
        yield None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
