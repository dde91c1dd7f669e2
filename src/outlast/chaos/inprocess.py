"""Run a script in this process and inject one fault inside it.

Some faults cannot be injected from outside: an exception, a lock that is never released. This module runs the
user's script as ``__main__``, unchanged, with a thread that waits and then injects the fault::

    outlast run --nproc-per-node 4 -m outlast.chaos.inprocess -- \
        --fault LOCK_GIL --rank 1 --base-delay 5 train.py --steps 500

Every rank draws the same rank and the same delay from the seed. The fault is injected in the first start of
the workers only, unless ``--restart-count`` names another one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outlast import settings
from outlast.chaos import policy as scenario
from outlast.chaos.faults import SIGNALS, require_cuda
from outlast.chaos.policy import FAULTS, RANDOM, Place, Target
from outlast.errors import OutlastError, ScriptNotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

_HELD = 24 * 3600  # seconds that LOCK_GIL holds the lock; long beyond every timeout
_FOR_EVER = 1 << 62  # clock cycles of the device that GPU_SLEEP takes (NVRx)


class InjectedError(Exception):
    """What the faults of kind exception raise; a class of its own, so that nobody expects it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; the first positional argument is the script, the rest belongs to it."""
    parser.add_argument("--fault", default=RANDOM, choices=[RANDOM, *worker_faults()], help="what to make")
    parser.add_argument("--rank", type=int, default=None, help="whose process; default: drawn from the seed")
    parser.add_argument("--base-delay", type=float, default=0.0, help="seconds; U(0, 0.2) of it are added")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart-count", type=int, default=0, help="in which start of the workers")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")


def worker_faults() -> list[str]:
    """Return the names of the faults that can be made within a worker."""
    return [name for name, spec in FAULTS.items() if spec.target is Target.WORKER]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, start the thread and run the script."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--"]:
        del given[0]
    parser = argparse.ArgumentParser(prog="python -m outlast.chaos.inprocess", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(given)
    try:
        prepare(options)
    except OutlastError as error:
        sys.stderr.write(f"outlast.chaos.inprocess: {error}\n")
        sys.exit(int(error.exit_code))
    run(options)


def run(options: argparse.Namespace) -> None:
    """Run the script as ``__main__``."""
    sys.argv = [options.script, *options.args]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def prepare(options: argparse.Namespace) -> None:
    """Start the thread that makes the fault, if it falls to this rank and this start.

    Raises:
        ScriptNotFound: there is no such file.
        UsageError: the fault needs a device that is not there, or the rank does not exist.
    """
    script = Path(options.script)
    if not script.is_file():
        raise ScriptNotFound(f"{script}: no such file; nothing was started")
    schedule(
        options.fault,
        options.rank,
        lambda draw: scenario.delay(options.base_delay, draw),
        script,
        options.seed,
        options.restart_count,
    )


def schedule(
    fault: str,
    rank: int | None,
    delay: Callable[[Callable[[], float]], float],
    script: Path,
    seed: int = 0,
    restart_count: int = 0,
) -> None:
    """Start the thread that makes a fault, if it falls to this rank and this start of the workers.

    Args:
        fault: a name of :func:`worker_faults`, or "random".
        rank: of the job; None: drawn.
        delay: returns the seconds to wait, given a function that draws from [0, 1).
        script: that runs in this process.
        seed: the same on every rank, which draw the same.
        restart_count: in which start.

    Raises:
        UsageError: the fault needs a device that is not there, or the rank does not exist.
    """
    place = settings.worker_context()
    dice = random.Random(seed)
    fault = scenario.concrete(fault, dice.random)
    if FAULTS[fault].place is Place.CUDA:
        require_cuda(fault)
    victim = int(dice.random() * place.world_size) if rank is None else rank
    if not 0 <= victim < place.world_size:
        raise UsageError(
            f"--rank {victim}: this job has ranks 0 to {place.world_size - 1}; nothing was started"
        )
    wait = delay(dice.random)
    if place.rank != victim or place.restart_count != restart_count:
        return
    make = _MAKERS[fault](script) if fault in _MAKERS else _sender(SIGNALS[fault])
    threading.Thread(target=_later, args=(fault, wait, make), name="chaos", daemon=True).start()


def _later(fault: str, wait: float, make: Callable[[], None]) -> None:
    time.sleep(wait)
    sys.stderr.write(f"chaos: {fault} after {wait:.2f} s in process {os.getpid()}\n")
    sys.stderr.flush()
    make()


def _workload_exception(script: Path) -> Callable[[], None]:
    """Prepare an exception that leaves the next function of the script that is called.

    The main thread is watched with ``sys.settrace`` from the start, call by call, not line by
    line; raising ends the watch.
    """
    due = threading.Event()
    name = str(script)

    def look(frame: FrameType, event: str, _: object) -> None:
        if due.is_set() and event == "call" and frame.f_code.co_filename == name:
            raise InjectedError(f"WORKLOAD_EXC in {frame.f_code.co_name}")

    sys.settrace(look)
    return due.set


def _async_exception(_: Path) -> Callable[[], None]:
    main = threading.main_thread().ident

    def make() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(InjectedError))

    return make


def _signal_exception(_: Path) -> Callable[[], None]:
    def handler(number: int, _: Any) -> NoReturn:
        raise InjectedError(f"SIGNAL_EXC in the handler of signal {number}")

    signal.signal(signal.SIGUSR1, handler)
    return _sender(signal.SIGUSR1)


def _locked_gil(_: Path) -> Callable[[], None]:
    """Prepare a call into C that keeps the interpreter's lock, as a broken extension does."""
    sleep = ctypes.PyDLL(None).sleep  # PyDLL, unlike CDLL, does not give the lock back
    return lambda: sleep(_HELD)


def _segfault(_: Path) -> Callable[[], None]:
    def make() -> None:
        ctypes.string_at(1)

    return make


def _abort(_: Path) -> Callable[[], None]:
    return os.abort


def _gpu_error(_: Path) -> Callable[[], None]:
    def make() -> None:
        import torch

        ones = torch.ones(1, dtype=torch.int64, device="cuda")
        ones[ones] = 0

    return make


def _gpu_sleep(_: Path) -> Callable[[], None]:
    def make() -> None:
        from outlast import _torch_compat

        _torch_compat.gpu_sleep(_FOR_EVER)

    return make


def _sender(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


_MAKERS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "WORKLOAD_EXC": _workload_exception,
    "ASYNC_EXC": _async_exception,
    "SIGNAL_EXC": _signal_exception,
    "LOCK_GIL": _locked_gil,
    "SEGFAULT": _segfault,
    "OS_ABORT": _abort,
    "GPU_ERROR": _gpu_error,
    "GPU_SLEEP": _gpu_sleep,
}

if __name__ == "__main__":
    main()
