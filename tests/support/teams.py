"""Several nodes on one host: each with a memory folder and a saver of its own, and ranks that are threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.policy.manifest import Identity
from outlast.checkpoint.replica.handshake import Credentials, derive
from outlast.checkpoint.save.rendezvous import Place
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, Status
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import SystemClock
from outlast.ports import Exchange
from outlast.recovery.policy.events import Loaded, Note, Record
from tests.support.jobs import DEADLINE, Job, saver_process, staged, together
from tests.support.launching import until
from tests.support.opened import close_at_end
from tests.support.ranks import lines

TOKEN = "a token of this test, 5b1f"


class TeamNode:
    """A node: its memory, its saver, and its disk."""

    def __init__(
        self, root: Path, name: str, durable: Path, domains: Mapping[str, str], token: str = TOKEN
    ) -> None:
        self.name = name
        self.durable = durable
        credentials = Credentials(derive(token, "run-a"))
        self.place = Place(name, domains, credentials=credentials)
        self.events = root / f"{name}.events.jsonl"
        self.memory = MemoryFolder(root / name / "memory")
        self.stage = Stage(self.memory.root)
        self.saver = saver_process(self.memory.root, self.events, credentials=credentials)

    def status(self) -> Status:
        return self.memory.status() or Status(0)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in lines(self.events) if one["kind"] == kind]

    def lose(self) -> None:
        """Lose the node: its processes and its memory; what comes under its name is a new one."""
        os.kill(self.saver.pid, signal.SIGKILL)
        until(self.saver.ended, "the end of the saver")
        self.saver.hang_up()
        self.memory.root.rename(self.memory.root.with_name(f"lost-{os.urandom(4).hex()}"))


class Team:
    """A job over several nodes.

    Args:
        root: where everything is.
        nodes: names, in the order of their ranks.
        per_node: ranks of a node.
        shared: one durable folder for all; otherwise each node has its own.
        domains: of each node.
        job: makes what a rank trains, from a seed.
    """

    def __init__(
        self,
        root: Path,
        nodes: Sequence[str],
        per_node: int = 1,
        shared: bool = True,
        domains: Mapping[str, Mapping[str, str]] | None = None,
        job: Callable[[int], Job] = Job,
    ) -> None:
        self.root = root
        self.per_node = per_node
        self._job = job
        self.nodes = [
            TeamNode(root, name, root / ("disk" if shared else f"disk-{name}"), (domains or {}).get(name, {}))
            for name in nodes
        ]
        self.known = {node.name: node for node in self.nodes}
        self.store: Any = None  # of the next generation; None: a new one
        self.records: list[Record] = []
        self.jobs: list[Job] = []
        self.savers: list[Checkpointer] = []
        self.content: dict[int, list[bytes]] = {}
        self.step = 0
        self.generation = 0

    @property
    def world(self) -> int:
        return self.per_node * len(self.nodes)

    def node_of(self, rank: int) -> TeamNode:
        return self.nodes[rank // self.per_node]

    def have(self, *names: str) -> None:
        """Go on with these nodes from the next generation on; one that is not known is new.

        The others are spares: their savers go on, and what they have in memory stays.
        """
        durable = self.nodes[0].durable
        for name in names:
            if name not in self.known:
                self.known[name] = TeamNode(self.root, name, durable, {})
        self.nodes = [self.known[name] for name in names]

    def start(self, avoid: tuple[str, ...] = (), **settings: Any) -> None:
        """Begin a generation on the nodes that are there: restore into new jobs."""
        self.generation += 1
        self.jobs = [self._job(100 * self.generation + rank) for rank in range(self.world)]
        wanted = CheckpointOptions(timeout=DEADLINE, **{"max_failed_seconds": 0.0, **settings})

        def part(exchange: Exchange) -> Checkpointer:
            node = self.node_of(exchange.rank)
            identity = Identity("run-a", self.generation, exchange.rank, exchange.world_size)
            owns = exchange.rank % self.per_node == 0
            found = Checkpointer(
                *(node.durable, identity, exchange, wanted, SystemClock(), self.records.append, node.memory),
                *(node.saver.ensure if owns else lambda: "", node.place),
            )
            close_at_end(found.close)
            restored = found.restore(self.jobs[exchange.rank].state, avoid)
            self.step = 0 if restored is None else restored.step
            return found

        answers = together(self.world, part, generation=self.generation, store=self.store)
        self.savers = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            self.savers.append(answer)

    def train(self, steps: int, durable: Callable[[int], bool] = lambda _: False) -> None:
        """Do steps, and save each in memory on every node."""
        for _ in range(steps):
            self.step += 1
            for job in self.jobs:
                job.train()
            order = Order(self.step, durable(self.step), "a test", cursor={"at": self.step})
            assert staged(self.savers, self.jobs, order) == [True] * self.world, self.step
            self.content[self.step] = [job.content() for job in self.jobs]
            self.committed()

    def committed(self) -> None:
        def wanted() -> str:
            found = [(node.status(), node.logged("save_lost"), node.logged("note")) for node in self.nodes]
            return f"step {self.step} in memory: {found}"

        until(lambda: all(node.status().memory_step >= self.step for node in self.nodes), wanted)

    def replicated(self, step: int) -> None:
        """Train until a step is on other nodes, too."""

        def there() -> bool:
            if all(node.status().replicated_step >= step for node in self.nodes):
                return True
            self.train(1)
            return False

        until(there, lambda: f"replicas of step {step}: {[node.status() for node in self.nodes]}")

    def loaded(self) -> Loaded:
        return [record for record in self.records if isinstance(record, Loaded)][-1]

    def notes(self) -> str:
        return "\n".join(record.reason for record in self.records if isinstance(record, Note))

    def on_disk(self) -> list[str]:
        return sorted({name for node in self.nodes for name in DirectoryTier(node.durable).names()})

    def right(self) -> bool:
        """Whether every rank has, bit for bit, what was saved at the step that it is at."""
        return [job.content() for job in self.jobs] == self.content[self.step]

    def end(self) -> None:
        for saver in self.savers:
            saver.settle()
        for node in self.nodes:
            node.saver.hang_up()
        for node in self.nodes:
            until(node.saver.ended, f"the end of {node.name}'s saver")
