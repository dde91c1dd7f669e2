"""shrink: pause and throughput of a job that goes on with fewer ranks in another layout, and grows back.

Eight agents of one rank each train examples/train_gpt_3d.py with tp 2, pp 2, dp 2. One of them is killed with
all its processes, then two, then four; each time, when the job has trained in the smaller layout, the same
agents are started again, and it grows back. In one job nodes are killed when the memory of two nodes has a
newer state than the disk, so that a smaller layout loads from the memory of the nodes that are left; a growth
follows a save to disk and loads from there. Another job has no memory tier. Jobs alternate.

The pause has the parts of bench/recovery.py: detect (the leader knows of the loss), stop (the old ranks are
gone), spawn (the script's first statement runs on every rank), import (its imports are done), group (process
groups, model and optimizer), load (the state is loaded), replay (every rank has completed a step). A growth
begins with the last step of the smaller layout, and has nothing to detect. Beside each part are the processor
seconds that the job used in it, from /proc: divided by the processors of this machine they are the time that
the part takes here at the least, however little is waited for. "others" is what else this machine did during
the pause; where that is much, it hides what the job waited for. Throughput is that of the median step, as a
share of that of eight ranks, beside (n - k) / n. All ranks share this machine: with fewer processors than
ranks the share says nothing about ranks that have machines of their own. At the end of a job each sample of
each step must have been used once.

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
import threading
import time
from bisect import bisect
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
VICTIMS = {1: (7,), 2: (7, 5), 4: (7, 5, 3, 1)}  # ranks; the node of the next one has the replica of each
LAYOUTS = "layouts = [{ tp = 2, pp = 2, dp = 2 }, { tp = 2, dp = 3 }, { tp = 2, pp = 2 }]"
SOURCES = {
    "memory": "non_persistent_save_interval = 1\nsave_interval_seconds = 60.0",
    "disk": "async_save = false",
}
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict",
)
WINDOWS = 16  # of a step
BOUND = 1e-4  # relative difference of the losses of a step that two layouts did
LOOK = 0.005
COUNTS_EVERY = 0.2  # seconds between two looks at processor times
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 600.0


class Lost(Exception):
    """The job did not go on."""


@dataclass(frozen=True)
class Change:
    """One change of the layout; seconds.

    Args:
        parts: of the pause, which is their sum.
        processor: that the job used in each part.
        others: of the processors, that were used by others during the pause.
        steps_lost: that were done again.
        loaded: what the event log says of the load.
        nbytes: that rank 0 loaded.
    """

    parts: dict[str, float]
    processor: dict[str, float]
    others: float
    steps_lost: int
    loaded: str
    nbytes: int

    @property
    def pause(self) -> float:
        return sum(self.parts.values())


class Processors:
    """Counts, in a thread, the processor seconds of a job and of the whole machine."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._used: dict[int, float] = {}  # of each process, also of one that has ended
        self._counts: list[tuple[float, float, float]] = []  # when, by the job, by all
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(COUNTS_EVERY):
            for pid in {pid for name in list(self._agents.agents) for pid in self._agents.tree(name)}:
                with contextlib.suppress(OSError, IndexError):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._used[pid] = (int(fields[11]) + int(fields[12])) / TICKS
            fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
            busy = sum(int(fields[each]) for each in (0, 1, 2, 5, 6)) / TICKS  # not idle, not stolen
            self._counts.append((time.monotonic(), sum(self._used.values()), busy))

    def used(self, begin: float, end: float) -> tuple[float, float]:
        """Return the processor seconds of the job and of others in a time."""
        (job, every), (job_then, every_then) = (self._at(when) for when in (end, begin))
        return job - job_then, max(0.0, every - every_then - (job - job_then))

    def _at(self, when: float) -> tuple[float, float]:
        counts = list(self._counts)
        place = min(max(1, bisect([one[0] for one in counts], when)), len(counts) - 1)
        (before, *first), (after, *second) = counts[place - 1 : place + 1]
        share = min(1.0, max(0.0, (when - before) / (after - before)))
        job, every = (one + share * (two - one) for one, two in zip(first, second, strict=True))
        return job, every

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()


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
        self.processors = Processors(agents)
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

    def nodes(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Return the nodes of ranks of the newest generation."""
        folders = list(self.agents.run.glob("nodes/*/logs/gen-*/rank-*"))
        newest = max(path.parent.name for path in folders)
        of = {int(path.name[5:]): path.parts[-4] for path in folders if path.parent.name == newest}
        return tuple(of[rank] for rank in ranks)

    def until_replicated(self) -> None:
        """Wait until the memory of two nodes has a newer state than the disk, and than that of now."""
        step = max(self.steps[-1]["step"], *(one["step"] for one in self.records("saved", 0.0)))

        def newest() -> bool:
            found = [-1]
            for path in Path("/dev/shm").glob(f"outlast-memory-*-{self.agents.job}*/status.json"):
                with contextlib.suppress(OSError, ValueError):
                    found.append(json.loads(path.read_text())["replicated_step"])
            return max(found) > step

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
        parts, processor, last = {}, {}, began
        time.sleep(2 * COUNTS_EVERY)  # until the processor times of the end are known, too
        for part, bound in zip(PARTS, BOUNDS, strict=True):
            at = max(last, marks[bound])
            parts[part], processor[part] = at - last, self.processors.used(last, at)[0]
            last = at
        others = self.processors.used(began, last)[1]
        loaded = self.until(lambda: self.records("loaded", began), "load in the event log")[-1]
        lost = before[-1]["step"] + 1 - loaded["step"]
        return Change(parts, processor, others, lost, loaded["reason"], loaded["nbytes"])

    def require_each_sample_once(self) -> None:
        """Check the traces of all data-parallel ranks; of a step that was done again the last time counts.

        Raises:
            Lost: a sample was left out or used twice, or a loss differs.
        """
        found: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
        last: dict[int, tuple[float, str]] = {}
        for path in self.agents.trace.glob("rank-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    one = json.loads(line)
                    step, layout, rank = one["step"], one["layout"], int(path.stem.removeprefix("rank-"))
                    found.setdefault((step, layout), {})[rank] = one
                    last[step] = max(last.get(step, (0.0, "")), (one["clock"], layout))
        losses: dict[int, float] = {}
        for (step, _), said in found.items():
            for loss in (float.fromhex(one["loss"]) for one in said.values()):
                if abs(loss - losses.setdefault(step, loss)) > BOUND * loss:
                    raise Lost(f"step {step}: losses {losses[step]} and {loss}")
        whole = {
            step: [window for one in found[step, layout].values() for window in one["ids"]]
            for step, (_, layout) in sorted(last.items())[:-1]  # that one may not have ended everywhere
        }
        if sorted(whole) != list(range(len(whole))):
            raise Lost("a step was left out")
        for step, ids in whole.items():
            if len(set(ids)) != WINDOWS or len(ids) != WINDOWS:
                raise Lost(f"step {step} used the windows {ids}")

    def stop(self) -> None:
        """End the job, and remove what killed agents have left in shared memory."""
        self.processors.stop()
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
        used = sum(record["processor"].values())
        figures.say(f"  {source:<6} {words}  {record['loaded']}")
        here = f"{used / (os.cpu_count() or 1):.2f} s on this machine"
        figures.say(f"         processor {used:.2f} s, {here}; others {record['others']:.2f} s")

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
                old, victims = job.ranks(), job.nodes(VICTIMS[lost])
                change = job.change(old, layout, job.kill(victims))
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
                job.agents.start(*victims)
                change = job.change(old, FULL)
                add(kind="growth", lost=lost, layout=FULL, pause=change.pause, **vars(change))
            job.require_each_sample_once()
            figures.say(f"  {source:<6} every sample once in {len(job.steps)} steps")
        except Lost as error:
            lines.write({"record": "lost", "source": source, "reason": str(error)[:1000]})
            figures.say(f"  {source}: {error}")
        finally:
            job.stop()
    return found


def report(found: list[dict[str, Any]], lines: figures.Lines) -> None:
    """Print and write the medians."""
    figures.say(
        f"\n{'seconds, median':<24}{'pause':>8}{'at least':>9}" + "".join(f"{part:>8}" for part in PARTS)
    )
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
                    "processor": figures.summary([sum(one["processor"].values()) for one in many]),
                    "others": figures.summary([one["others"] for one in many]),
                    "processors": os.cpu_count(),
                    "steps_lost": figures.summary([one["steps_lost"] for one in many]),
                    "nbytes": many[0]["nbytes"],
                }
                if kind == "shrink":
                    record["share"] = figures.summary([one["share"] for one in many])
                    record["ideal"] = many[0]["ideal"]
                lines.write({"record": "summary", "kind": kind, "lost": lost, "source": source, **record})
                least = record["processor"]["median"] / (os.cpu_count() or 1)
                row = f"{record['pause']['median']:8.2f}{least:9.2f}"
                row += "".join(f"{parts[part]['median']:8.2f}" for part in PARTS)
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
