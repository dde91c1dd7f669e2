"""control_plane: start, idle load, restart and election of a job of 10 to 1,250 agents with 8 ranks each.

The leader is the product's agent, ``outlast run`` in a process of its own; its ranks sleep. All other
agents are the product's cluster nodes and channels, several hundred in a process, with simulated ranks. They
communicate over loopback. For each size:

start        all agents but one join; time from the join of the last one until generation 1 is in force on all
rest         CPU time of the leader, its memory, bytes; while nothing happens, and while every
             agent reports the progress of its ranks once a second, as in training
restart      the end of one rank is reported; time until the next generation is in force on all
succession   the leader is killed (SIGKILL); time until a new leader's generation is in force on all others

    python bench/control_plane.py --sizes 10 40 160 640 1250 --out control_plane.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plane_agents
from peers import figures

from outlast.cluster.lease_file import boot_time

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTORS_AN_AGENT = 8
LOOK = 0.05
SLOTS = 8
SUCCESSORS = range(1, 5)  # with the leader, they are the voters
SETTLE = 3.0  # seconds between a start and the time at rest


class Stuck(Exception):
    """An expected event did not happen in time."""


@dataclass(frozen=True)
class Usage:
    """The CPU time and memory of a process, and the time of the measurement."""

    at: float
    processor: float
    resident: int


def usage(pid: int) -> Usage:
    """Return CPU time (user and system, s) and resident memory (bytes) of a process."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(values[11]) + int(values[12])
    resident = int(values[21]) * resource.getpagesize()
    return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), resident)


class Crowds:
    """The processes with the agents that do not lead."""

    def __init__(self, count: int, argv: list[str], env: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--serve", *argv]
        self._processes = [
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count + 1)
        ]

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Send a command to all processes at once; return their answers."""
        for process in self._processes:
            self._write(process, order)
        return [self._answer(process) for process in self._processes]

    def _place(self, number: int) -> int:
        """Return which process an agent is in: those that may become leader share none with the others."""
        return 0 if number in SUCCESSORS else 1 + number % (len(self._processes) - 1)

    def join(self, numbers: list[int]) -> None:
        """Make agents join."""
        for at, process in enumerate(self._processes):
            mine = [one for one in numbers if self._place(one) == at]
            self._write(process, {"do": "join", "numbers": mine})
        for process in self._processes:
            self._answer(process)

    def fail(self, number: int) -> float:
        """End a rank of an agent's node; return when that was reported."""
        process = self._processes[self._place(number)]
        at = boot_time()
        self._write(process, {"do": "fail", "number": number})
        self._answer(process)
        return at

    def processor(self) -> float:
        return sum(usage(process.pid).processor for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _write(self, process: subprocess.Popen[str], order: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise Stuck(f"a process of agents has ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("trouble"):
            raise Stuck(answer["trouble"])
        return answer


class Plane:
    """A job: its leader and all other agents."""

    def __init__(self, agents: int, folder: Path, options: argparse.Namespace) -> None:
        self.agents = agents
        self.output = folder / "output.txt"
        self._patience = options.patience
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OUTLAST_TOKEN": secrets.token_hex(16),
            "OMP_NUM_THREADS": "1",
        }
        argv = ["--nnodes", f"{agents - 1}:{agents}", "--nproc-per-node", str(SLOTS)]
        argv += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "plane", "--max-restarts", "1000"]
        argv += ["--node-name", "n0", "--run-dir", str(folder / "run"), "--no-python", "sleep", "100000"]
        with self.output.open("w") as output:
            run = [sys.executable, "-m", "outlast", "run", *argv]
            self.leader = subprocess.Popen(run, env=env, stdout=output, stderr=subprocess.STDOUT)
        self._until_there()
        self.crowds = Crowds(options.processes, argv, env)

    def _until_there(self) -> None:
        deadline = time.monotonic() + self._patience
        while "this node is the leader" not in (said := self.output.read_text()):
            if time.monotonic() > deadline or self.leader.poll() is not None:
                raise SystemExit(f"the leader does not begin: {said[-2000:]}")
            time.sleep(LOOK)

    def until_begun(self, generation: int, agents: int) -> float:
        """Wait until a generation is in force on a number of agents; return when it was on the last."""
        self.wait(
            f"generation {generation} on {agents} agents",
            lambda found: sum(one["begun"] for one in found) >= agents,
            generation,
        )
        return max(float(one["last_begun"]) for one in self.look(generation))

    def look(self, generation: int = 0) -> list[dict[str, Any]]:
        return self.crowds.ask(do="look", generation=generation)

    def wait(self, what: str, ready: Callable[[list[dict[str, Any]]], bool], generation: int = 0) -> None:
        deadline = time.monotonic() + self._patience
        found = self.look(generation)
        while not ready(found):
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {self._patience:.0f} s; {found}")
            time.sleep(LOOK)
            found = self.look(generation)

    def end(self) -> None:
        self.crowds.end()
        with suppress(ProcessLookupError):
            self.leader.send_signal(signal.SIGTERM)
        try:
            self.leader.wait(20)
        except subprocess.TimeoutExpired:
            self.leader.kill()
            self.leader.wait()


def total(found: list[dict[str, Any]], what: str) -> float:
    return float(sum(one[what] for one in found))


def start(plane: Plane) -> dict[str, float]:
    """Make all agents join, the last one alone."""
    plane.look()  # the processes are there
    began = boot_time()
    plane.crowds.join(list(range(1, plane.agents - 1)))
    wanted = plane.agents - 2
    plane.wait("all but one are taken in", lambda found: total(found, "taken_in") >= wanted)
    all_in = max(float(one["last_taken_in"]) for one in plane.look())
    time.sleep(SETTLE)
    plane.crowds.join([plane.agents - 1])
    joined = max(float(one["joined"]) for one in plane.look())
    in_force = plane.until_begun(1, plane.agents - 1)
    return {"all_joined": all_in - began, "start": in_force - joined}


def rest(plane: Plane, seconds: float, told: bool) -> dict[str, float]:
    """Measure the leader while nothing happens."""
    plane.crowds.ask(do="steps", told=told)
    time.sleep(SETTLE)
    pid = plane.leader.pid
    before, counted, others = usage(pid), plane.look(), plane.crowds.processor()
    time.sleep(seconds)
    after, found = usage(pid), plane.look()
    if total(found, "newest") != total(counted, "newest"):
        raise Stuck("a generation began in the time at rest")
    wall = after.at - before.at
    grown = {what: total(found, what) - total(counted, what) for what in found[0] if what != "trouble"}
    return {
        "seconds": wall,
        "core_percent": 100 * (after.processor - before.processor) / wall,
        "resident_mb": after.resident / 1e6,
        "sent_bytes_a_second": grown["from_leader"] / wall,
        "received_bytes_a_second": grown["to_leader"] / wall,
        "messages_a_second": grown["messages"] / wall,
        "dropped": grown["dropped"],
        "others_core_percent": 100 * (plane.crowds.processor() - others) / wall,
    }


def newest(plane: Plane) -> int:
    return max(int(one["newest"]) for one in plane.look())


def restart(plane: Plane, dice: random.Random) -> float:
    """Report a fault; return the time until the next generation."""
    following = newest(plane) + 1
    at = plane.crowds.fail(dice.randrange(1, plane.agents))
    return plane.until_begun(following, plane.agents - 1) - at


def succession(plane: Plane) -> float:
    """Kill the leader; return the time until the next generation."""
    following = newest(plane) + 1
    at = boot_time()
    plane.leader.kill()
    return plane.until_begun(following, plane.agents - 1) - at


def measure(agents: int, options: argparse.Namespace, lines: figures.Lines) -> None:
    """Measure one size."""
    dice = random.Random(options.seed + agents)
    with tempfile.TemporaryDirectory(prefix="plane-", ignore_cleanup_errors=True) as folder:
        plane = Plane(agents, Path(folder), options)
        found: dict[str, Any] = {"record": "size", "agents": agents, "ranks": agents * SLOTS}
        try:
            found |= start(plane)
            if options.rest:
                found["rest"] = rest(plane, options.rest, told=False)
                found["training"] = rest(plane, options.rest, told=True)
            found["restart"] = [restart(plane, dice) for _ in range(options.restarts)]
            found["succession"] = succession(plane)
        except Stuck as stuck:
            found["stuck"] = str(stuck)
            figures.say(f"  {stuck}\n{plane.output.read_text()[-2000:]}")
        finally:
            plane.end()
    lines.write({**found, "loadavg": os.getloadavg()[0]})
    figures.say(row(found))


def row(found: dict[str, Any]) -> str:
    """Return the printed row of one size."""
    cells = [f"{found['agents']:6d}"]
    cells += [f"{found.get(what, float('nan')):8.2f}" for what in ("all_joined", "start")]
    for what in ("rest", "training"):
        one = found.get(what, {})
        sent = one.get("sent_bytes_a_second", 0.0) + one.get("received_bytes_a_second", 0.0)
        cells.append(f"{one.get('core_percent', float('nan')):7.2f} {sent / 1e3:8.1f}")
    cells.append(f"{found.get('rest', {}).get('resident_mb', float('nan')):7.1f}")
    restarts = figures.summary(found.get("restart", []))
    cells += [f"{one:8.2f}" for one in (restarts.get("median", float("nan")), found.get("succession", -1))]
    return "  ".join((*cells, f"load {os.getloadavg()[0]:.1f}"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 40, 160, 640, 1250], help="agents")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds, twice a size; 0: not measured")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that most other agents are in")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for anything waited for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if min(options.sizes) < 4:
        raise SystemExit(
            f"--sizes {min(options.sizes)}: at least 4 agents, or nobody can succeed; nothing was run"
        )
    needed = max(options.sizes) * DESCRIPTORS_AN_AGENT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise SystemExit(f"open files: {needed} expected, 'ulimit -Hn' is {hard}; nothing was run")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(options.seed, arguments=" ".join(map(str, vars(options).values()))))
    figures.say(
        f"{'agents':>6}  {'joined':>8}  {'start':>8}  {'rest %':>7} {'kB/s':>8}  {'train %':>7} {'kB/s':>8}"
        f"  {'MB':>7}  {'restart':>8}  {'success.':>8}"
    )
    for agents in options.sizes:
        measure(agents, options, lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        plane_agents.serve(sys.argv[2:])
    else:
        main()
