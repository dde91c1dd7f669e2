"""Two jobs of one name: how they learn of each other, and which one gives way.

Over the network by letters (``here-is``), and where agents share the run folder by a notice in it, which
the coordinator writes anew every second. A notice that changes is a job that runs; one that does not is what
is left of one. So an agent that begins anew, cut off from the others, founds nothing while they can write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

NOTICE_EVERY = 1.0


@dataclass(frozen=True)
class Notice:
    """A job that runs.

    Args:
        run_id: what it is called.
        generation, session: which one it is; the younger generation counts for more.
        address: of whoever coordinates it.
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

    def letter(self) -> dict[str, Any]:
        """Return the letter that tells of it."""
        said = {"run_id": self.run_id, "generation": self.generation, "session": self.session}
        return {"kind": "here-is", **said, "address": self.address}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Notice:
        """Return what a letter, or the file, says.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        names = str(found["run_id"]), int(found["generation"]), str(found["session"]), str(found["address"])
        return cls(*names, int(found.get("beat", 0)))


class Meeting(Enum):
    """What an agent does about another job of its name."""

    NOTHING = "nothing"
    JOIN = "join"  # it has begun none itself
    GIVE_WAY = "give way"
    ANSWER = "answer"  # so that the other one gives way


def meet(other: Notice, ours: Notice, begun: bool | None) -> Meeting:
    """Return what to do about another job.

    Args:
        other, ours: the jobs.
        begun: this agent coordinates, and its job has begun, or has not; None: it coordinates nothing.
    """
    if other.run_id != ours.run_id or other.session == ours.session:
        return Meeting.NOTHING
    if begun is None:
        return Meeting.ANSWER if ours.address else Meeting.NOTHING
    if not begun:
        return Meeting.JOIN
    return Meeting.GIVE_WAY if other.rank > ours.rank else Meeting.ANSWER


class Board:
    """Reads the notices in a shared folder.

    Args:
        quiet: seconds without a new one after which nobody writes them any more.
    """

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._last: Notice | None = None
        self.until = float("-inf")  # when it will be known that nobody writes them

    def runs(self, found: Notice | None, session: str, now: float) -> bool:
        """Say whether another job than that of a session writes notices."""
        if found is None or found.session == session:
            return False
        if found == self._last:
            return False
        first = self._last is None or self._last.session != found.session
        self._last, self.until = found, now + self._quiet
        return not first
