"""How an agent finds the leader of its job: addresses, and when it was last in contact.

Two jobs of one name: how they learn of each other, and which one gives way.

Over the network by messages (``here-is``), and where agents share the run folder by a notice in it, which
the leader writes anew every second. A notice that changes is a job that runs; one that does not is what
is left of one. So an agent that begins anew, cut off from the others, founds nothing while they can write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from outlast.cluster.policy.ballots import Record, majority
from outlast.cluster.policy.events import NodeStatus, Start
from outlast.cluster.policy.members import Member
from outlast.cluster.policy.messages import agent_id, node_of

KNOCK_EVERY = 1.0


class Contacts:
    """Where other agents are, and which are dead for sure.

    Args:
        me: this node.
        start: where others may be found.
        patience: seconds without a ping after which the contact is lost.
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
        self._next_knock = now
        self.pinged = -math.inf

    def out(self, leads: bool, now: float) -> bool:
        """Say whether this agent neither leads nor hears the leader."""
        if leads or now - self.pinged <= self._patience:
            self.out_since = now
            return False
        return True

    def learn(self, plan: Mapping[str, Any]) -> None:
        """Take note of the addresses in a plan."""
        for one in plan["membership"]["nodes"]:
            member = one["member"]
            self.addresses[agent_id(member["name"], member["incarnation"])] = member["address"]

    def join_message(
        self, generation: int, offer: NodeStatus, session: str, asked: int = 0
    ) -> dict[str, Any]:
        """Return the message that asks to be taken in, of an agent that runs a generation (0: none).

        Args:
            generation: that it runs.
            offer: what it has for the next one.
            session: the job that it is in.
            asked: the signal that asked it to stop; 0: none. Whoever takes it in is told so at once: the
                first ping may have to wait until another node has imported torch.
        """
        member = {**asdict(self._me), "domains": [list(pair) for pair in self._me.domains]}
        ran = {"generation": generation, "after": self._after, "session": session, "asked": asked}
        return {"kind": "join", "member": member, **asdict(offer), **ran}

    def seek(self, address: str) -> None:
        """Knock at an address from now on, too."""
        self._seeds = (*self._seeds, address)

    def knocks(self, record: Record | None, now: float) -> Iterator[str]:
        """Yield the addresses to knock at, when it is time to."""
        if now < self._next_knock:
            return
        self._next_knock = now + KNOCK_EVERY
        voters = frozenset() if record is None else record.voters
        known = {*self._seeds, *(self.addresses[one] for one in voters if one in self.addresses)}
        yield from sorted(known - {self._me.address, self._me.endpoint})

    def bury(self, fresh: set[str], record: Record) -> str:
        """Take note of agents that have begun anew, so that those before them on their nodes are dead.

        Returns:
            The nodes of dead voters, once nobody can be elected without them; else nothing.
        """
        nodes = set(map(node_of, fresh))
        known = record.agents | record.voters
        self._dead |= {one for one in known - fresh if node_of(one) in nodes}
        if majority(record.quorums, record.voters - self._dead):
            return ""
        return ", ".join(sorted(map(node_of, record.voters & self._dead)))


NOTICE_EVERY = 1.0


@dataclass(frozen=True)
class Beacon:
    """A job that runs.

    Args:
        run_id: what it is called.
        generation, session: which one it is; the younger generation counts for more.
        address: of its leader.
        beat: rises with each notice.
    """

    run_id: str
    generation: int
    session: str
    address: str
    beat: int = 0

    @property
    def rank(self) -> tuple[int, str]:
        """Return what two jobs of one name are compared by."""
        return self.generation, self.session

    def message(self) -> dict[str, Any]:
        """Return the message that tells of it."""
        said = {"run_id": self.run_id, "generation": self.generation, "session": self.session}
        return {"kind": "here-is", **said, "address": self.address}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Beacon:
        """Return what a message, or the file, says.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        names = str(found["run_id"]), int(found["generation"]), str(found["session"]), str(found["address"])
        return cls(*names, int(found.get("beat", 0)))


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
    """Reads the notices in a shared folder.

    Args:
        quiet: seconds without a new one after which nobody writes them any more.
    """

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._last: Beacon | None = None
        self.until = float("-inf")  # when it will be known that nobody writes them

    def runs(self, found: Beacon | None, session: str, now: float) -> bool:
        """Say whether another job than that of a session writes notices."""
        if found is None or found.session == session:
            return False
        if found == self._last:
            return False
        first = self._last is None or self._last.session != found.session
        self._last, self.until = found, now + self._quiet
        return not first
