"""``outlast metrics``: runs as Prometheus metrics, printed or kept in a file for node_exporter.

A process beside the run reads the event log, so that a scrape never waits for the agent and the agent never
for a scrape.
"""

from __future__ import annotations

import argparse
import importlib.resources
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from outlast.errors import ExitCode, UsageError
from outlast.observe.following import RunFollower
from outlast.observe.policy.metrics import exposition

RULES = "prometheus-rules.yaml"
_EVERY = 15.0  # seconds; Prometheus scrapes every 15 to 60 s


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast metrics ...`` and return its exit code.

    Raises:
        UsageError: an option is wrong or has no effect, no run can be read, or two runs have the same id.
    """
    options = _parser().parse_args(arguments)
    if options.rules:
        if options.run_dir or options.textfile or options.interval is not None:
            raise UsageError("--rules prints a file and takes neither a run nor other options")
        sys.stdout.write(importlib.resources.files("outlast.observe").joinpath(RULES).read_text("utf-8"))
        return ExitCode.OK
    if not options.run_dir:
        raise UsageError("name at least one run folder, or --rules")
    if options.interval is not None and not options.textfile:
        raise UsageError("--interval needs --textfile; nothing was written")
    followers = [RunFollower(path) for path in options.run_dir]
    left_out: dict[RunFollower, str] = {}
    text = _text(followers, left_out)
    if len(left_out) == len(followers):
        raise UsageError("no run can be read; nothing was written")
    if not options.textfile:
        sys.stdout.write(text)
        return ExitCode.OK
    try:
        _keep(followers, left_out, options.textfile, options.interval or _EVERY)
    except KeyboardInterrupt:
        options.textfile.unlink(missing_ok=True)
        return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast metrics",
        description="Print what runs do now as Prometheus metrics, or keep them in a file for node_exporter's"
        " textfile collector until Ctrl-C.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, nargs="*", metavar="RUN_DIR", help="run folders")
    add("--textfile", type=_textfile, metavar="FILE", help="file to replace again and again; ends in .prom")
    add("--interval", type=_seconds, metavar="S", help=f"seconds between two writes (default {_EVERY:.0f})")
    add("--rules", action="store_true", help="print recording and alert rules for these metrics")
    return parser


def _textfile(text: str) -> Path:
    if not text.endswith(".prom"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .prom: node_exporter would not read it")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return found


def _text(followers: Sequence[RunFollower], left_out: dict[RunFollower, str]) -> str:
    """Return the metrics of all runs that can be read, and say which cannot.

    Args:
        followers: of the runs.
        left_out: runs that could not be read the time before, and why; said again only when that changes.

    Raises:
        UsageError: two runs have the same id.
    """
    runs = []
    for one in followers:
        try:
            runs.append(one.poll())
        except UsageError as error:
            if left_out.get(one) != str(error):
                sys.stderr.write(f"outlast metrics: {error}; this run is left out\n")
            left_out[one] = str(error)
        else:
            left_out.pop(one, None)
    names = [one.run_id for one in runs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two of the run folders belong to run {name!r}; name each run once")
    return exposition(runs)


def _keep(
    followers: Sequence[RunFollower], left_out: dict[RunFollower, str], path: Path, interval: float
) -> NoReturn:
    """Replace the file again and again, each time atomically: a half-written one would be scraped.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # does not end in .prom
    while True:
        text = _text(followers, left_out)
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"--textfile {path}: {error.strerror}; the metrics were not written") from error
        time.sleep(interval)
