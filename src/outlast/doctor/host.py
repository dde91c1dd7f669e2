"""What ``outlast doctor`` measures of the host besides the run folder: limits, network, caches, driver."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.doctor import policy
from outlast.doctor.policy import Diagnosis
from outlast.health.agent.telemetry.nvml import Nvml
from outlast.health.policy.preflight import Level
from outlast.health.policy.telemetry import DeviceSample, Notice
from outlast.ipc.limits import processor_limit

_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PATIENCE = 10.0  # seconds for a program that does nothing
_PROC = Path("/proc/sys")
_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


def scratch(environment: Mapping[str, str]) -> Sequence[Diagnosis]:
    """Run a program from the folder of temporary files, as torch.compile and Triton load theirs from it."""
    place = environment.get("TMPDIR") or tempfile.gettempdir()
    expected = "a folder whose programs can be run; torch.compile and Triton put libraries there"
    error = ""
    path = Path(place, f".doctor-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o700)
        subprocess.run([path], check=True, timeout=_PATIENCE)
    except PermissionError:
        error = "programs in it cannot be run (noexec)"
    except (OSError, subprocess.SubprocessError) as failure:
        error = getattr(failure, "strerror", None) or str(failure)
    finally:
        if path.exists():
            path.unlink()
    return [policy.judged("scratch", not error, f"{place}: {error or 'programs run'}", expected)]


def processors(
    ranks: int, environment: Mapping[str, str], process: Path = Path("/proc/self")
) -> Sequence[Diagnosis]:
    """Compare the ranks with the processors of the affinity and of the control groups."""
    usable = float(len(os.sched_getaffinity(0)))
    limit = processor_limit(process)
    told = environment.get("OMP_NUM_THREADS", "")
    return [
        policy.processors(
            ranks, min(usable, limit) if limit > 0 else usable, int(told) if told.isdigit() else 0
        )
    ]


def core_files(ranks: int, pattern: Path = _PROC / "kernel/core_pattern") -> Sequence[Diagnosis]:
    """Find out where a crash would write core files, and how much room is there."""
    limit, _ = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        name = pattern.read_text().strip()
    except OSError:
        name = "core"
    where = "" if name.startswith("|") else str(Path(name).parent if name.startswith("/") else Path.cwd())
    free = shutil.disk_usage(where).free if where and Path(where).is_dir() else 0
    return [policy.core_files(limit, where, free, ranks)]


def interfaces(environment: Mapping[str, str], net: Path = _NET) -> Sequence[Diagnosis]:
    """Look for the network interfaces that variables of NCCL, Gloo and TensorPipe name."""
    known = sorted(path.name for path in net.iterdir() if _is_up(path)) if net.is_dir() else []
    named = [(name, environment[name]) for name in _INTERFACES if environment.get(name)]
    if not named:
        return [policy.judged("interfaces", True, "no variable names one", "")]
    return [policy.interfaces(name, value, known) for name, value in named]


def _is_up(interface: Path) -> bool:
    try:
        return bool(int((interface / "flags").read_text(), 16) & 1)  # IFF_UP
    except (OSError, ValueError):
        return False


def caches(environment: Mapping[str, str]) -> Sequence[Diagnosis]:
    """Write and lock a file in each folder of caches that a variable names."""
    found = []
    for name in _CACHES:
        if value := environment.get(name):
            error = _unusable(Path(value).expanduser())
            told = f"{name}={value}: {error or 'can be written and locked'}"
            found.append(policy.judged("caches", not error, told, "a folder that ranks write and lock"))
    return found or [policy.judged("caches", True, "no variable names one", "")]


def _unusable(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # it is made when it is needed
    if not folder.is_dir():
        return f"{folder} is no folder"
    path = folder / f".doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with open(path, "xb") as file:
            path.unlink()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def locked_memory(infiniband: Path = _INFINIBAND) -> Sequence[Diagnosis]:
    """Compare the limit of locked memory with what InfiniBand needs, where there is any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    return [policy.locked_memory(limit, adapters)]


def overcommit(path: Path = _PROC / "vm/overcommit_memory") -> Sequence[Diagnosis]:
    """Read whether the kernel refuses memory that is not used yet."""
    try:
        mode = int(path.read_text())
    except (OSError, ValueError):
        mode = 0
    return [policy.overcommit(mode)]


def driver() -> Sequence[Diagnosis]:
    """Read each GPU once from NVIDIA's driver; may block as long as the driver does."""
    problems, devices = [], 0
    for one in Nvml(os.uname().nodename, {}, {}).sample(time.time()):
        if not isinstance(one, DeviceSample):
            said = one.text if isinstance(one, Notice) else ""
            ok = "not installed" in said or not list(Path("/dev").glob("nvidia[0-9]*"))
            return [
                policy.judged("driver", ok, said, "a driver that answers where there are GPUs", Level.ERROR)
            ]
        devices += 1
        problems += [f"GPU {one.index}: {text}" for text in _faults(one)]
    return policy.driver(devices, problems)


def _faults(one: DeviceSample) -> list[str]:
    found = [one.error] if one.error else []
    if one.ecc_uncorrected:
        found.append(f"{one.ecc_uncorrected} uncorrected ECC errors since the driver was loaded")
    if one.remap_failed:
        found.append("a row of its memory could not be remapped")
    if one.remap_pending:
        found.append("a row of its memory is remapped at the next reset")
    if one.recovery_action:
        found.append(f"the driver asks for recovery action {one.recovery_action} (1: reset, 2: reboot)")
    return found
