"""When workers may start after others have ended: once NVML lists none of the old processes as computing.

The driver frees the memory of a process some time after its end. A successor that starts before finds the
device full. Questions go to the collector, as a call of a sick driver may never return; no answer, and a
memory that is not freed in time, let the workers start all the same.

NVML names processes as its caller's namespace of pids sees them, or as the host does. A pid of the host
matches no worker in a container: then nothing is waited for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

PATIENCE = 50.0  # seconds for the whole wait: NVRx, gpu_memory_reclaim_timeout
_EVERY = 0.1  # seconds between two questions
_WORTH_SAYING = 0.5  # seconds of waiting
_ANYWAY = "the next workers start anyway, and may find too little memory"


@dataclass(frozen=True)
class Listing:
    """The processes that NVML lists as computing.

    Args:
        number: of the question that it answers.
        pids: of all devices that were read.
        problem: what could not be read, and why; empty: all was.
    """

    number: int
    pids: tuple[int, ...] = ()
    problem: str = ""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps({"listing": asdict(self)}, separators=(",", ":"))


LISTING = b'{"listing":'  # how a line with one begins


def listing_of(line: bytes) -> Listing:
    """Return the listing that a line describes.

    Raises:
        ValueError: it describes none.
    """
    try:
        found = json.loads(line)["listing"]
        return Listing(int(found["number"]), tuple(map(int, found["pids"])), str(found["problem"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"a listing of processes expected, {line[:80]!r} found") from error


@dataclass(frozen=True)
class Ask:
    """Have the collector list the processes; the answer carries the number."""

    number: int


@dataclass(frozen=True)
class Say:
    """Note something for a person."""

    text: str


Order = Ask | Say


class MemoryWait:
    """Waits until the processes that have ended are listed no more.

    Args:
        answer_within: seconds for one answer of the collector.
    """

    def __init__(self, answer_within: float) -> None:
        self._answer_within = answer_within
        self._pids: frozenset[int] = frozenset()
        self._listed: list[int] = []
        self._began = self._listed_since = self._asked = self._most = 0.0
        self._number = 0
        self._answered = False

    @property
    def over(self) -> bool:
        """Whether workers may start."""
        return not self._pids

    def deadline(self) -> float:
        """Return when :meth:`tick` has something to do."""
        if self.over:
            return math.inf
        after = _EVERY if self._answered else self._answer_within
        return min(self._began + self._most, self._asked + after)

    def begin(self, pids: Iterable[int], now: float, start_timeout: float = math.inf) -> list[Order]:
        """Wait for processes that end now, besides those that are waited for already.

        The first question is asked before they have ended: where none is listed even then, nothing is
        waited for. Ranks of other nodes may have started already and count as hung when they have waited for
        their peers for ``start_timeout`` seconds: half of it is the most.
        """
        more = frozenset(pids)
        if not more:
            return []
        fresh, self._pids = self.over, self._pids | more
        if not fresh:
            return []
        self._began, self._listed = now, []
        self._most = min(PATIENCE, start_timeout / 2)
        return self._ask(now)

    def handle(self, listing: Listing, now: float) -> list[Order]:
        """Take an answer of the collector."""
        if self.over or listing.number != self._number:
            return []
        listed = sorted(self._pids.intersection(listing.pids))
        if listed:
            self._listed_since = self._listed_since if self._listed else now
            self._listed, self._answered = listed, True
            return self.tick(now)
        if listing.problem:
            return self._end(f"{listing.problem}; {_ANYWAY}")
        waited = now - self._listed_since if self._listed else 0.0
        if waited < _WORTH_SAYING:
            return self._end("")
        return self._end(f"NVML listed ended processes for {waited:.1f} s; the next workers start now")

    def no_collector(self) -> list[Order]:
        """Take note that a question could not be asked."""
        return [] if self.over else self._end(f"no collector runs that could ask the driver; {_ANYWAY}")

    def tick(self, now: float) -> list[Order]:
        """Ask again, or end the wait."""
        if now < self.deadline():
            return []
        if now >= self._began + self._most:
            what = f"NVML still lists {_named(self._listed)}" if self._listed else "NVML was not read"
            return self._end(f"{what} {self._most:.0f} s after they ended; {_ANYWAY}")
        if self._answered:
            return self._ask(now)
        return self._end(f"the collector has not answered for {now - self._asked:.1f} s; {_ANYWAY}")

    def _ask(self, now: float) -> list[Order]:
        self._number += 1
        self._asked, self._answered = now, False
        return [Ask(self._number)]

    def _end(self, text: str) -> list[Order]:
        self._pids = frozenset()
        return [Say(f"GPU memory of the workers before: {text}")] if text else []


def _named(pids: list[int]) -> str:
    most = 8
    more = f" and {len(pids) - most} more" if len(pids) > most else ""
    return f"{'processes' if pids[1:] else 'process'} {', '.join(map(str, pids[:most]))}{more}"
