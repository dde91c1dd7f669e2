"""Start the user's script in a fork of the zygote, as in a new interpreter.

``__main__``, ``sys.argv``, ``sys.path[0]``, the standard streams and the seeds are set as
``python -u script.py`` sets them, so that multiprocessing, pickling, atexit and tracebacks behave as
under torchrun. An exception that ends the script is written to the rank's error file (torchelastic's
format) before the interpreter reports it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import faulthandler
import functools
import json
import os
import runpy
import signal
import stat
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

from outlast import _torch_compat, files, settings
from outlast.errors import NonFinite, OutlastError, ReplicasDiffer, RunFolderUnusable
from outlast.ipc.control import set_apart
from outlast.ipc.processes import STACK_SIGNAL
from outlast.recovery.policy.events import FaultKind

_MOST_TEXT = 1 << 18  # characters of a message, and of its traceback, in an error file
_NO_ROOM = 1 << 16  # bytes; with less, a disk is full for what a rank prints
_REENTRY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "inprocess", "worker", "reentry.py")


def take(
    environment: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
    stacks: str,
    module: Callable[[str], Any] = sys.modules.get,
) -> None:
    """Set up this process as a rank: streams, environment, seeds, stack dumps.

    Args:
        environment: its complete environment.
        stdout, stderr: files; None: the stream is kept.
        stacks: file for stack dumps.
        module: returns an imported module by its name; None: it was not imported.
    """
    append_to(stdout, stderr)
    settings.replace_environment(environment)
    sys.orig_argv[:] = [sys.executable, "-u", *sys.argv]
    _seed(module)
    answer_with_stacks(stacks)


def rehearse(kind: str, target: str, environment: Mapping[str, str], module: Callable[[str], Any]) -> None:
    """Write to what :func:`take` and :func:`run` write to: the kernel copies it here, and not in a restart.

    Args:
        kind, target: of the script.
        environment: of all ranks.
        module: as in :func:`take`.
    """
    settings.replace_environment(environment)
    _seed(module)
    if kind == "file" and os.path.isfile(target):
        unusable = (OSError, SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
        with contextlib.suppress(*unusable), warnings.catch_warnings():  # the rank will say so
            warnings.simplefilter("ignore")
            _compiled(target)


def _seed(module: Callable[[str], Any]) -> None:
    for name, seed in (("numpy.random", _seed_numpy), ("torch", _seed_torch)):
        found = module(name)
        if found is not None:
            seed(found)


def append_to(stdout: str | None, stderr: str | None) -> None:
    """Append the standard streams to files; None: the stream is kept."""
    for stream, path, descriptor in ((sys.stdout, stdout, 1), (sys.stderr, stderr, 2)):
        if path is not None:
            with contextlib.suppress(OSError, ValueError):  # what was printed belongs to the old file
                stream.flush()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_NOFOLLOW
            opened = os.open(path, flags, 0o644)
            os.dup2(opened, descriptor)
            os.close(opened)


_stacks: list[int] = []  # the descriptor in use: faulthandler does not own it


def answer_with_stacks(path: str) -> None:
    """Append all stacks to a file whenever STACK_SIGNAL arrives."""
    answer = set_apart(files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if (
        not _stacks
    ):  # faulthandler restores this as the interpreter ends; the default action would kill the process
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=answer, all_threads=True, chain=False)
    while _stacks:
        os.close(_stacks.pop())
    _stacks.append(answer)


def _seed_numpy(random: Any) -> None:
    random.seed()


def _seed_torch(torch: Any) -> None:
    torch.default_generator.seed()


def run(kind: str, target: str) -> None:
    """Execute the script or module as ``__main__``.

    Raises:
        SystemExit: as the script does, or with the exit code of the exception that ended it.
    """
    _torch_compat.let_gloo_finish_at_exit()
    main = types.ModuleType("__main__")
    kept = sys.modules["__main__"]
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing has been imported: its name for the same module
        sys.modules["__mp_main__"] = main
    main.__dict__["__builtins__"] = builtins
    try:
        if kind == "module":
            sys.argv[0] = "-m"
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif os.path.isfile(target) and not _is_archive(target):
            _run_file(main, target)
        else:
            sys.path[0] = target
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    except SystemExit as ending:
        if ending.code not in (None, 0):
            _announce_exit()
        raise
    except BaseException as caught:  # noqa: BLE001 - the last frame before the interpreter: report, then end as it would
        error = _of_full_disk(caught) or caught
        report(error)
        sys.exit(int(error.exit_code) if isinstance(error, OutlastError) else _status_of(error))
    finally:
        del kept


def _of_full_disk(error: BaseException) -> RunFolderUnusable | None:
    """Return what to end with where the output of this rank could not be written, None for another error."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC or error.filename is not None:
        return None
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            disk = os.fstatvfs(stream)
            if stat.S_ISREG(os.fstat(stream).st_mode) and disk.f_bavail * disk.f_frsize < _NO_ROOM:
                found = RunFolderUnusable(
                    f"{os.readlink(f'/proc/self/fd/{stream}')}: {error.strerror}; what this rank prints goes"
                    " there; make room, then start the same command again"
                )
                found.__cause__ = error
                return found
    return None


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _run_file(main: types.ModuleType, path: str) -> None:
    path = os.path.abspath(path)
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __annotations__={}
    )
    exec(_compiled(path), main.__dict__)


def _compiled(path: str) -> types.CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _announce_exit() -> None:
    """Tell the launcher before the interpreter ends and peers lose their connections to this rank."""
    path = settings.error_file()
    if path:
        with contextlib.suppress(OSError):
            open(path + settings.EXITING, "x").close()


def _status_of(error: BaseException) -> int:
    """Return the exit status of an interpreter that the exception ends (130: killed by SIGINT)."""
    if isinstance(error, KeyboardInterrupt):
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def report(error: BaseException) -> None:
    """Write the error file, then show the traceback without the frames of this package."""
    trace = error.__traceback__
    ours = (__file__, "<frozen runpy>", _REENTRY)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    _write_down(error, trace)
    sys.excepthook(type(error), error.with_traceback(trace), trace)


@functools.cache
def report_uncaught() -> None:
    """Write the error file also in a rank that runs as a plain interpreter, through ``sys.excepthook``."""
    before = sys.excepthook

    def report_it(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        _write_down(error, trace)
        before(kind, error, trace)

    sys.excepthook = report_it


def _write_down(error: BaseException, trace: types.TracebackType | None) -> None:
    path = settings.error_file()
    if path and not os.path.exists(path):
        text = "".join(traceback.format_exception(type(error), error, trace))
        extra: dict[str, Any] = {
            "py_callstack": text[-_MOST_TEXT:],
            "timestamp": str(int(time.time())),
            "monotonic": time.monotonic(),
        }
        if isinstance(error, OutlastError):
            extra["exit_code"] = int(error.exit_code)
        if isinstance(error, FloatingPointError):  # outlast.NonFinite is one
            extra["fault"] = FaultKind.NON_FINITE.value
        if isinstance(error, ReplicasDiffer):
            extra |= {"fault": FaultKind.CORRUPT.value, "agreed": error.agreed}
        if isinstance(error, (NonFinite, ReplicasDiffer)):
            extra["ranks"] = list(error.ranks)
        message = {"message": f"{type(error).__name__}: {error}"[:_MOST_TEXT], "extraInfo": extra}
        with contextlib.suppress(OSError):
            files.write_whole(path, json.dumps({"message": message}).encode())
