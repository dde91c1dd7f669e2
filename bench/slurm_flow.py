"""slurm_flow: the same job and time limit under KempnerForge's documented Slurm flow and under ours.

Theirs is the batch script of their preemptible example (``--signal=B:SIGTERM@LEAD``, ``--requeue``,
``set -euo pipefail``, ``srun --kill-on-bad-exit=1`` in the foreground) with their handler's pattern; ours
is what ``outlast slurm submit`` writes. Uses a real Slurm of two virtual nodes on this machine; needs root.

    python bench/slurm_flow.py --save-seconds 25 --lead 60 --out slurm_flow.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import figures

from tests.support.slurm_cluster import SlurmCluster, missing

JOB = Path(__file__).resolve().parent / "peers" / "slurm_flow_job.py"
PATIENCE = 420.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
THEIRS = """#!/bin/bash
#SBATCH --job-name=theirs
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --exclusive
#SBATCH --time=2
#SBATCH --output={folder}/%j.out
#SBATCH --signal=B:SIGTERM@{lead}
#SBATCH --requeue

set -euo pipefail

srun --kill-on-bad-exit=1 \\
    {python} {job} theirs {folder} {seconds}
"""


def theirs(cluster: SlurmCluster, folder: Path, options: argparse.Namespace) -> str:
    path = folder / "theirs.sbatch"
    path.write_text(
        THEIRS.format(
            folder=folder,
            lead=options.lead,
            python=sys.executable,
            job=JOB,
            seconds=options.save_seconds,
        )
    )
    return cluster.ask("sbatch", "--parsable", str(path)).strip()


def ours(cluster: SlurmCluster, folder: Path, options: argparse.Namespace) -> str:
    submit = (sys.executable, "-m", "outlast", "slurm", "submit", f"--lead={options.lead}", "--dry-run")
    run = (
        "--run-dir",
        str(folder / "run"),
        "--nproc-per-node=2",
        f"--ft-workers-stop-timeout={options.lead - 5}",
    )
    text = cluster.ask(
        *submit, "--sbatch=exclusive", "--", *run, str(JOB), "ours", str(folder), str(options.save_seconds)
    )
    path = folder / "ours.sbatch"
    (folder / "run").mkdir()
    path.write_text(text.replace("#SBATCH --signal", "#SBATCH --time=2\n#SBATCH --signal"))
    return cluster.ask("sbatch", "--parsable", str(path)).strip()


def watch(cluster: SlurmCluster, job: str, folder: Path) -> dict[str, Any]:
    """Wait until the job ends, or has resumed and ends, and return the result."""
    end = time.monotonic() + PATIENCE
    while (fields := cluster.job(job))["JobState"] not in OVER and time.monotonic() < end:
        time.sleep(1)
    told = [json.loads(line) for line in (folder / "steps-0.jsonl").read_text().splitlines()]

    def newest(name: str) -> int:
        return max((one[name] for one in told if name in one), default=0)

    began = [one["restored"] for one in told if "restored" in one]
    first = told[: next((i for i, one in enumerate(told) if one.get("restored", 0)), len(told))]
    return {
        "state": fields["JobState"],
        "exit_code": fields["ExitCode"],
        "restarts": int(fields["Restarts"]),
        "began_to_save": newest("saving"),
        "trained": max((one["step"] for one in first if "step" in one), default=0),
        "saved": newest("saved"),
        "resumed_at": began[-1] if len(began) > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save-seconds", type=float, default=25.0)
    parser.add_argument("--lead", type=int, default=60, help="seconds from the signal to the time limit")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    if missing():
        sys.exit(f"slurm_flow: {missing()}")
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=0))
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "slurm").mkdir()
        with SlurmCluster(Path(root) / "slurm") as cluster:
            figures.say(cluster.ask("sinfo", "--version").strip())
            for name, submit in (("theirs", theirs), ("ours", ours)):
                folder = Path(root) / name
                folder.mkdir()
                found = watch(cluster, submit(cluster, folder, options), folder)
                lines.write({"record": "job", "flow": name, **found})
                figures.say(f"{name:<8}" + "  ".join(f"{key}={value}" for key, value in found.items()))
                for path in sorted([*folder.glob("*.out"), *folder.glob("run/slurm-*.out")]):
                    lines.write({"record": "output", "flow": name, "text": path.read_text(errors="replace")})


if __name__ == "__main__":
    main()
