"""``outlast chaos telemetry``: telemetry of a scenario or of a file, for a replay or for a stand-in driver.

The stand-in for libnvidia-ml (``tests/support/nvml_stand_in.c`` of the repository) reads what it answers from
a state file, one line ``DEVICE FIELD VALUE`` for each value; this module writes that file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TextIO

from outlast import files
from outlast.errors import ExitCode, UsageError
from outlast.health.agent.telemetry import recorded
from outlast.health.policy import simulation
from outlast.health.policy.simulation import Kind, Scenario
from outlast.health.policy.telemetry import DeviceSample, Sample, Silence, XidEvent

_DESCRIPTION = """\
Make telemetry of a scenario, or take it from a file. With --replay-file it is written down at once, for
health.telemetry = "replay:FILE". With --state-file it drives a stand-in for NVIDIA's driver, in real time."""
_NOT_VALUES = frozenset(("time", "node", "index", "call_seconds", "error", "model"))
_DAY = 86400.0
_SHORTEST = 0.01  # seconds between two readings
_DEVICE = re.compile(r"NVML: device (\d+)")
Moment = tuple[float, list[Sample]]  # seconds from the start, and what is shown then


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = _DESCRIPTION
    parser.epilog = (
        f"scenarios: {', '.join(kind.value for kind in Kind)}; settings follow, as in"
        " xid,device=3,after=20,xid=79 (also devices=8, seed=0; after is in seconds, default 60);"
        " intense-load,xid is a failure under intense load"
    )
    add = parser.add_argument
    add("scenario", nargs="?", default="", metavar="SCENARIO", help="see below")
    add("--from", dest="source", type=Path, metavar="FILE", help="samples of a file instead of a scenario")
    add(
        "--replay-file",
        type=Path,
        metavar="FILE",
        help="write a file of samples: a table if it ends in .csv, else JSON lines",
    )
    add("--state-file", type=Path, metavar="FILE", help="of the stand-in, replaced at each reading")
    add("--kernel-log", type=Path, metavar="FILE", help="with --state-file: gets a line for each XID")
    add("--seconds", type=float, default=600.0, help="length (default 600)")
    add("--interval", type=float, default=10.0, help="seconds between two readings (default 10)")


def run(given: argparse.Namespace) -> int:
    """Carry out the command and return its exit code.

    Raises:
        UsageError: options contradict each other, or a file cannot be used.
    """
    if not 0 < given.seconds <= _DAY:
        raise UsageError(
            f"--seconds {given.seconds}: above 0 and up to {_DAY:.0f} expected; nothing was written"
        )
    if not _SHORTEST <= given.interval <= _DAY:
        raise UsageError(
            f"--interval {given.interval}: from {_SHORTEST} up to {_DAY:.0f} expected; nothing was written"
        )
    if bool(given.scenario) == (given.source is not None):
        raise UsageError("either SCENARIO or --from FILE expected; nothing was written")
    if (given.replay_file is None) == (given.state_file is None):
        raise UsageError("either --replay-file or --state-file expected; nothing was written")
    if given.kernel_log is not None and given.state_file is None:
        raise UsageError("--kernel-log needs --state-file; nothing was written")
    moments = _moments(given)
    try:
        if given.replay_file is not None:
            _write(moments, given.replay_file)
        else:
            _drive(moments, given.state_file, given.kernel_log)
    except OSError as error:
        path = error.filename or given.replay_file or given.state_file
        raise UsageError(f"{path}: {error.strerror}") from error
    return ExitCode.OK


def _moments(given: argparse.Namespace) -> Iterator[Moment]:
    if given.source is not None:
        return of_file(recorded.read(given.source), given.seconds)
    try:
        scenario = simulation.parse(given.scenario)
    except ValueError as error:
        raise UsageError(f"{given.scenario}: {error}; nothing was written") from None
    return of_scenario(scenario, given.seconds, given.interval)


def of_scenario(scenario: Scenario, seconds: float, interval: float) -> Iterator[Moment]:
    """Yield what a scenario shows at each reading; times begin at the present."""
    began, before, elapsed = time.time(), -1.0, 0.0
    while elapsed <= seconds:
        now = began + elapsed
        if simulation.silent(scenario, elapsed):
            what = f"NVML: device {scenario.device}, temperature (simulated)"
            yield elapsed, [Silence(now, os.uname().nodename, elapsed - scenario.after, what)]
        else:
            yield elapsed, simulation.samples(scenario, os.uname().nodename, elapsed, before, now)
        before, elapsed = elapsed, elapsed + interval


def of_file(samples: Iterable[Sample], seconds: float) -> Iterator[Moment]:
    """Yield samples of a file, those of one time together."""
    together: list[Sample] = []
    first = 0.0
    for sample in samples:
        first = first or sample.time
        if together and sample.time != together[0].time:
            yield together[0].time - first, together
            together = []
        if sample.time - first > seconds:
            return
        together.append(sample)
    if together:
        yield together[0].time - first, together


def _write(moments: Iterator[Moment], path: Path) -> None:
    descriptor = files.open_regular(path, os.O_WRONLY | os.O_CREAT, 0o666, follow=True)
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.truncate()
        shown = (sample for _, samples in moments for sample in samples)
        count = recorded.write(shown, file, recorded.is_table(path))
    sys.stdout.write(f"{count} samples in {path}\n")


def _drive(moments: Iterator[Moment], state: Path, log: Path | None) -> None:
    if log is None:
        _show(moments, state, None)
        return
    descriptor = files.open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666, follow=True)
    with open(descriptor, "a", encoding="utf-8", buffering=1) as file:
        _show(moments, state, file)


def _show(moments: Iterator[Moment], state: Path, log: TextIO | None) -> None:
    began = time.monotonic()
    shown: dict[int, list[str]] = {}
    for at, samples in moments:
        time.sleep(max(0.0, began + at - time.monotonic()))
        update(shown, samples)
        text = "".join(line + "\n" for lines in shown.values() for line in lines)
        files.write_whole(state, text.encode())
        for event in samples:
            if isinstance(event, XidEvent) and log is not None:
                log.write(f"NVRM: Xid (PCI:{event.pci}): {event.xid}, {event.text}\n")


def update(shown: dict[int, list[str]], samples: Sequence[Sample]) -> None:
    """Change the lines of the state file, by device (-1: the library), to what samples say."""
    for sample in samples:
        if isinstance(sample, DeviceSample):
            shown[sample.index] = _lines(sample)
        elif isinstance(sample, Silence) and sample.what.startswith("NVML:"):
            match = _DEVICE.match(sample.what)
            index = int(match[1]) if match else -1
            shown[index] = [
                *(line for line in shown.get(index, []) if " hang " not in line),
                f"{index} hang 1",
            ]
    count = max([index for index in shown if index >= 0], default=-1) + 1
    hangs = [line for line in shown.get(-1, []) if " hang " in line]
    shown[-1] = [f"-1 count {count}", *hangs]


def _lines(sample: DeviceSample) -> list[str]:
    if sample.error:
        return [f"{sample.index} lost 1"]
    plain = replace(sample, uuid=re.sub(r"\s+", "-", sample.uuid))
    found = []
    for spec in fields(plain):
        value = getattr(plain, spec.name)
        if spec.name not in _NOT_VALUES and value != "":
            text = "na" if value is None else str(int(value) if isinstance(value, bool) else value)
            found.append(f"{sample.index} {spec.name} {text}")
    return found
