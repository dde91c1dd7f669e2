"""The part of a preflight that needs torch, in a separate process that is killed at a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outlast.health.policy import preflight as policy
from outlast.health.policy.preflight import Check, Findings, Preflight
from outlast.ipc.processes import Child, start

_MODULE = "outlast.health.worker"
_KILL_PATIENCE = 5.0  # after SIGKILL; a process in uninterruptible sleep may not end
_TAIL_BYTES = 2000


class DeviceProbe:
    """Imports torch and checks the devices while the caller does other things.

    Call :meth:`result` once, or :meth:`close`. Create it in the main thread: the kernel ends the process with
    the thread that started it.

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
            pid = start(
                [sys.executable, "-m", _MODULE, "--parent", str(os.getpid()), "--devices", devices],
                env={**environment, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,
            )
            self._process = Child(pid)
        except OSError:
            os.close(self._output)
            os.close(self._errors)
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended and the result is there."""
        return self._process.pidfd

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def result(self, deadline: float, limits: Preflight) -> Findings:
        """Wait for the end until ``deadline`` (monotonic), kill what has not ended, return the findings.

        A process that hangs, dies or prints something unexpected is a finding, too.
        """
        timed_out = self._process.wait(max(0.0, deadline - time.monotonic())) is None
        self._kill()
        said = _read(self._output)
        complaint = _last_line(_read(self._errors))
        self._release()
        code = self._process.exit_code
        seconds = time.monotonic() - self._began
        how = f"did not end within {seconds:.1f} s and was killed" if timed_out else _how_it_ended(code)
        if complaint and not timed_out:
            how += f": {complaint}"
        return _parse(said, how if timed_out or code != 0 else "", seconds, limits)

    def close(self) -> None:
        """Kill the process with all that it started, without a result."""
        self._kill()
        self._release()

    def _kill(self) -> None:
        self._process.kill_group()
        self._process.wait(_KILL_PATIENCE)

    def _release(self) -> None:
        self._process.close()
        for descriptor in (self._output, self._errors):
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


def _parse(said: str, failure: str, seconds: float, limits: Preflight) -> Findings:
    """Return the findings for the lines of the process; ``failure``: how it ended, "" for well."""
    found: Findings = []
    doing, imported = "the start of Python", False
    try:
        for text in said.splitlines():
            line: dict[str, Any] = json.loads(text)
            if "begins" in line:
                doing = str(line["begins"])
                continue
            doing = ""
            if "torch" in line:
                imported = True
                found += policy.torch(str(line["torch"]), float(line["seconds"]))
            else:
                found += _compute(line, limits)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        failure = failure or f"printed something else than a report ({type(error).__name__}: {error})"
    if not imported:
        where = f" in {doing}" if doing != "torch" else ""
        found += policy.torch("", seconds, f"the import {failure or 'printed nothing'}{where}")
    elif failure or doing:
        place = f"{doing}: " if doing else ""
        found += policy.no_answer(Check.COMPUTE, f"{place}the check {failure or 'ended early'}", seconds)
    return found


def _compute(line: Mapping[str, Any], limits: Preflight) -> Findings:
    device = f"{line['device']} ({line['model']})" if line["model"] else str(line["device"])
    memory = (int(line["free"]), int(line["total"]), int(line["tested"]))
    problems = [str(one) for one in line["problems"]]
    seconds = float(line["seconds"])
    return [replace(one, seconds=seconds) for one in policy.compute(device, memory, problems, limits)]
