"""large: a rank with several GiB of state: steps, saves, a kill and the restore, beside plain torch and DCP.

One rank trains 60 steps with one thread and saves each ten steps, to disk; after step 35 it kills itself.
Systems take turns (ABBA) on one host: "plain" (torchrun, no save, no kill), "dcp" (torchrun, DCP's
async_save), "eager" and "lazy" (outlast run, a session).

period   from the begin of a step to that of the next: median, 95th percentile, worst; and of the first five
stall    from the end of a step to the begin of the next: training stands still. The longest between a step
         after which a save is due and the next such step, since a save may be put off
recovery from SIGKILL to the end of the next completed step
restore  into live objects, in GB/s, beside a memcpy of as much and a read of a file that no cache has
memory   the most that the job's processes held, shared memory once; sampled four times a second

The goals: the 95th percentile within 10 % of plain's plus one copy at memory speed; the first save stalls no
longer than the last; a restore at 0.7 of the slower of read and memcpy.

    python bench/large.py --gib 4 --out large.jsonl
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from peers import figures
from peers.checkpoint_memory import blocks, family

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "bench" / "peers" / "large_job.py"
SYSTEMS = ("plain", "dcp", "eager", "lazy")
PATIENCE = 3600.0
SAMPLES = 0.25  # seconds
FIRST = 5  # steps whose periods are listed
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK = 16 << 20
Line = dict[str, Any]


def copied(nbytes: int) -> float:
    """Return the GB/s of a memcpy by one thread into memory that has its pages."""
    source, target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (target, source)]
    ctypes.memset(addresses[1], 1, nbytes)
    ctypes.memset(addresses[0], 1, nbytes)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        ctypes.memmove(addresses[0], addresses[1], nbytes)
        took.append(time.perf_counter() - began)
    return nbytes / min(took) / 1e9


def read(folder: Path, nbytes: int) -> float:
    """Return the GB/s of reading a file of which the page cache has nothing."""
    path, block = folder / "raw", bytearray(BLOCK)
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // BLOCK):
            file.write(os.urandom(64) * (BLOCK // 64))
        os.fsync(file.fileno())
    took = []
    for _ in range(3):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.readinto(block):
                pass
            took.append(time.perf_counter() - began)
    path.unlink()
    return nbytes / min(took) / 1e9


class Memory:
    """The most that a process and its descendants hold, and the files of outlast's on /dev/shm."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLES):
            own = 0
            for pid in family([self._pid]):
                try:
                    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                except (OSError, ValueError):
                    continue
                own += (resident - shared) * PAGE
            held = sum(blocks(one) for one in Path("/dev/shm").glob("outlast-*"))
            self.peak = max(self.peak, own + held)

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak


def run(system: str, options: argparse.Namespace) -> Line:
    """Run one job, and return what its trace tells."""
    with tempfile.TemporaryDirectory(prefix="large-", dir=options.disk) as name:
        folder = Path(name)
        of_outlast = [sys.executable, "-m", "outlast", "run", "--run-dir", str(folder / "run")]
        of_torch = [sys.executable, "-m", "torch.distributed.run"]
        launch = of_outlast if system in ("eager", "lazy") else of_torch
        values = {"system": system, "folder": folder, "gib": options.gib, "steps": options.steps}
        values |= {"every": options.every, "die": options.die}
        words = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
        )
        load = os.getloadavg()[0]
        with (
            (folder / "output.txt").open("w") as output,
            subprocess.Popen(
                [*launch, "--nproc-per-node", "1", "--max-restarts", "3", str(JOB), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as job,
        ):
            memory = Memory(job.pid)
            code = job.wait(PATIENCE)
            peak = memory.stop()
        if code:
            raise SystemExit(f"{system} ended with {code}: {(folder / 'output.txt').read_text()[-2000:]}")
        trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return {"record": "run", "system": system, "peak_bytes": peak, "load": load, **told(trace, options)}


def told(trace: list[Line], options: argparse.Namespace) -> Line:
    """Return the figures of a trace."""
    pids = list(dict.fromkeys(line["pid"] for line in trace))
    periods, found = [], Line()
    stalls: dict[int, float] = {}
    for pid in pids:
        mine = [line for line in trace if line["pid"] == pid]
        steps = [line for line in mine if line["what"] == "step"]
        ends = [*steps[1:], *(line for line in mine if line["what"] == "over")]
        for one, following in zip(steps, ends, strict=False):
            begins = following.get("began", following["clock"])
            periods.append(begins - one["began"])
            due = one["step"] // options.every * options.every
            stalls[due] = max(stalls.get(due, 0.0), begins - one["clock"])
    if len(pids) > 1:
        killed = max(line["clock"] for line in trace if line["pid"] == pids[0])
        second = {line["what"]: line for line in reversed([one for one in trace if one["pid"] == pids[1]])}
        found["recovery_s"] = second["step"]["clock"] - killed
        found["restore_s"] = second["restored"]["clock"] - second["built"]["clock"]
        found["steps_lost"] = options.die - second["step"]["step"] + 1
    return {"periods_s": periods, "stalls_s": stalls, **found}


def shown(system: str, runs: list[Line], nbytes: int) -> Line:
    """Return the summary of the runs of a system."""
    periods = [one for each in runs for one in each["periods_s"]]
    ordered = sorted(periods)
    found: Line = {
        "record": "summary",
        "system": system,
        "runs": len(runs),
        "median_s": statistics.median(periods),
        "p95_s": ordered[int(0.95 * (len(ordered) - 1))],
        "worst_s": ordered[-1],
        "first_steps_s": [max(each["periods_s"][at] for each in runs) for at in range(FIRST)],
        "stalls_s": {
            step: max(each["stalls_s"].get(step, 0.0) for each in runs) for step in runs[0]["stalls_s"]
        },
        "peak_GiB": max(each["peak_bytes"] for each in runs) / 2**30,
    }
    if all("recovery_s" in each for each in runs):
        found["recovery_s"] = statistics.median(each["recovery_s"] for each in runs)
        found["restore_GB_s"] = nbytes / statistics.median(each["restore_s"] for each in runs) / 1e9
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="of state: parameters and Adam's moments")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--die", type=int, default=35, help="step after which the rank kills itself")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--disk", type=Path, help="folder on the disk that is measured; as a rule TMPDIR")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    nbytes, lines = int(options.gib * 2**30), figures.Lines(options.out)
    with tempfile.TemporaryDirectory(prefix="large-", dir=options.disk) as name:
        raw: Line = {"record": "raw", "memcpy_GB_s": copied(nbytes), "read_GB_s": read(Path(name), nbytes)}
    for line in ({**figures.surroundings(0), "gib": options.gib}, raw):
        lines.write(line)
        figures.say(json.dumps(line))
    found: dict[str, list[Line]] = {}
    for system in figures.abba(options.systems, options.rounds):
        one = run(system, options)
        lines.write(one)
        found.setdefault(system, []).append(one)
    for system, runs in found.items():
        line = shown(system, runs, nbytes)
        lines.write(line)
        figures.say(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
