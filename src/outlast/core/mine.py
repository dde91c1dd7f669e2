"""What the newest record means for this node."""

from __future__ import annotations

from outlast.core.ballots import Record
from outlast.core.contacts import Contacts
from outlast.core.letters import (
    Assignment,
    Ending,
    Letter,
    assignment,
    assignment_from_json,
    plan_from_text,
)


class Mine:
    """Keeps it: from the plan, where the agent has it, else from what the coordinator wrote besides.

    Args:
        name: of the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = (-1, -1)
        self._mine: Assignment | Ending | None = None

    def take(self, letter: Letter, record: Record, contacts: Contacts) -> None:
        """Take what a ping says; the plan in it tells where others are, too."""
        if "record" in letter and record.plan:
            plan = plan_from_text(record.plan)
            self._key, self._mine = record.key, assignment(plan, record.generation, self._name)
            contacts.learn(plan)
        elif "yours" in letter:
            self._key, self._mine = record.key, assignment_from_json(letter["yours"])

    def of(self, record: Record) -> Assignment | Ending | None:
        """Return what a record means; None: nothing, or it was never told."""
        return self._mine if self._key == record.key else None
