"""What an import may read or change in its process besides variables, the search path and warning filters."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

AT_START = {"torch's default dtype": "torch.float32"}  # where torch is not imported yet
_WORDS = 624  # of a Mersenne Twister


def surroundings() -> dict[str, str]:
    """Return what a script may change before an import, by what messages call it; quick.

    What belongs to a module that is not imported, or not yet to its end, is left out.
    """
    found = {"the working folder": ""}
    with contextlib.suppress(OSError):  # it was removed
        found["the working folder"] = os.getcwd()
    with contextlib.suppress(AttributeError, RuntimeError):  # an import of it is under way
        if "torch" in sys.modules:
            found["torch's default dtype"] = str(sys.modules["torch"].get_default_dtype())
    with contextlib.suppress(AttributeError):
        if "multiprocessing" in sys.modules:
            method = start_method() or sys.modules["multiprocessing"].get_all_start_methods()[0]
            found["the start method of multiprocessing"] = method
    return found


def start_method() -> str:
    """Return the start method of multiprocessing; "": it can still be chosen."""
    with contextlib.suppress(AttributeError):
        if "multiprocessing" in sys.modules:
            method: str | None = sys.modules["multiprocessing"].get_start_method(allow_none=True)
            return method or ""
    return ""


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs, of what both know."""
    return [what for what in before if what in now and before[what] != now[what]]


def seeds() -> dict[str, Any]:
    """Return what a seed sets in each generator of the process, and a few draws do not change.

    A Mersenne Twister makes its next words at the first draw after a seed, so that draw is made here.
    """
    if random.getstate()[1][-1] >= _WORDS:
        random.random()
    found: dict[str, Any] = {"random": random.getstate()[1][:-1]}  # without its position
    with contextlib.suppress(AttributeError):
        numpy: Any = sys.modules.get("numpy.random")
        state = None if numpy is None else numpy.get_state()
        if isinstance(state, tuple):  # else it is another generator than the usual one
            if state[2] >= _WORDS:
                numpy.random_sample()
            found["numpy"] = numpy.get_state()[1].tobytes()
    with contextlib.suppress(AttributeError):
        if "torch" in sys.modules:
            found["torch"] = sys.modules["torch"].initial_seed()
    return found


def umask() -> str:
    """Return the process's umask, without setting it for a moment."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next((line.split()[1] for line in file if line.startswith("Umask:")), "")
    return ""
