"""The judgements of ``outlast doctor``: a small function for each check, over what was measured.

Nothing is measured here. The checks of a preflight are taken as they are and get a cure; others are of what a
preflight leaves out, because a node may join all the same, or because a script is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.config import Config
from outlast.health.policy.preflight import Finding, Level, in_bytes
from outlast.recovery.policy.events import FaultSeen, FirstStep, Progress, Record, RunStarted, Saved

WRITE_LEAST = 50e6  # bytes/s to the run folder; a slow hard disk writes 100 MB/s
TIMES_LONGER = 2  # a timeout than what was measured on an idle machine
CORE = 4 << 30  # bytes of a core file; a rank that has imported torch and CUDA maps more
LOCKED_LEAST = 64 << 20  # bytes; Linux' default of 8 MiB is less than NCCL registers
_ATTACH_RESTRICTED = 2  # yama: only processes with CAP_SYS_PTRACE attach to others


@dataclass(frozen=True)
class Diagnosis:
    """The result of a check.

    Args:
        check: its name.
        ok: whether it passed.
        found, expected: in words, with units.
        cure: what to do; empty where nothing is to be done.
        level: what a failed check means: an error, the job would fail; a warning, it would be slow or less
            would be known after a fault.
    """

    check: str
    ok: bool
    found: str
    expected: str = ""
    cure: str = ""
    level: Level = Level.ERROR

    @property
    def fails(self) -> bool:
        """Whether a job would fail because of it."""
        return not self.ok and self.level is Level.ERROR

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**self.__dict__, "level": self.level.value}


# By check; a finding that knows more says more. A test compares the table of docs/reference/commands.md.
CURES: Mapping[str, str] = {
    "disk": "make room, or name another folder with --run-dir",
    "memory": "start fewer ranks here, or raise the memory limit of the container",
    "shm": "docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory at /dev/shm",
    "ports": "end the process that listens there (ss -ltnp), or choose another port",
    "address": "correct the name in DNS or /etc/hosts, or name a reachable address with --local-addr",
    "clock": "start chrony or another NTP client, and set the clock",
    "open-files": "ulimit -n 65536; in systemd LimitNOFILE=65536",
    "processes": "ulimit -u 65536; raise pids.max of the container",
    "devices": "compare nvidia-smi with --nproc-per-node, and CUDA_VISIBLE_DEVICES",
    "torch": "install torch for this Python and this driver; the error is above",
    "compute": "take the node out of use and run the vendor's diagnosis (dcgmi diag -r 3)",
    "bandwidth": "check cables, link speed (ethtool) and other traffic",
    "rename": "keep the run folder on a POSIX file system (local disk, NFS, Lustre)",
    "lock": "mount the file system with locks (NFS: without nolock; Lustre: with flock)",
    "write": "save less often to this disk, or name a faster one with --run-dir",
    "run-folder": "wait for it, or name another folder with --run-dir",
    "ptrace": "sysctl kernel.yama.ptrace_scope=1 (3 lasts until the next boot); container: SYS_PTRACE",
    "environment": "correct its name, or unset it",
    "script": "correct it; no restart helps",
    "config": "correct the keys that it names; outlast run refuses the file as well",
    "scratch": "set TMPDIR to a folder that exists and is mounted without noexec",
    "processors": "start fewer ranks, raise the CPU limit of the container, or lower OMP_NUM_THREADS",
    "core-files": "ulimit -c 0, or set kernel.core_pattern to a program or a folder with room",
    "interfaces": "name an interface that `ip link` lists and that is up, or unset the variable",
    "caches": "name a folder that every rank can write, on a file system with locks",
    "overcommit": "sysctl vm.overcommit_memory=0",
    "locked-memory": "ulimit -l unlimited; in systemd LimitMEMLOCK=infinity",
    "driver": "take the GPU out of use, and reset it or reboot (nvidia-smi -q names its state)",
    "ddp": "DistributedDataParallel(model, find_unused_parameters=True), which keeps the first buckets",
    "modules": "rename the file: Python imports it in place of the module",
    "timeouts": "lengthen the timeout, or leave it out: then it is learned",
    "saving": "save less often, or name a faster disk with --run-dir",
    "start": "read the reason; outlast run SCRIPT fails in the same way",
    "preemption": "let the script end when session.steps ends, and see docs/how-to/preemption.md",
    "damaged-copy": "keep at least two checkpoints (keep_last_n), and restore through the session",
    "crash": "read the reason; the script has to come to its first step when it is started again",
    "hang": "read the reason; the ranks of this machine could not be stopped or killed",
    "leftovers": "end the process that is named, and see which part of the script started it",
    "slurm": "correct the line of the batch file as the finding says",
    "kubernetes": "correct the line of the manifest as the finding says",
}
# Values that cost speed or knowledge, and are left in an environment by accident: why, and the cure.
_COSTLY: Mapping[tuple[str, str], tuple[str, str]] = {
    ("CUDA_LAUNCH_BLOCKING", "1"): (
        "each kernel is waited for; steps take several times as long",
        "unset it",
    ),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): ("each collective is checked by another one", "unset it"),
    ("NCCL_DEBUG", "TRACE"): ("NCCL writes several lines for each call", "set NCCL_DEBUG=WARN"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): (
        "each collective blocks the CPU, and a timeout raises instead of ending the rank",
        "unset it",
    ),
    ("NCCL_P2P_DISABLE", "1"): ("GPUs of a node talk through host memory", "unset it"),
    ("NCCL_SHM_DISABLE", "1"): ("ranks of a node talk over the network", "unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): (
        "an error of NCCL ends no rank: each waits until its timeout",
        "unset it",
    ),
    ("NCCL_ASYNC_ERROR_HANDLING", "0"): (
        "an error of NCCL ends no rank: each waits until its timeout",
        "unset it",
    ),
}


def cured(finding: Finding) -> Diagnosis:
    """Return the finding of a preflight with its cure."""
    cure = "" if finding.ok else CURES[finding.check.value]
    return Diagnosis(finding.check.value, finding.ok, finding.found, finding.expected, cure, finding.level)


def rename(where: str, error: str, seen: Sequence[str]) -> Diagnosis:
    """Judge whether a file is replaced atomically in a folder; commits depend on it.

    Args:
        where: the folder.
        error: why a file could not be replaced; empty: it was.
        seen: what a reader saw that was neither the old nor the new content.
    """
    found = f"{where}: {error or (f'a reader saw {seen[0]}' if seen else 'a file is replaced at once')}"
    cure = "" if not error and not seen else CURES["rename"]
    return Diagnosis("rename", not cure, found, "a reader sees the old content or the new one", cure)


def lock(where: str, holds: bool, error: str) -> Diagnosis:
    """Judge whether the lock of a run folder keeps a second launcher out."""
    ok = holds and not error
    told = error or ("a lock keeps others out" if holds else "two holders have the same lock")
    cure = "" if ok else CURES["lock"]
    return Diagnosis("lock", ok, f"{where}: {told}", "one holder at a time", cure)


def writing(where: str, rate: float, error: str) -> Diagnosis:
    """Judge how fast the run folder takes bytes that are synced, in bytes/s."""
    if error:
        return Diagnosis("write", False, f"{where}: {error}", "a file that is written", CURES["disk"])
    ok = rate >= WRITE_LEAST
    cure = "" if ok else CURES["write"]
    expected = f"at least {in_bytes(WRITE_LEAST)}/s"
    return Diagnosis("write", ok, f"{where}: {in_bytes(rate)}/s", expected, cure, Level.WARNING)


def tracing(scope: int, is_root: bool) -> Diagnosis:
    """Judge whether stacks of a rank that cannot answer can be read.

    Args:
        scope: kernel.yama.ptrace_scope; -1: the kernel has none.
        is_root: this process may attach to any other up to scope 2.
    """
    ok = scope < _ATTACH_RESTRICTED or (is_root and scope == _ATTACH_RESTRICTED)
    found = "no restriction" if scope < 0 else f"kernel.yama.ptrace_scope is {scope}"
    cure = "" if ok else CURES["ptrace"]
    expected = "at most 1; else py-spy reads no stack of a rank that hangs in C code"
    return Diagnosis("ptrace", ok, found, expected, cure, Level.WARNING)


def variables(
    unread: Sequence[str], near: Mapping[str, str], environment: Mapping[str, str]
) -> list[Diagnosis]:
    """Judge the environment.

    Args:
        unread: a line for each variable of outlast that nothing reads.
        near: names of NCCL, torch and OpenMP that do not exist, and the known name that is meant.
        environment: of the job.
    """
    expected = "names that something reads"
    found = [
        Diagnosis("environment", False, text, expected, CURES["environment"], Level.WARNING)
        for text in unread
    ]
    for name, meant in sorted(near.items()):
        text = f"{name}: nothing reads it; {meant} is meant"
        found.append(Diagnosis("environment", False, text, expected, f"rename it to {meant}", Level.WARNING))
    for (name, value), (why, cure) in _COSTLY.items():
        if environment.get(name, "").upper() == value:
            text = f"{name}={value}: {why}"
            found.append(Diagnosis("environment", False, text, "a value for training", cure, Level.WARNING))
    return found or [Diagnosis("environment", True, "no variable is misspelt or costly")]


def script(path: str, error: str) -> Diagnosis:
    """Judge the training script; ``error``: why it cannot be read or compiled."""
    cure = CURES["script"] if error else ""
    return Diagnosis("script", not error, f"{path}: {error or 'compiles'}", "a script that compiles", cure)


def launchers(where: str, holder: str, named: bool) -> Diagnosis:
    """Judge whether a launcher holds the run folder.

    Args:
        where: the folder.
        holder: pid of the launcher; empty: none holds it.
        named: the user names the folder; else a launcher takes one beside it.
    """
    found = f"{where}: held by the launcher with pid {holder}" if holder else f"{where}: not in use"
    cure = CURES["run-folder"] if holder else ""
    level = Level.ERROR if named else Level.WARNING
    return Diagnosis("run-folder", not holder, found, "a folder that no launcher uses", cure, level)


def judged(check: str, ok: bool, found: str, expected: str, level: Level = Level.WARNING) -> Diagnosis:
    """Return a diagnosis with the cure of its check where it is not ok."""
    return Diagnosis(check, ok, found, expected, "" if ok else CURES[check], level)


def processors(ranks: int, usable: float, threads: int) -> Diagnosis:
    """Judge whether the ranks have a processor each.

    Args:
        usable: processors that this process may use, by its affinity and the CPU limit of its group.
        threads: that each rank is told to compute with (OMP_NUM_THREADS); 0: not told.
    """
    told = f"{usable:g} processors for {ranks} ranks"
    told += f" of {threads} threads (OMP_NUM_THREADS)" if threads > 1 else ""
    ok = usable >= ranks * max(1, threads)
    return judged("processors", ok, told, "a processor for each rank and thread")


def core_files(limit: int, where: str, free: int, ranks: int) -> Diagnosis:
    """Judge whether the core files of a crash have room.

    Args:
        limit: bytes of a core file; 0: none is written; -1: no limit.
        where: the folder; empty: a program takes them.
        free: bytes free there.
    """
    if not limit or not where:
        return judged("core-files", True, "none is written" if not limit else "a program takes them", "")
    each = CORE if limit == -1 else min(limit, CORE)
    found = f"{where}: {in_bytes(free)} free for the core files of {ranks} ranks"
    expected = f"at least {in_bytes(each)} a rank; a crash fills the disk, and the next save fails"
    return judged("core-files", free >= each * ranks, found, expected)


def interfaces(variable: str, names: str, known: Sequence[str]) -> Diagnosis:
    """Judge whether a variable names network interfaces that are there, by the rules of its library.

    NCCL needs one of the names: ``^`` excludes, ``=`` is exact, otherwise a name is a prefix. Gloo and
    TensorPipe need each of them, as a whole, and know neither sign.
    Source: NCCL's documentation of NCCL_SOCKET_IFNAME; Gloo by trial.
    """
    of_nccl = variable.startswith("NCCL")
    wanted = [one for one in (names.lstrip("=") if of_nccl else names).split(",") if one]
    if not of_nccl:
        ok = all(name in known for name in wanted)
    elif names.startswith("="):
        ok = any(name in known for name in wanted)
    else:
        ok = names.startswith("^") or any(one.startswith(name) for name in wanted for one in known)
    found = f"{variable}={names}: " + ("is there" if ok else "no such interface is up")
    return judged("interfaces", ok, found, f"one of {', '.join(known) or 'none'}", Level.ERROR)


def locked_memory(limit: int, adapters: Sequence[str]) -> Diagnosis:
    """Judge whether NCCL may register memory with InfiniBand adapters; limit in bytes, -1: none."""
    ok = not adapters or limit < 0 or limit >= LOCKED_LEAST
    told = "no limit" if limit < 0 else in_bytes(limit)
    found = f"{told} of locked memory, {len(adapters)} InfiniBand adapter(s)"
    expected = f"at least {in_bytes(LOCKED_LEAST)}; NCCL fails with ibv_reg_mr otherwise"
    return judged("locked-memory", ok, found, expected, Level.ERROR)


def overcommit(mode: int) -> Diagnosis:
    """Judge vm.overcommit_memory: with 2 the fork of a large process fails."""
    found = f"vm.overcommit_memory is {mode}"
    return judged("overcommit", mode != 2, found, "0 or 1; else data loaders fail to fork: no memory")


def driver(devices: int, problems: Sequence[str]) -> list[Diagnosis]:
    """Judge what the driver says of the GPUs: a line for each that is not fit."""
    expected = "GPUs without errors that a reset has to clear"
    found = [judged("driver", False, one, expected, Level.ERROR) for one in problems]
    return found or [judged("driver", True, f"{devices} GPU(s) without errors", expected)]


def buckets(path: str, lines: Sequence[int]) -> Diagnosis:
    """Judge the lines of a script with a DistributedDataParallel that rebuilds its buckets.

    Source: torch's reducer rebuilds them after the first iteration in the order in which gradients came,
    unless find_unused_parameters is set; a model that is built again after a restart sums in another order.
    """
    where = ", ".join(map(str, lines))
    found = (
        f"{path}: DDP in line {where} rebuilds its buckets"
        if lines
        else f"{path}: no DistributedDataParallel that rebuilds its buckets"
    )
    expected = "fixed buckets; else a resumed run differs in the last bit at 3 ranks or more"
    return judged("ddp", not lines, found, expected)


def modules(folder: str, names: Sequence[str]) -> Diagnosis:
    """Judge the names of modules beside a script that are those of Python or torch."""
    found = f"{folder}: {', '.join(names) or 'none'} has the name of a module that others import"
    return judged("modules", not names, found, "names of your own")


@dataclass(frozen=True)
class Measured:
    """What a run's records say of its steps, saves and restarts; times in seconds, 0: not known.

    Args:
        source: where the records are from.
        start: from the launch to the first step.
        step: longest mean time of a step between two records.
        pause: longest time for which a save paused training.
        interval: shortest time between two saves.
        nbytes: of the largest checkpoint.
        restart: longest time from a fault that was seen to the next first step.
    """

    source: str
    start: float = 0.0
    step: float = 0.0
    pause: float = 0.0
    interval: float = 0.0
    nbytes: int = 0
    restart: float = 0.0


def measured(source: str, records: Iterable[Record]) -> Measured:
    """Return what the records of a run say; those of another generation begin anew."""
    launched = seen = saved = last = None
    start = step = pause = restart = 0.0
    interval, nbytes = math.inf, 0
    for one in records:
        if isinstance(one, RunStarted):
            launched, seen, saved, last = one.clock, None, None, None
        elif isinstance(one, FaultSeen):
            seen = seen or one.clock
            saved = last = None
        elif isinstance(one, FirstStep):
            start = max(start, one.clock - launched) if launched is not None else start
            restart = max(restart, one.clock - seen) if seen is not None else restart
            launched, seen, saved, last = None, None, None, (one.clock, one.step)
        elif isinstance(one, (Progress, Saved)):
            if last is not None and one.step > last[1]:
                step = max(step, (one.clock - last[0]) / (one.step - last[1]))
            last = (one.clock, one.step) if last is None or one.step > last[1] else last
            if isinstance(one, Saved):
                pause, nbytes = max(pause, one.seconds), max(nbytes, one.nbytes)
                interval = min(interval, one.clock - saved) if saved is not None else interval
                saved = one.clock
    return Measured(source, start, step, pause, interval if interval < math.inf else 0.0, nbytes, restart)


def timeouts(config: Config, found: Measured, rate: float, grace: float) -> list[Diagnosis]:
    """Judge the timeouts of a configuration by what was measured, and by the time that the scheduler gives.

    Args:
        rate: bytes/s that the run folder takes; 0: not known.
        grace: seconds from the scheduler's notice to its SIGKILL; 0: not known.
    """
    fixed, write = config.fault_tolerance, found.nbytes / rate if rate else 0.0
    limits = [
        ("initial_rank_heartbeat_timeout", fixed.initial_rank_heartbeat_timeout, "a start", found.start),
        ("rank_heartbeat_timeout", fixed.rank_heartbeat_timeout, "a step", found.step),
        ("rank_section_timeouts.step", fixed.rank_section_timeouts.get("step"), "a step", found.step),
        (
            "rank_section_timeouts.checkpointing",
            fixed.rank_section_timeouts.get("checkpointing"),
            "the pause of a save",
            found.pause,
        ),
        ("checkpoints.timeout", config.checkpoints.timeout, "a save", max(found.pause, write)),
        ("preemption.preempt_time", config.preemption.preempt_time, "a save", max(found.pause, write)),
    ]
    wrong = [
        judged(
            "timeouts",
            False,
            f"{name} is {limit:g} s, and {what} took {took:.2g} s ({found.source})",
            f"at least {TIMES_LONGER} times as long",
            Level.ERROR,
        )
        for name, limit, what, took in limits
        if limit is not None and limit < TIMES_LONGER * took
    ]
    last = config.preemption.preempt_time or fixed.workers_stop_timeout
    if 0 < grace < last:
        name = "preemption.preempt_time" if config.preemption.preempt_time else "workers_stop_timeout"
        text = f"{name} is {last:g} s, and the scheduler kills the job {grace:g} s after its notice"
        cure = f"set {name} below {grace:g}, or ask the scheduler for more time"
        wrong.append(Diagnosis("timeouts", False, text, "less than the scheduler gives", cure, Level.WARNING))
    told = f"longer than what was measured ({found.source})" if found.source else "nothing to compare with"
    return wrong or [judged("timeouts", True, told, "")]


def saving(config: Config, found: Measured, rate: float) -> Diagnosis:
    """Judge whether the disk takes checkpoints as fast as they are made; rate in bytes/s."""
    options = config.checkpoints
    every = options.save_interval_seconds or (options.save_interval or 0) * found.step or found.interval
    if not (found.nbytes and rate and every):
        return judged("saving", True, "no checkpoint to compare with", "")
    takes = found.nbytes / rate
    text = f"a checkpoint of {in_bytes(found.nbytes)} takes {takes:.2g} s at {in_bytes(rate)}/s"
    return judged("saving", takes <= every, text, f"less than the {every:.3g} s between two ({found.source})")


PATHS = ("start", "preemption", "damaged-copy", "crash", "hang")  # of the rehearsal, in this order


def rehearsed(path: str, found: str) -> Diagnosis:
    """Return what is told of a path of the rehearsal that goes on."""
    return judged(path, True, found, "")


def broken(path: str, found: str) -> Diagnosis:
    """Return what is told of a path of the rehearsal that does not go on."""
    return judged(path, False, found, "the job goes on", Level.ERROR)


def unrehearsed(path: str, why: str) -> Diagnosis:
    """Return what is told of a path that could not be tried, which says nothing against the machine."""
    cure = "a longer --timeout, or a script with outlast.start() and session.steps()"
    return Diagnosis(path, False, f"not rehearsed: {why}", "a path that is tried", cure, Level.WARNING)


def leftovers(what: Sequence[str]) -> Diagnosis:
    """Judge what outlived the job of the rehearsal, and was ended then."""
    return judged("leftovers", not what, ", ".join(what) or "nothing", "nothing")


def no_answer(check: str, seconds: float) -> Diagnosis:
    """Return what is told of a check that did not end in time: a file system or a driver that hangs."""
    cure = "look for a file server or a driver that does not answer (dmesg)"
    return Diagnosis(check, False, f"no answer within {seconds:.0f} s", "an answer in time", cure)
