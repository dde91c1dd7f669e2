"""inprocess: time from a fault until the last rank is back in its function, compared with NVRx's wrapper.

One small DDP job on 4 gloo ranks of this host, the same for all systems: "outlast" (outlast run and
outlast.resilient), "nvrx" (inprocess.Wrapper of nvidia-resiliency-ext with its own intervals) and
"nvrx-tuned" (intervals and last_call_wait of 50 ms, modules excluded from garbage collection, and
outlast's abort, because its own does nothing for gloo). Faults: a rank raises; a rank is killed
(outlast forks it again, NVRx continues with three); a rank hangs in Python and handles signals. Systems
alternate (ABBA), one job each; times are CLOCK_MONOTONIC, written by the ranks. "killed" counts healthy
processes that did not survive.

    python bench/inprocess.py --tries 10 --nvrx /path/to/venv/bin/python --out inprocess.jsonl
    python bench/inprocess.py --systems outlast --tries 70 --tries-per-job 35
    python bench/inprocess.py --recoveries 480 --out inprocess-480.jsonl
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import figures
from peers.inprocess_job import Job, Line, Lost

START_PATIENCE = 120.0
PATIENCE = 60.0
SETTLED = 5  # steps of every rank before the next fault
FAULTS = ("raise", "kill", "hang")


@dataclass(frozen=True)
class Try:
    """One fault: seconds until the last rank was back in, and until all had done a step; the world then."""

    system: str
    fault: str
    reentered: float
    stepped: float
    world: int
    killed: int


def settle(job: Job, world: int) -> dict[int, Line]:
    """Wait until the ranks of one call have trained; return the line with which each pid entered."""

    def settled() -> dict[int, Line] | None:
        entered = {line["pid"]: line for line in job.lines if line["kind"] == "entered"}
        newest = max((line["iteration"] for line in entered.values()), default=-1)
        inside = {pid: line for pid, line in entered.items() if line["iteration"] == newest}
        steps = [line for line in job.lines if line["kind"] == "step" and line["iteration"] == newest]
        trained = [pid for pid in inside if sum(line["pid"] == pid for line in steps) >= SETTLED]
        return inside if len(trained) == len(inside) == world else None

    found: dict[int, Line] = job.until(settled, f"a settled world of {world}", START_PATIENCE)
    return found


def strike(job: Job, fault: str, pid: int) -> float:
    """Make the fault; return when it happened."""
    if fault == "kill":
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at
    (job.folder / "fault").write_text(fault)
    (job.folder / "fault").rename(job.folder / f"fault-{pid}")
    line: Line = job.until(
        lambda: next((one for one in job.lines if one["kind"] == "fault"), None), "the fault", PATIENCE
    )
    return float(line["clock"])


def attempt(job: Job, fault: str, world: int, dice: random.Random) -> tuple[Try, dict[int, Line]]:
    """Make one fault and wait until every rank has completed a step again."""
    before = settle(job, world)
    victims = [pid for pid, line in before.items() if line["rank"] != 0 or job.system == "outlast"]
    victim = dice.choice(sorted(victims))
    job.forget()
    at = strike(job, fault, victim)
    expected = world - (fault == "kill" and job.system != "outlast")

    def back() -> list[list[Line]] | None:
        found = []
        for kind in ("entered", "step"):
            later = [line for line in job.lines if line["kind"] == kind and line["clock"] > at]
            newest = max((line["iteration"] for line in later), default=0)
            later = [
                line
                for line in later
                if line["iteration"] == newest > next(iter(before.values()))["iteration"]
            ]
            found.append(list({line["pid"]: line for line in reversed(later)}.values()))
        return found if all(len(lines) >= expected for lines in found) else None

    entered, stepped = job.until(back, f"the world of {expected} after {fault}", PATIENCE)
    healthy = before.keys() - ({victim} if fault == "kill" else set())
    gone = healthy - {line["pid"] for line in entered}
    last_in, last_step = (max(line["clock"] for line in lines) - at for lines in (entered, stepped))
    return Try(job.system, fault, last_in, last_step, len(entered), len(gone)), {
        line["pid"]: line for line in entered
    }


def block(system: str, fault: str, options: argparse.Namespace, dice: random.Random) -> list[Try | str]:
    """Run one job and bring some faults; NVRx's world shrinks with a kill, so there it is one fault a job."""
    done: list[Try | str] = []
    count = 1 if fault == "kill" and system != "outlast" else options.tries_per_job
    with tempfile.TemporaryDirectory(prefix=f"inprocess-{system}-", ignore_cleanup_errors=True) as folder:
        job = Job(system, Path(folder), options.ranks, options.hang_timeout, options.nvrx)
        try:
            for _ in range(count):
                done.append(attempt(job, fault, options.ranks, dice)[0])
        except Lost as lost:
            done.append(f"{lost}\n{job.output()}")
        finally:
            job.stop()
    return done


def quartiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {**figures.summary(values), "q1": values[0], "q3": values[0]} if values else {"n": 0}
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {**figures.summary(values), "q1": q1, "q3": q3}


def compare(options: argparse.Namespace, lines: figures.Lines) -> None:
    """Make every fault in every system, in turn."""
    dice = random.Random(options.seed)
    for fault in options.faults:
        tries: dict[str, list[Try]] = {name: [] for name in options.systems}
        lost = dict.fromkeys(options.systems, 0)
        for name in figures.abba(options.systems, 10**3):
            if all(len(tries[one]) + lost[one] >= options.tries for one in options.systems):
                break
            if len(tries[name]) + lost[name] >= options.tries:
                continue
            for found in block(name, fault, options, dice):
                load = os.getloadavg()[0]
                if isinstance(found, str):
                    lost[name] += 1
                    lines.write({"record": "lost", "system": name, "fault": fault, "reason": found})
                    figures.say(f"  {found}")
                    continue
                tries[name].append(found)
                lines.write({"record": "try", **asdict(found), "loadavg": load})
                figures.say(
                    f"  {name} {fault}: in {found.reentered:.3f} s, killed {found.killed}, load {load:.1f}"
                )
        for name in options.systems:
            summarise(name, fault, tries[name], lost[name], lines)


def summarise(name: str, fault: str, tries: list[Try], lost: int, lines: figures.Lines) -> None:
    back, step = (quartiles([getattr(one, what) for one in tries]) for what in ("reentered", "stepped"))
    killed = sum(one.killed for one in tries)
    record = {"record": "summary", "system": name, "fault": fault, "reentered": back, "stepped": step}
    lines.write(
        {**record, "healthy_killed": killed, "lost": lost, "worlds": sorted({one.world for one in tries})}
    )
    if not tries:
        figures.say(f"{name:<11} {fault:<6} n 0, lost {lost}")
        return
    figures.say(
        f"{name:<11} {fault:<6} n {len(tries)}  in: median {back['median']:.3f} s ({back['q1']:.3f} to"
        f" {back['q3']:.3f}, max {back['max']:.3f})  step: {step['median']:.3f} s  healthy killed {killed}"
        f"  lost {lost}"
    )


def endure(options: argparse.Namespace, lines: figures.Lines) -> None:
    """Let one job recover many times from exceptions; record the open resources of its processes."""
    dice = random.Random(options.seed)
    taken: list[dict[str, Any]] = []
    killed = 0
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="inprocess-", ignore_cleanup_errors=True) as folder:
        job = Job("outlast", Path(folder), options.ranks, options.hang_timeout, options.nvrx)
        try:
            for number in range(options.recoveries):
                found, entered = attempt(job, "raise", options.ranks, dice)
                times.append(found.reentered)
                if found.killed:
                    killed += found.killed
                    figures.say(f"  recovery {number + 1}: {found.killed} healthy processes were gone")
                if number in (0, 9) or number % 60 == 59:
                    taken.append(usage(job, number + 1, entered))
                    lines.write({"record": "usage", **taken[-1], "loadavg": os.getloadavg()[0]})
                    figures.say(f"  {taken[-1]}")
        except Lost as lost:
            lines.write({"record": "lost", "system": "outlast", "reason": str(lost)})
            figures.say(f"  {lost}\n{job.output()}")
        finally:
            job.stop()
    if len(taken) > 1:
        early, late = taken[1 if len(taken) > 2 else 0], taken[-1]
        names = [name for name in early if name != "recoveries"]
        growth = {name: late[name] - early[name] for name in names}
        between = (early["recoveries"], late["recoveries"])
        record = {"record": "growth", "between": between, **growth, "healthy_killed": killed}
        lines.write({**record, "recovered": len(times), "reentered": quartiles(times)})
        figures.say(f"growth between recoveries {between[0]} and {between[1]}: {growth}")
        figures.say(f"{len(times)} recoveries, healthy killed {killed}: {quartiles(times)}")


def usage(job: Job, recoveries: int, entered: dict[int, Line]) -> dict[str, Any]:
    """Resources of the ranks (the largest of them), the agent and shared memory after some recoveries."""
    ranks = {name: max(line[name] for line in entered.values()) for name in ("resident", "files", "threads")}
    agent = Path(f"/proc/{job.processes[0].pid}")
    pages = int((agent / "statm").read_text().split()[1])
    shared = [path for path in Path("/dev/shm").glob(f"*-{agent.name}-*/**/*") if path.is_file()]
    return {
        "recoveries": recoveries,
        **ranks,
        "agent_resident": pages * os.sysconf("SC_PAGESIZE"),
        "agent_files": len(os.listdir(agent / "fd")),
        "agent_threads": len(os.listdir(agent / "task")),
        "shm_files": len(shared),
        "shm_bytes": sum(path.stat().st_size for path in shared if path.exists()),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=10, help="per system and fault")
    parser.add_argument("--tries-per-job", type=int, default=5)
    parser.add_argument("--recoveries", type=int, default=0, help="instead: so many in one job of outlast")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hang-timeout", type=float, default=3.0, help="seconds; NVRx's soft_timeout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--systems", nargs="+", default=["outlast", "nvrx", "nvrx-tuned"])
    parser.add_argument(
        "--nvrx", type=Path, default=Path("-"), help="Python with NVRx; else NVRx is left out"
    )
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lines = figures.Lines(options.out)
    if not options.nvrx.exists() and any(name != "outlast" for name in options.systems):
        options.systems = [name for name in options.systems if name == "outlast"]
        lines.write({"record": "left out", "system": "nvrx", "reason": "not installed"})
        figures.say("nvrx: not installed (--nvrx names no Python); left out")
    lines.write(figures.surroundings(options.seed, arguments=" ".join(map(str, vars(options).values()))))
    if options.recoveries:
        endure(options, lines)
    else:
        compare(options, lines)


if __name__ == "__main__":
    main()
