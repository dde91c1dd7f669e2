"""A job of several nodes on a simulated network and clock: real cluster nodes, pretended workers.

Everything that agents decide is the product's code; messages go through JSON, as they do on the wire.
What is simulated is time, the network, and what workers would do: they start, make steps together, fail
when one of them dies, stand still when one is cut off or stopped, and save from time to time if their
node may.

Who only wants to know what becomes of a job needs four methods, and no class of ours: ``befall``, ``mend``,
``run`` and ``outcome``; see :mod:`.test_outcomes`. :mod:`.fleet_reentry` and :mod:`.fleet_steps` have ranks
that can be entered again, and ranks that agree on a step.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outlast.cluster.policy.contacts import BEACON_EVERY
from outlast.cluster.policy.events import (
    CommitRight,
    JoinRejected,
    Judged,
    Lived,
    Log,
    Order,
    Ping,
    Reset,
    SendMessage,
    SendToAddress,
    Start,
)
from outlast.cluster.policy.members import JobSpec, Member
from outlast.cluster.policy.messages import (
    MESSAGES,
    AppendEntries,
    AppendReply,
    Assignment,
    Beacon,
    Ending,
    Message,
    NodeStatus,
    Quiesce,
)
from outlast.cluster.policy.node import ClusterNode
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import AllStarted, CommitSeen, Event, StepsDone, WorkerFinished
from outlast.stragglers.policy.options import StragglerOptions
from tests.simulation.fencing import Commit, overlaps

_TURN = 0.05
_STEP = 0.1
_SAVE_EVERY = 10
_SLOWEST_SAVE = 12.0
_RESET, _PING, _PONG, _VACANT = "reset", "ping", "pong", "vacant"  # of the network and of channels
FAULTS = ("fail", "kill", "power", "stop", "busy", "cut", "reset")


class Halt(Enum):
    """Why an agent does nothing, while its workers go on."""

    NONE = "none"
    BUSY = "busy"  # its loop does not turn; its channel answers
    STOPPED = "stopped"


@dataclass
class Node:
    """An agent, and what its workers would do."""

    name: str
    cluster_node: ClusterNode | None = None
    incarnation: int = 0
    side: int = 0
    stopped: bool = False
    agent: Halt = Halt.NONE  # of its agent alone
    idle_since: float = 0.0
    right: tuple[int, float] = (0, -math.inf)  # to commit, as its lease file has it
    unspoken: list[tuple[Event, int]] = field(default_factory=list)
    undone: list[Order] = field(default_factory=list)
    held: list[tuple[str, str]] = field(default_factory=list)
    mine: Assignment | None = None
    running: int = 0
    starts_at: float = math.inf
    started: bool = False
    port: int = 0
    warm_at: float = 0.0
    looks_at: float = 0.0
    ending: Ending | None = None
    turned_away: str = ""
    leads: bool = False

    @property
    def turns(self) -> bool:
        """Say whether its agent's loop turns."""
        return self.cluster_node is not None and not self.stopped and self.agent is Halt.NONE

    @property
    def id(self) -> str:
        """Return that of its agent."""
        return f"{self.name}#{self.incarnation}"


class Fleet:
    """Some nodes, the first of which has the rendezvous endpoint.

    Args:
        count: of nodes.
        least, most, spares: ``--nnodes`` and ``--spares``.
        seed: of the network's delays.
        steps: after which the job is done.
    """

    stragglers: StragglerOptions | None = None

    def __init__(
        self,
        count: int,
        least: int,
        most: int,
        *,
        spares: int = 0,
        seed: int = 0,
        steps: int = 10**9,
    ) -> None:
        self.now = 1000.0
        self.log: list[str] = []
        self.commits: list[Commit] = []
        self.lived: list[str] = []  # nodes that were lost and are back
        self.judged: Counter[str] = Counter()  # what was done about faults, by the kind of action
        self.led: list[str] = []  # nodes, in the order in which they became leaders
        self.steps: dict[int, int] = {}
        self.job_state: Mapping[str, Any] | None = None
        self._terms = JobSpec("run", "1", "-", 1, least, most, spares)
        self._config = FaultToleranceOptions(max_restarts=100, max_restarts_per_day=10000)
        self._dice = random.Random(seed)
        self._last_step = steps
        self._queue: list[tuple[float, int, str, str, str]] = []
        self._sent = 0
        self._arrives: dict[tuple[str, str], float] = {}
        self._done: dict[tuple[int, str], int] = {}  # steps of a generation of a job
        self._saved = -1
        self.shared = True  # one run folder on all nodes
        self.notice: Beacon | None = None
        self._frozen = 0
        self._stops, self._runs = "", 0
        self._saves: list[tuple[float, str, int, int]] = []  # when, agent, generation, step
        self._next_step = self.now
        self.nodes = {f"n{at}": Node(f"n{at}") for at in range(count)}
        for name in self.nodes:
            self.start(name)

    # What a test does to it.

    def start(self, name: str, after: int = 0, imports: float = 0.0) -> None:
        """Start a node's agent.

        Args:
            name: of the node.
            after: a generation that it knows to have been.
            imports: seconds until it can begin ranks.
        """
        node = self.nodes[name]
        warm_at = self.now + imports
        self.nodes[name] = node = Node(
            name, None, node.incarnation + 1, node.side, port=node.port, warm_at=warm_at
        )
        me = Member(name, f"{name}:1", 1, "run", "1", "-", incarnation=str(node.incarnation))
        bootstrap_node = name == "n0"
        begin = Start(bootstrap_node, ("n0:1",), self.job_state if bootstrap_node else None, after)
        clock = (self.now, 1.7e9 - self.now)
        node.cluster_node = ClusterNode(me, self._terms, self._config, begin, clock, self.stragglers)

    def kill(self, name: str, power: bool = False) -> None:
        """End a node's agent and workers; with ``power``, so that nobody is told by the network."""
        node = self.nodes[name]
        node.cluster_node = None
        if not power:
            for other in self.nodes.values():
                if other.cluster_node is not None and other is not node and other.side == node.side:
                    self._post(node, other.id, _RESET)
        self._workers_gone(node)

    def leave(self) -> None:
        """End the agents that know how the job ended, as soon as they may."""
        for node in self.nodes.values():
            if node.ending is not None and node.cluster_node is not None and node.cluster_node.settled():
                self._obey(node, node.cluster_node.farewell())
                self.notice = node.cluster_node.beacon(self.now) or self.notice
                self.kill(node.name)

    def stop(self, name: str) -> None:
        """Stop a node's processes (SIGSTOP)."""
        self.nodes[name].stopped = True

    def resume(self, name: str) -> None:
        """Let them go on; what was written to them meanwhile arrives now."""
        node = self.nodes[name]
        node.stopped = False
        self._catch_up(node)

    def halt(self, name: str, how: Halt) -> None:
        """Let a node's agent do nothing for a while; its workers go on."""
        self.nodes[name].agent, self.nodes[name].idle_since = how, self.now

    def stop_after_moving_on(self, name: str) -> None:
        """Stop a node's agent right after its first message to others in another generation."""
        self._stops, self._runs = name, self.generation()

    def go_on(self, name: str) -> None:
        """Let its agent go on with what it was about to do, then with all that has arrived."""
        node = self.nodes[name]
        node.agent = Halt.NONE
        undone, node.undone = node.undone, []
        self._obey(node, undone)
        self._catch_up(node)

    def _catch_up(self, node: Node) -> None:
        unspoken, node.unspoken = node.unspoken, []
        for event, generation in unspoken:
            if node.cluster_node is not None:
                self._obey(node, node.cluster_node.tell(event, generation, self.now))
        held, node.held = node.held, []
        for sender, message in held:
            self._arrive(node, sender, message)

    def reset(self, one: str, other: str) -> None:
        """Reset the connection of two nodes."""
        for here, there in ((one, other), (other, one)):
            self._post(self.nodes[here], self.nodes[there].id, _RESET)

    def cut(self, *names: str) -> None:
        """Cut nodes off from all others."""
        for name in names:
            self.nodes[name].side = 1

    def heal(self) -> None:
        """Undo every cut."""
        for node in self.nodes.values():
            node.side = 0

    def befall(self, what: str, name: str) -> bool:
        """Let one of :data:`FAULTS` happen to a node that works; return whether it passes after a while."""
        node = self.nodes[name]
        if not node.turns or node.side:
            return False
        match what:
            case "fail":
                if node.started:
                    self.fail(name)
            case "reset":
                for other in [other for other in self.nodes if other != name][:1]:
                    self.reset(name, other)
            case "kill" | "power":
                self.kill(name, power=what == "power")
            case "busy":
                self.halt(name, Halt.BUSY)
            case "stop":
                self.stop(name)
            case "cut":
                self.cut(name)
        return what not in ("fail", "reset")

    def mend(self, what: str, name: str) -> None:
        """Undo what befell a node."""
        node = self.nodes[name]
        if what in ("kill", "power"):
            if node.cluster_node is None and not self.ended():
                self.start(name, after=node.running)
        elif what == "stop" and node.stopped:
            self.resume(name)
        elif what == "busy" and node.agent is Halt.BUSY:
            self.go_on(name)
        elif what == "cut":
            node.side = 0

    def freeze(self) -> None:
        """Let the workers of the present generation make no step any more."""
        self._frozen = self.generation()

    def fail(self, name: str, words: str = "signal 9") -> None:
        """Let a worker of a node die."""
        node = self.nodes[name]
        self._workers_gone(node)
        self._fault(node, FaultKind.CRASH, words)

    def tell(self, name: str, event: Event) -> None:
        """Let something happen on a node."""
        self._say(self.nodes[name], event)

    # Time.

    def run(self, until: float) -> None:
        """Let time pass."""
        while self.now < until:
            self._turn(min(self.now + _TURN, until))

    def run_until(self, condition: Callable[[], Any], limit: float, turn: float = _TURN) -> bool:
        """Let time pass until something is so, which is asked after each turn; say whether it came to be."""
        end = self.now + limit
        while not condition() and self.now < end:
            self._turn(self.now + turn)
        return bool(condition())

    def _turn(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, to, sender, message = heapq.heappop(self._queue)
            node = self.nodes[to.partition("#")[0].partition(":")[0]]
            if to in (node.id, f"{node.name}:1") and node.cluster_node is not None:
                self._arrive(node, sender, message)
            elif message == _PING and node.side == self.nodes[sender.partition("#")[0]].side:
                self._post(node, sender, _VACANT)
        self.now = until
        for node in self.nodes.values():
            if node.turns:
                self._obey(node, node.cluster_node.tick(self.now) if node.cluster_node is not None else ())
                self._look_at_board(node)
            if node.cluster_node is not None and node.turns:
                alone = node.cluster_node.alone_since(self.now)
                if alone is not None and self.now - alone > self._terms.join_timeout:
                    self.kill(node.name)
                    self.start(node.name)
                if self.now >= node.starts_at:
                    node.starts_at = math.inf
                    node.started = True
                    self._say(node, AllStarted(node.running))
        due = [late for late in self._saves if late[0] <= self.now]
        self._saves = [late for late in self._saves if late[0] > self.now]
        for late in due:
            self._save(late)
        while self._next_step <= self.now:
            self._next_step += _STEP
            self._train()

    def _look_at_board(self, node: Node) -> None:
        """Write and read the notice in the folder that all nodes share, once a second."""
        if node.cluster_node is None or self.now < node.looks_at or not self.shared:
            return
        node.looks_at = self.now + BEACON_EVERY
        self._obey(node, node.cluster_node.read(self.notice, self.now))
        if node.cluster_node is not None:
            self.notice = node.cluster_node.beacon(self.now) or self.notice

    def _arrive(self, node: Node, sender: str, message: str) -> None:
        if node.cluster_node is None:
            return
        origin = self.nodes[sender.partition("#")[0]]
        if message == _PING and node.agent is Halt.BUSY and origin.side == node.side:
            self._post(node, sender, _PONG)
            return
        if not node.turns:
            node.held.append((sender, message))
            return
        if origin.side != node.side:
            return
        if message == _RESET:
            self._obey(node, node.cluster_node.gone(sender, "connection reset"))
        elif message == _PING:
            self._post(node, sender, _PONG)
        elif message == _PONG:
            self._obey(node, node.cluster_node.answered(sender, self.now - origin.idle_since, self.now))
        elif message == _VACANT:
            node.cluster_node.unreachable(f"{origin.name}:1", self.now)
        else:
            self._obey(node, node.cluster_node.handle(sender, MESSAGES.read(message), self.now))

    def _post(self, sender: Node, to: str, message: Message | str) -> None:
        self._sent += 1
        pair = (sender.id, to)
        at = max(self.now + self._dice.uniform(0.0005, 0.01), self._arrives.get(pair, 0.0))
        self._arrives[pair] = at
        text = message if isinstance(message, str) else MESSAGES.write(message)
        heapq.heappush(self._queue, (at, self._sent, to, sender.id, text))

    def _obey(self, node: Node, orders: Iterable[Order]) -> None:
        leads = node.cluster_node is not None and node.cluster_node.leader_state is not None
        if leads and not node.leads:
            self.led.append(node.name)
        node.leads = leads
        left = list(orders)
        while left and node.agent is Halt.NONE:
            one = left.pop(0)
            match one:
                case SendMessage(to, message) | SendToAddress(to, message):
                    self._post(node, to, message)
                    self._stop_if_moved_on(node, message)
                case Lived(name):
                    self.lived.append(name)
                case Ping(to):
                    self._post(node, to, _PING)
                case CommitRight(generation, until):
                    node.right = (generation, until)
                case Judged(action, fault):
                    about = f" after {fault.kind.value} on {fault.node}" if fault is not None else ""
                    self._note(node, f"{action.kind.value}{about}: {action.reason}")
                    self.judged[action.kind.value] += fault is not None
                case Log(reason):
                    self._note(node, reason)
                case _:
                    self._carry_out(node, one)
        node.undone += left

    def _stop_if_moved_on(self, node: Node, said: Message) -> None:
        if node.name != self._stops or node.cluster_node is None:
            return
        leads = isinstance(said, AppendEntries) and node.cluster_node.generation > self._runs
        if leads or (isinstance(said, AppendReply) and said.generation > self._runs):
            self._stops = ""
            self.halt(node.name, Halt.STOPPED)

    def _carry_out(self, node: Node, order: Order) -> None:
        match order:
            case Quiesce():
                self._halt(node, order)
            case Assignment():
                self._assigned(node, order)
            case Ending():
                self._end(node)
                node.ending = order
            case Reset(after, reason):
                self._note(node, reason)
                self._workers_gone(node)
                self.start(node.name, after)
            case JoinRejected(reason):
                node.turned_away = reason
                self.kill(node.name)  # as its launcher does

    def _note(self, node: Node, words: str) -> None:
        self.log.append(f"{self.now - 1000:7.2f} {node.name}: {words}")

    # What workers would do.

    def _halt(self, node: Node, order: Quiesce) -> None:
        if node.running < order.generation:
            self._end(node)
        if node.cluster_node is not None:
            self._obey(node, node.cluster_node.halted(order.generation, self.now))

    def _end(self, node: Node) -> None:
        node.started, node.starts_at, node.mine = False, math.inf, None

    def _assigned(self, node: Node, mine: Assignment) -> None:
        if mine.generation <= node.running and (node.mine is not None or not mine.seated):
            return
        if mine.generation == node.running and not node.started and mine.seated:
            return
        self._end(node)
        if node.cluster_node is not None and node.cluster_node.leader_state is not None:
            self.job_state = node.cluster_node.leader_state.lead.job_state()
        node.running = mine.generation
        if not mine.seated:
            return
        node.mine = mine
        node.starts_at = self.now + 0.2 + mine.wait
        if mine.master:
            node.port += 1

    def _say(self, node: Node, event: Event) -> None:
        if not node.turns:
            node.unspoken.append((event, node.running))
        elif node.cluster_node is not None:
            self._obey(node, node.cluster_node.tell(event, node.running, self.now))

    def _fault(self, node: Node, kind: FaultKind, words: str) -> None:
        rank = node.mine.first_rank if node.mine is not None else -1
        step = self.steps.get(node.running, -1)
        self._say(node, Fault(kind, node.name, rank, node.running, step, words, words))

    def _workers_gone(self, node: Node) -> None:
        generation, before = node.running, node.started
        node.started = False
        for other in self.nodes.values():
            same = other.cluster_node is not None and other.running == generation and other.started
            if before and same and other is not node and other.side == node.side:
                other.started = False
                self._fault(other, FaultKind.ERROR, "connection closed by peer")

    def _offer(self, node: Node) -> NodeStatus:
        return NodeStatus(node.port + 1 if self.now >= node.warm_at else 0)

    def _train(self) -> None:
        groups: dict[tuple[int, str], list[Node]] = {}
        for node in self.nodes.values():
            if node.cluster_node is not None and node.turns:
                self._obey(node, node.cluster_node.offers(self._offer(node), self.now))
            if node.mine is not None and node.started and not node.stopped and node.cluster_node is not None:
                groups.setdefault((node.running, node.cluster_node.session), []).append(node)
        for (generation, _), group in groups.items():
            if generation > self._frozen:
                self._make_step(generation, group)

    def _make_step(self, generation: int, group: list[Node]) -> None:
        mine = group[0].mine
        if mine is None or len(group) < mine.nodes or len({node.side for node in group}) > 1:
            return
        key = (generation, group[0].cluster_node.session if group[0].cluster_node else "")
        step = self._done[key] = self._done.get(key, max(self._saved, 0)) + 1
        self.steps[generation] = max(step, self.steps.get(generation, 0))
        for node in group:
            self._say(node, StepsDone(step))
        first = min(group, key=lambda node: node.mine.node_rank if node.mine is not None else 0)
        if step % _SAVE_EVERY == 0:
            late = self.now + self._dice.choice((0.05, 0.05, self._dice.uniform(0.0, _SLOWEST_SAVE)))
            self._saves.append((late, first.id, generation, step))
        if step >= self._last_step:
            for node in group:
                self._say(node, WorkerFinished(node.mine.first_rank if node.mine else 0, generation))

    def _save(self, late: tuple[float, str, int, int]) -> None:
        """Let a node's saver finish a save: the shared disk is reached by those that are cut off, too."""
        _, agent, generation, step = late
        node = self.nodes[agent.partition("#")[0]]
        if node.id != agent or node.cluster_node is None:
            return
        if node.stopped:
            self._saves.append(late)
            return
        allowed, until = node.right
        if allowed == generation and self.now < until:
            self.commits.append(Commit(self.now, node.name, generation, step, node.cluster_node.session))
            self._saved = step
            if node.running == generation:
                self._say(node, CommitSeen(step, f"step-{step:09d}.g{generation}"))

    # What a test looks at.

    def outcome(self) -> dict[str, Any]:
        """Return what became of the job, as its user sees it."""
        ended = self.ended()
        kinds = ("restart-in-job", "replace-node", "shrink")
        return {
            "ended": sorted(set(ended)),
            "nodes": len(ended),
            "saved": max((one.step for one in self.commits), default=-1),
            "generations": self.generation(),
            "restarts": {kind: self.judged[kind] for kind in kinds if self.judged[kind]},
            "back": len(self.lived),
            "refused": sum(bool(node.turned_away) for node in self.nodes.values()),
            "overlaps": bool(overlaps(self.commits)),
        }

    def ended(self) -> list[int]:
        """Return the exit codes with which nodes know that the job ended."""
        return [node.ending.exit_code for node in self.nodes.values() if node.ending is not None]

    def lives(self) -> bool:
        """Say whether an agent is left."""
        return any(node.cluster_node is not None for node in self.nodes.values())

    def generation(self) -> int:
        """Return the youngest generation that runs."""
        return max(node.running for node in self.nodes.values())

    def may_commit(self) -> set[int]:
        """Return the generations of which some node may commit now."""
        return {node.right[0] for node in self.nodes.values() if node.right[1] > self.now}

    def active(self) -> tuple[str, ...]:
        """Return the nodes whose workers run, of the youngest generation."""
        newest = self.generation()
        return tuple(
            name
            for name, node in self.nodes.items()
            if node.started and node.running == newest and node.cluster_node is not None
        )

    def place(self, name: str) -> int:
        """Return a node's place among those that have ranks; -1: it has none."""
        mine = self.nodes[name].mine
        return -1 if mine is None else mine.node_rank

    def leaders(self) -> tuple[str, ...]:
        """Return the nodes that believe that they coordinate."""
        return tuple(
            name
            for name, node in self.nodes.items()
            if node.cluster_node is not None and node.cluster_node.leader_state is not None
        )
