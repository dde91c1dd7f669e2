"""The command lines of ``outlast chaos`` and ``outlast demo``.

``outlast demo`` trains the example twice, without faults and with faults, and compares the runs bit by bit.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import outlast
from outlast.chaos import campaign, oracle
from outlast.chaos import policy as scenario
from outlast.chaos.campaign import Conduct, Plan
from outlast.chaos.policy import DEMO_LAST_STEP, FAULTS, RANDOM, RANDOM_CHOICES, Injection, Place, Target
from outlast.errors import ScriptNotFound, UsageError
from outlast.observe.policy import goodput
from outlast.recovery.policy.events import FaultKind, FaultSeen, Loaded, Quarantined, RunStarted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from outlast.chaos.faults import Made
    from outlast.observe.policy.goodput import Incident
    from outlast.recovery.policy.events import Record


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
    from outlast.chaos import telemetry

    telemetry.add_arguments(
        commands.add_parser("telemetry", help="of devices, for a replay or a stand-in driver")
    )
    given = list(arguments)
    if given[:1] == ["run"]:
        return _run(within, given[1:])
    options = parser.parse_args(given)
    return telemetry.run(options) if options.command == "telemetry" else _inject(options)


def demo(arguments: Sequence[str]) -> int:
    """Carry out ``outlast demo`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="outlast demo",
        description="Train a small GPT twice, without faults and with a crash, a hang, a flipped bit and a "
        "lost agent, and compare the two runs bit by bit.",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws ranks, moments and the bit (default 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--nproc-per-node", type=int, default=RANKS, help=f"default {RANKS}")
    parser.add_argument("--dir", type=Path, help="keep everything in this new folder")
    return show(parser.parse_args(arguments))


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
    from outlast.chaos import faults
    from outlast.chaos import faults as targets

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


STEPS = 300
RANKS = 4
SAVE_INTERVAL = 20
_LEAST_STEPS = DEMO_LAST_STEP + 2 * SAVE_INTERVAL
_EXPECTED = {"rank_killed": FaultKind.CRASH, "rank_hung": FaultKind.HANG}


def show(options: argparse.Namespace) -> int:
    """Run the demo; return 0 when the two runs are equal, and every fault was found and survived.

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
            f"(sha256 {run.weights[:16]}); no process and no file remains"
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


_ACTIONS = {"restart-in-job": "all ranks restarted", "run again": "same command run again"}


def _print_table(conduct: Conduct, run: oracle.Outcome, console: Console) -> None:
    """Print each incident of the ledger, with the injections that led to it.

    How many steps were lost is counted in the traces: after an agent's death no log knows it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ledger = goodput.fold(conduct.records)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "rank", "found\nafter", "running\nafter", "steps\nlost", "what was done"):
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
            " +\n".join(names) or incident.kind,
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
    """Return what was done about an incident: the action, copies set aside, the copy that was loaded."""
    said = [_ACTIONS.get(incident.action, incident.action)]
    for record in records:
        if record.generation == incident.generation + 1:
            if isinstance(record, Quarantined):
                said.append(f"bad copy of step {record.step} quarantined")
            elif isinstance(record, Loaded):
                tiers = dict.fromkeys(place.rpartition("/")[0] for place in record.places)
                said.append(f"step {record.step} loaded from {' and '.join(tiers)}")
    return "\n".join(said)


def unanswered(conduct: Conduct) -> list[str]:
    """Return the injections without the right event in the log, such as a fault that no detector saw."""
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
