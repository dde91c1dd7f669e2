"""How an agent finds whoever coordinates its job: addresses, and when it was last in contact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from outlast.core.ballots import Record, majority
from outlast.core.council_events import Start
from outlast.core.lead_events import Offer
from outlast.core.letters import agent_id, node_of
from outlast.core.members import Member

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
        """Say whether this agent neither coordinates nor hears who does."""
        if leads or now - self.pinged <= self._patience:
            self.out_since = now
            return False
        return True

    def learn(self, plan: Mapping[str, Any]) -> None:
        """Take note of the addresses in a plan."""
        for one in plan["membership"]["nodes"]:
            member = one["member"]
            self.addresses[agent_id(member["name"], member["life"])] = member["address"]

    def join_letter(self, generation: int, offer: Offer, session: str, asked: int = 0) -> dict[str, Any]:
        """Return the letter that asks to be taken in, of an agent that runs a generation (0: none).

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
