"""What the kernel says of a rank: states, processor time, input and output, the system call that it is in."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
from dataclasses import dataclass

from outlast.core.doing import Call
from outlast.transport.processes import children_of, cpu_seconds, state_of

_NS = 1e9
# Numbers of system calls by machine; "file" are those that read, write or sync a descriptor.
_CALLS = {
    "x86_64": {
        "file": (0, 1, 17, 18, 19, 20, 74, 75, 277, 295, 296, 327, 328),
        "socket": (42, 43, 45, 47, 288, 299),
        "sleep": (35, 230),
        "child": (61, 247),
        "poll": (7, 271),
        "select": (23, 270),
    },
    "aarch64": {
        "file": (63, 64, 65, 66, 67, 68, 69, 70, 82, 83, 84, 286, 287),
        "socket": (202, 203, 207, 212, 242, 243),
        "sleep": (101, 115),
        "child": (95, 260),
        "poll": (73,),
        "select": (72,),
    },
}
_HERE = _CALLS.get(platform.machine(), {})
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class Count:
    """What a process has used so far.

    Args:
        ran: seconds on a processor.
        queued: seconds that it waited for one: on a busy host a rank may get little.
        io: bytes read and written.
    """

    ran: float = 0.0
    queued: float = 0.0
    io: int = 0


def count_of(pid: int) -> Count:
    """Return what the process has used so far."""
    return Count(*_processor(pid), _io(pid))


def _processor(pid: int) -> tuple[float, float]:
    """Return seconds on a processor and in its queue, of all threads."""
    ran = queued = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                words = file.read().split()
                ran, queued = ran + int(words[0]), queued + int(words[1])
    except (OSError, ValueError, IndexError):
        ran = 0
    return (ran / _NS, queued / _NS) if ran else (cpu_seconds(pid), 0.0)


def _io(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    except (OSError, IndexError, ValueError):
        return 0


def worst_state(pid: int) -> str:
    """Return the state of the main thread, or D when any thread waits in the kernel uninterruptibly."""
    state = state_of(pid)
    if state not in ("S", "R"):
        return state
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"D":
                    return "D"
    return state


def is_traced(pid: int) -> bool:
    """Say whether a debugger or tracer is attached to the process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"TracerPid:"):
                return line.split()[1] != b"0"
    return False


def kernel_place(pid: int) -> str:
    """Return the kernel's function in which the main thread sleeps, "" when it is not told."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        found = file.read().strip()
        return "" if found == "0" else found
    return ""


def call_of(pid: int) -> Call:
    """Return the system call that the main thread is in, as far as it tells something."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
        number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):
        return Call.NONE
    if number in _HERE.get("file", ()):
        return _kind_of(pid, arguments[0])
    if number in _HERE.get("socket", ()):
        return Call.SOCKET
    if number in _HERE.get("child", ()):
        return Call.CHILD
    only_time = number in _HERE.get("select", ()) and arguments[0] == 0
    only_time |= number in _HERE.get("poll", ()) and arguments[1] == 0
    if number in _HERE.get("sleep", ()) or only_time:
        return Call.SLEEP
    return Call.NONE


def _kind_of(pid: int, descriptor: int) -> Call:
    """Return what a descriptor of the process is."""
    try:
        mode = os.stat(f"/proc/{pid}/fd/{descriptor}").st_mode
    except OSError:
        return Call.NONE
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode):
        return Call.FILE
    if stat.S_ISFIFO(mode) and _is_unnamed(pid, descriptor) and any(children_of(pid)):
        return Call.CHILD
    return Call.SOCKET if stat.S_ISSOCK(mode) else Call.NONE


def _is_unnamed(pid: int, descriptor: int) -> bool:
    """Say whether a descriptor is a pipe that only relatives of a process have."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("pipe:")
    return False


def uses_gpu(pid: int) -> bool:
    """Say whether the process has opened a GPU."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(_GPU_FILES):
                    return True
    return False
