"""``outlast demo``: the example trained twice, without faults and with faults, and compared bit by bit."""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import outlast
from outlast.chaos import campaign, oracle
from outlast.chaos.campaign import Conduct, Plan
from outlast.core import goodput, scenario
from outlast.core.errors import ScriptNotFound, UsageError
from outlast.core.events import FaultKind, FaultSeen, Loaded, Quarantined, RunStarted
from outlast.core.scenario import DEMO_LAST_STEP, FAULTS, Injection, Target

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from outlast.chaos.faults import Made
    from outlast.core.events import Record
    from outlast.core.goodput import Incident

STEPS = 300
RANKS = 4
SAVE_INTERVAL = 20
_LEAST_STEPS = DEMO_LAST_STEP + 2 * SAVE_INTERVAL
_EXPECTED = {"rank_killed": FaultKind.CRASH, "rank_hung": FaultKind.HANG}


def show(options: argparse.Namespace) -> int:
    """Run the demo; return 0 when the two runs are equal, and every fault was found and outlasted.

    Raises:
        UsageError: too few steps for the scenario, or the folder exists.
        ScriptNotFound: the example is not where the package has it.
    """
    from rich.console import Console

    if options.steps < _LEAST_STEPS:
        raise UsageError(
            f"--steps {options.steps}: the scenario needs at least {_LEAST_STEPS}; nothing was started"
        )
    if options.dir is not None and options.dir.exists():
        raise UsageError(f"--dir {options.dir}: exists already; nothing was started")
    console = Console(highlight=False, soft_wrap=True)
    kept = options.dir is not None
    folder = options.dir.absolute() if kept else Path(tempfile.mkdtemp(prefix="outlast-demo-"))
    problems = _compare(options, folder, console)
    for problem in problems:
        console.print(f"[bold red]✗[/] {problem}")
    if problems or kept:
        console.print(f"everything is kept in {folder}; see also: outlast report {folder / 'faults' / 'run'}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def example() -> Path:
    """Return the path of the example, of an installed package or of a checkout.

    Raises:
        ScriptNotFound: it is in neither place.
    """
    package = Path(outlast.__file__).resolve().parent
    places = (package / "examples" / "train_gpt.py", package.parents[1] / "examples" / "train_gpt.py")
    for place in places:
        if place.is_file():
            return place
    raise ScriptNotFound(f"the example is neither {places[0]} nor {places[1]}; nothing was started")


def _compare(options: argparse.Namespace, folder: Path, console: Console) -> list[str]:
    injections = scenario.demo(options.nproc_per_node, SAVE_INTERVAL, random.Random(options.seed).random)
    names = ", ".join(one.fault if one.rank < 0 else f"{one.fault} (rank {one.rank})" for one in injections)
    console.print(
        f"A small GPT, {options.steps} steps on {options.nproc_per_node} ranks, first without faults, "
        f"then with these (seed {options.seed}): {names}."
    )
    conducts: list[Conduct] = []
    for name, wanted in (("fault-free", ()), ("faults", injections)):
        with console.status(f"{name} ..."):
            conduct = campaign.carry_out(_plan(options, folder / name, wanted))
        console.print(f"{name}: exit code {conduct.exit_code} after {conduct.seconds:.1f} s")
        if conduct.problems:
            return [f"{name}: {problem}" for problem in conduct.problems]
        conducts.append(conduct)
    reference, run = _outcome(folder / "fault-free", conducts[0]), _outcome(folder / "faults", conducts[1])
    _print_table(conducts[1], run, console)
    problems = [*unanswered(conducts[1]), *oracle.judge(reference, run, options.steps)]
    if not problems:
        samples = sum(len(line.ids) for trace in reference.traces.values() for line in trace)
        console.print(
            f"[bold green]✓[/] equal bit for bit: the losses of {options.steps} steps on {len(run.traces)} "
            f"ranks ({run.replayed()} steps were computed again), the {samples} samples, the final weights "
            f"(sha256 {run.weights[:16]}); no process and no file left behind"
        )
    return problems


def _plan(options: argparse.Namespace, folder: Path, injections: tuple[Injection, ...]) -> Plan:
    run_dir, traces = folder / "run", folder / "trace"
    launch = [sys.executable, "-m", "outlast", "run", "--nproc-per-node", str(options.nproc_per_node)]
    job = ["--steps", str(options.steps), "--seed", str(options.seed), "--save-interval", str(SAVE_INTERVAL)]
    files = ["--trace", str(traces), "--final", str(folder / "final.txt")]
    command = (*launch, "--run-dir", str(run_dir), str(example()), *job, *files)
    return Plan(command, run_dir, traces, folder / "output.txt", injections)


def _outcome(folder: Path, conduct: Conduct) -> oracle.Outcome:
    final = folder / "final.txt"
    weights = final.read_text().strip() if final.exists() else ""
    return oracle.Outcome(oracle.read_traces(folder / "trace"), weights, tuple(conduct.leftovers))


def _print_table(conduct: Conduct, run: oracle.Outcome, console: Console) -> None:
    """Print each incident as the ledger tells it, with the injections that led to it.

    How many steps were lost is counted in the traces: after an agent's death no log knows it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ledger = goodput.fold(conduct.records)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "rank", "found after", "running after", "steps lost", "what was done"):
        table.add_column(name, justify="right" if name.endswith(("rank", "after", "lost")) else "left")
    injected = list(conduct.made)
    for incident in ledger.incidents:
        names: list[str] = []
        since = until = math.inf
        while injected and (not names or FAULTS[names[-1]].target is Target.CHECKPOINT):
            names.append(injected[0].fault)
            since = injected.pop(0).clock
            until = injected[0].clock if injected else math.inf
        table.add_row(
            " + ".join(names) or incident.kind,
            str(incident.rank) if incident.rank >= 0 else "",
            _seconds(incident.detected_after),
            _seconds(incident.running_again_after),
            str(oracle.steps_lost(run.traces, since, until)),
            _answer(incident, conduct.records),
        )
    console.print(table, soft_wrap=False)
    console.print(
        f"{ledger.goodput or 0.0:.0%} of {ledger.wall:.1f} s became kept steps; the last worker outlived its "
        f"killed agent by {max(conduct.outlived, default=0.0):.2f} s"
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _answer(incident: Incident, records: Sequence[Record]) -> str:
    """Say what was done about an incident: the action, copies set aside, the copy that was loaded."""
    said = [f"{incident.action}: {incident.action_reason}" if incident.action_reason else incident.action]
    for record in records:
        if record.generation == incident.generation + 1:
            if isinstance(record, Quarantined):
                said.append(f"{record.checkpoint} quarantined")
            elif isinstance(record, Loaded):
                said.append(f"{record.checkpoint} loaded")
    return "; ".join(said)


def unanswered(conduct: Conduct) -> list[str]:
    """Return the injections that the event log does not answer as it should: a fault that nobody saw."""
    return [problem for made in conduct.made if (problem := _unanswered(made, conduct))]


def _unanswered(made: Made, conduct: Conduct) -> str:
    later = [record for record in conduct.records if record.clock >= made.clock]
    if made.fault in _EXPECTED:
        expected = _EXPECTED[made.fault]
        seen = next((record for record in later if isinstance(record, FaultSeen)), None)
        if seen is None:
            return f"{made.fault} of rank {made.rank}: no fault was seen"
        if (seen.fault, seen.rank) != (expected.value, made.rank):
            return (
                f"{made.fault} of rank {made.rank}: seen as {seen.fault} of rank {seen.rank} ({seen.reason})"
            )
    elif made.fault == "agent_killed":
        if not any(isinstance(record, RunStarted) for record in later):
            return "agent_killed: no second launch in the event log"
    elif not any(
        isinstance(record, Quarantined) and made.detail.startswith(record.checkpoint) for record in later
    ):
        return f"{made.fault}: {made.detail} was not quarantined"
    return ""
