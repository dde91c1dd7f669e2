"""What a rank does, from what the kernel and its stacks say of it.

A silent rank may compute, wait for storage, for the network or for a process of its own, sleep, or
do nothing at all. Which of these it is decides whether a timeout that nobody fixed convicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

_BUSY_SHARE = 0.3  # of one processor, the time that it waited for one included
_INNER = 6  # innermost frames in which a library is looked for

_LIBRARIES = (
    "torch/serialization.py",
    "torch/distributed/checkpoint/",
    "<frozen importlib._bootstrap_external>",
    "/shutil.py",
    "/zipfile.py",
    "/tarfile.py",
    "/gzip.py",
    "safetensors/",
    "/h5py/",
)
_STORAGE = ("outlast/checkpoint/", *_LIBRARIES)  # threads of ours are idle there most of the time
_NETWORK = (
    "/socket.py",
    "/ssl.py",
    "/http/client.py",
    "/urllib/request.py",
    "/urllib3/",
    "/requests/",
    "/botocore/",
    "/aiohttp/",
    "/httpx/",
    "/fsspec/",
    "/huggingface_hub/",
)
_LOADER = ("torch/utils/data/dataloader.py",)
_CHILD = ("/subprocess.py", "/multiprocessing/popen_fork.py", "torch/multiprocessing/spawn.py")
_DEBUGGER = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd.py", "/IPython/")
_ON_DISK = (
    "nfs",
    "rpc_wait",
    "fuse",
    "request_wait_answer",
    "ceph",
    "ll_",
    "cl_sync",
    "jbd2",
    "io_schedule",
    "folio_wait",
)


class Doing(Enum):
    """What a rank does; the value completes a sentence about it."""

    STOPPED = "is stopped"
    DEBUGGED = "is held by a debugger"
    STORAGE = "waits for storage: a disk or file system is slow"
    NETWORK = "waits for the network"
    LOADER = "waits for its data loader"
    CHILD = "waits for a process that it started"
    COLLECTIVE = "waits in a collective"
    COMPUTES = "computes"
    SLEEPS = "sleeps, and wakes up by itself"
    NOTHING = "uses no processor and no storage, and nothing will wake it that can be seen"


class Call(Enum):
    """The system call that a thread is in, as far as it tells something."""

    NONE = ""
    FILE = "a file"  # read, write or sync of a regular file
    SOCKET = "a socket"
    SLEEP = "a sleep"  # or any wait with a time limit and nothing else to wake it
    CHILD = "the end of a child, or what one writes into a pipe"


@dataclass(frozen=True)
class Facts:
    """What was seen of one rank.

    Args:
        states: letters of /proc/PID/stat, of the main thread, of each look.
        traced: another process traces it.
        call: the system call that its main thread is in.
        kernel: the kernel's function that its main thread sleeps in (wchan), "" when it is not told.
        share: processors that it used or waited for; of a process that uses a GPU it says nothing.
        io: bytes that it read or wrote while it was watched.
        gpu: it has opened a GPU.
        stack: of its main thread, innermost last, "file:function".
        others: stacks of its other threads.
        waiting: its main thread waits for other ranks.
    """

    states: tuple[str, ...]
    traced: bool = False
    call: Call = Call.NONE
    kernel: str = ""
    share: float = 0.0
    io: int = 0
    gpu: bool = False
    stack: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    waiting: bool = False


def _within(stack: Sequence[str], places: Iterable[str]) -> bool:
    return any(place in frame for frame in stack[-_INNER:] for place in places)


_SIGNS: tuple[tuple[Doing, Callable[[Facts], bool]], ...] = (
    (Doing.DEBUGGED, lambda seen: seen.traced or "t" in seen.states),
    (Doing.STOPPED, lambda seen: seen.states[-1:] == ("T",)),
    (Doing.COLLECTIVE, lambda seen: seen.waiting),
    (Doing.STORAGE, lambda seen: "D" in seen.states or seen.kernel.startswith(_ON_DISK)),
    (Doing.STORAGE, lambda seen: seen.call is Call.FILE),
    (Doing.LOADER, lambda seen: _within(seen.stack, _LOADER)),
    (Doing.STORAGE, lambda seen: _within(seen.stack[-2:], _STORAGE)),
    (Doing.COMPUTES, lambda seen: not seen.gpu and seen.share > _BUSY_SHARE),
    (Doing.CHILD, lambda seen: seen.call is Call.CHILD or _within(seen.stack, _CHILD)),
    (Doing.DEBUGGED, lambda seen: _within(seen.stack, _DEBUGGER)),
    (Doing.NETWORK, lambda seen: seen.call is Call.SOCKET or _within(seen.stack[-3:], _NETWORK)),
    (Doing.STORAGE, lambda seen: seen.io > 0),
    (Doing.SLEEPS, lambda seen: seen.call is Call.SLEEP),
    # The main thread waits for one of the others, or may.
    (Doing.STORAGE, lambda seen: any(_within(one[-1:], _LIBRARIES) for one in seen.others)),
    (Doing.NETWORK, lambda seen: any(_within(one[-1:], _NETWORK) for one in seen.others)),
)


def doing_of(facts: Facts) -> Doing:
    """Return what a rank does; the first sign counts."""
    return next((doing for doing, shows in _SIGNS if shows(facts)), Doing.NOTHING)
