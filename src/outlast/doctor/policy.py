"""The judgements of ``outlast doctor``: a small function for each check, over what was measured.

Nothing is measured here. The checks of a preflight are taken as they are and get a cure; others are of what a
preflight leaves out, because a node may join all the same, or because a script is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.health.policy.preflight import Check, Finding, Level, in_bytes

WRITE_LEAST = 50e6  # bytes/s to the run folder; a slow hard disk writes 100 MB/s
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


_CURES: Mapping[Check, str] = {
    Check.DISK: "make room, or name another folder with --run-dir",
    Check.MEMORY: "start fewer ranks here, or raise the memory limit of the container",
    Check.SHARED_MEMORY: "docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory at /dev/shm",
    Check.PORTS: "end the process that listens there (ss -ltnp), or choose another port",
    Check.ADDRESS: "correct the name in DNS or /etc/hosts, or name a reachable address with --local-addr",
    Check.CLOCK: "start chrony or another NTP client, and set the clock",
    Check.OPEN_FILES: "ulimit -n 65536; in systemd LimitNOFILE=65536",
    Check.PROCESSES: "ulimit -u 65536; raise pids.max of the container",
    Check.DEVICES: "compare nvidia-smi with --nproc-per-node, and CUDA_VISIBLE_DEVICES",
    Check.TORCH: "install torch for this Python and this driver; the error is above",
    Check.COMPUTE: "take the node out of use and run the vendor's diagnosis (dcgmi diag -r 3)",
    Check.BANDWIDTH: "check cables, link speed (ethtool) and other traffic",
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
}


def cured(finding: Finding) -> Diagnosis:
    """Return the finding of a preflight with its cure."""
    cure = "" if finding.ok else _CURES[finding.check]
    return Diagnosis(finding.check.value, finding.ok, finding.found, finding.expected, cure, finding.level)


def rename(where: str, error: str, seen: Sequence[str]) -> Diagnosis:
    """Judge whether a file is replaced atomically in a folder; commits depend on it.

    Args:
        where: the folder.
        error: why a file could not be replaced; empty: it was.
        seen: what a reader saw that was neither the old nor the new content.
    """
    found = f"{where}: {error or (f'a reader saw {seen[0]}' if seen else 'a file is replaced at once')}"
    cure = (
        ""
        if not error and not seen
        else "keep the run folder on a POSIX file system (local disk, NFS, Lustre)"
    )
    return Diagnosis("rename", not cure, found, "a reader sees the old content or the new one", cure)


def lock(where: str, holds: bool, error: str) -> Diagnosis:
    """Judge whether the lock of a run folder keeps a second launcher out."""
    ok = holds and not error
    told = error or ("a lock keeps others out" if holds else "two holders have the same lock")
    cure = "" if ok else "mount the file system with locks (NFS: without nolock; Lustre: with flock)"
    return Diagnosis("lock", ok, f"{where}: {told}", "one holder at a time", cure)


def writing(where: str, rate: float, error: str) -> Diagnosis:
    """Judge how fast the run folder takes bytes that are synced, in bytes/s."""
    if error:
        return Diagnosis("write", False, f"{where}: {error}", "a file that is written", _CURES[Check.DISK])
    ok = rate >= WRITE_LEAST
    cure = "" if ok else "save less often to this disk, or name a faster one with --run-dir"
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
    cure = (
        "" if ok else "sysctl kernel.yama.ptrace_scope=1 (3 lasts until the next boot); container: SYS_PTRACE"
    )
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
        Diagnosis("environment", False, text, expected, "correct its name, or unset it", Level.WARNING)
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
    cure = "correct it; no restart helps" if error else ""
    return Diagnosis("script", not error, f"{path}: {error or 'compiles'}", "a script that compiles", cure)


def launchers(where: str, holder: str, named: bool) -> Diagnosis:
    """Judge whether a launcher holds the run folder.

    Args:
        where: the folder.
        holder: pid of the launcher; empty: none holds it.
        named: the user names the folder; else a launcher takes one beside it.
    """
    found = f"{where}: held by the launcher with pid {holder}" if holder else f"{where}: not in use"
    cure = "wait for it, or name another folder with --run-dir" if holder else ""
    level = Level.ERROR if named else Level.WARNING
    return Diagnosis("run-folder", not holder, found, "a folder that no launcher uses", cure, level)


def no_answer(check: str, seconds: float) -> Diagnosis:
    """Return what is told of a check that did not end in time: a file system or a driver that hangs."""
    cure = "look for a file server or a driver that does not answer (dmesg)"
    return Diagnosis(check, False, f"no answer within {seconds:.0f} s", "an answer in time", cure)
