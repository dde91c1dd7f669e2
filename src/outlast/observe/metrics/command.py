"""``outlast metrics``: runs as Prometheus metrics, printed, in a file, over HTTP, or sent to a tracker.

A process beside the run reads the event log, so that a scrape never waits for the agent and the agent never
for a scrape.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outlast import files
from outlast.errors import ExitCode, UsageError
from outlast.observe.following import RunFollower
from outlast.observe.metrics import endpoint, trackers
from outlast.observe.metrics.exporter import Exporter
from outlast.observe.policy import metrics
from outlast.observe.refreshing import seconds_from, until_ctrl_c

RULES = "prometheus-rules.yaml"
DASHBOARD = "grafana-dashboard.json"
_EVERY = 15.0  # seconds; Prometheus scrapes every 15 to 60 s


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast metrics ...`` and return its exit code.

    Raises:
        UsageError: an option is wrong or has no effect, no run can be read, or two runs have the same id.
    """
    options = _parser().parse_args(arguments)
    if options.rules or options.grafana:
        others = options.run_dir or options.textfile or options.listen or options.to
        others = others or options.interval is not None
        if others or (options.rules and options.grafana):
            raise UsageError(
                "--rules and --grafana print one file each and take neither a run nor other options"
            )
        sys.stdout.write(_shipped(RULES if options.rules else DASHBOARD))
        return ExitCode.OK
    if not options.run_dir:
        raise UsageError("name at least one run folder, or --rules or --grafana")
    if options.interval is not None and not (options.textfile or options.to):
        raise UsageError("--interval needs --textfile or --to; nothing was written")
    if sum(map(bool, (options.listen, options.textfile, options.to))) > 1:
        raise UsageError("--listen, --textfile and --to exclude each other; start one command for each")
    if options.to:
        if len(options.run_dir) > 1:
            raise UsageError(
                f"--to takes one run, {len(options.run_dir)} were named; start one command for each"
            )
        return _send(RunFollower(options.run_dir[0]), options.to, options.interval or _EVERY)
    exporter = Exporter([RunFollower(path) for path in options.run_dir])
    text = exporter.begin()
    if options.listen:
        return _serve(exporter, options.listen)
    if not options.textfile:
        sys.stdout.write(text)
        return ExitCode.OK
    until_ctrl_c(lambda: _replace(options.textfile, exporter.text()), options.interval or _EVERY)
    options.textfile.unlink(missing_ok=True)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast metrics",
        description="Print what runs do now as Prometheus metrics. Until Ctrl-C, keep them in a file for"
        " node_exporter's textfile collector, serve them to Prometheus, or send them to a tracker.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, nargs="*", metavar="RUN_DIR", help="run folders")
    add("--textfile", type=_textfile, metavar="FILE", help="file to replace again and again; ends in .prom")
    add(
        "--interval",
        type=seconds_from(1),
        metavar="S",
        help=f"seconds between two writes, or two looks for --to (default {_EVERY:.0f})",
    )
    add(
        "--listen",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve them at http://HOST:PORT/metrics (default host 127.0.0.1; port 0: any)",
    )
    add(
        "--to",
        type=_tracker,
        metavar="KIND:PLACE",
        help="send them until the run ends: tensorboard:FOLDER, wandb:FOLDER, mlflow:URI or otlp:URL",
    )
    add("--rules", action="store_true", help="print recording and alert rules for these metrics")
    add("--grafana", action="store_true", help="print a dashboard of these metrics for Grafana")
    return parser


def _shipped(name: str) -> str:
    return importlib.resources.files("outlast.observe.metrics").joinpath(name).read_text("utf-8")


def _textfile(text: str) -> Path:
    if not text.endswith(".prom"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .prom: node_exporter would not read it")
    return Path(text)


def _address(text: str) -> tuple[str, int]:
    try:
        return endpoint.address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _tracker(text: str) -> tuple[str, str]:
    kind, _, place = text.partition(":")
    if kind not in trackers.KINDS or not place:
        kinds = ", ".join(f"{one}:PLACE" for one in trackers.KINDS)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {kinds}")
    return kind, place


def _send(follower: RunFollower, where: tuple[str, str], interval: float) -> int:
    """Send the values of a run again and again until it has ended, or until Ctrl-C.

    Raises:
        UsageError: the run has no event log, or the tracker cannot take them.
    """
    now = follower.poll()
    if not now.run_id:
        raise UsageError(f"{follower.run_dir}: no start is in the event log yet; nothing was sent")
    tracker, sent = trackers.opened(*where, now.run_id), -1.0
    try:
        while True:
            if now.heard != sent:
                tracker.log(metrics.measured(now), now)
                sent = now.heard
            if now.end is not None:
                return ExitCode.OK
            time.sleep(interval)
            now = follower.poll()
    except KeyboardInterrupt:
        return ExitCode.OK
    finally:
        tracker.close()


def _serve(exporter: Exporter, where: tuple[str, int]) -> int:
    listener = endpoint.listen(where)
    sys.stderr.write(f"outlast metrics: serving {endpoint.url(listener)}\n")
    with contextlib.suppress(KeyboardInterrupt):
        endpoint.Endpoint(listener, exporter.text).serve()
    return ExitCode.OK


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: a half-written one would be scraped.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        files.write_whole(path, text.encode(errors="replace"))  # its other name does not end in .prom
    except OSError as error:
        raise UsageError(f"--textfile {path}: {error.strerror}; the metrics were not written") from error
