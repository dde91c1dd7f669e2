"""dashboard: what it takes to show a large run, and what the run notices of it.

Writes the event log of a simulated run: 4,096 ranks, 10,000 incidents, 1 GB. Measured are the time until
`outlast dashboard` serves it, its memory, an answer, the first paint in a headless Chromium (left out where
there is none), the time from an appended record to its appearance in the page, and the processor time of a
second with and without news. Then a job of one rank runs, and the processor time of its agent is compared
with and without a dashboard that watches it, in turns.

    python bench/dashboard.py --gib 1 --ranks 4096 --out dashboard.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import figures

from outlast.observe.policy import codec
from outlast.recovery.policy import events

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.support import browser  # noqa: E402 - found along the path set above

BEGAN = 1_795_000_000.0
PATIENCE = 900.0
SECTION = "document.getElementById('now').innerText"


class Story:
    """The records of a simulated run, a minute of training between two incidents.

    Args:
        ranks: world size.
        seed: of all draws.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks, self.step, self.seconds, self.generation = ranks, 0, 0.0, 1
        self._dice = random.Random(seed)

    def head(self) -> dict[str, Any]:
        return {"time": BEGAN + self.seconds, "clock": self.seconds, "generation": self.generation}

    def begin(self) -> list[events.Record]:
        command = ("train.py", "--steps", "1000000000")
        started = events.RunStarted(
            **self.head(),
            run_id="bench",
            node="n0",
            pid=1,
            boot_id="bench",
            command=command,
            world_size=self.ranks,
            reason="a new run",
        )
        return [started, *self._start()]

    def _start(self) -> list[events.Record]:
        pids = tuple(range(1000, 1000 + self.ranks))
        ranks = events.GenerationStarted(
            **self.head(), world_size=self.ranks, pids=pids, start="zygote", reason=""
        )
        self.seconds += 2
        marks = {"spawned": self.seconds - 2, "first_step": self.seconds}
        return [ranks, events.FirstStep(**self.head(), step=self.step + 1, marks=marks)]

    def minutes(self, progress: int) -> list[events.Record]:
        """Return a minute in which progress is written so often, with the step times of all ranks."""
        found: list[events.Record] = []
        for _ in range(progress):
            self.step += 1
            self.seconds += 60 / progress
            found.append(events.Progress(**self.head(), step=self.step))
        ratios = {str(rank): round(self._dice.uniform(0.97, 1.1), 3) for rank in range(self.ranks)}
        found.append(events.StepTimes(**self.head(), step=self.step, seconds=0.5, ratios=ratios))
        name = f"step-{self.step:09}.g{self.generation}"
        saved = events.Saved(
            **self.head(), step=self.step, checkpoint=name, nbytes=1 << 40, seconds=0.1, reason="due"
        )
        return [*found, saved]

    def incident(self) -> list[events.Record]:
        rank = self._dice.randrange(self.ranks)
        seen = events.FaultSeen(
            **self.head(),
            fault="crash",
            node=f"n{rank // 8}",
            rank=rank,
            step=self.step,
            since=self.seconds,
            reason=f"rank {rank} was terminated by signal 9 (SIGKILL)",
            signature=f"signal 9 of {rank}",
        )
        taken = events.ActionTaken(
            **self.head(),
            action="restart-in-job",
            next_generation=self.generation + 1,
            state="newest",
            reason="restart 1 of 3",
        )
        self.generation += 1
        return [seen, taken, *self._start()]


def write(path: Path, gib: float, incidents: int, story: Story) -> None:
    """Write a log of about that size."""
    lines = "".join(
        codec.encode(one) + "\n" for one in [*story.begin(), *story.minutes(10), *story.incident()]
    )
    progress = max(10, int((gib * 2**30 / incidents - len(lines)) / 100))
    with path.open("w") as file:
        for record in story.begin():
            file.write(codec.encode(record) + "\n")
        for _ in range(incidents):
            for record in (*story.minutes(progress), *story.incident()):
                file.write(codec.encode(record) + "\n")
        for record in story.minutes(progress):
            file.write(codec.encode(record) + "\n")


@dataclass(frozen=True)
class Dashboard:
    """A dashboard in a process of its own."""

    pid: int
    address: str
    seconds: float  # until it served

    def ask(self) -> bytes:
        with urllib.request.urlopen(self.address, timeout=PATIENCE) as answer:
            found: bytes = answer.read()
        return found

    def resident(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


@contextlib.contextmanager
def dashboard(run: Path) -> Iterator[Dashboard]:
    began = time.monotonic()
    command = [sys.executable, "-m", "outlast", "dashboard", "--port", "0", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, f"no address in {line!r}"
            yield Dashboard(process.pid, found[0].rstrip(";"), time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGINT)


def processor(pid: int) -> float:
    """Return the processor seconds of a process."""
    found = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return found / 1e9


def during(pid: int, seconds: float, each_second: Callable[[], object] = lambda: None) -> float:
    """Return the processor seconds of a process in each second of a time."""
    began, before = time.monotonic(), processor(pid)
    while time.monotonic() - began < seconds:
        each_second()
        time.sleep(1)
    return (processor(pid) - before) / (time.monotonic() - began)


def painted(tab: browser.Tab, shown: Dashboard) -> float:
    """Return the milliseconds from the navigation to the first paint with content."""
    tab.open("about:blank")
    tab.open(shown.address)
    entry = "performance.getEntriesByName('first-contentful-paint')[0]"
    tab.wait(f"{entry} !== undefined")
    return float(tab.value(f"{entry}.startTime"))


def measure(shown: Dashboard, log: Path, story: Story, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure one dashboard of the simulated run."""
    answers = []
    for _ in range(rounds):
        began = time.monotonic()
        page = shown.ask()
        answers.append(time.monotonic() - began)
    found: dict[str, Any] = {
        "until_served": shown.seconds,
        "page_bytes": len(page),
        "answer": figures.summary(answers),
    }

    def news() -> None:
        with log.open("a") as file:
            file.writelines(codec.encode(record) + "\n" for record in story.minutes(1))

    if browser.PROGRAM is not None:
        with browser.opened(folder) as tab:
            found["first_paint_ms"] = figures.summary([painted(tab, shown) for _ in range(rounds)])
            tab.wait("document.getElementById('status').textContent === 'Live.'")
            delays = []
            for _ in range(rounds):
                began = time.monotonic()
                news()
                tab.wait(f"{SECTION}.includes({str(story.step)!r})")
                delays.append(time.monotonic() - began)
            found["news_to_page"] = figures.summary(delays)
            found["processor_quiet"] = during(shown.pid, 10)
            found["processor_with_news"] = during(shown.pid, 20, news)
    return found | {"resident_bytes": shown.resident()}


def watched(seconds: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the agent's processor seconds in a second, alone and with a dashboard that is looked at."""
    run = folder / "job"
    script = ROOT / "examples" / "train_gpt.py"
    command = [
        sys.executable,
        "-m",
        "outlast",
        "run",
        "--run-dir",
        str(run),
        str(script),
        "--steps",
        "1000000",
    ]
    alone, with_one = list[float](), list[float]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder) as job:
        try:
            log, end = run / "events.jsonl", time.monotonic() + PATIENCE
            while not (log.exists() and '"first_step"' in log.read_text()) and time.monotonic() < end:
                time.sleep(0.1)
            for number in range(rounds):
                for watches in (False, True) if number % 2 == 0 else (True, False):
                    if watches:
                        with dashboard(run) as shown:
                            with_one.append(during(job.pid, seconds, shown.ask))
                    else:
                        alone.append(during(job.pid, seconds))
        finally:
            job.terminate()
    more = statistics.median(with_one) - statistics.median(alone)
    return {"alone": figures.summary(alone), "watched": figures.summary(with_one), "more_of_a_core": more}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the log")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--incidents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--watched-seconds", type=float, default=20.0, help="of a turn, see above")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    lines = figures.Lines(options.out)
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        folder = Path(name)
        run, story = folder / "run", Story(options.ranks, options.seed)
        run.mkdir()
        log = run / "events.jsonl"
        write(log, options.gib, options.incidents, story)
        made = {"ranks": options.ranks, "incidents": options.incidents, "log_bytes": log.stat().st_size}
        with dashboard(run) as shown:
            found = measure(shown, log, story, options.rounds, folder / "chromium")
        for record in (
            figures.surroundings(options.seed),
            {"record": "dashboard", **made, **found},
            {"record": "watched", **watched(options.watched_seconds, options.rounds, folder)},
        ):
            lines.write(record)
            figures.say(str(record))


if __name__ == "__main__":
    main()
