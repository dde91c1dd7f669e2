"""``outlast demo``: the example trained twice, without faults and with faults, and compared bit by bit."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import outlast
from outlast.chaos import campaign, oracle
from outlast.chaos.campaign import Conduct, Plan
from outlast.core import scenario
from outlast.core.errors import ScriptNotFound, UsageError
from outlast.core.events import FaultKind, FaultSeen, Quarantined, RunStarted
from outlast.core.scenario import DEMO_LAST_STEP, Injection

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from outlast.chaos.faults import Made

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
            f"--steps {options.steps}: the scenario needs {_LEAST_STEPS} at least; nothing was started"
        )
    if options.dir is not None and options.dir.exists():
        raise UsageError(f"--dir {options.dir}: exists already; nothing was started")
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="outlast-demo-")) if options.dir is None else options.dir.absolute()
    problems = _compare(options, folder, console)
    for problem in problems:
        console.print(f"[bold red]✗[/] {problem}", soft_wrap=True)
    if problems or options.dir is not None:
        console.print(
            f"Everything is kept in {folder}; `outlast report {folder / 'faults' / 'run'}` tells the story."
        )
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
    import random

    injections = scenario.demo(options.nproc_per_node, random.Random(options.seed).random)
    console.print(
        f"A small GPT, {options.steps} steps on {options.nproc_per_node} ranks: first without faults, then with "
        f"{_enumeration(injections)} (seed {options.seed}).",
        soft_wrap=True,
    )
    conducts: dict[str, Conduct] = {}
    for name, made in (("fault-free", ()), ("faults", injections)):
        with console.status(f"{name} ..."):
            conduct = campaign.carry_out(_plan(options, folder / name, made))
        console.print(f"{name}: exit code {conduct.exit_code} after {conduct.seconds:.1f} s")
        if conduct.problems:
            return [f"{name}: {problem}" for problem in conduct.problems]
        conducts[name] = conduct
    reference, run = (_outcome(folder / name, conduct) for name, conduct in conducts.items())
    _print_table(conducts["faults"], console)
    problems = [*unanswered(conducts["faults"]), *oracle.judge(reference, run, options.steps)]
    if not problems:
        samples = sum(len(line.ids) for trace in reference.traces.values() for line in trace)
        console.print(
            f"[bold green]✓[/] equal bit for bit: the losses of {options.steps} steps on {len(run.traces)} ranks "
            f"({run.replayed()} steps computed again), the {samples} samples, the final weights "
            f"({run.weights[:16]}); no process and no file left behind",
            soft_wrap=True,
        )
    return problems


def _enumeration(injections: tuple[Injection, ...]) -> str:
    return ", ".join(one.fault if one.rank < 0 else f"{one.fault} (rank {one.rank})" for one in injections)


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
        if (seen.fault, seen.rank) != (expected, made.rank):
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
