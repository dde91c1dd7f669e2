"""``outlast stragglers``: which ranks slowed a run, and how long each rank was busy in a step."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.codec import plain
from outlast.errors import ExitCode
from outlast.observe import report
from outlast.observe.policy import heat
from outlast.observe.text import clean
from outlast.recovery.policy.events import Record, StepTimes, StragglerSeen

if TYPE_CHECKING:
    from rich.console import Console

_MOST_RANKS = 32  # rows of the heat map: those that were the furthest from the median
_SHADES = ((1.5, "█", "#"), (1.3, "▓", "+"), (1.1, "▒", ":"), (1.04, "░", "."), (0.0, "·", "-"))
_LEGEND = "busy for at least 1.5, 1.3, 1.1, 1.04 times the median of all ranks, or less:"
_NOTHING = (
    "no times are in the log: a run writes them with [stragglers] enabled, once its ranks have completed"
    " two windows of steps; a script reports steps with session.steps() or outlast.progress, or has a torch"
    " optimizer"
)


@dataclass
class Slow:
    """A stretch in which a rank slowed the job.

    Args:
        first: the verdict that began it.
        last: the latest one.
        until: step of the verdict that ended it; -1: none did.
    """

    first: StragglerSeen
    last: StragglerSeen
    until: int = -1


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast stragglers ...`` and return its exit code.

    Raises:
        UsageError: there is no event log, or nothing can be read in it.
    """
    parser = argparse.ArgumentParser(
        prog="outlast stragglers", description="Say which ranks slowed a run, with a heat map of all ranks."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    log = report.read_log(options.run_dir)
    found, times = stretches(log.records), [one for one in log.records if isinstance(one, StepTimes)]
    if options.json:
        told = {
            "stragglers": [
                {**asdict(one.last), "since": one.first.step, "until": one.until} for one in found
            ],
            "times": [asdict(one) for one in times],
        }
        sys.stdout.write(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
        return ExitCode.OK
    from rich.console import Console

    console = Console()
    newest = max((one.generation for one in log.records), default=0)
    for line in (*_told(found, newest), *_map(times, console), *report.unread(log)):
        console.print(clean(line), markup=False, highlight=False, soft_wrap=True)
    return ExitCode.OK


def stretches(records: Iterable[Record]) -> list[Slow]:
    """Return the stretches in which ranks slowed the job or could not be judged, in their order."""
    found: list[Slow] = []
    running: dict[tuple[int, int, str], Slow] = {}
    for one in records:
        if not isinstance(one, StragglerSeen):
            continue
        key = (one.generation, one.rank, one.section)
        known = running.get(key)
        if one.state == "off":
            if known is not None:
                known.until = one.step
                del running[key]
        elif known is None or known.first.state != one.state:
            running[key] = Slow(one, one)
            found.append(running[key])
        else:
            known.last = one
    return found


def _told(found: Sequence[Slow], newest: int) -> list[str]:
    slow = [one for one in found if one.first.state == "on"]
    lines = [] if slow else ["no rank slowed the job"]
    for one in slow:
        ended = one.last.generation < newest
        end = f"until generation {one.last.generation} ended" if ended else "and still does"
        end = f"until step {one.until}" if one.until >= 0 else end
        where = f"rank {one.last.rank} on {one.last.node or 'an unknown node'}"
        what = one.last.activity + (f", section {one.last.section}" if one.last.section else "")
        lines.append(f"{where} slowed the job from step {one.first.step} on, {end}: {what}")
        cost = (
            ""
            if math.isnan(one.last.job_slowdown)
            else f"; the job took {one.last.job_slowdown:.2f} times as long"
        )
        lines.append(f"   {one.last.reason}{cost}")
    unknown = sorted({one.first.rank for one in found if one.first.state == "unknown"})
    if unknown:
        shown = ", ".join(map(str, unknown[:_MOST_RANKS]))
        lines.append(f"not judged, because times were missing or no numbers: ranks {shown}")
    return lines


def _map(times: Sequence[StepTimes], console: Console) -> list[str]:
    """Return the heat map: a row for each rank, a column for each record, or for several."""
    if not times:
        return [_NOTHING]
    wide = len(str(max((int(rank) for one in times for rank in one.ratios if rank.isdecimal()), default=0)))
    shown = heat.of_steps(times, _MOST_RANKS, max(10, console.width - wide - 20))
    label = max((len(one) for one in shown.rows), default=0)
    ascii_only = console.options.ascii_only
    lines = [
        f"busy seconds of each rank in a step against the median of all ranks, steps {times[0].step} to"
        f" {times[-1].step}; the median was {report.duration(times[-1].seconds)} at the end"
    ]
    for name, cells, worst in zip(shown.rows, shown.cells, shown.worst, strict=True):
        row = "".join(_shade(cell, ascii_only) for cell in cells)
        rank = name.removeprefix("rank ").rjust(label - len("rank "))
        lines.append(f"  rank {rank} {row} {worst:.2f} at most")
    if shown.left_out:
        lines.append(f"  {shown.left_out} ranks that were nearer to the median are not shown")
    shades = " ".join(_shade(least, ascii_only) for least, _, _ in _SHADES)
    return [*lines, f"  {_LEGEND} {shades}"]


def _shade(ratio: float, ascii_only: bool) -> str:
    if math.isnan(ratio):
        return " "
    return next(plain if ascii_only else block for least, block, plain in _SHADES if ratio >= least)
