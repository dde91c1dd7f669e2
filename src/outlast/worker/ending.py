"""How a rank's interpreter ends: not while a thread of torch lets go of a tensor.

The thread of a gloo group drops the tensors of a collective shortly after the collective has returned. If it
has the last reference to a tensor that Python knows, it asks for the interpreter. While the interpreter ends,
the thread is ended instead, in code that must not be unwound, and the process dies of SIGABRT ("terminate
called without an active exception"): a rank that has done all of its work would be restarted.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

_THREADS = "pt_"  # torch names its threads so, from 2.5 on
_WITHIN = 0.25  # seconds; one that works longer than that is left to itself
_LOOKS = 2  # in a row, in which none of them runs
_TURN = 0.001  # seconds; the interpreter is free meanwhile


def let_threads_rest_at_exit() -> None:
    """Wait for torch's threads when the interpreter ends; call it before the script runs, to be the last."""
    atexit.register(wait_for_rest)


def wait_for_rest() -> bool:
    """Wait until none of torch's threads runs; return whether that was so in time."""
    if "torch.distributed" not in sys.modules:
        return True
    quiet, end = 0, time.monotonic() + _WITHIN
    while quiet < _LOOKS and time.monotonic() < end:
        time.sleep(_TURN)
        quiet = 0 if _one_runs() else quiet + 1
    return quiet >= _LOOKS


def _one_runs() -> bool:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat") as file:
                _, _, rest = file.read().partition("(")
        except OSError:  # it has ended
            continue
        name, _, fields = rest.rpartition(")")
        if name.startswith(_THREADS) and fields.split()[0] == "R":
            return True
    return False
