"""A simulated job of several nodes whose ranks can be entered again in their processes; see :mod:`.fleet`."""

from __future__ import annotations

from typing import Any

from outlast.cluster.policy.messages import Assignment, NodeStatus, Quiesce
from outlast.recovery.policy.events import Fault, FaultKind
from tests.simulation.fleet import Fleet, Node

_LEAVES = 0.1  # seconds from the call to the gate
_PATIENCE = 10.0  # after which a rank that sticks is ended


class ResilientFleet(Fleet):
    """A fleet with a rank a node that goes to the gate when it is called; takes what :class:`Fleet` does."""

    def __init__(self, count: int, least: int, most: int, **more: Any) -> None:
        self.processes: dict[str, int] = {}  # how many each node has started so far
        self._living: set[str] = set()
        self._sticky: set[str] = set()
        self._deaf: set[str] = set()
        self._gates: dict[str, tuple[float, int]] = {}  # when, and for which generation, a rank is there
        super().__init__(count, least, most, **more)

    # What a test does to it.

    def raise_in(self, name: str) -> None:
        """Let the function of a node's rank raise."""
        node = self.nodes[name]
        self._workers_gone(node)
        self._fault(node, FaultKind.ERROR, "RuntimeError: boom")

    def stick(self, name: str) -> None:
        """Let a node's rank not leave its function; the node ends it when its time is up."""
        self._sticky.add(name)

    def deaf(self, name: str) -> None:
        """Let a node not bring its rank to the gate, nor end it, nor say so."""
        self._deaf.add(name)

    def fail(self, name: str, words: str = "signal 9") -> None:
        """Let a worker of a node die."""
        self._living.discard(name)
        super().fail(name, words)

    def kill(self, name: str, power: bool = False) -> None:
        """End a node's agent and workers."""
        self._living.discard(name)
        self._gates.pop(name, None)
        super().kill(name, power)

    # What agents and workers would do.

    def _turn(self, until: float) -> None:
        super()._turn(until)
        for name, (at, generation) in list(self._gates.items()):
            if self.now >= at and not self.nodes[name].stopped:
                del self._gates[name]
                if name in self._sticky:
                    self._sticky.discard(name)
                    self._living.discard(name)
                    self._note(self.nodes[name], "its rank is ended: it did not leave its function in time")
                self._answer(self.nodes[name], generation)

    def _answer(self, node: Node, generation: int) -> None:
        if node.cluster_node is not None:
            self._obey(node, node.cluster_node.halted(generation, self.now))

    def _halt(self, node: Node, order: Quiesce) -> None:
        if not order.reenter:
            self._gates.pop(node.name, None)
            if node.running < order.generation:
                self._living.discard(node.name)
            super()._halt(node, order)
        elif node.running < order.generation and node.mine is not None:
            self._end(node)
            late = _PATIENCE if node.name in self._sticky else _LEAVES
            if node.name not in self._deaf:
                here = self.now if node.name not in self._living else self.now + late
                self._gates[node.name] = (here, order.generation)
        elif node.name not in self._gates and node.name not in self._deaf:
            self._answer(node, order.generation)

    def _assigned(self, node: Node, mine: Assignment) -> None:
        before = node.running
        super()._assigned(node, mine)
        if node.running == before or not mine.seated:
            return
        seat = f"rank {mine.first_rank} of generation {mine.generation}"
        if mine.reenter and node.name in self._living:
            self._note(node, f"its process enters again, as {seat}")
            return
        self._living.add(node.name)
        self.processes[node.name] = self.processes.get(node.name, 0) + 1
        self._note(node, f"a new process is {seat}")

    def _offer(self, node: Node) -> NodeStatus:
        store = super()._offer(node).store
        if node.name not in self._living:
            return NodeStatus(store)
        return NodeStatus(store, True, 2 * _PATIENCE) if node.running else NodeStatus(store, False)

    def _fault(self, node: Node, kind: FaultKind, words: str) -> None:
        rank = node.mine.first_rank if node.mine is not None else -1
        able = node.name in self._living or None
        step = self.steps.get(node.running, -1)
        self._say(node, Fault(kind, node.name, rank, node.running, step, words, words, reenters=able))
