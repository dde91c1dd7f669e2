"""straggler_live: steps until a rank that becomes slow is named in a live job, and alarms in a healthy one.

Four ranks over gloo run tests/support/scripts/slowing.py. From step 50 on one rank takes twice as long in
one part of its step: compute, communication or data; once with the sections of a session, once with a plain
script that only announces its steps. One JSON line a job: the steps from the first slow one until the
verdict, whether rank and kind are right. With --healthy, all ranks are healthy for so many seconds, their
times vary (see the script), and every alarm is counted.

    python bench/straggler_live.py --rounds 5 --out straggler_live.jsonl
    python bench/straggler_live.py --healthy 3600
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import figures

from outlast.observe import recorder
from outlast.recovery.policy.events import StepTimes, StragglerSeen

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "support" / "scripts" / "slowing.py"
RANKS, SLOW, FROM, ENDLESS = 4, 2, 50, 1_000_000
HOWS, PARTS = ("session", "plain"), ("compute", "communication", "data")
PATIENCE = 300.0
LEAVING = 30.0


def watch(how: str, part: str, seconds: float, until_named: bool) -> tuple[list[StragglerSeen], int]:
    """Run a job for so long, or until a rank is named; return the alarms and the newest step of a report."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "run" / "events.jsonl"
        line = [sys.executable, "-m", "outlast", "run", f"--nproc-per-node={RANKS}", f"--run-dir={name}/run"]
        words = (how, SLOW, FROM, ENDLESS, part)
        with open(Path(name) / "output", "w") as output:
            job = subprocess.Popen([*line, str(SCRIPT), *map(str, words)], stdout=output, stderr=output)
            try:
                end = time.monotonic() + seconds
                alarms: list[StragglerSeen] = []
                while time.monotonic() < end and not (alarms and until_named):
                    if job.poll() is not None:
                        said = Path(output.name).read_text()
                        raise SystemExit(f"the job ended with {job.returncode}:\n{said}")
                    time.sleep(0.5 if until_named else 5.0)
                    records = recorder.read(log).records if log.exists() else ()
                    alarms = [one for one in records if isinstance(one, StragglerSeen) and one.state == "on"]
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait(LEAVING)
        steps = [one.step for one in recorder.read(log).records if isinstance(one, StepTimes)]
        return alarms, max(steps, default=0)


def slow(how: str, part: str) -> dict[str, Any]:
    """Run a job with a slow rank; return the verdict."""
    alarms, _ = watch(how, part, PATIENCE, until_named=True)
    found: dict[str, Any] = {"record": "slow", "how": how, "part": part, "load": os.getloadavg()[0]}
    if not alarms:
        return {**found, "steps": None, "right": False}
    first = alarms[0]
    right = (first.rank, first.activity) == (SLOW, part) and first.step > FROM
    return {**found, "steps": first.step - FROM, "right": right, "reason": first.reason}


def healthy(how: str, seconds: float) -> dict[str, Any]:
    """Run a job without a slow rank; return its alarms."""
    began = os.getloadavg()[0]
    alarms, step = watch(how, "noise", seconds, until_named=False)
    return {
        "record": "healthy",
        "how": how,
        "seconds": seconds,
        "steps": step,
        "alarms": [one.reason for one in alarms],
        "load": [began, os.getloadavg()[0]],
    }


def main() -> None:
    """Run the jobs in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--healthy", type=float, help="seconds of a job without a slow rank, instead")
    parser.add_argument("--how", choices=HOWS, nargs="+", default=HOWS)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = figures.Lines(given.out)
    lines.write(figures.surroundings(seed=0))
    if given.healthy:
        for how in given.how:
            found = healthy(how, given.healthy)
            lines.write(found)
            figures.say(json.dumps(found))
        return
    steps: dict[str, list[int]] = {}
    cases = [f"{how} {part}" for how in given.how for part in given.parts]
    for case in figures.abba(cases, given.rounds):
        found = slow(*case.split())
        lines.write(found)
        figures.say(json.dumps(found))
        if found["right"]:
            steps.setdefault(case, []).append(found["steps"])
    for case in cases:
        right = steps.get(case, [])
        median = f"median {statistics.median(right):.0f}, most {max(right)}" if right else "none"
        figures.say(f"{case:<24}{len(right)} of {given.rounds} right; steps until named: {median}")


if __name__ == "__main__":
    main()
