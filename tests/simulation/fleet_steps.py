"""A simulated job of several nodes whose ranks agree on a step: two on each node, coupled by their steps."""

from __future__ import annotations

from typing import Any

from outlast.agreement.policy.steps import Proposal, RanksSeen, Stage, StepParticipant, TellRanks, Want
from outlast.cluster.policy.events import Order
from outlast.cluster.policy.messages import Assignment
from tests.simulation.fleet import Fleet, Node
from tests.simulation.ranks import Rank, acted_apart

_EACH = 2


class AgreeingFleet(Fleet):
    """A fleet whose ranks ask for saves and stops, promise, wait and act; see :class:`.Fleet`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.ranks: dict[tuple[int, str], list[Rank]] = {}  # of a generation and an agent
        self._pages: dict[tuple[int, str], Proposal] = {}
        self.sent_steps = 0
        self.saves = True  # what ranks agree to save arrives on disk
        super().__init__(*args, **more)

    def want(self, name: str, want: Want) -> None:
        """Let a rank of a node ask for something."""
        node = self.nodes[name]
        self.ranks[node.running, node.id][0].wants |= want

    def wanted(self) -> bool:
        """Say whether a rank of the present generation waits, or asks for something."""
        ranks = [rank for one in self.active() for rank in self._of(self.nodes[one])]
        return any(rank.wants or rank.left < rank.completed for rank in ranks)

    def apart(self) -> list[str]:
        """Return what must not be, of all generations."""
        found = []
        for generation in {one for one, _ in self.ranks}:
            ranks = [rank for (one, _), some in self.ranks.items() if one == generation for rank in some]
            found += [f"generation {generation}, {words}" for words in acted_apart(ranks)]
        return found

    @property
    def half_committed(self) -> bool:
        """Whether some active nodes, and not all, have been told that a step is committed."""
        active = (self.nodes[name] for name in self.active())
        told = [self._pages.get((node.running, node.id)) for node in active]
        committed = [one for one in told if one is not None and one.stage is Stage.COMMITTED]
        return 0 < len(committed) < len(told)

    def acts(self) -> int:
        """Return how often a rank has acted."""
        return sum(len(rank.acts) for some in self.ranks.values() for rank in some)

    def _of(self, node: Node) -> list[Rank]:
        return self.ranks.get((node.running, node.id), [])

    def _turn(self, until: float) -> None:
        super()._turn(until)
        for node in self.nodes.values():
            if node.cluster_node is not None and not node.stopped and node.started:
                self._between(node)
                seen = RanksSeen(node.running, tuple(rank.status() for rank in self._of(node)))
                self._obey(node, node.cluster_node.steps(seen, self.now))

    def _between(self, node: Node) -> None:
        for rank in self._of(node):
            rank.said = self._pages.get((node.running, node.id))
            before = len(rank.acts)
            if rank.left < rank.completed or rank.held:
                rank.look()
            if len(rank.acts) > before and rank.number == 0 and self.saves:
                self._saves.append((self.now + 0.1, node.id, node.running, rank.completed))

    def _carry_out(self, node: Node, order: Order) -> None:
        if not isinstance(order, TellRanks):
            super()._carry_out(node, order)
        elif order.generation == node.running:
            self._pages[node.running, node.id] = order.said

    def _assigned(self, node: Node, mine: Assignment) -> None:
        super()._assigned(node, mine)
        key = (node.running, node.id)
        if node.mine is mine and key not in self.ranks:
            self.ranks[key] = [Rank(mine.first_rank * _EACH + at, StepParticipant()) for at in range(_EACH)]
            for rank in self.ranks[key]:
                rank.begin(1)

    def _make_step(self, generation: int, group: list[Node]) -> None:
        mine = group[0].mine
        if mine is None or len(group) < mine.nodes or len({node.side for node in group}) > 1:
            return
        ranks = [rank for node in group for rank in self._of(node)]
        if any(rank.left < rank.completed or rank.held for rank in ranks):
            return
        super()._make_step(generation, group)
        for rank in ranks:
            rank.completed += 1
        for node in group:
            self._between(node)
