"""``outlast health``: show the devices and the host of this node, once or live."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outlast import files, settings
from outlast.errors import ExitCode, UsageError
from outlast.health.agent.telemetry.collector import CollectorSettings
from outlast.health.agent.telemetry.display import Shown
from outlast.health.agent.telemetry.process import CollectorProcess
from outlast.health.agent.telemetry.watching import chosen
from outlast.health.policy.options import REPLAY, HealthOptions, source_problem

_STARTING = 6  # times the timeout of a call, for the driver's first one
_SETTLED = 0.3  # seconds without a sample, after which a reading is taken for complete
_CLEAR = "\x1b[H\x1b[2J"
_EVERYTHING = -2  # all XIDs that the kernel log still has


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast health ...`` and return its exit code.

    Raises:
        UsageError: an option is wrong.
        NodeUnfit: NVML is asked for and not installed.
    """
    if arguments[:1] in (["fit"], ["ledger"]):
        from outlast.health.agent import ledger_command

        part = ledger_command.fit_main if arguments[0] == "fit" else ledger_command.ledger_main
        return part(arguments[1:])
    given = _parser().parse_args(arguments)
    if problem := source_problem(given.telemetry) or (
        "" if given.telemetry != "off" else "off shows nothing"
    ):
        raise UsageError(f"--telemetry {problem}; nothing was read")
    options = HealthOptions(kernel_log=os.path.abspath(given.kernel_log), call_timeout=given.call_timeout)
    library_path = settings.inherited().get("LD_LIBRARY_PATH", "")
    source = chosen(given.telemetry, library_path) or "nvml"  # which then says that there is none
    collector = CollectorProcess(
        CollectorSettings(
            *(os.uname().nodename, source, given.interval, options.call_timeout, options.kernel_log),
            folder=str(Path.cwd()),
            position=_EVERYTHING,
        )
    )
    try:
        shown = Shown(of_file=source.startswith(REPLAY))
        if given.watch:
            return _watch(collector, shown, given.interval)
        return _once(collector, shown, options.call_timeout)
    finally:
        collector.close()


def _parser() -> argparse.ArgumentParser:
    standard = HealthOptions()
    parser = argparse.ArgumentParser(
        prog="outlast health",
        description="Show what NVIDIA's driver says of this node's GPUs, XIDs in the kernel log, and the"
        " host. A driver that does not answer is reported and never waited for. outlast health fit --help"
        " and outlast health ledger --help: the hazard and the node ledger.",
    )
    add = parser.add_argument
    add("--watch", action="store_true", help="show it again at each reading, until Ctrl-C")
    add("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between readings (default 2)")
    add(
        "--telemetry",
        default="auto",
        metavar="SOURCE",
        help="auto (NVML where it is installed), nvml, replay:FILE or simulate:SCENARIO",
    )
    add("--kernel-log", default=standard.kernel_log, metavar="FILE", help=f"default {standard.kernel_log}")
    add(
        "--call-timeout",
        type=_seconds,
        default=standard.call_timeout,
        metavar="S",
        help=f"seconds after which a call of the driver counts as silent (default {standard.call_timeout:g})",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to a day")
    return found


def _once(collector: CollectorProcess, shown: Shown, timeout: float) -> int:
    deadline = time.monotonic() + (_STARTING + 2) * timeout
    settled = math.inf
    while (now := time.monotonic()) < min(deadline, settled):
        files.readable((collector.fileno(),), max(0.0, min(_SETTLED, deadline - now)))
        found = collector.read(time.monotonic())
        shown.take(found)
        if shown.complete and (found or settled == math.inf):
            settled = time.monotonic() + _SETTLED
    _print(shown)
    return ExitCode.OK


def _watch(collector: CollectorProcess, shown: Shown, interval: float) -> int:
    clear = sys.stdout.isatty()
    printed = 0.0
    while True:
        now = time.monotonic()
        files.readable((collector.fileno(),), max(0.0, min(_SETTLED, collector.deadline() - now)))
        shown.take(collector.read(time.monotonic()))
        if shown.complete and time.monotonic() - printed >= interval:
            printed = time.monotonic()
            sys.stdout.write(_CLEAR if clear else "")
            _print(shown)


def _print(shown: Shown) -> None:
    sys.stdout.write("\n".join(shown.lines(os.uname().nodename, time.time())) + "\n")
    sys.stdout.flush()
