"""``outlast report``: where the wall time of a run went, and each incident."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast.codec import plain
from outlast.errors import ExitCode, UsageError
from outlast.observe import recorder, runs
from outlast.observe.policy import goodput, imports, node_logs
from outlast.observe.policy.goodput import AGENT_DEATH, Category, Incident, Ledger
from outlast.observe.policy.imports import ImportCosts
from outlast.observe.run_folder import RunFolder
from outlast.observe.text import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from outlast.observe.recorder import Log

_BAR = 30  # characters of a category that took all of the time
_NUMBERS = (
    "step",
    "restarts",
    "goodput",
    "#",
    "seconds",
    "share",
    "rank",
    "at step",
    "detected after",
    "running again after",
    "steps lost",
)
_WHOLE = ("what", "action", "run folder")  # columns that are never broken; headings are if need be
_OWN = "the script keeps its own checkpoints and does not announce them (outlast.progress)"
_COUNTED = (
    "counted: optimizer steps of one process, from 0 after each restart. The step that the script "
    "resumed from is not known; report it with outlast.progress(step, saved=True), see "
    "docs/how-to/adapt-a-script.md"
)
_UNRESTORED = "session.restore was not called, so nothing was saved"
_BEGAN_ANEW = (
    "counted: steps of a session without session.restore, from 0 after each restart; call "
    "session.restore(model=..., optimizer=...) before the loop, see docs/how-to/adapt-a-script.md"
)
_NO_STEPS = (
    "No step is in the log, so nothing counts as training: a script reports its steps with "
    "session.restore(...) and session.steps(...), see docs/how-to/adapt-a-script.md"
)


def main(arguments: Sequence[str]) -> int:
    """Run ``outlast report ...`` and return its exit code.

    Raises:
        UsageError: see :func:`report`; or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="outlast report",
        description="Say where the wall time of a run went, and tell each incident. Without a run: list the"
        " runs in this folder and in outlast-runs.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", nargs="?", help="the run folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one page for a browser instead")
    form.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto instead")
    options = parser.parse_args(arguments)
    if options.run_dir is None and (options.html or options.trace):
        raise UsageError("--html and --trace write a file about one run: name it; nothing was written")
    if options.html is not None:
        from outlast.observe.dashboard import saved

        saved.write(options.run_dir, options.html)
        return ExitCode.OK
    if options.trace is not None:
        from outlast.observe import trace

        log = read_log(options.run_dir)
        sys.stdout.write(f"{trace.write(options.trace, log.records, goodput.fold(log.records))}\n")
        return ExitCode.OK
    if options.run_dir is None:
        from outlast.observe import run_list

        return run_list.main(options.json)
    return report(options.run_dir, options.json)


def report(run_dir: Path, as_json: bool) -> int:
    """Print the report of a run folder, also of a running job; return the exit code.

    Raises:
        UsageError: there is no event log, or nothing can be read in it.
    """
    log = read_log(run_dir)
    ledger = goodput.fold(log.records)
    if as_json:
        costs = imports.fold(log.records)
        found = {
            **to_json(ledger),
            "imports": None if costs is None else asdict(costs),
            "lines_skipped": log.skipped,
            "lines_unknown": len(log.unknown),
        }
        sys.stdout.write(json.dumps(found, indent=2, allow_nan=False) + "\n")
        return ExitCode.OK
    from rich.console import Console

    console = Console()
    render(ledger, console)
    for line in (*_imports(imports.fold(log.records)), *unread(log)):
        console.print(line, markup=False, highlight=False)
    return ExitCode.OK


def read_log(run_dir: Path) -> Log:
    """Return the event log of a run, with the records of all nodes.

    Raises:
        UsageError: there is no event log, or nothing can be read in it.
    """
    path = RunFolder(run_dir).events
    nodes = RunFolder(run_dir).node_events()
    try:
        log = _joined(path, nodes) if nodes else recorder.read(path)
    except OSError as error:
        raise UsageError(
            f"{error.filename or path}: {error.strerror}; there is nothing to report; name the folder that "
            f"outlast run was given as --run-dir{runs.nearby(run_dir)}"
        ) from error
    if not log.records:
        raise UsageError(
            f"{path}: no record could be read, {log.skipped} lines could not be parsed and"
            f" {len(log.unknown)} are of a newer outlast; there is nothing to report"
        )
    return log


def _joined(path: Path, nodes: Mapping[str, Path]) -> Log:
    """Return the log of a job of several nodes; it may have run on one before."""
    logs = {name: recorder.read(one) for name, one in nodes.items()}
    if path.exists():
        logs[""] = recorder.read(path)
    unknown = tuple(one for log in logs.values() for one in log.unknown)
    records = node_logs.merged({name: log.records for name, log in logs.items() if log.records})
    return recorder.Log(records, unknown, sum(log.skipped for log in logs.values()))


def to_json(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger for JSON, with the derived numbers; floats that are not finite are strings."""
    seconds: dict[str, float | None] = {name.value: spent for name, spent in ledger.seconds.items()}
    if ledger.lost_unknown:
        seconds[Category.LOST_WORK.value] = None
    end = None if ledger.end is None else {"exit_code": ledger.end.exit_code, "reason": ledger.end.reason}
    found: dict[str, Any] = plain(
        {
            "run_id": ledger.run_id,
            "began": ledger.began,
            "launches": ledger.launches,
            "generations": ledger.generations,
            "wall": ledger.wall,
            "goodput": ledger.goodput,
            "steps_unknown": ledger.steps_unknown,
            "seconds": seconds,
            "incidents": [asdict(incident) for incident in ledger.incidents],
            "checkpoints": {
                "committed": len(ledger.saves),
                "lost": len(ledger.lost_saves),
                "median_seconds": _median_seconds(ledger),
                "last_step": ledger.saves[-1].step if ledger.saves else None,
                "own": len({one.step for one in ledger.own}),
                "own_last_step": ledger.own[-1].step if ledger.own else None,
                "quarantined": [
                    {"checkpoint": one.checkpoint, "reason": one.reason} for one in ledger.quarantined
                ],
                "trust": [
                    {"checkpoint": one.checkpoint, "trust": one.trust, "reason": one.reason}
                    for one in ledger.trust
                ],
            },
            "timeouts": ledger.timeouts,
            "end": end,
        }
    )
    return found


def _median_seconds(ledger: Ledger) -> float | None:
    return statistics.median(saved.seconds for saved in ledger.saves) if ledger.saves else None


def render(ledger: Ledger, console: Console) -> None:
    """Print a ledger as tables; bars are of ``#`` where the terminal lacks block characters."""
    heading = f"run {ledger.run_id or 'without a name'}: {_count(ledger.launches, 'launch', 'launches')}"
    heading += f", {_count(ledger.generations, 'generation')}, {duration(ledger.wall)}"
    why = _UNRESTORED if ledger.unrestored else _OWN
    goodput = f"unknown: {why}" if ledger.goodput is None else f"{ledger.goodput:.1%}"
    _say(console, f"{heading}, goodput {goodput}")
    console.print(_categories(ledger, "#" if console.options.ascii_only else "█"))
    if not ledger.seconds[Category.TRAINING] and not ledger.seconds[Category.LOST_WORK]:
        _say(console, _NO_STEPS)
    if ledger.incidents:
        console.print(_incidents(ledger.incidents, ledger.steps_unknown))
        if ledger.steps_unknown and any(one.step >= 0 for one in ledger.incidents):
            _say(console, _BEGAN_ANEW if ledger.unrestored else _COUNTED)
        for number, incident in enumerate(ledger.incidents, 1):
            _say(console, "\n".join(_story(number, incident)))
    else:
        _say(console, "no incidents")
    _say(console, "\n".join(_checkpoints(ledger)))
    limits = ", ".join(f"{name} {duration(limit)}" for name, limit in ledger.timeouts.items())
    _say(console, f"timeouts learned: {limits or 'none yet; configured timeouts and defaults apply'}")
    if ledger.end is None:
        _say(console, "no end is recorded: the run is still running, or its launcher was killed")
    else:
        _say(console, f"ended with exit code {ledger.end.exit_code}: {ledger.end.reason}")


def _say(console: Console, text: str) -> None:
    console.print(clean(text), markup=False, highlight=False, soft_wrap=True)


def make_table(*columns: str) -> Table:
    """Return an empty table in the form of all reports."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        side: Literal["left", "right"] = "right" if column in _NUMBERS else "left"
        table.add_column(column, justify=side, no_wrap=column in _WHOLE, overflow="fold")
    return table


def _categories(ledger: Ledger, block: str) -> Table:
    table = make_table("category", "seconds", "share", "")
    for category, seconds in ledger.seconds.items():
        share = seconds / ledger.wall if ledger.wall else 0.0
        bar = block * round(share * _BAR)
        name = category.value.replace("_", " ")
        if ledger.lost_unknown and category is Category.LOST_WORK:
            table.add_row(name, "unknown", "", "")
        elif ledger.lost_unknown and category is Category.TRAINING:
            table.add_row(f"{name}, lost work included", f"{seconds:.3f}", f"{share:.1%}", bar)
        else:
            table.add_row(name, f"{seconds:.3f}", f"{share:.1%}", bar)
    return table


def _incidents(incidents: Sequence[Incident], steps_unknown: bool) -> Table:
    from rich.text import Text

    table = make_table(
        "#", "what", "rank", "at step", "detected after", "running again after", "steps lost", "action"
    )
    unknown = "unknown" if steps_unknown else "-"
    for number, incident in enumerate(incidents, 1):
        cells = (
            str(number),
            incident.kind,
            "-" if incident.rank < 0 else str(incident.rank),
            "-" if incident.step < 0 else f"{incident.step}{' counted' * steps_unknown}",
            duration(incident.detected_after),
            duration(incident.running_again_after),
            unknown if incident.steps_lost is None else str(incident.steps_lost),
            incident.action,
        )
        table.add_row(*(Text(clean(cell)) for cell in cells))
    return table


def _story(number: int, incident: Incident) -> list[str]:
    """Return the details of an incident."""
    place = f"{duration(incident.at)} after the start, generation {incident.generation}"
    lines = [f"{number}. {place}: {_indented(incident.reason)}"]
    lines.append(f"   -> {incident.action}: {_indented(incident.action_reason)}")
    if incident.phases:
        parts = (f"{name.replace('_', ' ')} {duration(spent)}" for name, spent in incident.phases.items())
        since = "the new launcher's spawn" if incident.kind == AGENT_DEATH else "the detection"
        lines.append(f"   since {since}: {', '.join(parts)}")
    lines += [f"   {name}: {_indented(text)}" for name, text in incident.evidence.items()]
    return lines


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")


def _checkpoints(ledger: Ledger) -> list[str]:
    line = f"checkpoints: {len(ledger.saves)} committed"
    if ledger.saves:
        blocking = duration(_median_seconds(ledger))
        line += f", the last at step {ledger.saves[-1].step}; each paused training for {blocking} (median)"
    if ledger.own:
        number = len({one.step for one in ledger.own})
        line += f"; the script announced {number} of its own, the last at step {ledger.own[-1].step}"
    if ledger.lost_saves:
        line += f"; {len(ledger.lost_saves)} could not be written, the last: {ledger.lost_saves[-1].reason}"
    proven = [one.checkpoint for one in ledger.trust if one.trust == "proven"]
    if proven:
        line += f"; {len(set(proven))} proven by later training, the last {proven[-1]}"
    aside = {(one.checkpoint, one.reason) for one in ledger.quarantined}
    doubts = (
        one
        for one in ledger.trust
        if one.trust != "proven" and (one.checkpoint.rpartition("/")[2], one.reason) not in aside
    )
    return [
        line,
        *(f"   quarantined {one.checkpoint}: {_indented(one.reason)}" for one in ledger.quarantined),
        *(f"   {one.trust} {one.checkpoint}: {_indented(one.reason)}" for one in doubts),
    ]


def _imports(costs: ImportCosts | None) -> list[str]:
    """Return what the imports of the ranks cost."""
    if costs is None:
        return []
    line = f"imports: {duration(costs.seconds)} of a processor in a rank's first start"
    line += f" ({_count(costs.modules, 'module')})"
    line += f"; imported ahead for {_count(costs.starts, 'start')}, which saved {duration(costs.saved)}"
    left_out = (f"   left to the ranks: {clean(name)}: {clean(why)}" for name, why in costs.left_out.items())
    return [line, *left_out]


def unread(log: Log) -> list[str]:
    """Return a line for each kind of lines of the log that were ignored."""
    lines = []
    if log.skipped:
        lines.append(f"ignored: {_count(log.skipped, 'line')} of the log, torn or damaged")
    if log.unknown:
        count = _count(len(log.unknown), "line")
        lines.append(f"ignored: {count} of the log, written by a newer outlast")
    return lines


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float | None) -> str:
    """Return seconds for people: ``81 ms``, ``4.20 s``, ``3 min 07 s``, ``2 h 05 min``."""
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return "off"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
