"""Many agents in one process: the product's cluster nodes and channels, in one loop instead of a thread each.

The ranks are simulated: they start at once, end at once, and make steps. A process gets commands
as JSON lines on standard input, and answers each on standard output.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from outlast.cluster.agent.cluster_controller import shared_options
from outlast.cluster.lease_file import boot_time
from outlast.cluster.policy.events import (
    JoinRejected,
    Order,
    Ping,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
)
from outlast.cluster.policy.members import JobSpec, Member
from outlast.cluster.policy.messages import MESSAGES, Assignment, Ending, NodeStatus, Quiesce
from outlast.cluster.policy.node import ClusterNode
from outlast.cluster.rpc.arrivals import Arrivals
from outlast.cluster.rpc.channel import Arrival, Gone, Pong, Post, Received, Refused
from outlast.cluster.rpc.connection import READ_BYTES
from outlast.cluster.rpc.loop import Loop
from outlast.cluster.rpc.server import ChannelServer, ServerTerms
from outlast.launcher.command.options import LaunchOptions, parse_run
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import AllStarted, StepsDone

STEPS_EVERY = 1.0  # an agent tells so often how far its ranks are; see cluster/agent/cluster_controller.py
_INTO = memoryview(bytearray(READ_BYTES))
_EVENTS = 4096


class QuietPost(Post):
    """A channel without a thread; its owner calls it."""

    def _start(self, listeners: list[socket.socket], terms: ServerTerms, patience: float) -> int:
        port: int = listeners[0].getsockname()[1]
        self._arrivals = Arrivals()
        self._loop = Loop(listeners, patience)
        self._loop._into = _INTO  # one thread reads for all
        self._loop._woken = True  # nobody has to be woken
        self._office = ChannelServer(self._loop, terms, self._arrivals)
        return port

    @property
    def epoll(self) -> int:
        """Return the descriptor that is readable when a call is due."""
        return self._loop._epoll.fileno()

    def turn(self) -> list[Arrival]:
        """Do what is due and return what has arrived."""
        with self._loop.turn:
            self._loop._take_turn(self._office, self._loop._epoll.poll(0, _EVENTS))
            while self._loop._orders:
                self._loop._take_turn(self._office, [])
            self._loop._woken = True
        return self._arrivals.take()


@dataclass(frozen=True)
class Job:
    """The common data of all agents of a job."""

    options: LaunchOptions
    terms: JobSpec
    token: str


def job_of(argv: Sequence[str]) -> Job:
    """Return the job of a command line of ``outlast run``."""
    options = parse_run(argv, os.environ)
    digest = shared_options(options)
    version = metadata.version("outlast")
    terms = options.nodes.terms(options.run_id, version, digest, options.world.nproc_per_node)
    return Job(options, terms, os.environ["OUTLAST_TOKEN"])


class Agent:
    """One agent with simulated ranks."""

    def __init__(self, job: Job, number: int) -> None:
        self.name = f"n{number}"
        self.number = number
        self.post = QuietPost(f"{self.name}#b", "127.0.0.1", 0, job.token)
        me = Member(
            name=self.name,
            address=f"127.0.0.1:{self.post.port}",
            slots=job.terms.slots,
            run_id=job.terms.run_id,
            version=job.terms.version,
            options=job.terms.options,
            incarnation="b",
        )
        now = boot_time()
        start = Start(False, tuple(job.options.nodes.endpoint.split(",")))
        config = job.options.config.fault_tolerance
        self.cluster_node = ClusterNode(me, job.terms, config, start, (now, time.time() - now))
        self.joined = now
        self.taken_in = 0.0
        self.in_force: dict[int, float] = {}
        self.trouble = ""
        self._port = 30000 + number
        self._mine: Assignment | None = None
        self._step = 0
        self._steps_at = now + STEPS_EVERY * (number % 100) / 100
        self._carry(self.cluster_node.offers(NodeStatus(-self._port), now))

    def turn(self) -> None:
        """Handle arrived messages, and send the answers."""
        while arrived := self.post.turn():
            now = boot_time()
            for one in arrived:
                if isinstance(one, Received):
                    self.taken_in = self.taken_in or now
                    message = MESSAGES.read(one.text)
                    self._carry(self.cluster_node.handle(one.sender, message, now))
                elif isinstance(one, Gone):
                    self._carry(self.cluster_node.gone(one.peer, one.reason))
                elif isinstance(one, Pong):
                    self._carry(self.cluster_node.answered(one.peer, one.idle, now))
                elif isinstance(one, Refused) and one.vacant:
                    self.cluster_node.unreachable(one.address, now)

    def tick(self, now: float, steps: bool) -> None:
        """Do what is due."""
        self._carry(self.cluster_node.tick(now))
        if steps and self._mine is not None and now >= self._steps_at:
            self._steps_at = now + STEPS_EVERY
            self._step += 1
            event = StepsDone(self._step)
            self._carry(self.cluster_node.tell(event, self._mine.generation, now))
        self.turn()

    def fail(self) -> None:
        """Report that a rank has ended by a signal."""
        if self._mine is None:
            raise RuntimeError(f"{self.name} runs nothing that could fail")
        rank, generation = self._mine.first_rank, self._mine.generation
        words = f"rank {rank} ended by signal 9"
        cause = f"signal 9 in generation {generation}"  # the same one again and again ends a job
        fault = Fault(FaultKind.CRASH, self.name, rank, generation, self._step, words, cause, -9)
        self._carry(self.cluster_node.tell(fault, generation, boot_time()))
        self.turn()

    def _carry(self, orders: Iterable[Order]) -> None:
        for one in orders:
            now = boot_time()
            match one:
                case SendMessage(to, message, address):
                    self.post.send(to, MESSAGES.write(message).encode(), address)
                case Ping(to, address):
                    self.post.ping(to, address)
                case SendToAddress(address, message):
                    self.post.knock(address, MESSAGES.write(message).encode())
                case Quiesce(generation):
                    if self._mine is not None and self._mine.generation < generation:
                        self._mine = None
                    self._carry(self.cluster_node.halted(generation, now))
                case Assignment():
                    self._begin(one, now)
                case Ending() | JoinRejected() | Reset():
                    self.trouble = f"{self.name}: {one.reason}"

    def _begin(self, mine: Assignment, now: float) -> None:
        if mine.generation in self.in_force:
            return
        self._mine = mine
        self.in_force[mine.generation] = now
        if mine.master:
            self._port -= 1
            self._carry(self.cluster_node.offers(NodeStatus(-self._port), now))
        self._carry(self.cluster_node.tell(AllStarted(mine.generation), mine.generation, now))


class Crowd:
    """All agents of this process, and the loop that serves them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._agents: dict[int, Agent] = {}
        self._by_epoll: dict[int, Agent] = {}
        self._due: list[tuple[float, int]] = []
        self._epoll = select.epoll()
        self._epoll.register(0, select.EPOLLIN)
        self._steps = False

    def serve(self) -> None:
        """Serve until standard input ends."""
        while True:
            now = boot_time()
            while self._due and self._due[0][0] <= now:
                agent = self._agents[heapq.heappop(self._due)[1]]
                agent.tick(now, self._steps)
                heapq.heappush(self._due, (agent.cluster_node.deadline(now), agent.number))
            wait = max(0.0, self._due[0][0] - boot_time()) if self._due else 1.0
            for descriptor, _ in self._epoll.poll(wait, _EVENTS):
                if descriptor in self._by_epoll:
                    self._by_epoll[descriptor].turn()
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        line = sys.stdin.buffer.readline()
        if not line:
            return False
        order = json.loads(line)
        answer: dict[str, Any] = {}
        match order["do"]:
            case "join":
                for number in order["numbers"]:
                    self._join(int(number))
            case "fail":
                self._agents[int(order["number"])].fail()
            case "steps":
                self._steps = bool(order["told"])
            case "look":
                answer = self._look(int(order["generation"]))
        sys.stdout.write(json.dumps({**answer, "now": boot_time()}) + "\n")
        sys.stdout.flush()
        return True

    def _join(self, number: int) -> None:
        agent = self._agents[number] = Agent(self._job, number)
        self._by_epoll[agent.post.epoll] = agent
        self._epoll.register(agent.post.epoll, select.EPOLLIN)
        now = boot_time()
        agent.tick(now, False)
        heapq.heappush(self._due, (agent.cluster_node.deadline(now), number))

    def _look(self, generation: int) -> dict[str, Any]:
        agents = self._agents.values()
        begun = [one.in_force[generation] for one in agents if generation in one.in_force]
        counts = [one.post.counters() for one in agents]
        return {
            "begun": len(begun),
            "last_begun": max(begun, default=0.0),
            "newest": max((max(one.in_force, default=0) for one in agents), default=0),
            "taken_in": sum(bool(one.taken_in) for one in agents),
            "last_taken_in": max((one.taken_in for one in agents), default=0.0),
            "joined": max((one.joined for one in agents), default=0.0),
            "to_leader": sum(one.sent_bytes for one in counts),
            "from_leader": sum(one.received_bytes for one in counts),
            "messages": sum(one.sent + one.received for one in counts),
            "dropped": sum(one.dropped for one in counts),
            "trouble": next((one.trouble for one in agents if one.trouble), ""),
        }


def serve(argv: Sequence[str]) -> None:
    """Serve agents of the job that a command line of ``outlast run`` describes, until standard input ends."""
    Crowd(job_of(argv)).serve()
