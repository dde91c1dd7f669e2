"""trainers: what a step of a healthy job costs in Transformers' and Lightning's Trainer, by level of use.

One job a round and way, ways in turn (ABBA) in one run on one host: the Trainer as it is under torchrun
("plain"); under `outlast run` with our callback, which reports steps ("callback"); with the callback and our
storage ("storage": OutlastTrainer, OutlastCheckpointIO). Every way saves a checkpoint each --save steps. A
round's figures are the median of rank 0's steps and the mean, which has the saves in it; ways are compared
with plain within a round.

The frameworks come from a folder that bench/frameworks.py --install has filled.

    python bench/trainers.py --folder /tmp/frameworks --rounds 12 --out trainers.jsonl
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
from pathlib import Path

from overhead import MILLI, quartiles
from peers import figures

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).resolve().parent / "peers"
FRAMEWORKS = ("transformers", "lightning")
WAYS = ("plain", "callback", "storage")
PATIENCE = 600.0


def launch(framework: str, way: str, options: argparse.Namespace) -> list[float]:
    """Run one job; return the seconds of rank 0's steps, without those of the warm-up."""
    with tempfile.TemporaryDirectory(prefix="trainers-", ignore_cleanup_errors=True) as folder:
        launcher = ["torch.distributed.run", "--standalone"]
        if way != "plain":
            launcher = ["outlast", "run", "--run-dir", str(Path(folder) / "run")]
        job = [str(PEERS / f"trainer_{framework}.py"), folder, way]
        job += [str(options.steps), str(options.length), str(options.save)]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, f"--nproc-per-node={options.ranks}", *job],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{options.folder}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        out = Path(folder) / "seconds.json"
        if done.returncode or not out.exists():
            raise SystemExit(f"{framework}, {way}, measured nothing:\n{done.stdout[-3000:]}")
        seconds: list[float] = json.loads(out.read_text())
        return seconds[options.steps // 10 :]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the frameworks are installed")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--length", type=float, default=0.06, help="seconds that a step sleeps beside its work"
    )
    parser.add_argument("--steps", type=int, default=150, help="of a job; a tenth of them is warm-up")
    parser.add_argument("--save", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each way")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def measure(framework: str, options: argparse.Namespace, lines: figures.Lines) -> None:
    """Measure all ways of a framework, and print and write what they come to."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for way in figures.abba(WAYS, options.rounds):
        load = os.getloadavg()[0]
        seconds = launch(framework, way, options)
        figure = {"median": statistics.median(seconds), "mean": statistics.fmean(seconds)}
        for name, value in figure.items():
            found[way][name].append(value)
        record = {"record": "round", "framework": framework, "way": way, "ranks": options.ranks}
        lines.write({**record, "seconds": figure, "loadavg": load})
    for way in WAYS:
        shown = f"{framework:<14}{way:<10}"
        record = {"record": "cost", "framework": framework, "way": way, "ranks": options.ranks}
        for name in ("median", "mean"):
            own, plain = found[way][name], found["plain"][name]
            step = quartiles([MILLI * one for one in own])
            share = quartiles([100 * one / other for one, other in zip(own, plain, strict=True)])
            record |= {f"{name}_milliseconds": step, f"{name}_percent_of_plain": share}
            shown += f"{step['median']:>10.3f}{share['median']:>9.2f}{share['q1']:>8.2f}{share['q3']:>8.2f}"
        lines.write(record)
        figures.say(shown)


def main() -> None:
    options = parse()
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    columns = "".join(f"{name + ' ms':>10}{'% plain':>9}{'q1':>8}{'q3':>8}" for name in ("median", "mean"))
    figures.say(f"{'framework':<14}{'way':<10}{columns}")
    for framework in options.frameworks:
        if not (options.folder / framework).is_dir():
            raise SystemExit(f"{framework} is not in {options.folder}; see bench/frameworks.py --install")
        measure(framework, options, lines)


if __name__ == "__main__":
    main()
