"""double_kills: two processes of a job end within 50 ms; are the final weights those of a calm run?

A job of two ranks saves every step in memory and every tenth on disk. The seed draws two of its processes (a
rank, the zygote, a standby or store host, the cleaner, the checkpoint writer, the launcher), the step after
which they end, how (SIGKILL, or SIGSTOP of a helper, or SIGTERM of the launcher), and the pause between them.
A launcher that was ended is started again with the same command, up to four times. Required: the job ends
with 0, the weights are bitwise those of a job without kills, at most two steps are lost by a restart, and no
process and no runtime folder is left. The draws repeat with the seed; exact moments do not. Prints a JSON
line for each job; exits with 1 if anything was wrong.

    python bench/double_kills.py --tries 60 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outlast.ipc.processes import children_of, state_of, tree_of

STEPS = 40
WITHIN = 0.05  # seconds between the two
LIMIT = 240.0  # seconds for a launch
LAUNCHES = 5
SCRIPT = """
import hashlib, os, time
from pathlib import Path
import torch, torch.distributed as dist, outlast

HERE = Path(__file__).parent
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters())
options = outlast.CheckpointOptions(non_persistent_save_interval=1)
with outlast.start(save_interval=10, checkpoints=options) as session:
    begun = session.restore(model=model, optimizer=optimizer)
    for step in session.steps(STEPS):
        torch.manual_seed(step)
        model(torch.randn(8, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if dist.get_rank() == 0:
            with open(HERE / "steps", "a") as file:
                file.write(f"{begun} {step + 1}\\n")
if dist.get_rank() == 0:
    state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    (HERE / "weights").write_text(hashlib.sha256(state).hexdigest())
dist.destroy_process_group()
"""
TARGETS = ("rank 0", "rank 1", "zygote", "fork", "cleaner", "writer", "launcher")
HELPERS = ("zygote", "fork", "cleaner", "writer")


class Job:
    """One job in a folder of its own.

    Args:
        folder: for its files.
        steps: of the training.
        width: of its model; its state has 12 * width ** 2 bytes.
        options: of the launcher.
    """

    def __init__(
        self, folder: Path, steps: int = STEPS, width: int = 64, options: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT.replace("STEPS", str(steps)).replace("WIDTH", str(width)))
        self.options = options
        self.run = folder / "run"
        self.log = self.run / "events.jsonl"  # where this process reads it
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launchers: list[int] = []
        self.seen: set[int] = set()

    def start(self) -> None:
        command = [sys.executable, "-m", "outlast", "run", "--nproc-per-node=2", "--run-dir", str(self.run)]
        with open(self.folder / "console", "ab") as file:
            self.launcher = subprocess.Popen(
                [*command, *self.options, str(self.script)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.launchers.append(self.launcher.pid)

    def steps(self) -> list[tuple[int, int]]:
        """Return the steps as they were made: from which each start went on, and which it was."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            lines = (self.folder / "steps").read_text().splitlines()
            return [(int(begun), int(step)) for begun, step in map(str.split, lines)]
        return []

    def lost(self) -> int:
        """Return how many steps a start has repeated at most."""
        pairs = itertools.pairwise(self.steps())
        return max([made - begun for (before, made), (begun, _) in pairs if begun != before], default=0)

    def records(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def find(self, what: str) -> int:
        """Return the pid of a process of the job; 0: there is none now."""
        assert self.launcher is not None
        agent = self.launcher.pid
        self.seen |= tree_of(agent)
        if what == "launcher":
            return agent
        started = [one["pids"] for one in self.records() if one["kind"] == "generation_started"]
        ranks = started[-1] if started else []
        if what.startswith("rank"):
            return ranks[int(what[-1])] if ranks else 0
        found = {}
        for pid in children_of(agent):
            words = _words(pid)
            if "outlast.checkpoint.writer" in words:
                found["writer"] = pid
            elif "telemetry.collector" in words:
                found["collector"] = pid
            elif "zygote.py" in words and pid not in ranks:
                leads = _session(pid) == pid
                kind = "zygote" if leads and "zygote" not in found else "store host" if leads else "standby"
                found[kind] = pid
                if kind != "zygote":
                    found["fork"] = pid
            elif words == _words(agent):
                found["cleaner"] = pid
        return int(found.get(what, 0))

    def left(self) -> list[str]:
        """Return what is there although the job has ended."""
        found = [f"process {pid}: {_words(pid)[:80]}" for pid in self.seen if _of(self.folder, pid)]
        for agent in self.launchers:
            found += [str(one) for one in Path("/dev/shm").glob(f"outlast-{agent}-*")]
        return found


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def _of(folder: Path, pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X") and str(folder) in _words(pid)


def strike(job: Job, draw: random.Random) -> list[str]:
    """End two processes; return which, and how."""
    first, second = draw.sample(TARGETS, 2)
    pause, told = draw.uniform(0.0, WITHIN), []
    pids = {what: job.find(what) for what in (first, second)}
    for what in (first, second):
        number = signal.SIGKILL
        if what in HELPERS and draw.random() < 0.25:
            number = signal.SIGSTOP
        elif what == "launcher" and draw.random() < 0.4:
            number = signal.SIGTERM
        if pids[what]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[what], number)
                told.append(f"{number.name} to {what}")
        time.sleep(pause if what == first else 0.0)
    return told


def attempt(number: int, seed: int, calm: str, keep: bool) -> dict[str, Any]:
    """Run one job to its end, with two processes ended in mid-run."""
    draw = random.Random(f"{seed}:{number}")
    folder = Path(tempfile.mkdtemp(prefix="outlast-double-"))
    job = Job(folder)
    told: list[str] = []
    codes: list[int] = []
    at, began = draw.choice((0, *range(1, STEPS - 2))), time.monotonic()
    wrong: list[str] = []
    for launch in range(LAUNCHES):
        job.start()
        assert job.launcher is not None
        deadline = time.monotonic() + LIMIT
        while job.launcher.poll() is None and time.monotonic() < deadline:
            if not told and launch == 0 and len(job.steps()) >= at and job.find("rank 1"):
                if not at:
                    time.sleep(draw.uniform(0.0, 1.0))
                told = strike(job, draw)
            time.sleep(0.01)
        if job.launcher.poll() is None:
            wrong.append(f"the launcher did not end within {LIMIT:.0f} s")
            job.launcher.kill()
        codes.append(job.launcher.wait())
        if codes[-1] == 0 or wrong:
            break
    if codes[-1] != 0:
        wrong.append(f"ended with {codes}")
    weights = folder / "weights"
    if weights.exists() and calm and weights.read_text() != calm:
        wrong.append("other weights than those of the calm run")
    lost = job.lost()
    if lost > 2:
        wrong.append(f"{lost} steps lost")
    deadline = time.monotonic() + 20.0
    while (left := job.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    wrong += left
    line = {
        "try": number,
        "step": at,
        "ended": told,
        "codes": codes,
        "lost": lost,
        "seconds": round(time.monotonic() - began, 1),
        "weights": weights.read_text() if weights.exists() else "",
        "wrong": wrong,
    }
    if wrong or keep:
        line["folder"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return line


def calm_run(steps: int = STEPS, width: int = 64) -> str:
    """Return the digest of the weights of a job in which nothing ends."""
    job = Job(Path(tempfile.mkdtemp(prefix="outlast-double-")), steps, width)
    job.start()
    assert job.launcher is not None
    if job.launcher.wait(LIMIT):
        raise SystemExit((job.folder / "console").read_text())
    found = (job.folder / "weights").read_text()
    shutil.rmtree(job.folder)
    return found


def main() -> int:
    """Run the jobs that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=60, help="jobs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=2, help="jobs at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all jobs")
    options = parser.parse_args()
    calm, bad = calm_run(), 0
    numbers = range(options.first, options.first + options.tries)
    with ThreadPoolExecutor(options.side_by_side) as pool:
        for line in pool.map(lambda one: attempt(one, options.seed, calm, options.keep), numbers):
            bad += bool(line["wrong"])
            line.pop("weights")
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    sys.stderr.write(f"{len(numbers)} jobs, {bad} wrong\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
