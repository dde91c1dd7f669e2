"""How an agent finds the leader of its job, and which of two jobs of one name gives way.

Two jobs learn of each other by a :class:`Beacon`: as a message and, where agents share the run folder, as a
file in it that the leader writes every second. A file that changes is a job that runs; one that does not is
of a job that has ended. So an agent that starts again, cut off from the others, founds no job while they can
write.
"""

from __future__ import annotations

import math
from enum import Enum

from outlast.cluster.policy.ballots import majority
from outlast.cluster.policy.events import Start
from outlast.cluster.policy.members import Member
from outlast.cluster.policy.messages import Beacon, Join, NodeStatus, Record, agent_id, node_of
from outlast.cluster.policy.plan import JobPlan

JOIN_EVERY = 1.0


class Contacts:
    """Where other agents are, and which are dead for sure.

    Args:
        me: this node.
        start: where others may be found.
        patience: seconds without a heartbeat after which the contact is lost.
        now: in seconds of the agent's clock.
    """

    def __init__(self, me: Member, start: Start, patience: float, now: float) -> None:
        self.addresses: dict[str, str] = {}
        self.out_since = now
        self._me = me
        self._seeds = start.seeds
        self._after = start.after
        self._patience = patience
        self._dead: set[str] = set()
        self._next_join = now
        self.pinged = -math.inf

    def out(self, leads: bool, now: float) -> bool:
        """Say whether this agent neither leads nor hears the leader."""
        if leads or now - self.pinged <= self._patience:
            self.out_since = now
            return False
        return True

    def learn(self, plan: JobPlan) -> None:
        """Take note of the addresses in a plan."""
        for one in plan.membership.nodes:
            self.addresses[agent_id(one.member.name, one.member.incarnation)] = one.member.address

    def join(self, generation: int, status: NodeStatus, session: str, asked: int) -> Join:
        """Return the message that asks to join, of an agent that runs a generation (0: none)."""
        return Join(self._me, generation, self._after, session, asked, status)

    def seek(self, address: str) -> None:
        """Ask at an address for the leader from now on, too."""
        self._seeds = (*self._seeds, address)

    def due(self, record: Record | None, now: float) -> list[str]:
        """Return the addresses to ask for the leader, when it is time to."""
        if now < self._next_join:
            return []
        self._next_join = now + JOIN_EVERY
        voters = frozenset[str]() if record is None else record.voters
        known = {*self._seeds, *(self.addresses[one] for one in voters if one in self.addresses)}
        return sorted(known - {self._me.address, self._me.endpoint})

    def bury(self, fresh: set[str], record: Record) -> str:
        """Take note of agents that have started again, so that those before them on their nodes are dead.

        Returns:
            The nodes of dead voters, once nobody can be elected without them; else nothing.
        """
        nodes = set(map(node_of, fresh))
        known = record.agents | record.voters
        self._dead |= {one for one in known - fresh if node_of(one) in nodes}
        if majority(record.quorums, record.voters - self._dead):
            return ""
        return ", ".join(sorted(map(node_of, record.voters & self._dead)))


BEACON_EVERY = 1.0


class Contact(Enum):
    """What an agent does about another job of its name."""

    NOTHING = "nothing"
    JOIN = "join"  # it has begun none itself
    GIVE_WAY = "give way"
    ANSWER = "answer"  # so that the other one gives way


def meet(other: Beacon, ours: Beacon, begun: bool | None) -> Contact:
    """Return what to do about another job.

    Args:
        other, ours: the jobs.
        begun: this agent is the leader, and its job has begun, or has not; None: it leads nothing.
    """
    if other.run_id != ours.run_id or other.session == ours.session:
        return Contact.NOTHING
    if begun is None:
        return Contact.ANSWER if ours.address else Contact.NOTHING
    if not begun:
        return Contact.JOIN
    return Contact.GIVE_WAY if other.rank > ours.rank else Contact.ANSWER


class LeaderBeacon:
    """Reads the beacons in a shared folder.

    Args:
        quiet: seconds without a new one after which nobody writes them any more.
    """

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._last: Beacon | None = None
        self.until = float("-inf")  # when it will be known that nobody writes them

    def runs(self, found: Beacon | None, session: str, now: float) -> bool:
        """Say whether another job than that of a session writes beacons."""
        if found is None or found.session == session or found == self._last:
            return False
        first = self._last is None or self._last.session != found.session
        self._last, self.until = found, now + self._quiet
        return not first
