"""checkpoint: cost of saving and loading, compared with torch, NVRx, torchsnapshot and lm-resiliency.

Each block is one job of one or two gloo ranks that share one state. Blocks of the systems alternate (ABBA)
in one run on one host. Ranks of outlast-replicas hold the same state, as under DDP, and save it once;
with -each, every rank saves it. Within a block each save and load is compared with the raw speed of host and
disk for as many bytes: a memcpy into warm memory, a synced write from warm memory (through
the page cache, and past it with O_DIRECT), a read into warm memory.

stall    time for which the training thread waits: the call, and the fence before the next optimizer step,
         with a second or more of computing between them
total    from the call until the data are on disk, synced, with no other load
load     into live objects, with the page cache of the files dropped before (cold) or not (warm)
memory   maximum that the processes use while saves follow each other, minus their use before
bytes    of one checkpoint, in memory and on disk; and of all buffers

Raw figures are the faster of two: memcpy by torch's threads or by one; through the page cache or not.
The peers need these packages, each with pip install --no-deps beside torch, numpy, psutil, pyyaml and xxhash:
nvidia-resiliency-ext==0.4.1 and its nvidia-ml-py; lm-resiliency==0.2.0; torchsnapshot==0.1.0 with
aiofiles, aiohttp, nest_asyncio, zipp and importlib_metadata==8.5.0.

    python bench/checkpoint.py --out checkpoint.jsonl --nvrx-python P --torchsnapshot-python P \\
        --lm-resiliency-python P
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import checkpoint_memory, checkpoint_table, figures

WORKER = Path(__file__).resolve().parent / "peers" / "checkpoint_worker.py"
OURS = ("outlast", "outlast-lazy", "outlast-blocking")
REPLICAS = ("outlast-replicas-each", "outlast-replicas")  # before and after; of several ranks only
TORCH = ("torch.save", "dcp", "dcp-thread", "dcp-thread-lazy", "dcp-process")
OTHERS = {
    "nvrx-async": "nvrx_python",
    "nvrx-local": "nvrx_python",
    "torchsnapshot": "torchsnapshot_python",
    "lm-resiliency": "lm_resiliency_python",
}
PATIENCE = 600.0


class Lost(Exception):
    """A block did not finish."""


class Job:
    """The ranks of one system.

    Args:
        system: which.
        world: ranks.
        options: of the run.
        folder: empty, on the disk that is measured.
        watch: they wait until their memory is sampled.
    """

    def __init__(
        self, system: str, world: int, options: argparse.Namespace, folder: Path, watch: bool
    ) -> None:
        self.system, self.folder = system, folder
        python = getattr(options, OTHERS[system]) if system in OTHERS else sys.executable
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"system": system, "world": world, "port": port, "rounds": options.rounds}
        shared |= {"gib": options.gib, "folder": folder, "compute": options.compute}
        arguments = [text for key, value in shared.items() for text in (f"--{key}", str(value))]
        source = str(WORKER.parent.parent.parent / "src")
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), source)))
        self._output = (folder / "output.txt").open("w")
        self._processes = [
            subprocess.Popen(
                [str(python), str(WORKER), *arguments, "--rank", str(rank), *(["--watch"] if watch else [])],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "measured.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, kind: str) -> dict[str, Any]:
        """Wait until the job has written a record of a kind; return it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            failed = any(process.poll() not in (None, 0) for process in self._processes)
            for record in self.records():
                if record["record"] == kind:
                    return record
            if failed:
                break
            time.sleep(0.05)
        raise Lost((self.folder / "output.txt").read_text()[-2000:])

    def end(self) -> None:
        """Wait for its end, or kill it, with all processes that it started."""
        deadline = time.monotonic() + PATIENCE / 10
        started = checkpoint_memory.family(self.pids)
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in started & checkpoint_memory.family([process.pid]):
                    subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
                process.wait()
        self._output.close()


def block(system: str, world: int, options: argparse.Namespace, lines: figures.Lines) -> list[dict[str, Any]]:
    """Run one job and return what it measured."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.disk) as name:
        job = Job(system, world, options, Path(name), watch=False)
        try:
            job.wait("over")
        except Lost as lost:
            lines.write({"record": "lost", "system": system, "world": world, "reason": str(lost)})
            figures.say(f"  {system} did not come to its end: {lost}")
        finally:
            job.end()
        found = [{**record, "system": system, "world": world} for record in job.records()]
    for record in found:
        lines.write(record)
    return found


def memory(system: str, options: argparse.Namespace, lines: figures.Lines) -> dict[str, Any] | None:
    """Run one job and return its memory."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.disk) as name:
        job = Job(system, 1, options, Path(name), watch=True)
        try:
            about = job.wait("about")
            watch = checkpoint_memory.Watch(job.pids, Path(about["memory"]) if about["memory"] else None)
            (Path(name) / "go").touch()
            job.wait("over")
            watch.stop()
        except Lost as lost:
            lines.write({"record": "lost", "system": system, "world": 1, "reason": str(lost)})
            figures.say(f"  {system} did not come to its end: {lost}")
            return None
        finally:
            job.end()
    record = {"record": "memory_peak", "system": system, "nbytes": about["nbytes"], "samples": watch.samples}
    found = {**record, "baseline": watch.baseline, "peak": watch.peak}
    lines.write(found)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="of state, over all ranks")
    parser.add_argument("--rounds", type=int, default=3, help="saves and loads a block, besides the first")
    parser.add_argument("--blocks", type=int, default=2, help="of each system")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of computing beside a save")
    parser.add_argument("--systems", nargs="+", default=[*OURS, *REPLICAS, *TORCH, *OTHERS])
    parser.add_argument("--disk", type=Path, help="folder on the disk that is measured; as a rule TMPDIR")
    for option in sorted(set(OTHERS.values())):
        parser.add_argument(f"--{option.replace('_', '-')}", type=Path, help="interpreter that has it")
    parser.add_argument("--no-memory", action="store_true", help="leave the measurement of memory out")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def available(options: argparse.Namespace, lines: figures.Lines) -> list[str]:
    """Return the systems that can be measured, and print why others cannot."""
    found = []
    for system in options.systems:
        python = getattr(options, OTHERS[system]) if system in OTHERS else Path(sys.executable)
        if python is not None and python.exists():
            found.append(system)
            continue
        reason = f"--{OTHERS[system].replace('_', '-')} names no interpreter"
        lines.write({"record": "left out", "system": system, "reason": reason})
        figures.say(f"{system}: left out, {reason}")
    return found


def main() -> int:
    options = parse()
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(0, arguments=" ".join(map(str, vars(options).values()))))
    systems = available(options, lines)
    records: list[dict[str, Any]] = []
    for number in range(options.blocks):
        for world in options.worlds:
            able = [one for one in systems if world > 1 or one not in REPLICAS]
            for system in figures.abba(able, 2)[number % 2 * len(able) :][: len(able)]:
                began = time.monotonic()
                found = block(system, world, options, lines)
                records += found
                totals = [one["total"] for one in found if one["record"] == "save"]
                total = f"{statistics.median(totals):.2f} s" if totals else "none"
                figures.say(
                    f"  block {number + 1}, {world} rank(s), {system}: total {total};"
                    f" took {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f}"
                )
    peaks = []
    if not options.no_memory:
        alone = [one for one in systems if one not in REPLICAS]
        peaks = [peak for one in alone if (peak := memory(one, options, lines)) is not None]
    met = True
    for world in options.worlds:
        met &= checkpoint_table.report([one for one in records if one.get("world") == world], world, lines)
    return 0 if checkpoint_table.report_memory(peaks, lines) and met else 1


if __name__ == "__main__":
    sys.exit(main())
