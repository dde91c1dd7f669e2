"""``outlast metrics``: runs as Prometheus metrics, printed, in a file for node_exporter, or over HTTP.

A process beside the run reads the event log, so that a scrape never waits for the agent and the agent never
for a scrape.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from outlast.errors import ExitCode, UsageError
from outlast.observe.following import RunFollower
from outlast.observe.metrics import endpoint
from outlast.observe.metrics.exporter import Exporter
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
        others = options.run_dir or options.textfile or options.listen or options.interval is not None
        if others or (options.rules and options.grafana):
            raise UsageError(
                "--rules and --grafana print one file each and take neither a run nor other options"
            )
        sys.stdout.write(_shipped(RULES if options.rules else DASHBOARD))
        return ExitCode.OK
    if not options.run_dir:
        raise UsageError("name at least one run folder, or --rules or --grafana")
    if options.interval is not None and not options.textfile:
        raise UsageError("--interval needs --textfile; nothing was written")
    if options.listen and options.textfile:
        raise UsageError("--listen and --textfile exclude each other; start one command for each")
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
        " node_exporter's textfile collector, or serve them to Prometheus.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, nargs="*", metavar="RUN_DIR", help="run folders")
    add("--textfile", type=_textfile, metavar="FILE", help="file to replace again and again; ends in .prom")
    add(
        "--interval",
        type=seconds_from(1),
        metavar="S",
        help=f"seconds between two writes (default {_EVERY:.0f})",
    )
    add(
        "--listen",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve them at http://HOST:PORT/metrics (default host 127.0.0.1; port 0: any)",
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # does not end in .prom
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"--textfile {path}: {error.strerror}; the metrics were not written") from error
