"""The faults of bench/partitions.py, drawn from a seed and the state of the hosts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

LASTS = 15.0
LEAST, MOST = 3, 7
FLAP = (1.0, 4.0)
CALM = (0.5, 8.0)  # between the last event and the mending
PING_TIMEOUTS = (1.5, 3.0, 5.0)  # --ping-timeout: less than a lease, as long, and the default
LEADER = 0.5  # how often the leader's host is the victim, where it can be


@dataclass(frozen=True)
class Happening:
    """One fault of one or more hosts; ``seconds`` until it is undone, 0: it is not."""

    kind: str
    hosts: tuple[str, ...]
    seconds: float = 0.0


@dataclass
class Board:
    """The state of each host.

    Attributes:
        cut: their cable is out.
        paused: their processes are stopped.
        idle: they have power but no agent.
        off: they have no power.
    """

    hosts: tuple[str, ...]
    cut: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)

    def candidates(self, kind: str) -> list[str]:
        """Return the hosts on which a fault is possible."""
        powered = [name for name in self.hosts if name not in self.off]
        match kind:
            case "cut" | "cut two" | "flap":
                return [name for name in powered if name not in self.cut]
            case "heal":
                return [name for name in powered if name in self.cut]
            case "pause":
                return [name for name in powered if name not in self.paused | self.idle]
            case "resume":
                return [name for name in powered if name in self.paused]
            case "kill agent":
                return [name for name in powered if name not in self.idle]
            case "start agent":
                return [name for name in powered if name in self.idle - self.paused]
            case "kill host":
                return powered
            case "boot":
                return [name for name in self.hosts if name in self.off]
        raise ValueError(f"{kind!r}: known are {', '.join(WEIGHTS)}")

    def note(self, kind: str, host: str) -> None:
        """Record the fault of a host."""
        match kind:
            case "cut" | "cut two" | "flap":
                self.cut.add(host)
            case "heal":
                self.cut.discard(host)
            case "pause":
                self.paused.add(host)
            case "resume":
                self.paused.discard(host)
            case "kill agent":
                self.idle.add(host)
            case "start agent":
                self.idle.discard(host)
            case "kill host":
                for state in (self.cut, self.paused, self.idle):
                    state.discard(host)
                self.off.add(host)
            case "boot":
                self.off.discard(host)


WEIGHTS = {
    "cut": 3,
    "cut two": 2,
    "heal": 3,
    "pause": 3,
    "resume": 3,
    "flap": 2,
    "kill agent": 2,
    "start agent": 3,
    "kill host": 1,
    "boot": 3,
}


def moments(dice: random.Random) -> list[float]:
    """Return the times of the faults, in seconds after the first commit of the job."""
    return sorted(dice.uniform(0.0, LASTS) for _ in range(dice.randint(LEAST, MOST)))


def draw(dice: random.Random, board: Board, leader: str) -> Happening:
    """Draw the next fault.

    Args:
        dice: of the schedule.
        board: the state of the hosts.
        leader: host of the leader, as far as is known; empty: unknown.
    """
    possible = [kind for kind in WEIGHTS if len(board.candidates(kind)) > (kind == "cut two")]
    kind = dice.choices(possible, [WEIGHTS[kind] for kind in possible])[0]
    hosts = board.candidates(kind)
    dice.shuffle(hosts)
    if dice.random() < LEADER and leader in hosts:
        hosts.remove(leader)
        hosts.insert(0, leader)
    if kind == "heal":
        return Happening(kind, tuple(sorted(hosts)))
    seconds = round(dice.uniform(*FLAP), 2) if kind == "flap" else 0.0
    return Happening(kind, tuple(hosts[: 1 + (kind == "cut two")]), seconds)


def mending(board: Board) -> Iterator[Happening]:
    """Yield the actions that undo all faults."""
    for kind in ("heal", "resume", "boot", "start agent"):
        hosts = board.candidates(kind)
        if hosts:
            yield Happening(kind, tuple(hosts))
