"""Real agents of several nodes on one host: started, broken, waited for, and looked for afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import leftovers
from tests.support.launching import DEADLINE, SCRIPTS, started, until
from tests.support.ports import free_port
from tests.support.processes import listening, tree_of
from tests.support.warm import Warm

_WAITING = ("--no-python", sys.executable, str(SCRIPTS / "waiting.py"))


class Agents:
    """The agents of one job.

    Args:
        folder: of the test.
        nodes: ``--nnodes``.
        spares: ``--spares``.
        script: with its arguments after the folder; nothing: the one that waits, without torch.
        options: more options of all agents.
        cold: as for ``Run``: for who looks at command lines and environments.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str = "2:2",
        spares: int = 0,
        script: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        cold: bool = False,
    ) -> None:
        self.folder = folder
        self.cold = cold
        self.run = folder / "run"
        self.trace = folder / "trace"
        self.trace.mkdir(parents=True)
        self.job = f"test-{uuid.uuid4().hex[:8]}"
        self.port = free_port()
        self.settings: dict[str, str] = {
            "--nnodes": nodes,
            "--spares": str(spares),
            "--rdzv-endpoint": f"127.0.0.1:{self.port}",
            "--rdzv-id": self.job,
            "--run-dir": str(self.run),
            "--rdzv-conf": "last_call_timeout=100,join_timeout=120",
        }
        program = (str(SCRIPTS / script[0]),) if script else _WAITING
        self.command = (*program, str(self.trace), *script[1:])
        self.options = options
        self.agents: dict[str, subprocess.Popen[bytes] | Warm] = {}
        self._others = leftovers.processes()

    def start(
        self,
        *names: str,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        **other: Any,
    ) -> None:
        """Start agents; a setting such as ``nnodes="1:2"`` replaces what the others were given."""
        given = {**self.settings, **{f"--{key.replace('_', '-')}": one for key, one in other.items()}}
        words = [word for pair in given.items() for word in pair if pair[1]]
        for name in names:
            ours = [sys.executable, "-m", "outlast", "run", "--node-name", name, *words]
            self.launch(name, [*ours, *self.options, *options, *self.command], environment or {})

    def launch(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Start the process of an agent."""
        with open(self.folder / f"{name}.console", "ab") as file:
            self.agents[name] = started(command, file, environment, self.cold)

    def console(self, name: str) -> str:
        """Return what an agent has shown."""
        return (self.folder / f"{name}.console").read_text(errors="replace")

    def consoles(self) -> str:
        """Return what all have shown."""
        return "\n".join(f"--- {name}\n{self.console(name)}" for name in self.agents)

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return what is in a node's event log."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.run / "nodes" / name / "events.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [one for one in found if one["kind"] == kind]

    def said(self, name: str, *tokens: str) -> int:
        """Return how many notes of an agent have all of these: a name, an option, a number."""
        return sum(all(one in note["reason"] for one in tokens) for note in self.records(name, "note"))

    def until(self, condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
        """Return the first true answer of a condition; fail with what all agents have shown."""
        try:
            return until(condition, what, deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.consoles()}") from None

    def until_said(self, name: str, *tokens: str) -> None:
        """Wait until a note of an agent has all of these."""
        self.until(lambda: self.said(name, *tokens), f"{tokens} of {name}")

    def start_founder(self, name: str = "n0", **given: Any) -> None:
        """Start the agent that founds the job: it listens where agents meet."""
        self.start(name, **given)
        self.until(lambda: self.port in listening(self.agents[name].pid), f"{name} to found the job")

    def until_seeks(self, name: str) -> None:
        """Wait until an agent asks where agents meet."""
        self.until_said(name, f":{self.port}")

    def until_spare(self, name: str) -> None:
        """Wait until an agent runs in a generation without ranks."""
        self.until_said(name, "spare")

    def leader(self) -> str:
        """Return which agent leads, once the job has begun: it listens at the address in the run folder."""

        def leads() -> str:
            with contextlib.suppress(OSError, ValueError):
                port = int(json.loads((self.run / "leader.json").read_text())["address"].rpartition(":")[2])
                return next((one for one, agent in self.agents.items() if port in listening(agent.pid)), "")
            return ""

        found: str = self.until(leads, "a leader")
        return found

    def lost(self, name: str, after: int = 0) -> bool:
        """Return whether the loss of a node has ended a generation after another one."""
        faults = [one for agent in self.agents for one in self.records(agent, "fault_seen")]
        return any(
            (one["fault"], one["node"]) == ("lost", name) and one["generation"] > after for one in faults
        )

    def ranks(self, generation: int, world: int) -> dict[int, int]:
        """Return the pids of the ranks of a generation that have begun, by rank."""
        found = {}
        for path in self.trace.glob(f"rank-*-of-{world}.g{generation}"):
            with contextlib.suppress(ValueError):
                found[int(path.name.split("-")[1])] = int(path.read_text())
        return found

    def until_runs(self, ranks: int, after: int = 0) -> int:
        """Wait until all ranks of a generation after another have begun; return its number."""

        def whole() -> int:
            younger = [one for one in self.generations() if one > after]
            return max((one for one in younger if len(self.ranks(one, ranks)) == ranks), default=0)

        found: int = self.until(whole, f"{ranks} ranks of a generation after {after}")
        return found

    def commits(self) -> list[dict[str, Any]]:
        """Return what rank 0 committed, in order."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.trace / "commits.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def until_commit(self, generation: int) -> None:
        """Wait until a generation has committed."""
        self.until(
            lambda: any(one["generation"] == generation for one in self.commits()),
            f"a commit of generation {generation}",
        )

    def generations(self) -> list[int]:
        """Return the generations that have begun anywhere."""
        return sorted({int(path.name.rpartition(".g")[2]) for path in self.trace.glob("rank-*.g*")})

    def order(self, *orders: str) -> None:
        """Have the ranks do something; see the script that waits."""
        temporary = self.trace / ".do"
        temporary.write_text("".join(f"{one}\n" for one in orders))
        temporary.replace(self.trace / "do")

    def send(self, name: str, signum: int) -> None:
        """Send a signal to an agent."""
        self.agents[name].send_signal(signum)

    def kill(self, name: str) -> None:
        """Kill an agent, and wait until it is dead."""
        self.send(name, signal.SIGKILL)
        self.agents[name].wait(DEADLINE)

    def tree(self, name: str) -> list[int]:
        """Return the pids of an agent and of all that it has started."""
        return tree_of(self.agents[name].pid)

    def finish(self, *names: str) -> dict[str, int]:
        """Wait for the ends of agents, of all when none is named; return their exit codes."""
        codes = {}
        for name in names or tuple(self.agents):
            try:
                codes[name] = self.agents[name].wait(DEADLINE)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} still runs:\n{self.consoles()}") from None
        return codes

    def left(self) -> list[str]:
        """Return the processes of this job that live, and what is in shared memory of it.

        A memory folder of which a checkpoint writer has said that it stays is not counted.
        """
        kept = [one["reason"] for name in self.agents for one in self.records(name, "note")]
        found = [
            str(path)
            for path in Path("/dev/shm").glob(f"outlast-memory-*-{self.job}*")
            if not any(f"({path}/" in reason for reason in kept)
        ]
        for agent in self.agents.values():
            found += map(str, Path("/dev/shm").glob(f"outlast-{agent.pid}-*"))
        return [*found, *leftovers.processes(self._others).values()]

    def nothing_left(self) -> None:
        """Wait until no process and no folder in shared memory is left of the job."""
        try:
            until(lambda: not self.left(), "the end of everything", 90.0)
        except AssertionError:
            raise AssertionError(f"left behind: {self.left()}\n{self.consoles()}") from None

    def stop(self) -> None:
        """Kill what still lives."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait(DEADLINE)
        for pid in leftovers.processes(self._others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shared = Path("/dev/shm")
        for agent in self.agents.values():  # its cleaner has been killed, too
            for path in shared.glob(f"outlast-{agent.pid}-*"):
                shutil.rmtree(path, ignore_errors=True)
        for path in shared.glob(f"outlast-memory-*-{self.job}*"):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def agents(folder: Path, *args: Any, **more: Any) -> Iterator[Agents]:
    """Give a job's agents; none lives afterwards."""
    found = Agents(folder, *args, **more)
    try:
        yield found
    finally:
        found.stop()


def certificate(folder: Path) -> str:
    """Return the option's value for a certificate that signs itself, and may sign for the whole job."""
    key, certificate = folder / "job.key", folder / "job.pem"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-batch")
    files = ("-subj", "/CN=job", "-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", "req", "-x509", *kind, *files], check=True, capture_output=True, timeout=30)
    return f"{certificate},{key},{certificate}"
