"""shrink: pause and throughput of a job that goes on with fewer ranks in another layout, and grows back.

Eight agents of one rank each train examples/train_gpt_3d.py with tp 2, pp 2, dp 2. One of them is killed with
all its processes, then two, then four; each time, when the job has trained in the smaller layout, the same
agents are started again, and it grows back. State comes from the memory of the nodes that are left if all of
it is there, else from disk, and each record says which; another job has no memory tier. Jobs alternate.

The pause has the parts of bench/recovery.py: detect (the leader knows of the loss), stop (the old ranks are
gone), spawn (the script's first statement runs on every rank), import (its imports are done), group (process
groups, model and optimizer), load (the state is loaded), replay (every rank has completed a step). A growth
begins with the last step of the smaller layout, and has nothing to detect. Throughput is that of the median
step, as a share of that of eight ranks, beside (n - k) / n. All ranks share this machine: with fewer
processors than ranks the share says nothing about ranks that have machines of their own.

    python bench/shrink.py --rounds 1 --out shrink.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import figures
from peers.nodes_jobs import ROOT, Lines
from recovery import BOUNDS, PARTS, exists

from tests.support.agents import Agents

RANKS = 8
FULL = "tp 2, pp 2, dp 2"
LEFT = {1: "tp 2, pp 1, dp 3", 2: "tp 2, pp 1, dp 3", 4: "tp 2, pp 2, dp 1"}  # by agents that are lost
VICTIMS = {1: ("n7",), 2: ("n6", "n5"), 4: ("n7", "n6", "n5", "n4")}  # n0 is the leader
LAYOUTS = "layouts = [{ tp = 2, pp = 2, dp = 2 }, { tp = 2, dp = 3 }, { tp = 2, pp = 2 }]"
SOURCES = {
    "memory": "non_persistent_save_interval = 1\nsave_interval_seconds = 60.0",
    "disk": "async_save = false",
}
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining")
LOOK = 0.005
PATIENCE = 600.0


class Lost(Exception):
    """The job did not go on."""


@dataclass(frozen=True)
class Change:
    """One change of the layout; seconds.

    Args:
        parts: of the pause, which is their sum.
        steps_lost: that were done again.
        loaded: what the event log says of the load.
        nbytes: that rank 0 loaded.
    """

    parts: dict[str, float]
    steps_lost: int
    loaded: str
    nbytes: int

    @property
    def pause(self) -> float:
        return sum(self.parts.values())


class Job:
    """The job, and what its first data-parallel rank has traced.

    Args:
        folder: empty.
        source: where state comes from, one of :data:`SOURCES`.
        interval: steps between two checkpoints.
    """

    def __init__(self, folder: Path, source: str, interval: int) -> None:
        config = folder / "job.toml"
        config.write_text(f"[parallelism]\n{LAYOUTS}\n\n[checkpoints]\n{SOURCES[source]}\n")
        options = ["--config", str(config), "--nproc-per-node=1", "--max-restarts=1000"]
        options += [word for module in PRELOADED for word in ("--preload", module)]
        agents = Agents(
            folder / "job",
            f"{RANKS - max(LEFT)}:{RANKS}",
            options=(*options, "--ft-max-restarts-per-day=1000"),
        )
        agents.settings["--rdzv-conf"] = "last_call_timeout=600,join_timeout=600"
        words = ("--steps", "1000000", "--save-interval", str(interval), "--trace", str(agents.trace))
        agents.command = (str(ROOT / "examples" / "train_gpt_3d.py"), *words)
        self.agents = agents
        self.steps: list[dict[str, Any]] = []
        self._trace = Lines(agents.trace / "rank-00000.jsonl")

    def start(self) -> None:
        """Start the leader, then the others."""
        self.agents.start("n0")
        self.until(lambda: self.agents.said("n0", "this node is the leader"), "a leader")
        self.agents.start(*(f"n{number}" for number in range(1, RANKS)))

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the first true answer of a condition, reading the trace meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.steps += map(json.loads, self._trace.new())
            if answer := condition():
                return answer
            if (leader := self.agents.agents.get("n0")) is not None and leader.poll() is not None:
                break
            time.sleep(LOOK)
        raise Lost(f"no {what} within {PATIENCE:.0f} s\n{self.agents.consoles()[-4000:]}")

    def train(self, layout: str, steps: int) -> float:
        """Wait for some steps in a layout from now on; return their median time."""
        known = len(self.steps)

        def done() -> list[float]:
            found = [one["clock"] for one in self.steps[known:] if one["layout"] == layout]
            return found if len(found) > steps else []

        clocks: list[float] = self.until(done, f"steps of {layout}")
        return statistics.median(later - one for one, later in itertools.pairwise(clocks))

    def records(self, kind: str, after: float) -> list[dict[str, Any]]:
        """Return what is in the event logs of all nodes after a time, the oldest first."""
        found = [one for node in self.agents.agents for one in self.agents.records(node, kind)]
        return sorted((one for one in found if one["clock"] >= after), key=lambda one: one["clock"])

    def ranks(self) -> set[int]:
        """Return the processes of the newest generation."""
        started = self.records("generation_started", 0.0)
        newest = max(one["generation"] for one in started)
        return {pid for one in started if one["generation"] == newest for pid in one["pids"]}

    def until_replicated(self) -> None:
        """Wait until the newest state but a few steps is in the memory of two nodes."""
        step = self.steps[-1]["step"]

        def newest() -> bool:
            found = [-1]
            for path in Path("/dev/shm").glob(f"outlast-memory-*-{self.agents.job}*/status.json"):
                with contextlib.suppress(OSError, ValueError):
                    found.append(json.loads(path.read_text())["replicated_step"])
            return max(found) >= step

        self.until(newest, "replica")

    def kill(self, names: tuple[str, ...]) -> float:
        """End nodes: their agents, all that these started, and what they have in memory; return when."""
        pids = [pid for name in names for pid in self.agents.tree(name)]
        killed = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in names:
            self.agents.agents[name].wait(PATIENCE)
            for path in Path("/dev/shm").glob(f"outlast-memory-*-{self.agents.job}*-{name}"):
                shutil.rmtree(path, ignore_errors=True)
        return killed

    def change(self, old: set[int], layout: str, killed: float = 0.0) -> Change:
        """Wait for the first step in a layout on all ranks; return the pause in parts.

        Args:
            old: ranks of the layout before.
            layout: that follows.
            killed: when ranks were killed; 0: none were, and the pause begins with the last step before.
        """
        known, gone = len(self.steps), list[float]()

        def back() -> bool:
            if not gone and not any(map(exists, old)):
                gone.append(time.monotonic())
            return bool(gone) and any(one["layout"] == layout for one in self.steps[known:])

        self.until(back, f"step of {layout}")
        before = [one for one in self.steps if one["pid"] in old]
        began = killed or before[-1]["clock"]
        world = self.records("generation_started", began)[-1]["world_size"]

        def first_steps() -> list[dict[str, Any]]:
            found = self.records("first_step", began)
            found = [one for one in found if one["generation"] == found[-1]["generation"]]
            return found if len(found) == world else []

        found = self.until(first_steps, f"first step of {layout} on all ranks")
        marks = {name: max(one["marks"][name] for one in found) for name in found[0]["marks"]}
        seen = self.until(lambda: not killed or self.records("fault_seen", began), "fault in the event log")
        detected = seen[0]["clock"] if killed else began
        marks |= {"gone": gone[0], "imported": marks["session"], "detected": detected}
        parts, last = {}, began
        for part, bound in zip(PARTS, BOUNDS, strict=True):
            at = max(last, marks[bound])
            parts[part], last = at - last, at
        loaded = self.until(lambda: self.records("loaded", began), "load in the event log")[-1]
        lost = before[-1]["step"] + 1 - loaded["step"]
        return Change(parts, lost, loaded["reason"], loaded["nbytes"])

    def stop(self) -> None:
        """End the job, and remove what killed agents have left in shared memory."""
        self.agents.stop()
        for path in Path("/dev/shm").glob(f"outlast-memory-*-{self.agents.job}*"):
            shutil.rmtree(path, ignore_errors=True)


def round_of(source: str, options: argparse.Namespace, lines: figures.Lines) -> list[dict[str, Any]]:
    """Run one job through all losses; return a record for each change."""
    found: list[dict[str, Any]] = []

    def add(**record: Any) -> None:
        found.append({"record": "change", "source": source, **record, "loadavg": os.getloadavg()[0]})
        lines.write(found[-1])
        parts = "  ".join(f"{part} {record['parts'][part]:.2f}" for part in PARTS)
        words = f"{record['kind']:<6} {record['lost']} lost  pause {record['pause']:.2f} s  {parts}"
        figures.say(f"  {source:<6} {words}  {record['loaded']}")

    with tempfile.TemporaryDirectory(prefix="shrink-", ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), source, options.save_interval)
        try:
            job.start()
            for lost in options.lost:
                layout = LEFT[lost]
                whole = job.train(FULL, options.steps)
                job.until(lambda: job.records("saved", 0.0), "checkpoint on disk")
                if source == "memory":
                    job.until_replicated()
                old = job.ranks()
                change = job.change(old, layout, job.kill(VICTIMS[lost]))
                seconds = job.train(layout, options.steps)
                add(
                    kind="shrink",
                    lost=lost,
                    layout=layout,
                    pause=change.pause,
                    share=whole / seconds,
                    ideal=1 - lost / RANKS,
                    **vars(change),
                )
                old = job.ranks()
                job.agents.start(*VICTIMS[lost])
                change = job.change(old, FULL)
                add(kind="growth", lost=lost, layout=FULL, pause=change.pause, **vars(change))
        except Lost as error:
            lines.write({"record": "lost", "source": source, "reason": str(error)[:1000]})
            figures.say(f"  {source}: {error}")
        finally:
            job.stop()
    return found


def report(found: list[dict[str, Any]], lines: figures.Lines) -> None:
    """Print and write the medians."""
    figures.say(f"\n{'seconds, median':<24}{'pause':>8}" + "".join(f"{part:>8}" for part in PARTS))
    for kind in ("shrink", "growth"):
        for lost in LEFT:
            for source in SOURCES:
                many = [
                    one for one in found if (one["kind"], one["lost"], one["source"]) == (kind, lost, source)
                ]
                if not many:
                    continue
                parts = {part: figures.summary([one["parts"][part] for one in many]) for part in PARTS}
                record: dict[str, Any] = {
                    "pause": figures.summary([one["pause"] for one in many]),
                    "parts": parts,
                    "steps_lost": figures.summary([one["steps_lost"] for one in many]),
                    "nbytes": many[0]["nbytes"],
                }
                if kind == "shrink":
                    record["share"] = figures.summary([one["share"] for one in many])
                    record["ideal"] = many[0]["ideal"]
                lines.write({"record": "summary", "kind": kind, "lost": lost, "source": source, **record})
                cells = [record["pause"]["median"], *(parts[part]["median"] for part in PARTS)]
                row = "".join(f"{cell:8.2f}" for cell in cells)
                more = (
                    f"  share {record['share']['median']:.2f} of {record['ideal']:.2f}"
                    if kind == "shrink"
                    else ""
                )
                figures.say(f"{kind:<7}{lost} lost  {source:<9}{row}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="jobs for each source of state")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--lost", nargs="+", type=int, default=list(LEFT), choices=LEFT, help="agents")
    parser.add_argument("--steps", type=int, default=40, help="in each layout before the next change")
    parser.add_argument("--save-interval", type=int, default=20, help="steps between two checkpoints on disk")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    options = parser.parse_args()
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(0, arguments=" ".join(map(str, vars(options).values()))))
    found: list[dict[str, Any]] = []
    for source in figures.abba(options.sources, options.rounds):
        figures.say(f"{source}, load {os.getloadavg()[0]:.2f}")
        found += round_of(source, options, lines)
    report(found, lines)


if __name__ == "__main__":
    main()
