"""What ``outlast doctor`` measures of a run folder and the environment, one check after another."""

from __future__ import annotations

import difflib
import fcntl
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outlast import settings
from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.doctor.script import compiled
from outlast.files import open_regular
from outlast.observe.run_folder import pid_in

_TRIAL = ".doctor-"
_REPLACED = 200  # times a file is replaced while a reader reads it
_SLICE = 0.5  # seconds
_WRITTEN = 64 << 20  # bytes; a page cache hides less
_BLOCK = 1 << 20
_MOST_WRITING = 10.0  # seconds
_MOST_CLEARING = 5.0  # seconds; a file system that hangs is not waited for
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
# What is misspelt most: names of NCCL, torch and OpenMP that change how a job runs.
_KNOWN = (
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_P2P_DISABLE"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    *("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHELASTIC_ERROR_FILE"),
    *("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"),  # of older versions of torch, still read
)
# The same names for the accelerators and libraries of other vendors.
_OTHERS = re.compile(
    r"(PYTORCH_(HIP|NPU|MUSA|XPU|MLU|HPU|GCU)|(TORCH_)?[RHXMEB]?CCL|(HIP|ROCR|MUSA|ASCEND|NPU|MLU)_VISIBLE)_"
)
_CLOSE = 0.88  # of difflib: one letter of ten differs, or two change places
_stopped = threading.Event()  # no check goes on

Check = tuple[str, Callable[[], Sequence[Diagnosis]]]


@dataclass
class Disk:
    """Where the run folder is or would be; ``rate`` is what it takes, in bytes/s, 0 before :meth:`write`."""

    place: Path
    rate: float = 0.0

    @classmethod
    def of(cls, run_dir: Path) -> Disk:
        """Return that of a run folder, which need not exist."""
        place = run_dir.absolute()
        while not place.is_dir() and place != place.parent:
            place = place.parent
        return cls(place)

    def write(self) -> Sequence[Diagnosis]:
        """Write and sync 64 MiB, or what is written in 10 s."""
        self.rate, error = _written(self.place)
        return [policy.writing(str(self.place), self.rate, error)]


def checks(
    disk: Disk,
    run_dir: Path,
    script: Path | None,
    environment: Mapping[str, str],
    named: bool = True,
) -> list[Check]:
    """Return the checks of a run folder, the environment and a script; each may block as long as the kernel.

    Args:
        named: the user names the run folder; else ``outlast run`` takes one beside it where it is held.
    """
    place = disk.place
    node = environment.get("OUTLAST_NODE") or os.uname().nodename
    found: list[Check] = [
        ("rename", partial(rename, place)),
        ("lock", partial(lock, place)),
        ("write", disk.write),
        ("run-folder", partial(launcher_of, run_dir, node, named)),
        ("ptrace", partial(tracing, _YAMA)),
        ("environment", partial(variables, environment)),
    ]
    if script is not None:
        found.append(("script", partial(compiled, script)))
    return found


def examine(wanted: Sequence[Check], deadline: float) -> list[Diagnosis]:
    """Make checks one after another in a thread, until ``deadline`` (monotonic); one that hangs ends them."""
    began = time.monotonic()
    _stopped.clear()
    answers: queue.SimpleQueue[Sequence[Diagnosis]] = queue.SimpleQueue()

    def work() -> None:
        for name, measure in wanted:
            if _stopped.is_set():
                return
            try:
                answers.put(measure())
            except Exception as error:  # noqa: BLE001 - a check that fails is a finding, not a crash
                told = f"{type(error).__name__}: {error}"
                answers.put([Diagnosis(name, False, told, "a check that ends", "correct what it names")])

    worker = threading.Thread(target=work, name="doctor", daemon=True)
    found: list[Diagnosis] = []
    try:
        worker.start()
        for name, _ in wanted:
            while True:  # in slices: Ctrl-C just before a wait is heard at its end
                try:
                    found += answers.get(timeout=max(0.001, min(_SLICE, deadline - time.monotonic())))
                    break
                except queue.Empty:
                    if time.monotonic() >= deadline:
                        return [*found, policy.no_answer(name, time.monotonic() - began)]
        return found
    finally:
        _stopped.set()  # also after Ctrl-C: the thread removes its files
        if worker.is_alive():  # one that Ctrl-C kept from starting looks at _stopped first
            worker.join(_MOST_CLEARING)


@contextmanager
def _trial(place: Path) -> Iterator[Path]:
    """Give the name of a file that is removed afterwards."""
    path = place / f"{_TRIAL}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def rename(place: Path) -> Sequence[Diagnosis]:
    """Replace a file again and again while a thread reads it; anything but a whole content is told."""
    contents = (b"a" * 4096, b"b" * 4096)
    seen: list[str] = []
    over = threading.Event()

    def read(path: Path) -> None:
        while not over.is_set() and not seen:
            try:
                content = path.read_bytes()
            except OSError as error:
                seen.append(error.strerror or str(error))
            else:
                if content not in contents:
                    seen.append(f"{len(content)} bytes of a mixture")

    with _trial(place) as path, _trial(place) as other:
        try:
            path.write_bytes(contents[0])
            reader = threading.Thread(target=read, args=(path,), name="doctor-reader", daemon=True)
            reader.start()
            for at in range(_REPLACED):
                if _stopped.is_set():
                    break
                other.write_bytes(contents[at % 2])
                os.replace(other, path)
            over.set()
            reader.join(_MOST_WRITING)
        except OSError as error:
            over.set()
            return [policy.rename(str(place), error.strerror or str(error), ())]
    return [policy.rename(str(place), "", seen)]


def lock(place: Path) -> Sequence[Diagnosis]:
    """Take a lock twice, by two open files, as two launchers would."""
    with _trial(place) as path:
        try:
            with open(path, "wb") as first, open(path, "rb+") as second:
                path.unlink()
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return [policy.lock(str(place), True, "")]
        except OSError as error:
            return [policy.lock(str(place), False, error.strerror or str(error))]
    return [policy.lock(str(place), False, "")]


def _written(place: Path) -> tuple[float, str]:
    block, written, began = secrets.token_bytes(_BLOCK), 0, time.monotonic()
    with _trial(place) as path:
        try:
            with open(path, "wb", buffering=0) as file:
                path.unlink()  # nothing is left, however this process ends
                while written < _WRITTEN and time.monotonic() - began < _MOST_WRITING:
                    if _stopped.is_set():
                        break
                    written += file.write(block) or 0
                os.fdatasync(file)
        except OSError as error:
            return 0.0, error.strerror or str(error)
    return written / max(1e-6, time.monotonic() - began), ""


def launcher_of(run_dir: Path, node: str, named: bool) -> Sequence[Diagnosis]:
    """Look whether a launcher holds the run folder, or that of this node in it, as a launcher would.

    The pid in a lock file proves nothing: after the launcher was killed another process may have it. Where no
    launcher holds the lock, this has it shared for an instant, through a file that is open for reading.
    """
    for path in (run_dir / "lock", run_dir / "nodes" / node / "lock"):
        try:
            descriptor = open_regular(path)
        except OSError:  # nobody has used the folder, or the other checks say what is wrong with it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return [policy.launchers(str(path.parent), pid_in(descriptor), named)]
        except OSError:  # a file system without locks; the check of the lock says so
            continue
        finally:
            os.close(descriptor)
    return [policy.launchers(str(run_dir), "", named)]


def tracing(path: Path) -> Sequence[Diagnosis]:
    """Read whether the kernel lets one process read the memory of another."""
    try:
        scope = int(path.read_text())
    except (OSError, ValueError):
        scope = -1
    return [policy.tracing(scope, os.geteuid() == 0)]


def variables(environment: Mapping[str, str]) -> Sequence[Diagnosis]:
    """Look for variables that nothing reads, or that cost speed."""
    from outlast.launcher.command.parser import make_parser

    options = [action.dest for action in make_parser({})._actions]
    near = {}
    for name in environment:
        if name in _KNOWN or _OTHERS.match(name):
            continue
        if meant := difflib.get_close_matches(name, _KNOWN, 1, _CLOSE):
            near[name] = meant[0]
    return policy.variables(settings.unknown_variables(environment, options), near, environment)
