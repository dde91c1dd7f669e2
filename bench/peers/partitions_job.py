"""One job on four hosts under ``outlast run``, and the faults of bench/partitions.py on its hosts."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import sys
import time
from pathlib import Path

from outlast.cluster.lease_file import boot_time
from peers.nodes_jobs import ROOT, Lines
from peers.partitions_log import Pause
from peers.partitions_schedule import Board, Happening
from tests.support.hosts import Host, Hosts
from tests.support.namespaces import HostsUnusable, Process, until

WORKER = Path(__file__).resolve().parent / "partitions_worker.py"
HOSTS, LEAST, ACTIVE = 4, 2, 3
PORT = 29400
MANY = 1000
END_PATIENCE = 30.0
LEADS = re.compile(r"this node is the leader: ")


class Job:
    """A job that runs on every host, and the faults of the hosts.

    Args:
        hosts: all of them.
        folder: shared by the hosts.
        ping_timeout: seconds of silence after which a node is lost.
        plant: the planted bug; empty: none.
    """

    def __init__(self, hosts: Hosts, folder: Path, ping_timeout: float, plant: str) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.folder = folder
        self.ping_timeout = ping_timeout
        self.board = Board(tuple(self.hosts))
        self.pauses: list[Pause] = []
        self.agents: dict[str, Process] = {}
        self.ended: dict[str, int] = {}  # agents that nobody has ended, by host
        self.leader = ""
        self.lines: list[str] = []
        self._paused_at: dict[str, float] = {}
        self._logs = {name: Lines(folder / f"{name}.log") for name in self.hosts}
        self._commits = Lines(folder / "commits.jsonl")
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32) + "\n")
        self._token.chmod(0o600)
        worker = [str(WORKER), f"--commits={self._commits.path}", f"--since={boot_time()}"]
        self._worker = [*worker, *(["--no-lease"] if plant == "no-lease" else [])]

    def start(self, host: Host) -> None:
        """Start the agent on a host."""
        size = [f"--nnodes={LEAST}:{ACTIVE}", f"--spares={HOSTS - ACTIVE}", "--nproc-per-node=1"]
        meet = ["--rdzv-id=partitions", f"--rdzv-endpoint=n0:{PORT}", f"--token-file={self._token}"]
        keep = [f"--run-dir={self.folder / 'run'}", f"--max-restarts={MANY}"]
        keep.append(f"--ping-timeout={self.ping_timeout}")
        program = ["--no-python", sys.executable, *self._worker]
        command = [sys.executable, "-m", "outlast", "run", *size, *meet, *keep, *program]
        log = self.folder / f"{host.name}.log"
        around = {"PYTHONPATH": str(ROOT / "src")}
        self.agents[host.name] = host.start(command, around, log, self.folder)

    def look(self) -> None:
        """Read the commits and the leader, and which agents have ended."""
        for name, log in self._logs.items():
            if any(LEADS.search(line) for line in log.new()):
                self.leader = name
        self.lines += self._commits.new()
        for name, agent in list(self.agents.items()):
            code = agent.poll()
            if code is not None:
                self.ended[name] = code
                del self.agents[name]
                self.board.note("kill agent", name)

    def happen(self, what: Happening) -> None:
        """Make a fault on hosts."""
        for name in what.hosts:
            self._do(what.kind, self.hosts[name])
            self.board.note(what.kind, name)

    def _do(self, kind: str, host: Host) -> None:
        match kind:
            case "cut" | "cut two" | "flap":
                host.cut()
            case "heal":
                host.heal()
            case "pause":
                self._paused_at[host.name] = boot_time()
                host.pause()
            case "resume":
                host.resume()
                self._note_pause(host.name)
            case "kill agent":
                self._kill_agent(host)
            case "start agent":
                self.start(host)
            case "kill host":
                self.agents.pop(host.name, None)
                host.kill()
                self._note_pause(host.name)
            case "boot":
                host.boot()
                self.start(host)

    def _kill_agent(self, host: Host) -> None:
        agent = self.agents.pop(host.name, None)
        if agent is not None:
            with contextlib.suppress(ProcessLookupError):
                agent.send(signal.SIGKILL)
            agent.wait(END_PATIENCE)

    def _note_pause(self, name: str) -> None:
        start = self._paused_at.pop(name, None)
        if start is not None:
            self.pauses.append(Pause(name, start, boot_time()))

    def end(self) -> dict[str, list[str]]:
        """Ask every agent to end the job; return what is left on the hosts, by host."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.send(signal.SIGTERM)
        deadline = time.monotonic() + END_PATIENCE
        left: dict[str, list[str]] = {}
        for name, host in self.hosts.items():
            patience = max(0.1, deadline - time.monotonic())
            try:
                until(lambda host=host: not host.processes(), "", patience)
            except HostsUnusable:
                left[name] = [words or "a process without words" for words in host.processes().values()]
        return left
