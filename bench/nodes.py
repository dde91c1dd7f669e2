"""nodes: time from the loss of a node to detection and to the next step, compared with torchrun.

Three nodes and one spare are hosts on this machine (tests.support.hosts), with their own processes, network
and /dev/shm. There is one job for each fault: it trains for some steps, the fault happens, and the job is
watched until it ends or has made no step for --patience seconds. Measured for each fault: when the launcher
detected it, when the first step after it was completed, how many steps were repeated,
whether the job finished, and whether its weights equal those of the run without a fault. Needs root.

    python bench/nodes.py --repeats 3 --out nodes.jsonl
    python bench/nodes.py --systems torchrun torchrun-default --faults kill_worker cut_link
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import figures
from peers.nodes_jobs import ACTIVE, SYSTEMS, Job, load

from tests.support.hosts import Hosts, why_not

LOOK = 0.02
START_PATIENCE = 120.0
END_PATIENCE = 20.0  # seconds for launchers to end once the weights are there
SETTLED = 125  # steps before the fault, in which the spare gets ready; no multiple of the save interval
VICTIM = 1

Act = Callable[[Job], None]


@dataclass(frozen=True)
class Fault:
    """A fault of nodes, and how it is undone after some seconds."""

    act: Act
    mend: Act | None = None
    after: float = 0.0


def _kill_worker(job: Job) -> None:
    os.kill(job.worker(job.hosts[VICTIM]), signal.SIGKILL)


def _kill_agent(job: Job) -> None:
    job.launchers[job.hosts[VICTIM].name].send(signal.SIGKILL)


def _kill_node(number: int) -> Act:
    def kill(job: Job) -> None:
        host = job.hosts[number]
        host.kill()
        job.launchers.pop(host.name)

    return kill


def _cut(job: Job) -> None:
    job.hosts[VICTIM].cut()


def _heal(job: Job) -> None:
    job.hosts[VICTIM].heal()


FAULTS = {
    "undisturbed": Fault(lambda _: None),
    "kill_worker": Fault(_kill_worker),
    "kill_agent": Fault(_kill_agent),
    "kill_node": Fault(_kill_node(VICTIM)),
    "kill_leader_node": Fault(_kill_node(0)),
    "cut_link": Fault(_cut),
    "flap_2s": Fault(_cut, _heal, 2.0),
    "flap_20s": Fault(_cut, _heal, 20.0),
    "pause_resume": Fault(
        lambda job: job.hosts[VICTIM].pause(), lambda job: job.hosts[VICTIM].resume(), 30.0
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one fault; seconds after it, None for never."""

    detected: float | None
    running_again: float | None
    steps_repeated: int
    finished: bool
    digest: str
    seconds: float
    exits: dict[str, int | None]


class NotStarted(Exception):
    """The job did not start."""


def begin(job: Job) -> None:
    """Start the job, then the spare, and wait until it has trained for a while."""
    for host in list(job.hosts)[:ACTIVE]:
        job.start(host)
    deadline = time.monotonic() + START_PATIENCE
    spare = False
    while len(job.completed) < SETTLED or not spare:
        job.look()
        if job.completed and not spare:
            job.start(job.hosts[ACTIVE])
            spare = True
        if time.monotonic() > deadline or (job.ended() and not job.digest()):
            raise NotStarted(f"{job.name} did not train within {START_PATIENCE:.0f} s; see {job.folder}")
        time.sleep(LOOK)


def follow(job: Job, fault: Fault, patience: float) -> Outcome:
    """Make the fault and watch the job until it ends or makes no step for ``patience`` seconds."""
    moment = time.monotonic()
    fault.act(job)
    mend, over = fault.mend, 0.0
    while True:
        job.look()
        now = time.monotonic()
        if mend is not None and now >= moment + fault.after:
            mend(job)
            mend = None
        last = max([moment, *(step.clock for step in job.completed)])
        if job.digest() and not over:
            over = now + END_PATIENCE
        if (over and now > over) or job.ended() or now > last + patience:
            break
        time.sleep(LOOK)
    job.look()
    detected, back = job.detected(moment), job.back(moment)
    return Outcome(
        None if detected is None else detected - moment,
        None if back is None else back - moment,
        job.repeated(),
        bool(job.digest()),
        job.digest(),
        time.monotonic() - moment,
        job.exits(),
    )


def one(name: str, fault: str, options: argparse.Namespace, lines: figures.Lines) -> Outcome | None:
    """Run one job with one fault."""
    folder = Path(tempfile.mkdtemp(prefix=f"nodes-{name}-{fault}-", dir=options.work))
    before = load()
    try:
        with Hosts(ACTIVE + 1, folder / "hosts") as hosts:
            job = SYSTEMS[name](hosts, folder / "shared", options.steps, options.save_interval)
            begin(job)
            found = follow(job, FAULTS[fault], options.patience)
    except NotStarted as reason:
        figures.say(f"  {reason}")
        lines.write({"record": "not started", "system": name, "fault": fault, "reason": str(reason)})
        return None
    lines.write({"record": "fault", "system": name, "fault": fault, **asdict(found), "loadavg": before})
    figures.say(f"  {name:<17} {fault:<22} {row(found)}  load {before:.1f}")
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def shown(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def row(found: Outcome) -> str:
    ended = "finished" if found.finished else "JOB LOST"
    return (
        f"detected {shown(found.detected):>6}  running again {shown(found.running_again):>6}  "
        f"repeated {found.steps_repeated:>4}  {ended}"
    )


def middle(values: list[float | None]) -> float | None:
    """Return the median; None, for never, is greater than any number."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    found = ordered[len(ordered) // 2]
    return None if found == float("inf") else found


def report(outcomes: dict[tuple[str, str], list[Outcome]], lines: figures.Lines) -> None:
    """Print and write the summary."""
    right = {
        found.digest for (_, fault), many in outcomes.items() if fault == "undisturbed" for found in many
    }
    figures.say(f"\ndigests without a fault: {sorted(word[:12] for word in right)}")
    figures.say(
        f"{'fault':<23}{'system':<18}{'n':>3}{'detected':>10}{'again':>8}{'repeated':>10}  finished, equal"
    )
    for fault in FAULTS:
        for (name, which), many in outcomes.items():
            if which != fault or not many:
                continue
            finished = sum(found.finished for found in many)
            equal = sum(found.digest in right for found in many if found.finished)
            record = {
                "detected": middle([found.detected for found in many]),
                "running_again": middle([found.running_again for found in many]),
                "steps_repeated": middle([found.steps_repeated for found in many]),
            }
            lines.write(
                {
                    **{"record": "summary", "system": name, "fault": fault, "n": len(many)},
                    **{**record, "finished": finished, "equal": equal},
                }
            )
            figures.say(
                f"{fault:<23}{name:<18}{len(many):>3}{shown(record['detected']):>10}"
                f"{shown(record['running_again']):>8}{record['steps_repeated']:>10}  "
                f"{finished} of {len(many)}, {equal} of {finished}"
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=["outlast", "torchrun"], choices=SYSTEMS)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of standstill until never")
    parser.add_argument("--work", type=Path, help="folder for the jobs' folders; default: the system's")
    parser.add_argument("--keep", action="store_true", help="remove no job's folder")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    reason = why_not()
    if reason:
        raise SystemExit(f"nodes: no hosts can be started on this machine: {reason}")
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(0, arguments=" ".join(map(str, vars(options).values()))))
    faults = list(dict.fromkeys(["undisturbed", *options.faults]))
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for fault in faults:
        for name in figures.abba(options.systems, options.repeats):
            found = one(name, fault, options, lines)
            outcomes.setdefault((name, fault), []).extend([] if found is None else [found])
    report(outcomes, lines)


if __name__ == "__main__":
    main()
