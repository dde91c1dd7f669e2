"""``outlast doctor``: measures this machine for a job, and says what would go wrong and what to do."""

from __future__ import annotations

import argparse
import difflib
import fcntl
import json
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from outlast import settings
from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.errors import ExitCode, NodeUnfit
from outlast.files import open_regular, read_whole
from outlast.health.agent import preflight
from outlast.health.agent.preflight import PreflightOptions
from outlast.observe.run_folder import pid_in
from outlast.observe.runs import DEFAULT

_TRIAL = ".doctor-"
_REPLACED = 200  # times a file is replaced while a reader reads it
_WRITTEN = 64 << 20  # bytes; a page cache hides less
_BLOCK = 1 << 20
_MOST_WRITING = 10.0  # seconds
_MOST_CLEARING = 1.0  # seconds; a file system that hangs is not waited for
_MOST_SCRIPT = 16 << 20
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
_TIMEOUT = 60.0

_stopped = threading.Event()  # no check goes on

Check = tuple[str, Callable[[], Sequence[Diagnosis]]]


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast doctor ...`` and return its exit code.

    Raises:
        NodeUnfit: a job would fail; names the checks.
        UsageError: an option is wrong.
    """
    given = _parser().parse_args(arguments)
    deadline = time.monotonic() + given.timeout
    run_dir = given.run_dir or default_folder(given.script)
    options = PreflightOptions(
        run_dir=run_dir,
        nproc_per_node=given.nproc_per_node,
        ports=tuple(given.port),
        environment=settings.inherited(),
    )
    probe = preflight.begin(options)
    found = examine(checks(run_dir, given.script, options.environment, given.run_dir is not None), deadline)
    found += [policy.cured(one) for one in preflight.quick(options, deadline)]
    found += [policy.cured(one) for one in preflight.finish(options, probe, deadline)]
    if given.json:
        sys.stdout.write("".join(json.dumps(one.to_json()) + "\n" for one in found))
    else:
        sys.stdout.write("".join(f"{text}\n" for one in found for text in _told(one)))
    failed = [one.check for one in found if one.fails]
    if failed:
        raise NodeUnfit(f"a job would fail on {os.uname().nodename}: {', '.join(dict.fromkeys(failed))}")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast doctor",
        description="Find what would make a job fail or slow on this machine, and say what to do about it."
        " Exit code 0: nothing, or warnings; 69: a job would fail.",
    )
    add = parser.add_argument
    add("script", type=Path, nargs="?", metavar="SCRIPT", help="the training script; it is compiled, not run")
    add(
        "--run-dir", type=Path, help="run folder (default outlast-runs/<script>, without SCRIPT outlast-runs)"
    )
    add("--nproc-per-node", "--nproc_per_node", default="1", help="ranks: a number, cpu, gpu or auto")
    add("--port", type=int, action="append", default=[], help="port to listen on; may be repeated")
    add("--timeout", type=_seconds, default=_TIMEOUT, help=f"seconds for everything (default {_TIMEOUT:.0f})")
    add("--json", action="store_true", help="one JSON object a check")
    return parser


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 3600")
    return found


def default_folder(script: Path | None) -> Path:
    """Return the run folder that ``outlast run`` would use for a script."""
    from outlast.launcher.command.options import folder_name

    return Path(DEFAULT) if script is None else Path(DEFAULT, folder_name(script.name.removesuffix(".py")))


def _told(one: Diagnosis) -> Iterator[str]:
    word = "ok" if one.ok else ("FAILED" if one.fails else "warning")
    yield f"{word:<7}  {one.check:<11}  {one.found}"
    if not one.ok:
        yield f"{'':<7}  {'':<11}  expected: {one.expected}"
        yield f"{'':<7}  {'':<11}  cure: {one.cure}"


def checks(
    run_dir: Path, script: Path | None, environment: Mapping[str, str], named: bool = True
) -> list[Check]:
    """Return the checks that a preflight does not have, by name; each may block as long as the kernel.

    Args:
        named: the user names the run folder; else ``outlast run`` takes one beside it where it is held.
    """
    place = run_dir.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    node = environment.get("OUTLAST_NODE") or os.uname().nodename
    found: list[Check] = [
        ("rename", partial(rename, place)),
        ("lock", partial(lock, place)),
        ("write", partial(writing, place)),
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
    worker.start()
    found: list[Diagnosis] = []
    try:
        for name, _ in wanted:
            try:
                found += answers.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                return [*found, policy.no_answer(name, time.monotonic() - began)]
        return found
    finally:
        _stopped.set()  # also after Ctrl-C: the thread removes its files
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


def writing(place: Path) -> Sequence[Diagnosis]:
    """Write and sync 64 MiB, or what is written in 10 s."""
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
            return [policy.writing(str(place), 0.0, error.strerror or str(error))]
    return [policy.writing(str(place), written / max(1e-6, time.monotonic() - began), "")]


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


def compiled(script: Path) -> Sequence[Diagnosis]:
    """Compile the script without running it."""
    try:
        compile(read_whole(script, _MOST_SCRIPT, follow=True), str(script), "exec", dont_inherit=True)
    except OSError as error:
        return [policy.script(str(script), error.strerror or str(error))]
    except SyntaxError as error:
        return [policy.script(str(script), f"line {error.lineno}: {error.msg}")]
    except ValueError as error:
        return [policy.script(str(script), str(error))]
    return [policy.script(str(script), "")]
