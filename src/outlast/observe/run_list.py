"""``outlast report`` without a run: the runs that are found, newest first."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from outlast.errors import ExitCode, UsageError
from outlast.observe import report, runs, top
from outlast.observe.following import RunFollower
from outlast.observe.policy import goodput
from outlast.observe.run_folder import RunFolder
from outlast.observe.text import clean

_SHOWN = 50
_MOST_BYTES = 64 << 20  # of a run's logs, up to which its goodput is computed: that takes the whole log


@dataclass(frozen=True)
class Listed:
    """A run in the list.

    Args:
        folder: relative to the working folder where that is above it.
        state: in words.
        step: of the slowest rank; -1: not known.
        source: who tells the step, a ``StepSource``; ``counted``: from 0 after each restart.
        restarts: generations that a fault has begun.
        goodput: share of the wall time; None: not known, or not computed for a log of more than 64 MiB.
        changed: wall time of the latest record.
    """

    folder: str
    run_id: str
    state: str
    step: int
    source: str
    restarts: int
    goodput: float | None
    changed: float


def main(as_json: bool) -> int:
    """List the runs in the working folder and in its ``outlast-runs``; return the exit code.

    Raises:
        UsageError: there are none.
    """
    found = runs.find(Path.cwd())
    if not found:
        raise UsageError(
            f"no run folder is in {Path.cwd()} or in {runs.DEFAULT}/ there; name the folder that outlast run"
            " was given as --run-dir"
        )
    wall = time.time()
    listed = [look(path, wall) for path in found[:_SHOWN]]
    if as_json:
        sys.stdout.write(json.dumps([asdict(one) for one in listed], indent=2) + "\n")
        return ExitCode.OK
    from rich.console import Console
    from rich.text import Text

    console = Console()
    table = report.make_table("run folder", "run id", "step", "restarts", "goodput", "quiet for", "state")
    for one in listed:
        share = "-" if one.goodput is None else f"{one.goodput:.1%}"
        counted = " counted" if one.source == goodput.COUNTED else ""
        step = "-" if one.step < 0 else f"{one.step}{counted}"
        since = top.ago(wall - one.changed) if one.changed else "-"
        cells = (one.folder, one.run_id, step, str(one.restarts), share, since, one.state)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"and {len(found) - _SHOWN} older ones", markup=False, highlight=False)
    return ExitCode.OK


def look(path: Path, wall: float) -> Listed:
    """Return what is told of a run; one whose log cannot be read is listed with the reason as its state."""
    folder = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    known = RunFolder(path).peek(path / "run.json") or {}
    run_id = str(known.get("run_id", ""))
    try:
        now = RunFollower(path).poll()
        share = goodput.fold(report.read_log(path).records).goodput if _bytes(path) <= _MOST_BYTES else None
    except UsageError:
        return Listed(folder, run_id, "no readable log", -1, "", 0, None, 0.0)
    state = top.doing(now, wall)
    return Listed(folder, now.run_id or run_id, state, now.step, now.source, now.restarts, share, now.heard)


def _bytes(path: Path) -> int:
    folder = RunFolder(path)
    logs = [*folder.node_events().values(), folder.events]
    return sum(one.stat().st_size for one in logs if one.exists())
