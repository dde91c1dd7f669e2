"""The preflight of a node: which checks are made, all at once, and what they add up to."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outlast.errors import UsageError
from outlast.health.agent import devices, measuring
from outlast.health.agent.devices import DeviceProbe
from outlast.health.policy import (
    CHECK_OF_LIMIT,
    Check,
    Finding,
    Measurement,
    NoAnswer,
    Preflight,
    judge,
    unfit,
)

TIMEOUT = 60.0  # seconds for everything; torch takes 2 to 10 of them on a cold page cache

Task = tuple[Check, str, Callable[[], Measurement]]


@dataclass(frozen=True)
class PreflightOptions:
    """What a node is checked for.

    Args:
        run_dir: the run folder; it need not exist yet.
        checkpoint_dir: where checkpoints go; empty: into the run folder.
        nproc_per_node: as ``outlast run`` takes it.
        gpus: GPUs that there must be; -1: as many as ranks, or none.
        address: the name under which others reach this node; empty: its host name.
        ports: that it will listen on.
        skip: checks that are not made.
        limits: see there.
        environment: of the workers.

    Raises:
        UsageError: an option cannot take effect, because its check is skipped.
    """

    run_dir: Path
    checkpoint_dir: Path | None = None
    nproc_per_node: str = "1"
    gpus: int = -1
    address: str = ""
    ports: tuple[int, ...] = ()
    skip: frozenset[Check] = frozenset()
    limits: Preflight = field(default_factory=Preflight)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        standard = Preflight()
        given = {
            "a checkpoint folder": (self.checkpoint_dir is not None, Check.DISK),
            "a number of GPUs": (self.gpus >= 0, Check.DEVICES),
            "an address": (bool(self.address), Check.ADDRESS),
            "a port": (bool(self.ports), Check.PORTS),
        }
        for name, check in CHECK_OF_LIMIT.items():
            changed = getattr(self.limits, name) != getattr(standard, name)
            given[f"the limit {name}"] = (changed, check)
        for what, (named, check) in given.items():
            if named and self.skips(check):
                raise UsageError(f"{what} is given and {check.value} is skipped; nothing was checked")
        for port in self.ports:
            if not 0 < port < 1 << 16:
                raise UsageError(f"port {port}: a number from 1 to 65535 expected; nothing was checked")

    def skips(self, check: Check) -> bool:
        """Say whether a check is not made; without the import of torch no device is checked either."""
        return check in self.skip or (check is Check.COMPUTE and Check.TORCH in self.skip)


def examine(options: PreflightOptions, deadline: float) -> str:
    """Check this node and return why it must not join, in one sentence; empty: it may.

    Call it from the main thread, before the process has forked anything.

    Args:
        options: what is checked.
        deadline: monotonic time at which what has given no answer has failed.
    """
    probe = begin(options)
    findings = quick(options, deadline)
    return unfit((*findings, *finish(options, probe, deadline)))


def begin(options: PreflightOptions) -> DeviceProbe | Measurement | None:
    """Start the check that needs torch, in the background; hand what is returned to :func:`finish`."""
    if options.skips(Check.TORCH):
        return None
    try:
        return DeviceProbe(_devices(options), options.environment)
    except OSError as error:
        return NoAnswer(Check.TORCH, f"no process could be started: {error.strerror}")


def finish(
    options: PreflightOptions, begun: DeviceProbe | Measurement | None, deadline: float
) -> tuple[Finding, ...]:
    """Wait for what :func:`begin` began, until ``deadline`` (monotonic), and return its findings."""
    if begun is None:
        return ()
    measured = begun.result(deadline) if isinstance(begun, DeviceProbe) else [begun]
    return judge(measured, options.limits)


def quick(options: PreflightOptions, deadline: float) -> tuple[Finding, ...]:
    """Make every check that needs no torch, side by side, until ``deadline`` (monotonic)."""
    return judge(side_by_side(_tasks(options), deadline), options.limits)


def _devices(options: PreflightOptions) -> str:
    if options.skips(Check.COMPUTE):
        return "none"
    if options.nproc_per_node == "cpu" or options.gpus == 0:
        return "cpu"
    wanted = options.gpus > 0 or options.nproc_per_node == "gpu"
    return "cuda" if wanted or devices.gpu_count(options.environment) else "auto"


def _tasks(options: PreflightOptions) -> list[Task]:
    try:
        ranks = devices.rank_count(options.nproc_per_node, options.environment)
    except ValueError:
        ranks = 1  # the check of the devices says so
    host = options.address or os.uname().nodename
    tasks: list[Task] = [
        (Check.DISK, "the run folder", lambda: measuring.folder("run folder", options.run_dir)),
        (Check.MEMORY, "/proc/meminfo", lambda: measuring.memory(ranks)),
        (Check.SHARED_MEMORY, "/dev/shm", measuring.shared_memory),
        (Check.ADDRESS, f"the name {host}", lambda: measuring.address(host)),
        (Check.CLOCK, "the clock", lambda: measuring.clock(options.run_dir)),
        (Check.OPEN_FILES, "the limit of open files", measuring.open_files),
        (Check.PROCESSES, "the limit of processes", lambda: measuring.processes(ranks)),
        (Check.DEVICES, "the GPUs", lambda: _gpus(options)),
    ]
    folder = options.checkpoint_dir
    if folder is not None:
        tasks.insert(
            1,
            (Check.DISK, "the checkpoint folder", lambda: measuring.folder("checkpoint folder", folder)),
        )
    for port in options.ports:
        tasks.append((Check.PORTS, f"port {port}", _of_port(port)))
    return [task for task in tasks if not options.skips(task[0])]


def _gpus(options: PreflightOptions) -> Measurement:
    return measuring.gpus(options.nproc_per_node, options.gpus, options.environment)


def _of_port(number: int) -> Callable[[], Measurement]:
    return lambda: measuring.port(number)


def side_by_side(tasks: Sequence[Task], deadline: float) -> list[Measurement]:
    """Take the measurements in threads: a file system that does not answer blocks only its own."""
    began = time.monotonic()
    answers: queue.SimpleQueue[tuple[int, Measurement]] = queue.SimpleQueue()
    for index, task in enumerate(tasks):
        thread = threading.Thread(target=_answer, args=(index, task, answers), name="preflight", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            answers.put((index, NoAnswer(task[0], f"{task[1]}: no thread for it: {error}")))
    found: dict[int, Measurement] = {}
    while len(found) < len(tasks):
        try:
            index, measured = answers.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[index] = measured
    waited = time.monotonic() - began
    return [
        found.get(index, NoAnswer(check, f"{what}: no answer within {waited:.1f} s", waited))
        for index, (check, what, _) in enumerate(tasks)
    ]


def _answer(index: int, task: Task, answers: queue.SimpleQueue[tuple[int, Measurement]]) -> None:
    check, what, measure = task
    began = time.monotonic()
    try:
        measured = measure()
    except Exception as error:  # noqa: BLE001 - a node that cannot be measured is a finding, not a crash
        measured = NoAnswer(check, f"{what}: {type(error).__name__}: {error}")
    answers.put((index, replace(measured, seconds=time.monotonic() - began)))
