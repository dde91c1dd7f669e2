"""Which GPUs there are for the ranks, found out without importing torch.

The part of a preflight that needs torch, in a process of its own that is never trusted to end.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outlast.health.policy import Check, Compute, Measurement, NoAnswer, Torch
from outlast.ipc.processes import kill_group

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
        ValueError: the text means nothing, or nothing of that kind is there.
    """
    text = text.strip()
    if re.fullmatch(r"[0-9]+", text):
        if int(text) > 0:
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
    raise ValueError("expected a positive number, cpu, gpu or auto")


def gpu_count(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that this process may use; see :func:`rank_count`."""
    return visible(environment.get("CUDA_VISIBLE_DEVICES"), _gpus(environment, dev))


def _gpus(environment: Mapping[str, str], dev: Path) -> int:
    """Count the GPUs that the kernel shows; where it shows none (WSL), ask nvidia-smi."""
    import subprocess

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

    Another process asks torch, so that this one stays without it; it takes as long as importing torch.

    Raises:
        ValueError: torch cannot say it; the text says why.
    """
    import json
    import subprocess
    import sys

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
        raise ValueError(f"torch did not say within {_TORCH_PATIENCE:.0f} s where the GPUs are") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"torch cannot say which processors are near the GPUs: {why[:500]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return tuple(tuple(one) for one in found)


def virtual_gpus(ranks: int, names: str | None) -> tuple[str, ...]:
    """Return the one GPU that each rank sees under ``--virtual-local-rank``, as torchrun deals them out.

    Args:
        ranks: how many ranks there are.
        names: CUDA_VISIBLE_DEVICES; None: it is not set, and rank N gets GPU N.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    dealt = [str(rank) for rank in range(ranks)] if names is None else names.split(",")
    if len(dealt) < ranks:
        raise ValueError(f"{ranks} ranks, and CUDA_VISIBLE_DEVICES={names} has {len(dealt)} GPU(s)")
    return tuple(name.strip() for name in dealt[:ranks])


_MODULE = "outlast.health.worker"
_KILL_PATIENCE = 5.0  # after SIGKILL; a process that outlasts it sits in the kernel (D)
_TAIL_BYTES = 2000


class DeviceProbe:
    """Imports torch and checks the devices while the caller does other things.

    Ask for the :meth:`result` once, or :meth:`close` it.
    To be made from the main thread: the kernel ends the process with the thread that started it.

    Args:
        devices: "cuda" (there must be one), "cpu", "auto" (the CPU where there is none) or "none" (only the
            import).
        environment: of the workers; torch is imported under it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, devices: str, environment: Mapping[str, str]) -> None:
        self._output = os.memfd_create("device-check", os.MFD_CLOEXEC)
        self._errors = os.memfd_create("device-check-errors", os.MFD_CLOEXEC)
        self._began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, "--parent", str(os.getpid()), "--devices", devices],
                env={**environment, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,
            )
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.close(self._output)
            os.close(self._errors)
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended and the result is there."""
        return self._pidfd

    def result(self, deadline: float) -> list[Measurement]:
        """Wait for the end until ``deadline`` (monotonic), kill what has not ended, return what was measured.

        A process that hangs, dies or says something else gives a measurement with that as its error.
        """
        timed_out = False
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        self._kill()
        said = _read(self._output)
        complaint = _last_line(_read(self._errors))
        self._release()
        code = self._process.returncode
        seconds = time.monotonic() - self._began
        how = f"did not end within {seconds:.1f} s and was killed" if timed_out else _how_it_ended(code)
        if complaint and not timed_out:
            how += f": {complaint}"
        return _parse(said, how if timed_out or code != 0 else "", seconds)

    def close(self) -> None:
        """Kill the process with all that it started; its result is of no interest any more."""
        self._kill()
        self._release()

    def _kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_PATIENCE)

    def _release(self) -> None:
        for descriptor in (self._output, self._errors, self._pidfd):
            os.close(descriptor)


def _read(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text[-_TAIL_BYTES:].strip().splitlines()
    return lines[-1].strip() if lines else ""


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"
    return f"ended with exit code {code}"


def _parse(said: str, failure: str, seconds: float) -> list[Measurement]:
    """Return what the lines say; ``failure``: how the process ended, "" for well."""
    found: list[Measurement] = []
    doing = "the start of Python"
    try:
        for text in said.splitlines():
            line: dict[str, Any] = json.loads(text)
            if "begins" in line:
                doing = str(line["begins"])
                continue
            doing = ""
            if "torch" in line:
                found.append(Torch(str(line["torch"]), seconds=float(line["seconds"])))
            else:
                found.append(_compute(line))
    except (ValueError, KeyError, TypeError) as error:
        failure = failure or f"said something else than a report ({type(error).__name__}: {error})"
    imported = any(isinstance(one, Torch) for one in found)
    if not imported:
        where = f" in {doing}" if doing != "torch" else ""
        found.append(Torch("", f"the import {failure or 'said nothing'}{where}", seconds))
    elif failure or doing:
        place = f"{doing}: " if doing else ""
        found.append(NoAnswer(Check.COMPUTE, f"{place}the check {failure or 'ended early'}", seconds))
    return found


def _compute(line: Mapping[str, Any]) -> Compute:
    return Compute(
        str(line["device"]),
        str(line["model"]),
        int(line["free"]),
        int(line["total"]),
        int(line["tested"]),
        tuple(str(one) for one in line["problems"]),
        float(line["seconds"]),
    )
