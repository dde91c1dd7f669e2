"""partitions: random partitions, pauses and kills of whole nodes; no two generations may commit at once.

Each schedule is a job of three nodes and a spare on hosts of its own (tests.support.hosts), with real
agents. Its ranks ask for the right to commit twenty times a second and commit to one file. The seed draws
the faults: hosts are disconnected (also briefly and repeatedly), paused, lose their agent or their power, and
recover within 15 s; half of the faults hit the leader. The draws repeat with the seed and the state of the
hosts; exact moments depend on the machine. Then all faults are removed, and the job must commit again within
--patience seconds.

A checker reads the commits in the order in which they were written. Commits that a pause stopped between the
request and the write are counted separately; the generation in a copy's name covers them. Prints a JSON line
for each schedule and a summary; exits with 1 if generations overlapped, a job did not recover, an agent ended
by itself, or a process was left over. Needs root.

    python bench/partitions.py --schedules 200 --seed 1 --out partitions.jsonl
    python bench/partitions.py --only 17 --work /tmp/seed-17
    python bench/partitions.py --schedules 20 --plant no-lease     # overlaps must be found
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from peers import figures
from peers.nodes_jobs import load
from peers.partitions_job import ACTIVE, HOSTS, LEAST, Job
from peers.partitions_log import Commit, check, read
from peers.partitions_schedule import CALM, PING_TIMEOUTS, Happening, draw, mending, moments

from outlast.cluster.lease_file import boot_time
from tests.support.hosts import Hosts, why_not
from tests.support.namespaces import HostsUnusable

LOOK = 0.05
START_PATIENCE = 180.0
WATCHED = 5.0  # seconds after the job is back, longer than a lease
WRONG = ("overlaps", "ended", "left")


class NotDone(Exception):
    """A schedule that could not be carried out."""


class Schedule:
    """One job and its faults.

    Args:
        job: not started.
        dice: for the draws.
        patience: seconds in which the job must commit again.
    """

    def __init__(self, job: Job, dice: random.Random, patience: float) -> None:
        self.job, self.dice, self.patience = job, dice, patience
        self.events: list[dict[str, Any]] = []
        self.began = 0.0
        self.undo: list[tuple[float, str]] = []  # when the cable of a flapping host is put back

    def play(self) -> dict[str, Any]:
        """Start the job, make the faults, undo them; return the result."""
        self.begin()
        self.began = time.monotonic()
        for moment in moments(self.dice):
            self.wait_until(lambda moment=moment: time.monotonic() >= self.began + moment)
            self.happen(draw(self.dice, self.job.board, self.job.leader))
        mend = time.monotonic() + self.dice.uniform(*CALM)
        self.wait_until(lambda: time.monotonic() >= mend)
        self.undo.clear()
        for what in mending(self.job.board):
            self.happen(what)
        again, whole = self.come_back()
        watched = time.monotonic() + WATCHED
        self.wait_until(lambda: time.monotonic() >= watched)
        ended = dict(self.job.ended)
        left = self.job.end()
        self.job.look()
        times = {"again": again, "whole": whole}
        return {"events": self.events, **times, "ended": ended, "left": left, **self.found()}

    def begin(self) -> None:
        for host in self.job.hosts.values():
            self.job.start(host)
        deadline = time.monotonic() + START_PATIENCE
        while len({one.node for one in read(self.job.lines)}) < ACTIVE:
            if time.monotonic() > deadline or self.job.ended:
                raise NotDone(f"the job did not commit within {START_PATIENCE:.0f} s: see {self.job.folder}")
            self.look()

    def look(self) -> None:
        time.sleep(LOOK)
        self.job.look()
        now = time.monotonic()
        due = [one for one in self.undo if one[0] <= now]
        self.undo = [one for one in self.undo if one[0] > now]
        for _, host in due:
            if host in self.job.board.cut:
                self.happen(Happening("heal", (host,)))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.look()

    def happen(self, what: Happening) -> None:
        at = time.monotonic()
        self.job.happen(what)
        coordinated = bool({self.job.leader}.intersection(what.hosts))
        event = {"at": round(at - self.began, 2), "kind": what.kind, "hosts": what.hosts}
        self.events.append({**event, "seconds": what.seconds, "leader": coordinated})
        if what.seconds:
            self.undo += [(at + what.seconds, host) for host in what.hosts]

    def come_back(self) -> tuple[float | None, float | None]:
        """Wait until the newest generation commits on enough nodes, and on as many as may be active.

        Returns:
            The seconds that it took; None: it did not.
        """
        mended = boot_time()
        self.job.look()
        seen = len(self.job.lines)
        youngest = max(one.generation for one in read(self.job.lines))
        again = whole = None
        while whole is None and boot_time() < mended + self.patience:
            self.look()
            since = [one for one in read(self.job.lines[seen:]) if one.before > mended]
            firsts = _firsts(since, max((one.generation for one in since), default=0), youngest)
            if again is None and len(firsts) >= LEAST:
                again = round(firsts[LEAST - 1] - mended, 2)
            whole = round(firsts[ACTIVE - 1] - mended, 2) if len(firsts) == ACTIVE else None
        return again, whole

    def found(self) -> dict[str, Any]:
        found = check(read(self.job.lines), self.job.pauses)
        return {
            "generations": found.generations,
            "commits": found.commits,
            "overlaps": found.overlaps[:10],
            "overlapping": len(found.overlaps),
            "stopped_in_between": found.stopped_in_between,
            "stalled": found.stalled,
        }


def _firsts(commits: list[Commit], generation: int, least: int) -> list[float]:
    """Return when each node of a generation first committed, unless a newer generation exists."""
    firsts: dict[str, float] = {}
    for one in commits:
        if one.generation == generation >= least:
            firsts.setdefault(one.node, one.before)
    return sorted(firsts.values())


def wrong(line: dict[str, Any]) -> list[str]:
    """Return the errors of a schedule."""
    if "not_done" in line:
        return ["not done"]
    found = [name for name in WRONG if line[name]]
    return found if line["again"] is not None else [*found, "gave up"]


def one(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one schedule; return its line."""
    folder = Path(tempfile.mkdtemp(prefix=f"partitions-{seed}-", dir=options.work))
    shared = folder / "shared"
    shared.mkdir()
    dice = random.Random(seed)
    line: dict[str, Any] = {"record": "schedule", "seed": seed, "load": round(load(), 1)}
    line["ping_timeout"] = dice.choice(PING_TIMEOUTS)
    try:
        with Hosts(HOSTS, folder / "hosts") as hosts:
            job = Job(hosts, shared, line["ping_timeout"], options.plant)
            line |= Schedule(job, dice, options.patience).play()
    except (NotDone, HostsUnusable) as reason:
        line |= {"not_done": str(reason)}
    line["wrong"] = wrong(line)
    if line["wrong"] or options.keep or options.only is not None:
        line["folder"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return line


def say(line: dict[str, Any]) -> None:
    seed = f"seed {line['seed']:>5}"
    if "not_done" in line:
        figures.say(f"{seed}  NOT DONE: {line['not_done']}")
        return
    events = ", ".join(
        f"{event['at']:.1f} {event['kind']} {'+'.join(event['hosts'])}" for event in line["events"]
    )
    again, whole = ("never" if line[name] is None else f"{line[name]:.1f} s" for name in ("again", "whole"))
    figures.say(
        f"{seed}  {len(line['generations'])} generation(s)  {line['commits']:>5} commits  "
        f"again {again:>7}  whole {whole:>7}  {', '.join(line['wrong']).upper() or 'well'}  [{events}]"
    )
    for name in (*WRONG, "stopped_in_between"):
        if line[name]:
            figures.say(f"    {name}: {json.dumps(line[name])[:600]}")
    if line["wrong"]:
        figures.say(f"    see {line['folder']}")


def summary(lines: list[dict[str, Any]], plant: str) -> dict[str, Any]:
    done = [line for line in lines if "not_done" not in line]
    again = [line["again"] for line in done if line["again"] is not None]
    return {
        "record": "summary",
        "plant": plant,
        "schedules": len(lines),
        "not_done": len(lines) - len(done),
        "events": sum(len(line["events"]) for line in done),
        "generations": sum(len(line["generations"]) for line in done),
        "commits": sum(line["commits"] for line in done),
        "with_overlaps": sum(bool(line["overlaps"]) for line in done),
        "stopped_in_between": sum(len(line["stopped_in_between"]) for line in done),
        "stalled": sum(len(line["stalled"]) for line in done),
        "gave_up": sum(line["again"] is None for line in done),
        "agents_ended": sum(bool(line["ended"]) for line in done),
        "left_over": sum(bool(line["left"]) for line in done),
        "again": figures.summary(again),
        "never_whole": sum(line["whole"] is None for line in done),
        "whole": figures.summary([line["whole"] for line in done if line["whole"] is not None]),
        "wrong_seeds": sorted(line["seed"] for line in lines if line["wrong"]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule; the others follow")
    parser.add_argument("--only", type=int, help="repeat the schedule of this seed and keep its folder")
    parser.add_argument("--jobs", type=int, default=6, help="how many run at once")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to commit again in")
    parser.add_argument("--plant", choices=["no-lease"], default="", help="a fault that has to be found")
    parser.add_argument("--work", type=Path, help="folder for the schedules' folders; default: the system's")
    parser.add_argument("--keep", action="store_true", help="remove no schedule's folder")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    reason = why_not()
    if reason:
        raise SystemExit(f"partitions: no hosts can be started on this machine: {reason}")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    out = figures.Lines(options.out)
    out.write(figures.surroundings(options.seed, arguments=" ".join(map(str, vars(options).values()))))
    seeds = range(options.seed, options.seed + options.schedules)
    seeds = seeds if options.only is None else range(options.only, options.only + 1)
    lines = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(one, seed, options) for seed in seeds]):
            lines.append(done.result())
            out.write(lines[-1])
            say(lines[-1])
    found = summary(lines, options.plant)
    out.write(found)
    figures.say(json.dumps(found))
    if options.plant:
        raise SystemExit(not found["with_overlaps"])
    raise SystemExit(bool(found["wrong_seeds"]))


if __name__ == "__main__":
    main()
