"""overhead: what a step of a healthy job costs under each way of using outlast, beside plain torchrun.

One job a round and system, systems in turn (ABBA) in one run on one host: torchrun with a plain script,
`outlast run` with the same script, with a session and its defaults, with a guard. A round's figure is the
median of rank 0's steps; systems are compared with the first within a round. "watched" is a session
with stragglers, simulated telemetry each 10 s and risks that lead to saves; "unwatched" has none of these.

    python bench/overhead.py --ranks 2 4 --lengths 0.02 0.06 --rounds 12 --out overhead.jsonl
    python bench/overhead.py --ranks 4 --systems unwatched watched --rounds 12
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import figures

ROOT = Path(__file__).resolve().parent.parent
JOB = Path(__file__).resolve().parent / "peers" / "overhead_job.py"
PATIENCE = 600.0
MILLI = 1e3
KINDS = {"torchrun": "plain", "outlast, plain": "plain", "session": "session", "guard": "guard"}
CONFIGS = {
    "unwatched": "[stragglers]\nenabled = false\n[health]\ntelemetry = 'off'\n",
    "watched": "[health]\ntelemetry = 'simulate:healthy'\nmode = 'act'\n",
}
SYSTEMS = {**KINDS, **dict.fromkeys(CONFIGS, "session")}
Found = list[dict[str, Any]]


def launch(system: str, ranks: int, options: argparse.Namespace) -> Found:
    """Run one job; return seconds and collectives of its steps, for each length."""
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "found.json"
        place = [f"--nproc-per-node={ranks}"]
        if system == "torchrun":
            command = ["-m", "torch.distributed.run", *place, "--master-port=0"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        else:
            config = Path(folder) / "outlast.toml"
            config.write_text(CONFIGS.get(system, ""))
            command = ["-m", "outlast", "run", *place, "--run-dir", str(Path(folder) / "run")]
            command += ["--config", str(config)]
        lengths = map(str, options.lengths)
        done = subprocess.run(
            [sys.executable, *command, str(JOB), str(out), SYSTEMS[system], str(options.steps), *lengths],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if not out.exists():
            raise SystemExit(f"{system} with {ranks} ranks measured nothing:\n{done.stdout[-2000:]}")
        found: Found = json.loads(out.read_text())
        return found


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return count, median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"n": len(values), "q1": low, "median": middle, "q3": high}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=float, nargs="+", default=[0.02, 0.06], help="of a step, seconds")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each system")
    parser.add_argument("--steps", type=int, default=150, help="of each length in a job")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(KINDS))
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    figures.say(
        f"{'ranks':>5} {'step':>6}  {'system':<15}{'ms/step':>9}{'q1':>9}{'q3':>9}"
        f"{'% of ' + options.systems[0]:>15}{'q1':>8}{'q3':>8}{'collectives':>13}"
    )
    for ranks in options.ranks:
        medians: dict[tuple[float, str], list[float]] = defaultdict(list)
        counts: dict[tuple[float, str], list[float]] = defaultdict(list)
        for system in figures.abba(options.systems, options.rounds):
            load = os.getloadavg()[0]
            for found in launch(system, ranks, options):
                length, seconds = found["length"], statistics.median(found["seconds"])
                medians[length, system].append(seconds)
                counts[length, system].append(found["collectives"])
                record = {"record": "round", "system": system, "ranks": ranks, "step_seconds": length}
                record |= {"median_seconds": seconds, "collectives": found["collectives"]}
                lines.write({**record, "loadavg": load})
        for length in options.lengths:
            for system in options.systems:
                base = medians[length, options.systems[0]]
                show(lines, (ranks, length, system), medians[length, system], base, counts[length, system])


def show(
    lines: figures.Lines,
    at: tuple[int, float, str],
    own: list[float],
    base: list[float],
    counts: list[float],
) -> None:
    """Print and write what all rounds of a system come to, also as a share of the first system's."""
    ranks, length, system = at
    step, share = (
        quartiles([MILLI * one for one in own]),
        quartiles([100 * one / other for one, other in zip(own, base, strict=True)]),
    )
    collectives = statistics.median(counts)
    record = {"record": "cost", "system": system, "ranks": ranks, "step_seconds": length}
    lines.write({**record, "milliseconds": step, "percent_of_first": share, "collectives": collectives})
    figures.say(
        f"{ranks:>5} {length:>6.3f}  {system:<15}{step['median']:>9.3f}{step['q1']:>9.3f}{step['q3']:>9.3f}"
        f"{share['median']:>15.2f}{share['q1']:>8.2f}{share['q3']:>8.2f}{collectives:>13.2f}"
    )


if __name__ == "__main__":
    main()
