"""The preflight of a node: which checks are made, all in parallel, and what follows for the node."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from outlast import settings
from outlast.errors import NodeUnfit, UsageError
from outlast.health.agent import devices, measuring
from outlast.health.agent.probe import DeviceProbe
from outlast.health.policy.preflight import (
    CHECK_OF_LIMIT,
    Check,
    Finding,
    Findings,
    Preflight,
    no_answer,
    unfit,
)
from outlast.launcher.command.options import LaunchOptions

TIMEOUT = 60.0  # seconds for everything; torch takes 2 to 10 of them on a cold page cache

QUICK = 10.0  # seconds for the checks that need no torch before a node joins

Task = tuple[Check, str, Callable[[], Findings]]


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


def admit(options: LaunchOptions) -> Sequence[Finding]:
    """Check this node before it joins a job of several nodes; return the warnings.

    With ``auto``, what needs torch is checked where there are GPUs; elsewhere the zygote imports torch
    anyway, and NCCL needs no room in /dev/shm.

    Raises:
        NodeUnfit: it must not join.
    """
    if options.nodes.preflight == "off":
        return ()
    environment = settings.inherited()
    gpus = devices.gpu_count(environment)
    skip = set()
    if options.nodes.preflight == "auto":
        skip = {Check.ADDRESS} if gpus else {Check.ADDRESS, Check.SHARED_MEMORY, Check.TORCH, Check.COMPUTE}
    wanted = PreflightOptions(
        run_dir=Path(options.run_dir),
        nproc_per_node=str(options.world.nproc_per_node),
        gpus=-1 if gpus else 0,
        skip=frozenset(skip),
        environment=environment,
    )
    begun = begin(wanted)
    found = quick(wanted, time.monotonic() + QUICK)
    found += finish(wanted, begun, time.monotonic() + TIMEOUT)
    why = unfit(found)
    if why:
        raise NodeUnfit(f"node {options.nodes.name}: {why} (--preflight off joins all the same)")
    return [finding for finding in found if not finding.ok]


def examine(options: PreflightOptions, deadline: float) -> str:
    """Check this node and return why it must not join, in one sentence; empty: it may.

    Call it from the main thread, before the process has forked.

    Args:
        options: what is checked.
        deadline: monotonic time at which a check without an answer has failed.
    """
    probe = begin(options)
    findings = quick(options, deadline)
    return unfit((*findings, *finish(options, probe, deadline)))


def begin(options: PreflightOptions) -> DeviceProbe | Findings:
    """Start the check that needs torch, in the background; pass the result to :func:`finish`."""
    if options.skips(Check.TORCH):
        return []
    try:
        return DeviceProbe(_devices(options), options.environment)
    except OSError as error:
        return no_answer(Check.TORCH, f"no process could be started: {error.strerror}")


def finish(options: PreflightOptions, begun: DeviceProbe | Findings, deadline: float) -> Findings:
    """Wait for what :func:`begin` started, until ``deadline`` (monotonic), and return its findings."""
    return begun.result(deadline, options.limits) if isinstance(begun, DeviceProbe) else begun


def quick(options: PreflightOptions, deadline: float) -> Findings:
    """Make every check that needs no torch, in parallel, until ``deadline`` (monotonic)."""
    return in_parallel(_tasks(options), deadline)


def _devices(options: PreflightOptions) -> str:
    if options.skips(Check.COMPUTE):
        return "none"
    if options.nproc_per_node == "cpu" or options.gpus == 0:
        return "cpu"
    wanted = options.gpus > 0 or options.nproc_per_node == "gpu"
    return "cuda" if wanted or devices.gpu_count(options.environment) else "auto"


def _tasks(options: PreflightOptions) -> list[Task]:
    """Return the table of checks: which, of what, and the function."""
    try:
        ranks = devices.rank_count(options.nproc_per_node, options.environment)
    except ValueError:
        ranks = 1  # the check of the devices reports it
    host, limits = options.address or os.uname().nodename, options.limits
    gpus = partial(measuring.gpus, options.nproc_per_node, options.gpus, options.environment)
    folders = {"run folder": options.run_dir, "checkpoint folder": options.checkpoint_dir}
    tasks: list[Task] = [
        *(
            (Check.DISK, f"the {role}", partial(measuring.folder, role, path, limits))
            for role, path in folders.items()
            if path is not None
        ),
        (Check.MEMORY, "/proc/meminfo", partial(measuring.memory, ranks, limits)),
        (Check.SHARED_MEMORY, "/dev/shm", partial(measuring.shared_memory, limits)),
        (Check.ADDRESS, f"the name {host}", partial(measuring.address, host)),
        (Check.CLOCK, "the clock", partial(measuring.clock, options.run_dir, limits)),
        (Check.OPEN_FILES, "the limit of open files", partial(measuring.open_files, limits)),
        (Check.PROCESSES, "the limit of processes", partial(measuring.processes, ranks, limits)),
        (Check.DEVICES, "the GPUs", gpus),
        *((Check.PORTS, f"port {port}", partial(measuring.port, port)) for port in options.ports),
    ]
    return [task for task in tasks if not options.skips(task[0])]


def in_parallel(tasks: Sequence[Task], deadline: float) -> Findings:
    """Run checks in threads, so that a file system that does not answer blocks only its own check."""
    began = time.monotonic()
    answers: queue.SimpleQueue[tuple[int, Findings]] = queue.SimpleQueue()
    for index, task in enumerate(tasks):
        thread = threading.Thread(target=_answer, args=(index, task, answers), name="preflight", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            answers.put((index, no_answer(task[0], f"{task[1]}: no thread for it: {error}")))
    found: dict[int, Findings] = {}
    while len(found) < len(tasks):
        try:
            index, findings = answers.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[index] = findings
    waited = time.monotonic() - began
    for index, (check, what, _) in enumerate(tasks):
        if index not in found:
            found[index] = no_answer(check, f"{what}: no answer within {waited:.1f} s", waited)
    return [finding for index in range(len(tasks)) for finding in found[index]]


def _answer(index: int, task: Task, answers: queue.SimpleQueue[tuple[int, Findings]]) -> None:
    check, what, measure = task
    began = time.monotonic()
    try:
        findings = measure()
    except Exception as error:  # noqa: BLE001 - a check that fails is a finding, not a crash
        findings = no_answer(check, f"{what}: {type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    answers.put((index, [replace(one, seconds=seconds) for one in findings]))
