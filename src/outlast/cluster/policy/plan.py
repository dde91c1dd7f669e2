"""What a leader proposes: the plan of a generation, and all that a successor has to know besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from outlast.cluster.policy.codec import MOST_NODES, AtMost, Codec, MessageError, Port, Tree
from outlast.cluster.policy.members import MembershipState
from outlast.cluster.policy.messages import Assignment, Ending, Record, Wait
from outlast.cluster.policy.rank_assignment import RankAssignment
from outlast.recovery.policy.events import StateSource


@dataclass(frozen=True)
class JobPlan:
    """The plan in a record.

    Args:
        membership: which nodes there are.
        job: what the job's decider has to know.
        seats: nodes with ranks, in the order of their ranks; empty: no generation has begun.
        reason: of the plan.
        why: what ended the generation before; empty: nothing did.
        hung_again: a hang that came back ended it.
        state: which state the ranks load.
        avoid: what they are told of single copies.
        port: of their store.
        reenter: workers that can re-enter their function are kept.
        layout: of the ranks, as text; empty: none was given.
        end: how the job ended; None: it goes on.
        wait: seconds before new workers are started.
    """

    membership: MembershipState
    job: Annotated[Any, Tree(values=200_000, depth=24, text=1 << 16)]
    seats: Annotated[tuple[RankAssignment, ...], AtMost(MOST_NODES)]
    reason: str
    why: str
    hung_again: bool
    state: StateSource
    avoid: tuple[str, ...]
    port: Port
    reenter: bool
    layout: Annotated[str, AtMost(128)]
    end: Ending | None
    wait: Wait = 0.0

    def places(self) -> Mapping[str, int]:
        """Return the place of each node that has ranks."""
        return {seat.name: place for place, seat in enumerate(self.seats)}

    def assignment(
        self, generation: int, name: str, places: Mapping[str, int] | None = None
    ) -> Assignment | Ending | None:
        """Return what the plan means for a node; None: nothing was begun yet.

        Args:
            generation: its number.
            name: of the node.
            places: see :meth:`places`, for a caller that asks about many nodes.
        """
        if self.end is not None:
            return self.end
        if not self.seats:
            return None
        reason = self.why or self.reason
        place = (self.places() if places is None else places).get(name)
        if place is None:
            return Assignment(generation, reason=reason)
        last = self.seats[-1]
        return Assignment(
            generation=generation,
            seated=True,
            first_rank=self.seats[place].first_rank,
            node_rank=place,
            nodes=len(self.seats),
            world_size=last.first_rank + last.slots,
            host=self.seats[0].address.rpartition(":")[0],
            port=self.port,
            master=place == 0,
            avoid=self.avoid,
            state=self.state.value,
            reason=reason,
            reenter=self.reenter,
            hung_again=self.hung_again,
            layout=self.layout,
            wait=self.wait,
        )


PLANS: Codec[JobPlan] = Codec(JobPlan)


class LatestPlan:
    """Reads the plan of a record, and keeps the last one: several records may have the same plan."""

    def __init__(self) -> None:
        self._text = ""
        self._plan: JobPlan | None = None
        self.places: Mapping[str, int] = {}

    def of(self, record: Record) -> JobPlan:
        """Return the plan in a record that has one.

        Raises:
            MessageError: it is none.
        """
        if self._plan is None or self._text != record.plan:
            try:
                self.keep(record.plan, PLANS.read(record.plan))
            except MessageError as error:
                raise MessageError(f"plan: {error}") from error
        assert self._plan is not None
        return self._plan

    def keep(self, text: str, plan: JobPlan) -> None:
        """Take note of a plan that was just written."""
        self._text, self._plan, self.places = text, plan, plan.places()
