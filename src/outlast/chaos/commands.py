"""``outlast chaos`` and ``outlast demo``: their command lines."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.core import scenario
from outlast.core.errors import UsageError
from outlast.core.scenario import FAULTS, RANDOM, RANDOM_CHOICES, Place, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

_INJECT = """\
Make a fault in a live run from outside. Which process is whose is read from the run's event log, and
checked before a signal is sent. Faults that are marked "inside" happen within a worker only:

  outlast run --nproc-per-node 4 -m outlast.chaos.inprocess -- --fault LOCK_GIL --rank 1 train.py"""


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast chaos ...`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="outlast chaos", description="Make a fault happen, on purpose.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    inject = commands.add_parser(
        "inject",
        help="in a live run, from outside",
        description=_INJECT,
        epilog=_table(),
        formatter_class=raw,
    )
    inject.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run folder")
    inject.add_argument(
        "--fault", default=RANDOM, choices=[RANDOM, *FAULTS], metavar="FAULT", help="see below"
    )
    inject.add_argument("--rank", type=int, help="whose worker, counted on the node; default: drawn")
    inject.add_argument("--node", default="", help="of a job of several nodes; default: the one on this host")
    inject.add_argument("--base-delay", type=float, default=0.0, help="seconds; U(0, 0.2) of it are added")
    inject.add_argument("--seed", type=int, default=0)
    within = commands.add_parser("run", help="run a script in this process, with a fault inside it")
    given = list(arguments)
    if given[:1] == ["run"]:
        return _run(within, given[1:])
    return _inject(parser.parse_args(given))


def demo(arguments: Sequence[str]) -> int:
    """Carry out ``outlast demo`` and return its exit code."""
    from outlast.chaos import demo as show

    parser = argparse.ArgumentParser(
        prog="outlast demo",
        description="Train a small GPT twice, without faults and with a crash, a hang, a flipped bit and a "
        "lost agent, and compare the two runs bit by bit.",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws ranks, moments and the bit (default 0)")
    parser.add_argument("--steps", type=int, default=show.STEPS, help=f"default {show.STEPS}")
    parser.add_argument("--nproc-per-node", type=int, default=show.RANKS, help=f"default {show.RANKS}")
    parser.add_argument("--dir", type=Path, help="keep everything in this new folder")
    return show.show(parser.parse_args(arguments))


def _table() -> str:
    lines = [f"  {RANDOM:<16} one of {', '.join(RANDOM_CHOICES)}"]
    for name, spec in FAULTS.items():
        place = "" if spec.place is Place.OUTSIDE else f" ({spec.place.value})"
        lines.append(f"  {name:<16} {spec.effect}{place}")
    return "faults:\n" + "\n".join(lines)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    from outlast.chaos import inprocess

    inprocess.add_arguments(parser)
    options = parser.parse_args(arguments)
    inprocess.prepare(options)
    inprocess.run(options)
    return 0


def _inject(options: argparse.Namespace) -> int:
    """Wait as long as was drawn, make the fault and print what was done as a line of JSON.

    Raises:
        UsageError: the fault cannot be made from outside, or its target does not exist.
    """
    from outlast.chaos import faults, targets

    dice = random.Random(options.seed)
    fault = scenario.concrete(options.fault, dice.random)
    drawn = dice.random()
    time.sleep(scenario.delay(options.base_delay, dice.random))
    run = targets.find(options.run_dir, options.node)
    if run.ended:
        raise UsageError(f"{options.run_dir}: this run has ended; nothing was injected")
    rank = int(drawn * run.ranks) if options.rank is None else options.rank
    made = faults.inject(run, fault, rank if FAULTS[fault].target is Target.WORKER else -1, options.seed)
    sys.stdout.write(json.dumps(vars(made)) + "\n")
    return 0
