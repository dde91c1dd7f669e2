"""A rerun machine that is played events, and short names for its orders, for all tests of the policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from outlast.config import RerunOptions
from outlast.rerun.policy.events import (
    Event,
    Found,
    Incident,
    Loaded,
    Means,
    Order,
    Passed,
    Reran,
    Started,
    Swapped,
)
from outlast.rerun.policy.machine import RerunMachine

DEVICES = ("GPU-a", "GPU-b", "GPU-c")
FIVE = (*DEVICES, "GPU-d", "GPU-e")
SPARED = ("GPU-a", "GPU-s", "GPU-c")  # rank 1 has another device
NEAR, OTHER = Loaded(0, "local", "p"), Loaded(0, "local", "q")
FRESH, NO_MEANS = Loaded(0), Means()
PEERS, COPY, SPARE = Means({1: 2}), Means(another_copy=True), Means(spare=True)
HOUR, DAY = 3600.0, 86_400.0
Turn = Callable[["Case"], Order]


class Case:
    """A machine on some devices, after a load."""

    def __init__(self, loaded: Loaded = FRESH, devices: Sequence[str] = DEVICES, **options: Any) -> None:
        self.options = RerunOptions(**options)
        self.devices = tuple(devices)
        self.machine = RerunMachine(self.options)
        self.machine.handle(Started(self.devices), 0.0)
        self.machine.handle(loaded, 0.0)

    def play(self, *turns: Turn) -> list[str]:
        """Return the orders after each turn, in short."""
        return [short(turn(self)) for turn in turns]

    def reread(self) -> None:
        """Go on with what another process reads of it."""
        records = json.loads(json.dumps(self.machine.records()))
        self.machine = RerunMachine(self.options)
        self.machine.restore(records)

    def digests(self, bad: Sequence[int] = (), others: Sequence[int] = ()) -> tuple[str, ...]:
        kinds = {**dict.fromkeys(others, " other"), **dict.fromkeys(bad, " bad")}
        return tuple(f"{rank}{kinds.get(rank, '')}" for rank in range(len(self.devices)))

    @property
    def record(self) -> dict[str, Any]:
        """The last incident."""
        return self.machine.records()[-1]

    @property
    def tried(self) -> list[str]:
        return [one["remedy"] for one in self.record["attempts"]]

    @property
    def results(self) -> list[str]:
        return [one["result"] for one in self.record["attempts"]]


def short(order: Order) -> str:
    """Return remedy, exit code, pairs, verdict, device and copy of an order; "-": there is nothing to do."""
    if order == Order():
        return "-"
    remedy = order.remedy.name.lower() + (f"-{order.exit_code}" if order.exit_code != 0 else "")
    verdict = order.verdict.name.lower() if order.verdict else ""
    pairs = " ".join(f"{one}/{other}" for one, other in order.pairs)
    place = f"of {order.place}" if order.place else ""
    return " ".join(filter(None, (remedy, pairs, verdict, order.device, place)))


def heard(event: Event, at: float = 3.0) -> Turn:
    return lambda case: case.machine.handle(event, at)


def found(
    *ranks: int, step: int = 5, means: Means = NO_MEANS, at: float = 1.0, bad: Sequence[int] | None = None
) -> Turn:
    """The first run of a step is rejected; ``bad``: ranks whose results are wrong, those by default."""
    wrong = ranks if bad is None else bad
    return lambda case: case.machine.handle(Found(step, "loss", "nan", ranks, case.digests(wrong), means), at)


def reran(
    *ranks: int,
    others: Sequence[int] = (),
    apart: tuple[float, ...] = (),
    at: float = 2.0,
    bad: Sequence[int] | None = None,
) -> Turn:
    """The step was done again; ``others``: ranks that came to another result."""
    wrong = ranks if bad is None else bad
    return lambda case: case.machine.handle(Reran(ranks, case.digests(wrong, others), apart), at)


def swapped(*ranks: int, same: bool = True) -> Turn:
    return heard(Swapped(ranks, same))


def passed(step: int = 5) -> Turn:
    return heard(Passed(step))


def restarted(*devices: str, loaded: Loaded = FRESH) -> Turn:
    """Another process goes on with what was written down."""

    def turn(case: Case) -> Order:
        case.reread()
        order = case.machine.handle(Started(devices or case.devices), 3.0)
        case.machine.handle(loaded, 3.0)
        return order

    return turn


CLEAN = (reran(), reran())


def incidents(machine: RerunMachine) -> list[Incident]:
    return [Incident.of_record(record) for record in machine.records()]
