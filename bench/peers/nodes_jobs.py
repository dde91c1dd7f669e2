"""One training job on several hosts under torchrun or ``outlast run``, for bench/nodes.py.

The launcher reports when it detected a fault: torchrun in its output, outlast in its event log. The traces of
the ranks show the steps. All times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.hosts import Host, Hosts
from tests.support.namespaces import Process

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINING = Path(__file__).resolve().parent / "nodes_training.py"
PORT = 29400
ACTIVE = 3
MANY = 100
STANDSTILL = 2.0  # seconds without a completed step; a step takes 0.05 s, more on a busy machine


class Step(NamedTuple):
    """A step that every rank of a group has completed."""

    clock: float
    step: int
    group: int


class Lines:
    """Whole lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def new(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._at += len(whole) + 1
        return whole.decode(errors="replace").splitlines()


class Job:
    """A job that was started on every host; a base for the launchers.

    Args:
        hosts: the last one is the spare, started when the others train.
        folder: shared by the hosts, empty.
        steps: of the training.
        save_interval: steps between two checkpoints.
    """

    name = ""

    def __init__(self, hosts: Hosts, folder: Path, steps: int, save_interval: int) -> None:
        self.folder = folder
        self.hosts = hosts
        self.launchers: dict[str, Process] = {}
        self.work = ["--folder", str(folder), f"--steps={steps}", f"--save-interval={save_interval}"]
        self._traces = {host.name: Lines(folder / "trace" / f"{host.name}.jsonl") for host in hosts}
        self._partial: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._ranks: dict[str, int] = {}
        self.completed: list[Step] = []
        (folder / "trace").mkdir(parents=True)

    def environment(self) -> dict[str, str]:
        paths = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        return {**paths, "LOGLEVEL": "INFO"}

    def command(self, host: Host) -> list[str]:
        raise AssertionError(f"no launcher for {host.name}")

    def start(self, host: Host) -> None:
        """Start the launcher on a host."""
        log = self.folder / f"{host.name}.log"
        self.launchers[host.name] = host.start(self.command(host), self.environment(), log, self.folder)

    def look(self) -> None:
        """Read what the ranks and the launcher have written since the last call."""
        for name, lines in self._traces.items():
            for line in map(json.loads, lines.new()):
                self._ranks[name] = line["pid"]
                clocks = self._partial[line["group"], line["step"]]
                clocks.append(line["clock"])
                if len(clocks) == line["world"]:
                    self.completed.append(Step(max(clocks), line["step"], line["group"]))

    def noticed(self) -> list[float]:
        """Return when the launcher reported errors."""
        raise AssertionError("no launcher")

    def detected(self, fault: float) -> float | None:
        """Return when the launcher detected a fault; None if it did not during training."""
        end = max([step.clock for step in self.completed], default=0.0) if self.digest() else float("inf")
        return min((clock for clock in self.noticed() if fault < clock < end), default=None)

    def worker(self, host: Host) -> int:
        """Return the process id of a host's rank, as this process sees it."""
        for pid in host.processes():
            status = Path(f"/proc/{pid}/status").read_text()
            if f"NSpid:\t{pid}\t{self._ranks[host.name]}\n" in status:
                return pid
        raise AssertionError(f"no rank on {host.name}")

    def digest(self) -> str:
        """Return the digest of the final weights; empty until they are there."""
        path = self.folder / "digest"
        return path.read_text() if path.exists() else ""

    def ended(self) -> bool:
        """Say whether every launcher has."""
        return all(process.poll() is not None for process in self.launchers.values())

    def exits(self) -> dict[str, int | None]:
        return {name: process.poll() for name, process in self.launchers.items()}

    def back(self, fault: float) -> float | None:
        """Return the time of the first step after the last interruption, or of the last new group.

        Returns:
            The time; that of the fault if training did not stop; None if no step followed.
        """
        steps = sorted(self.completed)
        before = [step for step in steps if step.clock <= fault][-1:]
        after = [step for step in steps if step.clock > fault]
        if not after:
            return None
        pairs = itertools.pairwise(before + after)
        breaks = [
            two.clock for one, two in pairs if two.group != one.group or two.clock - one.clock > STANDSTILL
        ]
        return breaks[-1] if breaks else fault

    def repeated(self) -> int:
        """Return how many completed steps had been completed before."""
        return len(self.completed) - len({step.step for step in self.completed})


class Torchrun(Job):
    """``torchrun --nnodes 2:3``; the fourth launcher waits in its redundancy list."""

    name = "torchrun"
    shared_store = False
    NOTICED = re.compile(
        r"[WE]\d{4} |I\d{4} .*(Stopping worker group|UNHEALTHY|new nodes)"
    )  # not the ranks' lines

    def __init__(self, hosts: Hosts, folder: Path, steps: int, save_interval: int) -> None:
        super().__init__(hosts, folder, steps, save_interval)
        self._logs = [Lines(folder / f"{host.name}.log") for host in hosts]
        self._said: list[tuple[float, str]] = []

    def environment(self) -> dict[str, str]:
        if self.shared_store:
            return super().environment()
        # Without this, torchrun uses store keys of the last start again and burns restarts (pytorch#135712).
        return {**super().environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(self, host: Host) -> list[str]:
        first = self.hosts[0]
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.name}:{PORT}", "--rdzv-id=nodes"]
        conf = [f"--rdzv-conf=is_host={int(host is first)}", f"--local-addr={host.name}"]
        size = [f"--nnodes={ACTIVE - 1}:{ACTIVE}", "--nproc-per-node=1", f"--max-restarts={MANY}"]
        launch = [sys.executable, "-m", "torch.distributed.run", *size, *meet, *conf]
        return [*launch, str(TRAINING), "--plain", *self.work]

    def look(self) -> None:
        super().look()
        now = time.monotonic()
        self._said += [(now, line) for log in self._logs for line in log.new() if self.NOTICED.match(line)]

    def noticed(self) -> list[float]:
        return [clock for clock, _ in self._said]


class TorchrunShared(Torchrun):
    """torchrun with its defaults: the ranks use the launchers' store."""

    name = "torchrun-default"
    shared_store = True


class Outlast(Job):
    """``outlast run --nnodes 2:3 --spares 1``."""

    name = "outlast"
    NOTICED = frozenset({"fault_seen", "action_taken", "generation_started"})

    def __init__(self, hosts: Hosts, folder: Path, steps: int, save_interval: int) -> None:
        super().__init__(hosts, folder, steps, save_interval)
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32) + "\n")
        self._token.chmod(0o600)

    def command(self, host: Host) -> list[str]:
        del host
        meet = ["--rdzv-id=nodes", f"--rdzv-endpoint={self.hosts[0].name}:{PORT}"]
        size = [
            f"--nnodes={ACTIVE - 1}:{ACTIVE}",
            f"--spares={len(self.hosts) - ACTIVE}",
            "--nproc-per-node=1",
        ]
        keep = [f"--run-dir={self.folder / 'run'}", f"--token-file={self._token}", f"--max-restarts={MANY}"]
        return [sys.executable, "-m", "outlast", "run", *size, *meet, *keep, str(TRAINING), *self.work]

    def noticed(self) -> list[float]:
        found: list[float] = []
        for path in (self.folder / "run").rglob("events*.jsonl"):
            records: list[dict[str, Any]] = [json.loads(line) for line in Lines(path).new()]
            found += [one["clock"] for one in records if one["kind"] in self.NOTICED]
        return found


SYSTEMS: dict[str, type[Job]] = {one.name: one for one in (Outlast, Torchrun, TorchrunShared)}


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]
