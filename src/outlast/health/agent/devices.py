"""The GPUs and processors for the ranks, counted without importing torch."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MOST_RANKS = 4096  # of a node; each is a process
_PATIENCE = 10.0  # nvidia-smi hangs when a driver does
_TORCH_PATIENCE = 300.0  # an import of torch from a slow file system


def rank_count(text: str, environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Return the number of ranks that ``--nproc-per-node`` asks for.

    Args:
        text: a number, "cpu" (processors this process may use, as torchrun counts), "gpu" or
            "auto" (GPUs, and processors where there is no GPU).
        environment: CUDA_VISIBLE_DEVICES and PATH.
        dev: where the kernel shows devices.

    Raises:
        ValueError: the text is invalid, or there is no such device.
    """
    text = text.strip()
    if re.fullmatch(r"0*[0-9]{1,4}", text):
        if 0 < int(text) <= MOST_RANKS:
            return int(text)
    elif text == "cpu":
        return len(os.sched_getaffinity(0))
    elif text in ("gpu", "auto"):
        count = gpu_count(environment, dev)
        if count:
            return count
        if (dev / "kfd").exists():
            raise ValueError("this host has an AMD GPU, which is not counted; give a number")
        if text == "auto":
            return len(os.sched_getaffinity(0))
        raise ValueError("no NVIDIA GPU is visible (/dev/nvidia0, nvidia-smi -L, CUDA_VISIBLE_DEVICES)")
    elif text == "xpu":
        raise ValueError("XPUs cannot be counted without torch; give a number")
    raise ValueError(f"expected a number from 1 to {MOST_RANKS}, cpu, gpu or auto")


def gpu_count(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that this process may use; see :func:`rank_count`."""
    return visible(environment.get("CUDA_VISIBLE_DEVICES"), _gpus(environment, dev))


def _gpus(environment: Mapping[str, str], dev: Path) -> int:
    """Count the GPUs that the kernel shows; where it shows none (WSL), ask nvidia-smi."""
    try:
        count = sum(1 for name in os.listdir(dev) if re.fullmatch(r"nvidia\d+", name))
        if count:
            return count
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            env={"PATH": environment.get("PATH", os.defpath)},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))


def visible(names: str | None, count: int) -> int:
    """Return how many of ``count`` GPUs CUDA_VISIBLE_DEVICES leaves, counted as torch does.

    CUDA reads numbers up to the first one that does not exist; a repeated entry hides all.
    """
    if names is None:
        return count
    entries = [entry.strip() for entry in names.split(",")]
    if entries[0].startswith(("GPU-", "MIG-")):
        kind = entries[0][:4]
        named = list(itertools.takewhile(lambda entry: entry.startswith(kind), entries))
        return len(named) if count and len(set(named)) == len(named) else 0
    found: list[int] = []
    for entry in entries:
        number = re.match(r"\+?(\d+)", entry)
        if number is None or int(number[1]) >= count:
            break
        if int(number[1]) in found:
            return 0
        found.append(int(number[1]))
    return len(found)


def processors(mode: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the processors that ``--numa-binding`` gives each local rank, as torch chooses them.

    Torch is imported in a separate process, which takes some seconds.

    Raises:
        ValueError: torch failed; the text says why.
    """
    ask = (
        "import json, sys; from outlast._torch_compat import processors_near_gpus as near;"
        " print(json.dumps(near(sys.argv[1], int(sys.argv[2]))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", ask, mode, str(ranks)],
            capture_output=True,
            text=True,
            timeout=_TORCH_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"torch did not say within {_TORCH_PATIENCE:.0f} s which processors are near the GPUs"
        ) from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"torch cannot say which processors are near the GPUs: {why[:500]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return tuple(tuple(one) for one in found)


def virtual_gpus(ranks: int, environment: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the one GPU that each rank sees under ``--virtual-local-rank``, as torchrun deals them out.

    Args:
        ranks: how many ranks there are.
        environment: CUDA_VISIBLE_DEVICES; where it is not set, rank N gets GPU N.
        dev: where the kernel shows devices.

    Raises:
        ValueError: there are fewer GPUs than ranks, or HIP would read another variable.
    """
    hip = environment.get("HIP_VISIBLE_DEVICES", "")
    if hip and (dev / "kfd").exists():
        raise ValueError(
            f"HIP_VISIBLE_DEVICES={hip} is set, and HIP then ignores CUDA_VISIBLE_DEVICES, by which each rank"
            " gets its GPU; name the GPUs in CUDA_VISIBLE_DEVICES instead"
        )
    names = environment.get("CUDA_VISIBLE_DEVICES")
    dealt = [str(rank) for rank in range(ranks)] if names is None else [*filter(str.strip, names.split(","))]
    if len(dealt) < ranks:
        raise ValueError(f"{ranks} ranks, and CUDA_VISIBLE_DEVICES={names} has {len(dealt)} GPU(s)")
    return tuple(name.strip() for name in dealt[:ranks])
