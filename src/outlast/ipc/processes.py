"""What Linux knows about processes: death of a parent, adoption, states, stacks.

Used on both sides of a fork, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STAT_BYTES = 4096  # all of /proc/PID/stat: some 350
_LIBC = ctypes.CDLL(None, use_errno=True)

STACK_SIGNAL = signal.SIGRTMIN + 12  # faulthandler writes all stacks; free in glibc, CUDA and Python

RECORDER_SIGNAL = signal.SIGRTMIN + 13  # a thread of the rank waits for it and tells of its collectives


def answer_of(page: str) -> str:
    """Return the file in which a rank tells of its collectives, from that of its heartbeat page."""
    return f"{page}.collectives"


def wake_thread(pid: int, thread: int, signum: int) -> bool:
    """Send a signal to one thread of a process; say whether there is one."""
    return bool(_LIBC.tgkill(pid, thread, int(signum)) == 0)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, *, patience: float = 10.0) -> None:
    """Have the kernel kill this process when ``parent`` ends; wait for the adoption first.

    Raises:
        SystemExit: ``parent`` is already gone, so this process must not live either.
    """
    deadline = time.monotonic() + patience
    while os.getppid() != parent:
        if time.monotonic() > deadline or not is_alive(parent):
            os._exit(1)
        time.sleep(0.0002)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def cannot_start(what: str, error: OSError) -> str:
    """Return what to say when the system does not allow another process."""
    return (
        f"{what} cannot be started: {error.strerror}; this node limits processes or memory"
        " (ulimit -u, and pids.max and memory.max of the control group)"
    )


def is_alive(pid: int) -> bool:
    """Say whether the process exists and is not a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """Return the letter of /proc/PID/stat (R, S, D, T, t, Z, X), "" when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(_STAT_BYTES).rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent, 0 when there is no such process."""
    return family_of(pid)[0]


def family_of(pid: int) -> tuple[int, int, int]:
    """Return a process's parent, process group and session; zeros when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            parent, group, session = file.read(_STAT_BYTES).rpartition(b")")[2].split()[1:4]
        return int(parent), int(group), int(session)
    except (OSError, ValueError):
        return 0, 0, 0


def cpu_seconds(pid: int) -> float:
    """Return the processor time that all threads of the process have used, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; tells a reused pid from the old one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def identity() -> str:
    """Return words that tell this process from all others, on this host and elsewhere: see :func:`lives`."""
    return f"{os.getpid()} {start_ticks(os.getpid())} {boot_id()} {_pid_namespace()}"


def lives(identity: str) -> bool | None:
    """Say whether the process of an :func:`identity` lives; None: it cannot be seen from here.

    It cannot be seen where it runs on another host or in another namespace of pids, or /proc hides it.
    """
    words = identity.split()
    here = [boot_id(), _pid_namespace()]
    if len(words) != 4 or words[2:] != here or "unknown" in here or not "".join(words[:2]).isdecimal():
        return None
    pid, began = int(words[0]), int(words[1])
    if is_alive(pid):
        return start_ticks(pid) == began
    try:
        os.kill(pid, 0)
    except PermissionError:
        return None  # /proc shows the processes of this account only
    except (OSError, OverflowError):
        return False
    return False  # a zombie


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def children_of(pid: int) -> Iterator[int]:
    """Yield the pids of the direct children of a process, zombies included."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:  # one that ends meanwhile leaves its children to another thread
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            yield from map(int, file.read().split())


def tree_of(pid: int) -> set[int]:
    """Return the pid of a process, and those of its children, their children and so on."""
    found, unseen = {pid}, [pid]
    while unseen:
        fresh = set(children_of(unseen.pop())) - found
        found |= fresh
        unseen += fresh
    return found


def boot_id() -> str:
    """Return the identity of this boot; monotonic clocks compare only within one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


class Child:
    """A child of this process, held by a pidfd: until it is reaped here, its number is of no other process.

    Args:
        pid: of a child that nobody has waited for, or of one that this process is about to adopt.

    Raises:
        OSError: there are no more descriptors; the process has been killed.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # somebody else has reaped it
            self.pidfd = os.eventfd(1, os.EFD_CLOEXEC)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended, negative for a signal; reap it."""
        if self.exit_code is None:
            try:
                found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            except OSError:  # ECHILD before the adoption; else it was reaped elsewhere, and its code is lost
                self.exit_code = None if self.send(0) else -signal.SIGKILL
            else:
                if found is not None:
                    code = found.si_status
                    self.exit_code = code if found.si_code == os.CLD_EXITED else -code
        return self.exit_code

    def wait(self, patience: float) -> int | None:
        """Return the exit code; None: the process has not ended within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            poller.poll(left * 1000)
        return self.exit_code

    def send(self, signum: int) -> bool:
        """Send a signal to this process only; return whether there is one."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except PermissionError:  # it runs as somebody else by now
            return True
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EBADF):
                raise
            return False
        return True

    def kill_group(self) -> None:
        """Kill the process and the group that it leads."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send(signal.SIGKILL)

    def kill_tree(self) -> None:
        """Kill the process and its descendants, except :func:`trackers <is_tracker>`.

        What is started meanwhile, or has lost its parent, becomes a child of the subreaper.
        """
        below = list(_held_below(self.pid))  # before their parents die, and others adopt them
        self.send(signal.SIGKILL)
        for descriptor in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _held_below(root: int) -> Iterator[int]:
    """Yield a pidfd of each descendant of a process that is no tracker."""
    below = [(pid, root) for pid in children_of(root)]
    while below:
        pid, parent = below.pop()
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        if parent_of(pid) == parent and not is_tracker(pid):  # else the number was another process's
            yield descriptor
        else:
            os.close(descriptor)
        below += ((one, pid) for one in children_of(pid))


def start(command: Sequence[str], **options: Any) -> int:
    """Start a child like :class:`subprocess.Popen`; return its pid, for its :class:`Child`.

    Raises:
        OSError: the system allows no more processes, or there is no such program.
    """
    process = subprocess.Popen(list(command), **options)
    process.returncode = 0
    return process.pid


def kill_if(pid: int, is_meant: Callable[[int], bool]) -> bool:
    """Kill a process if it is the one that is meant; return whether it was.

    It is held while ``is_meant`` looks at it, so that no other process with its number is killed.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_meant(pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    finally:
        os.close(descriptor)


def is_tracker(pid: int) -> bool:
    """Return whether a process only waits for the end of others to remove the shared memory that they leave.

    These are Python's resource_tracker, also joblib's, and torch_shm_manager.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read(_STAT_BYTES).split(b"\0")
    except OSError:
        return False
    return os.path.basename(words[0]) == b"torch_shm_manager" or any(
        b"resource_tracker import main" in word for word in words[1:]
    )
