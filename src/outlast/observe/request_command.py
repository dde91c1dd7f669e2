"""``outlast request``: ask a running job to save now, to end, or to have a spare replace a node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outlast.errors import ExitCode, UsageError
from outlast.observe import requests, runs
from outlast.observe.requests import What


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast request ...`` and return its exit code.

    Raises:
        UsageError: there is no such run, none of its launchers runs, or none took the request in time.
    """
    options = _parser().parse_args(arguments)
    if runs.newest_change(options.run_dir) is None:
        raise UsageError(f"{options.run_dir}: no run is there{runs.nearby(options.run_dir)}")
    node = requests.ask(options.run_dir, What(options.what), options.node)
    who = f" by {node}" if node else ""
    sys.stdout.write(f"taken{who}: {options.what}; outlast top {options.run_dir} shows what follows\n")
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast request",
        description="Ask a running job for something, as the account that runs it. Its launcher takes the"
        " request within a second or two and says in its log what follows.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="run folder")
    add(
        "what",
        choices=[one.value for one in What],
        help="save: all ranks save after one of the next steps; drain: a spare takes the place of a node;"
        " stop: all ranks save, and the job ends as after SIGTERM",
    )
    add("--node", default="", metavar="NAME", help="the node to drain, or whose launcher is asked")
    return parser
