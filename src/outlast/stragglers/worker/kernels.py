"""Times of single kernels in a part of a step, by torch's profiler (Kineto, which reads CUPTI).

A profiler of the script goes first: none is begun beside it, and one that the script begins meanwhile takes
the place of ours, by Kineto's own rule. What fails is told in one line, and nothing is raised.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping

from outlast import _torch_compat

MOST_EVENTS = 1 << 16  # of one look that are read
MOST_KERNELS = 256  # names of one look; those beyond are left out
NAME = 120  # characters that are kept of a name; templates have thousands
EMPTY = 20  # looks in a row without a kernel, after which no more are taken
_NOT_TIMED = "single kernels of this rank are not timed"
_NO_WORK = ("nccl", "Memcpy", "Memset")  # begins of the names of what is no computation
_FAILURES = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, Warning)  # of the profiler


class Kernels:
    """Looks at the kernels of this process, one part of a step after another; for the thread that trains.

    Args:
        on_device: kernels of CUDA; otherwise the operators of the CPU on this thread.
    """

    def __init__(self, on_device: bool = True) -> None:
        self._on_device = on_device
        self._begun = False
        self._empty = 0
        self._over = False
        self._waited = False
        self._pid = os.getpid()

    def begin(self) -> bool:
        """Begin a look, unless there is one, or the script's own profiler runs, or it cannot be."""
        if self._over or self._begun or os.getpid() != self._pid:
            return False
        try:
            if self._on_device and not self._device_works():
                return False
            if _torch_compat.profiler_runs():
                self._wait()
                return False
            _torch_compat.begin_profile(self._on_device)
        except _FAILURES as error:
            self._end(str(error))
            return False
        self._begun = True
        return True

    def end(self) -> Mapping[str, list[float]]:
        """End a look; return the seconds of each call by kernel, without communication and copies."""
        if not self._begun:
            return {}
        self._begun = False
        try:
            events = _torch_compat.end_profile(self._on_device, MOST_EVENTS)
        except _FAILURES as error:
            self._end(str(error))
            return {}
        if events is None:
            return {}
        found: dict[str, list[float]] = {}
        for name, seconds in events:
            if not name.startswith(_NO_WORK):
                kernel = _short(name)
                if kernel in found or len(found) < MOST_KERNELS:
                    found.setdefault(kernel, []).append(seconds)
        self._empty = 0 if found else self._empty + 1
        if self._empty >= EMPTY:
            self._end(f"{EMPTY} looks found none; another program may use CUPTI")
        return found

    def _device_works(self) -> bool:
        """Say whether a look can be taken now; end them where there never is a device."""
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return not torch.cuda.is_current_stream_capturing()
        if not torch.cuda.is_available():
            self._end("this process has no CUDA device")
        return False

    def _wait(self) -> None:
        if not self._waited:
            self._waited = True
            sys.stderr.write(f"[outlast] {_NOT_TIMED} while the script's own profiler is started\n")

    def _end(self, why: str) -> None:
        self._over = True
        line = why.strip().partition("\n")[0]
        sys.stderr.write(f"[outlast] {_NOT_TIMED}: {line}\n")


def _short(name: str) -> str:
    """Return a name of at most NAME characters, different for different names."""
    if len(name) <= NAME:
        return name
    return f"{name[: NAME - 9]}#{zlib.crc32(name.encode(errors='replace')):08x}"
