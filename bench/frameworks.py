"""frameworks: time from kill -9 of a rank to the next step with frameworks, beside torchrun and ft_launcher.

The scripts are a Transformers Trainer, a Lightning Trainer, a loop of megatron-core, and DDP without a
framework; they know no launcher. Each block is one job with several kills; blocks of the systems alternate
(ABBA) in one run on one host. Under outlast the first kill comes when a zygote has imported what the ranks
import ("imported_ahead" in the event log); how long that took, and how long the first start took, is
recorded, too. A second checkout of outlast can take part as "checkout"; one that imports nothing ahead is
killed like torchrun.

--install puts the frameworks, and NVRx with what it needs, into a folder; torch and what the frameworks
need come from the dev extra. What is missing is left out with a line.

    python bench/frameworks.py --folder /tmp/frameworks --install
    python bench/frameworks.py --folder /tmp/frameworks --kills 8 --out frameworks.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import figures

ROOT = Path(__file__).parent.parent
JOBS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "megatron": ("megatron",),
    "ddp": (),
}
PACKAGES = [
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "torchmetrics",
    "lightning-utilities",
]
PACKAGES += ["megatron-core"]
NVRX = ["nvidia-resiliency-ext", "defusedxml", "psutil", "pynvml"]
PATIENCE = 240.0
SETTLED = 25  # steps after a start before the next kill
LOOK = 0.002


class Lost(Exception):
    """The job did not train, or did not recover."""


def _command(system: str, script: str, folder: Path, ranks: int) -> list[str]:
    launch = {
        "torchrun": ["torch.distributed.run", "--standalone"],
        "nvrx": [
            "nvidia_resiliency_ext.fault_tolerance.launcher",
            *("--ignore-missing-fault-tol-cfg", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
        ],
        "checkout": ["outlast", "run", "--run-dir", str(folder / "run")],
        "outlast": ["outlast", "run", "--run-dir", str(folder / "run"), "--warm-imports"],
    }[system]
    job = [str(Path(__file__).parent / "peers" / f"job_{script}.py"), str(folder)]
    return [sys.executable, "-m", *launch, f"--nproc-per-node={ranks}", "--max-restarts=1000", *job]


class Job:
    """A script under a launcher, in a folder of its own."""

    def __init__(self, system: str, script: str, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.ranks = folder, options.ranks
        root = options.checkout if system == "checkout" else ROOT
        paths = [root / "src", options.folder, *([options.folder / "nvrx"] if system == "nvrx" else [])]
        self.began = time.monotonic()
        with open(folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                _command(system, script, folder, options.ranks),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    "OMP_NUM_THREADS": "1",
                    # else torchrun uses keys of the last start again and burns restarts (pytorch#135712)
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                },
                start_new_session=True,
            )

    def lines(self) -> list[list[tuple[int, int, float]]]:
        """Return pid, step and time of each step, by rank."""
        found = []
        for rank in range(self.ranks):
            with contextlib.suppress(OSError):
                whole = (self.folder / f"trace-{rank}").read_text().rpartition("\n")[0].splitlines()
                found.append([(int(pid), int(step), float(at)) for pid, step, at in map(str.split, whole)])
        return found if len(found) == self.ranks else [[] for _ in range(self.ranks)]

    def wait(self, condition: Any, what: str) -> Any:
        """Return the first true answer of a condition."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            if answer := condition():
                return answer
            time.sleep(LOOK)
        raise Lost(f"waited for {what}: {(self.folder / 'output.txt').read_text()[-2000:]}")

    def settled(self) -> set[int]:
        """Return the pids of ranks that have each made some steps."""

        def look() -> set[int]:
            newest = [lines[-SETTLED:] for lines in self.lines()]
            good = all(len(lines) == SETTLED and len({pid for pid, _, _ in lines}) == 1 for lines in newest)
            return {lines[-1][0] for lines in newest} if good else set()

        found: set[int] = self.wait(look, "steps")
        return found

    def imported_ahead(self) -> float:
        """Return the seconds after the start at which a zygote had imported what the ranks import."""
        events = self.folder / "run" / "events.jsonl"
        self.wait(lambda: '"kind":"imported_ahead"' in events.read_text(), "imports ahead")
        return time.monotonic() - self.began

    def kill(self) -> float:
        """Kill a rank; return the seconds until every rank has completed a step."""
        pids = self.settled()
        killed = time.monotonic()
        os.kill(sorted(pids)[-1], signal.SIGKILL)

        def back() -> float:
            first = [
                next((at for pid, _, at in lines if pid not in pids and at > killed), 0.0)
                for lines in self.lines()
            ]
            return max(first) if all(first) else 0.0

        came: float = self.wait(back, "a step after the kill")
        return came - killed

    def stop(self) -> None:
        """End the launcher, and what it and its ranks leave behind: they all work in the job's folder."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(self.folder):
                    os.kill(int(entry), signal.SIGKILL)


def block(
    system: str, script: str, options: argparse.Namespace, lines: figures.Lines
) -> tuple[float, list[float]]:
    """Run one job with several kills; return the seconds to its first step, and those of each recovery."""
    kills: list[float] = []
    first = float("nan")
    with tempfile.TemporaryDirectory(prefix=f"frameworks-{system}-", ignore_cleanup_errors=True) as folder:
        job = Job(system, script, Path(folder), options)
        try:
            job.settled()
            first = max(found[0][2] for found in job.lines()) - job.began
            ahead = job.imported_ahead() if system == "outlast" and JOBS[script] else None
            lines.write(
                {"record": "start", "script": script, "system": system, "first": first, "ahead": ahead}
            )
            for _ in range(options.kills_per_block):
                kills.append(job.kill())
                record = {"record": "kill", "script": script, "system": system, "seconds": kills[-1]}
                lines.write({**record, "loadavg": os.getloadavg()[0]})
                figures.say(f"  {script}, {system}: first step {kills[-1]:.3f} s after the kill")
        except Lost as lost:
            lines.write({"record": "lost", "script": script, "system": system, "reason": str(lost)})
            figures.say(f"  {script}, {system}: {lost}")
        finally:
            job.stop()
    return first, kills


def report(
    script: str, found: dict[str, list[float]], starts: dict[str, list[float]], lines: figures.Lines
) -> None:
    """Print and write medians, spreads and ratios."""
    ours = figures.summary(found.get("outlast", []))
    for system, kills in found.items():
        total, start = figures.summary(kills), figures.summary(starts[system])
        if not total["n"]:
            figures.say(f"{script}, {system}: no recovery was measured")
            continue
        ratio = total["median"] / ours["median"] if ours["n"] else float("nan")
        record = {"record": "summary", "script": script, "system": system, "to_outlast": ratio}
        lines.write({**record, "seconds": total, "first_start": start})
        figures.say(
            f"{script:<13}{system:<10} n {total['n']}  median {total['median']:.3f} s"
            f"  min {total['min']:.3f} s  max {total['max']:.3f} s  {ratio:.1f} x outlast;"
            f" first start {start['median']:.1f} s"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the frameworks are installed")
    parser.add_argument("--install", action="store_true", help="install them there with pip, and end")
    parser.add_argument("--scripts", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--systems", nargs="+", choices=["outlast", "torchrun", "checkout", "nvrx"])
    parser.add_argument("--kills", type=int, default=8, help="per script and system")
    parser.add_argument("--kills-per-block", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--checkout", type=Path, help="of outlast, for one more system")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.install:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        for folder, packages in ((options.folder, PACKAGES), (options.folder / "nvrx", NVRX)):
            subprocess.run([*pip, "--target", str(folder), *packages], check=True)
        return
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(0, arguments=" ".join(map(str, vars(options).values()))))
    systems = ["outlast", "torchrun", *(["checkout"] if options.checkout else [])]
    if (options.folder / "nvrx").is_dir():
        systems.append("nvrx")
    else:
        lines.write({"record": "left out", "system": "nvrx", "reason": "not installed"})
        figures.say(f"nvrx is not in {options.folder} (--install); left out")
    systems = [name for name in systems if name in (options.systems or systems)]
    for script in options.scripts:
        missing = [name for name in JOBS[script] if not (options.folder / name).is_dir()]
        if missing:
            figures.say(f"{script}: {', '.join(missing)} is not in {options.folder} (--install); left out")
            lines.write({"record": "left out", "script": script, "reason": f"not installed: {missing}"})
            continue
        kills: dict[str, list[float]] = {name: [] for name in systems}
        starts: dict[str, list[float]] = {name: [] for name in systems}
        for system in figures.abba(systems, -(-options.kills // options.kills_per_block)):
            first, found = block(system, script, options, lines)
            kills[system] += found
            starts[system].append(first)
        report(script, kills, starts, lines)


if __name__ == "__main__":
    main()
