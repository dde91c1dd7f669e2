"""pauses: each process of a job is stopped for a while, and each link cut; no other one may be convicted.

One job for each run, on hosts of its own (tests.support.hosts): a small training with gloo (2 ranks or more),
saves, and a warm zygote. One process of one node is stopped (SIGSTOP) for some seconds and continued, or the
node's link is cut and healed; the seed draws the moment: as the process appears, in training, near the end.
Then the job must end with 0 on every node. A line for each run has the exit codes, whether the job is lost,
which nodes stay out, and which convictions are false: of another process than the one that was stopped, or an
exclusion. A charge of the node in the ledger is counted by itself. Needs root.

    python bench/pauses.py --out pauses.jsonl               # goes on where an earlier run ended
    python bench/pauses.py --processes agent link --nodes 2:2 3:3 --pauses 7 12 --runs 2 --jobs 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import figures
from peers.nodes_jobs import PORT, TRAINING, Lines, Outlast, load

from tests.support.hosts import Host, Hosts, why_not
from tests.support.namespaces import HostsUnusable

PROCESSES = ("agent", "cleaner", "zygote", "standby", "writer", "store", "rank", "link")
PHASES = {"start": 0.15, "training": 0.7, "end": 0.15}
NAP = 0.1  # seconds a step at least
BEFORE, AFTER = 40, 250  # steps before the pause at least, and after it
LOOK = 0.05
START_PATIENCE = 240.0
JOIN_TIMEOUT = 90  # seconds that a job waits for a node that stays out


class NotDone(Exception):
    """A run that could not be carried out."""


@dataclass(frozen=True)
class Case:
    """One run: ``process`` of a node is stopped for ``pause`` seconds."""

    nodes: str
    process: str
    place: str  # of the leader, who has rank 0 as a rule, or another node
    pause: float
    run: int

    @property
    def most(self) -> int:
        return int(self.nodes.partition(":")[2])

    @property
    def host(self) -> str:
        return "n0" if self.place == "leader" else "n1"


class Job(Outlast):
    """The job of a case."""

    def __init__(self, hosts: Hosts, folder: Path, case: Case, steps: int) -> None:
        super().__init__(hosts, folder, steps, 10)
        self.case = case
        self.work.append(f"--nap={NAP}")

    def command(self, host: Host) -> list[str]:
        words = [sys.executable, "-m", "outlast", "run", f"--nnodes={self.case.nodes}", "--nproc-per-node=1"]
        if self.case.most > 1:
            words += ["--rdzv-id=pauses", f"--rdzv-endpoint=n0:{PORT}", f"--token-file={self._token}"]
            words += [f"--rdzv-conf=join_timeout={JOIN_TIMEOUT}", f"--node-name={host.name}"]
        return [*words, f"--run-dir={self.folder / 'run'}", str(TRAINING), *self.work]

    def console(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def find(self, host: Host, process: str) -> int:
        """Return the pid of one of a host's processes, as this process sees it; 0: there is none now."""
        agent = self.launchers[host.name].pid()
        if process == "agent":
            return agent
        with contextlib.suppress(OSError, AssertionError, KeyError, IndexError, StopIteration):
            rank = self.worker(host) if host.name in self._ranks else 0
            if process == "rank":
                return rank
            found = {pid: words for pid, words in host.processes().items() if _parent(pid) == agent}
            forks = sorted(pid for pid, words in found.items() if "worker/zygote.py" in words and pid != rank)
            if process == "cleaner":
                return next(pid for pid, words in found.items() if " -m outlast run " in words)
            if process == "writer":
                return next(pid for pid, words in found.items() if "checkpoint.writer" in words)
            if process == "zygote":
                return forks[0]
            if process == "standby":
                return next(pid for pid in forks if os.getsid(pid) != pid)
            return next(pid for pid in forks[1:] if os.getsid(pid) == pid)
        return 0

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Give the records of every node's event log."""
        for path in (self.folder / "run").rglob("events.jsonl"):
            for line in Lines(path).new():
                with contextlib.suppress(ValueError):
                    yield path.parent.name if self.case.most > 1 else "n0", json.loads(line)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def play(case: Case, seed: int, work: Path, patience: float, making: threading.Lock) -> dict[str, Any]:
    """Run one job with its pause; return the line."""
    dice = random.Random(f"{seed}/{case}")
    phase = dice.choices(list(PHASES), list(PHASES.values()))[0]
    if phase == "start" and case.process in ("rank", "link", "standby", "store"):
        phase = "training"
    at = dice.randrange(BEFORE, BEFORE + 30)
    steps = at + AFTER if phase != "end" else at + dice.randrange(2, 12)
    folder = work / "-".join(map(str, asdict(case).values())).replace(":", "_")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        with making:
            hosts = stack.enter_context(Hosts(case.most, folder / "hosts"))
        job = Job(hosts, folder, case, steps)
        began = time.monotonic()
        paused_at = _begin(job, case, phase, at)
        host = next(one for one in hosts if one.name == case.host)
        pid, rank = _pause(job, host, case)
        while not job.ended() and time.monotonic() < paused_at + case.pause + steps * NAP + patience:
            job.look()
            time.sleep(LOOK)
        job.look()
        line = {**asdict(case), "phase": phase, "pid": pid, "seconds": round(time.monotonic() - began, 1)}
        return {**line, **_judged(job, case, phase, rank), "load": round(load(), 1)}


def _begin(job: Job, case: Case, phase: str, at: int) -> float:
    deadline = time.monotonic() + START_PATIENCE
    hosts = list(job.hosts)
    job.start(hosts[0])
    while case.most > 1 and "this node is the leader" not in job.console("n0"):
        time.sleep(LOOK)
        if time.monotonic() > deadline or job.ended():
            raise NotDone(f"no leader within {START_PATIENCE:.0f} s: see {job.folder}")
    for host in hosts[1:]:
        job.start(host)
    victim = next(one for one in hosts if one.name == case.host)
    while True:
        job.look()
        there = phase != "start" or bool(job.find(victim, case.process))
        if there and (phase == "start" or len(job.completed) >= at):
            return time.monotonic()
        if time.monotonic() > deadline or job.ended():
            raise NotDone(f"it did not train within {START_PATIENCE:.0f} s: see {job.folder}")
        time.sleep(LOOK)


def _pause(job: Job, host: Host, case: Case) -> tuple[int, int]:
    """Stop the process or cut the link for a while; return the pid and, for a rank, its number."""
    if case.process == "link":
        host.flap(case.pause)
        return 0, -1
    pid = job.find(host, case.process)
    if not pid:
        raise NotDone(f"{host.name} has no {case.process} now")
    rank = next((one["rank"] for name, one in _traces(job) if name == host.name), -1)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(case.pause)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return pid, rank if case.process == "rank" else -1


def _traces(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((job.folder / "trace").glob("*.jsonl")):
        for line in Lines(path).new()[-1:]:
            yield path.stem, json.loads(line)


def _judged(job: Job, case: Case, phase: str, rank: int) -> dict[str, Any]:
    """Return what came of a job."""
    faults, last = [], Counter[str]()
    for node, one in job.records():
        if one["kind"] == "fault_seen":
            faults.append({key: one[key] for key in ("fault", "node", "rank", "reason")})
        elif one["kind"] == "generation_started":
            last[node] = max(last[node], one["generation"])
    text = "\n".join(job.console(host.name) for host in job.hosts)
    ended = job.exits()
    newest = max(last.values(), default=0)
    # A node that comes back when the job is over has no ranks any more; it has to end like the others.
    late = phase == "end" and None not in ended.values()
    out = [host.name for host in job.hosts if last[host.name] < newest or ended[host.name] is None]
    out = [] if late else out
    ledger = (job.folder / "run" / "ledger").glob("*")
    entries = Counter(json.loads(line)["what"] for path in ledger for line in path.read_text().splitlines())
    both = case.process == "link" and case.most == 2  # each side may lose the other one
    false = [
        one
        for one in faults
        if not (
            one["fault"] == "lost"
            and case.process in ("agent", "link")
            and (one["node"] == case.host or both)
        )
        and not (case.process == "rank" and one["rank"] == rank >= 0)
    ]
    return {
        "ended": ended,
        "lost": any(code != 0 for code in ended.values()),
        "out": out,
        "faults": len(faults),
        "false": false,
        "excluded": len(re.findall(r"is excluded", text)),
        "charged": entries["fault"] - entries["lived"],
        "generations": newest,
        "digest": job.digest()[:12],
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Return all runs, in an order that the seed draws: any beginning of it is a sample."""
    found = []
    for run in range(options.runs):
        for nodes in options.nodes:
            for process in options.processes:
                if process == "link" and nodes == "1:1":
                    continue
                places = ["leader"] if nodes == "1:1" else options.places
                times = options.outages if process == "link" else options.pauses
                found += [Case(nodes, process, place, pause, run) for place in places for pause in times]
    random.Random(options.seed).shuffle(found)
    return found


def table(lines: list[dict[str, Any]]) -> None:
    """Print what came of the runs, by process and nodes."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in lines:
        groups[one["nodes"], one["process"]].append(one)
    figures.say(
        f"{'nodes':6}{'process':10}{'runs':>5}{'lost':>6}{'out':>5}{'false':>7}{'excluded':>10}{'charged':>9}"
    )
    for (nodes, process), some in sorted(groups.items()):
        counts = [
            sum(bool(one[key]) for one in some) for key in ("lost", "out", "false", "excluded", "charged")
        ]
        wide = "".join(f"{count:>{width}}" for count, width in zip(counts, (6, 5, 7, 10, 9), strict=True))
        figures.say(f"{nodes:6}{process:10}{len(some):>5}{wide}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pauses", type=float, nargs="+", default=[2.0, 5.0, 7.0, 12.0, 20.0])
    parser.add_argument("--outages", type=float, nargs="+", default=[1.0, 2.0, 4.0, 6.0, 10.0, 20.0, 30.0])
    parser.add_argument("--processes", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--nodes", nargs="+", default=["1:1", "2:2", "2:3", "3:3"])
    parser.add_argument("--places", nargs="+", choices=["leader", "other"], default=["leader", "other"])
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after that many")
    parser.add_argument(
        "--patience", type=float, default=180.0, help="seconds for a job to end after its steps"
    )
    parser.add_argument("--out", type=Path, help="JSON lines; runs that are in it are not repeated")
    parser.add_argument(
        "--work", type=Path, help="folder for the jobs; those of runs that went well are removed"
    )
    options = parser.parse_args()
    if reason := why_not():
        parser.error(f"no hosts can be started here: {reason}")
    known: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        known = [json.loads(line) for line in options.out.read_text().splitlines()]
    lines = [one for one in known if "nodes" in one]
    fields = tuple(Case.__dataclass_fields__)
    done = {tuple(one[key] for key in fields) for one in lines}
    out = figures.Lines(options.out)
    out.write(figures.surroundings(options.seed))
    work = options.work or Path(tempfile.mkdtemp(prefix="outlast-pauses-"))
    end, making = time.monotonic() + options.seconds, threading.Lock()

    def one(case: Case) -> dict[str, Any] | None:
        if time.monotonic() > end:
            return None
        try:
            return play(case, options.seed, work, options.patience, making)
        except (NotDone, HostsUnusable, OSError) as error:
            figures.say(f"not done: {case}: {error}")
            return None

    with ThreadPoolExecutor(options.jobs) as pool:
        wanted = [case for case in cases(options) if tuple(asdict(case).values()) not in done]
        for future in as_completed([pool.submit(one, case) for case in wanted]):
            line = future.result()
            if line is None:
                continue
            out.write(line)
            lines.append(line)
            bad = {key: line[key] for key in ("lost", "out", "false", "excluded") if line[key]}
            where = f"{line['nodes']} {line['process']} of {line['place']}"
            figures.say(f"{where}, {line['pause']:g} s in {line['phase']}: {line['ended']} {bad or 'well'}")
            if not bad:
                folder = "-".join(str(line[key]) for key in fields).replace(":", "_")
                shutil.rmtree(work / folder, ignore_errors=True)
    table(lines)
    return int(any(one["lost"] or one["out"] or one["false"] or one["excluded"] for one in lines))


if __name__ == "__main__":
    sys.exit(main())
