"""hang: time to find a stopped rank with learned timeouts, and false alarms on a busy host.

First the job trains alone until timeouts are learned, and ranks drawn from the seed are stopped
(SIGSTOP), one after the other. Then a busy loop runs on every core for the given time; every
fault in that time is a false alarm. Then ranks are stopped once more, under that load. A hang
is found in time within max(2 s, 5 x p99 of the step time before it).

    python bench/hang.py --minutes 10 --hangs 5 --out hang.jsonl

With --kinds it plays kinds of healthy pauses and of real hangs instead, one job each, under default and
learned timeouts. No pause may be taken for a hang; each hang must be found, and its culprit named.

    python bench/hang.py --kinds all --out kinds.jsonl
    python bench/hang.py --kinds evaluation,download,lock,sleep

With --tries it plays four kinds of hangs that many times each, one job for each kind: a rank is late, is one
collective ahead, has a dead lock, or is stopped. At least 95 of 100 culprits must be right; it tells how many
verdicts the flight recorder decided.

    python bench/hang.py --tries 100 --side-by-side 4 --out tries.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hang_runs
import hang_tries
from peers import figures, systems
from peers.systems import System

from outlast.chaos import faults
from outlast.chaos import faults as targets
from outlast.chaos.faults import Observer
from outlast.chaos.policy import Observation
from outlast.recovery.policy.events import FaultSeen, Record, TimeoutsLearned

LOOK = 0.01
PATIENCE = 300.0
LEAST_BOUND = 2.0
TIMES_P99 = 5.0
STEPS_BEFORE = 400  # over which the step time's p99 is taken
SETTLED = 60  # steps between a recovery and the next stop
BUSY = [sys.executable, "-c", "while True: pass"]


def wait(
    job: System, observer: Observer, ready: Callable[[Observation], bool], patience: float = PATIENCE
) -> None:
    """Wait for an observation.

    Raises:
        SystemExit: the job ended, or it took too long.
    """
    deadline = time.monotonic() + patience
    while not ready(observer.look()):
        if not job.alive() or time.monotonic() > deadline:
            raise SystemExit(
                f"the job did not get on; see {job.work}: {(job.work / 'output.txt').read_text()[-2000:]}"
            )
        time.sleep(LOOK)


def step_p99(job: System) -> float:
    """Return the 99th percentile of rank 0's latest step times, within one process."""
    job.traces.update()
    lines = job.traces.lines[0][-STEPS_BEFORE:]
    pairs = itertools.pairwise(lines)
    return figures.summary([b.clock - a.clock for a, b in pairs if a.pid == b.pid])["p99"]


def hang_once(job: System, observer: Observer, rank: int, busy: bool) -> dict[str, object]:
    """Stop a rank, wait until the job runs again, and return the result."""
    job.traces.update()
    count = sum(map(len, job.traces.lines)) + SETTLED * len(job.traces.lines)

    def settled(_: Observation) -> bool:
        job.traces.update()
        return sum(map(len, job.traces.lines)) >= count

    wait(job, observer, settled)
    before = observer.look()
    bound = max(LEAST_BOUND, TIMES_P99 * step_p99(job))
    made = faults.inject(targets.find(job.work / "run"), "rank_hung", rank, seed=0)
    wait(job, observer, lambda seen: seen.running and seen.generation > before.generation)
    seen = next(one for one in observer.records if isinstance(one, FaultSeen) and one.clock >= made.clock)
    return {
        "record": "hang",
        "busy": busy,
        "rank": rank,
        "named": seen.rank,
        "fault": seen.fault,
        "found_after": seen.clock - made.clock,
        "bound": bound,
        "in_time": seen.clock - made.clock <= bound,
        "reason": seen.reason,
        "loadavg": os.getloadavg()[0],
    }


def hangs(
    job: System, observer: Observer, options: argparse.Namespace, busy: bool, lines: figures.Lines
) -> int:
    """Stop ranks one after the other; return how many were not found in time."""
    dice = random.Random(options.seed + busy)
    late = 0
    for _ in range(options.hangs):
        record = hang_once(job, observer, dice.randrange(options.ranks), busy)
        late += not record["in_time"]
        lines.write(record)
        figures.say(
            f"rank {record['rank']} stopped{' on a busy host' if busy else ''}: {record['fault']} of rank "
            f"{record['named']} found after {record['found_after']:.2f} s, bound {record['bound']:.2f} s"
        )
    return late


def false_alarms(job: System, observer: Observer, seconds: float, lines: figures.Lines) -> Sequence[Record]:
    """Watch for some time; return the false alarms."""
    known = len(observer.records)
    began = time.monotonic()
    wait(job, observer, lambda _: time.monotonic() - began >= seconds, seconds + PATIENCE)
    found = [one for one in observer.records[known:] if isinstance(one, FaultSeen)]
    learned = [one for one in observer.records if isinstance(one, TimeoutsLearned)]
    record = {"record": "busy", "seconds": seconds, "false_alarms": len(found), "step_p99": step_p99(job)}
    lines.write(
        {
            **record,
            "reasons": [one.reason for one in found],
            "timeouts": learned[-1].timeouts if learned else {},
            "loadavg": os.getloadavg()[0],
        }
    )
    figures.say(f"{seconds:.0f} s beside a busy loop on every core: {len(found)} false alarms")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="beside the busy loops")
    parser.add_argument("--hangs", type=int, default=5, help="ranks stopped before, and again under load")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--kinds", help="all, pauses, hangs, or names of bench/hang_kinds.py with commas")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds of a pause, with --kinds")
    parser.add_argument("--tries", type=int, help="hangs of each of four kinds")
    parser.add_argument(
        "--side-by-side", type=int, default=1, help="kinds at a time, with --kinds or --tries"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> int:
    options = parse()
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(options.seed))
    if options.kinds:
        kinds = hang_runs.choose(options.kinds)
        return 1 if hang_runs.play_all(kinds, options.pause, options.side_by_side, lines) else 0
    if options.tries:
        return 1 if hang_tries.play_all(options.tries, options.side_by_side, options.seed, lines) else 0
    loops: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="hang-", ignore_cleanup_errors=True) as folder:
        job = systems.start("outlast", Path(folder), options.ranks, options.save_interval, None)
        observer = Observer(job.work / "run" / "events.jsonl", job.work / "trace")
        try:
            wait(job, observer, lambda seen: seen.running and seen.timeouts_learned)
            late = hangs(job, observer, options, False, lines)
            loops += [subprocess.Popen(BUSY) for _ in range(os.cpu_count() or 1)]
            alarms = false_alarms(job, observer, options.minutes * 60, lines)
            late += hangs(job, observer, options, True, lines)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
            job.stop()
    figures.say(f"{late} of {2 * options.hangs} hangs were found late; {len(alarms)} false alarms")
    return 1 if late or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
