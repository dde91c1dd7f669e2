"""What a transcript is played to, beside the deciders of one run; see :mod:`.transcript`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from outlast.config import PreemptionOptions, RerunOptions
from outlast.inprocess import policy as inprocess
from outlast.inprocess.policy import CULPRIT_PATIENCE, Called, Enter, Granularity, Kill, Reentry, Refill
from outlast.preemption.policy import Decision, Durable, Notice, Preempted, SaveFailed, Signal, Staged, Voted
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.rerun.policy.events import Event, Found, Loaded, Means, Order, Passed, Reran, Started, Swapped
from outlast.rerun.policy.machine import RerunMachine
from tests.simulation.fencing import overlaps
from tests.simulation.fleet import Fleet
from tests.simulation.fleet_reentry import ResilientFleet
from tests.simulation.fleet_steps import AgreeingFleet

_TURN = 0.25
Handle = Callable[..., Iterator[str]]
Lines = dict[str, Handle]


def on(lines: Lines, pattern: str) -> Callable[[Handle], Handle]:
    """Have a method take the lines of a pattern: its groups are the arguments."""

    def keep(handle: Handle) -> Handle:
        lines[pattern] = handle
        return handle

    return keep


def matched(pattern: str, line: str) -> tuple[Any, ...]:
    """Return the groups of a line.

    Raises:
        ValueError: it is no event.
    """
    found = re.fullmatch(pattern, line)
    if found is None:
        raise ValueError(f"transcript: {line!r} is no event")
    return found.groups()


class Stage:
    """The policy that answers, and the clock that the lines move."""

    lines: ClassVar[Lines] = {}
    now = 0.0

    def __init__(self, line: str) -> None:
        raise AssertionError(line)

    def take(self, line: str) -> Iterator[str]:
        """Take a line of the script, and give the answers.

        Raises:
            ValueError: it is no event.
        """
        at, what = matched(r"at (\S+) (.*)", line)
        yield from self._wait(float(at))
        for pattern, handle in self.lines.items():
            found = re.fullmatch(pattern, what)
            if found is not None:
                yield from handle(self, *found.groups())
                return
        raise ValueError(f"transcript: {line!r} is no event")

    def _wait(self, until: float) -> Iterator[str]:
        self.now = until
        yield from ()


class FleetStage(Stage):
    """A job of several nodes on a simulated network and clock; n0 has the endpoint."""

    lines: ClassVar[Lines] = {}

    def __init__(self, line: str) -> None:
        *numbers, kind = matched(
            r"begin fleet (\d+) nodes (\d+):(\d+) spares (\d+)( resilient| agreeing)?", line
        )
        count, least, most, spares = map(int, numbers)
        made = {" resilient": ResilientFleet, " agreeing": AgreeingFleet}.get(kind, Fleet)
        self._fleet = made(count, least, most, spares=spares)
        self._begun = self._fleet.now
        self._shown = 0

    def take(self, line: str) -> Iterator[str]:
        yield from super().take(line)
        yield from self._news()

    def _wait(self, until: float) -> Iterator[str]:
        self._fleet.run(self._begun + until)
        yield from self._news()

    def _news(self) -> Iterator[str]:
        log, self._shown = self._fleet.log[self._shown :], len(self._fleet.log)
        for entry in log:
            when, _, words = entry.strip().partition(" ")
            yield f"{when} s: {words}"

    @on(lines, r"look")
    def look(self) -> Iterator[str]:
        """Who runs what, and who leads?"""
        fleet = self._fleet
        ranks = " ".join(sorted(fleet.active(), key=fleet.place))
        chairs = " ".join(fleet.leaders()) or "nobody"
        fenced = "; ".join(overlaps(fleet.commits)) or "no generation committed after a younger one"
        steps = fleet.steps.get(fleet.generation(), 0)
        yield f"generation {fleet.generation()} on {ranks}, step {steps}; {chairs} coordinates; {fenced}"

    @on(lines, r"(cut|heal)((?: n\d+)*)")
    def network(self, what: str, names: str) -> Iterator[str]:
        getattr(self._fleet, what)(*names.split())
        yield from ()

    @on(lines, r"failing (n\d+)")
    def failing(self, name: str) -> Iterator[str]:
        """A device of the node is about to fail."""
        generation, words = self._fleet.generation(), f"{name} is failing"
        step = self._fleet.steps.get(generation, -1)
        self._fleet.tell(name, Fault(FaultKind.FAILING, name, -1, generation, step, words, words))
        yield from ()

    @on(lines, r"(kill|power|stop|resume|start|fail|raise|stick|deaf) (n\d+)")
    def node(self, what: str, name: str) -> Iterator[str]:
        """``power``: no network reports it; ``raise``, ``stick``, ``deaf``: of a resilient rank."""
        if what == "power":
            self._fleet.kill(name, power=True)
        else:
            getattr(self._fleet, "raise_in" if what == "raise" else what)(name)
        yield from ()


class PreemptionStage(Stage):
    """One rank that is preempted."""

    lines: ClassVar[Lines] = {}

    def __init__(self, line: str) -> None:
        lead, tiers = matched(r"begin preemption lead (\S+)((?: \w+=\S+)*)", line)
        self._tiers = _seconds(tiers)
        self._rank = Preempted(PreemptionOptions(), self._tiers, float(lead))
        self._started = False

    def _wait(self, until: float) -> Iterator[str]:
        if not self._started:
            self._started = True
            yield from self._answer(self._rank.start())
        self.now = until

    @on(lines, r"signal (\d+) on rank (\d+)")
    def signal(self, number: str, rank: str) -> Iterator[str]:
        return self._answer(self._rank.handle(Signal(int(number), int(rank)), self.now))

    @on(lines, r"(.+) ends at (\S+)")
    def notice(self, source: str, at: str) -> Iterator[str]:
        return self._answer(self._rank.handle(Notice(source, float(at)), self.now))

    @on(lines, r"staged (\d+)")
    def staged(self, step: str) -> Iterator[str]:
        return self._answer(self._rank.handle(Staged(int(step)), self.now))

    @on(lines, r"vote step (\d+) left (\S+)(?: with((?: \w+=\S+)+))?")
    def vote(self, step: str, left: str, slowest: str | None) -> Iterator[str]:
        """``with``: the tiers in which another rank needs longer."""
        seconds = self._tiers | _seconds(slowest or "")
        return self._answer(self._rank.handle(Voted(int(step), float(left), seconds), self.now))

    @on(lines, r"failed (\d+): (.+)")
    def failed(self, step: str, reason: str) -> Iterator[str]:
        return self._answer(self._rank.handle(SaveFailed(int(step), reason), self.now))

    @on(lines, r"durable (\d+) in (\w+)")
    def durable(self, step: str, tier: str) -> Iterator[str]:
        return self._answer(self._rank.handle(Durable(int(step), tier), self.now))

    @on(lines, r"wait until (\S+)")
    def wait(self, until: str) -> Iterator[str]:
        while self.now < float(until):
            self.now += _TURN
            yield from self._answer(self._rank.tick(self.now))

    def _answer(self, decisions: Iterable[Decision]) -> Iterator[str]:
        for one in decisions:
            yield f"{self.now:.2f} s: {one.order.value}: {one.reason}"


class ReentryStage(Stage):
    """The workers of one node, called out of their function between two generations."""

    lines: ClassVar[Lines] = {}

    def __init__(self, line: str) -> None:
        begin = (
            r"begin reentry (\d+) seats granularity (\w+) patience (\S+)(?: suspect (\d+))?(?: waits (\d+))?"
        )
        seats, granularity, patience, suspect, waits = matched(begin, line)
        called = {
            seat: Called(CULPRIT_PATIENCE if str(seat) == suspect else float(patience), str(seat) == waits)
            for seat in range(int(seats))
        }
        self._machine = Reentry(called, Granularity(granularity), float(patience), 0.0)

    def _wait(self, until: float) -> Iterator[str]:
        while (due := self._machine.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            yield from self._answer(self._machine.tick(self.now))
        self.now = max(self.now, until)

    @on(lines, r"seat (\d+) (unwinds|waits|stuck|ended)")
    def seat(self, number: str, what: str) -> Iterator[str]:
        event: type[inprocess.Event] = getattr(inprocess, what.capitalize())
        return self._answer(self._machine.handle(event(int(number)), self.now))

    @on(lines, r"wait until (\S+)")
    def wait(self, until: str) -> Iterator[str]:
        return self._wait(float(until))

    def _answer(self, orders: Iterable[inprocess.Order]) -> Iterator[str]:
        for order in orders:
            match order:
                case Kill(seat, reason):
                    yield f"{self.now:.2f} s: seat {seat} is ended: {reason}"
                case Refill(seat):
                    yield f"{self.now:.2f} s: seat {seat} is forked again"
                case Enter(seats):
                    yield f"{self.now:.2f} s: seats {', '.join(map(str, seats))} enter together"


class RerunStage(Stage):
    """The machine that reruns rejected results: devices by rank, options of ``[rerun]``."""

    lines: ClassVar[Lines] = {}

    def __init__(self, line: str) -> None:
        words = line.split()[2:]
        self._devices = tuple(word for word in words if "=" not in word)
        given = dict(word.split("=") for word in words if "=" in word)
        kinds = {name: type(value) for name, value in vars(RerunOptions()).items()}
        values: dict[str, Any] = {
            name: text == "True" if kinds[name] is bool else kinds[name](text) for name, text in given.items()
        }
        self._options = RerunOptions(**values)
        self._machine = RerunMachine(self._options)
        self._machine.handle(Started(self._devices), 0.0)

    @on(lines, r"process ended")
    def restart(self) -> Iterator[str]:
        """Let another process go on with what was written down."""
        records = json.loads(json.dumps(self._machine.records()))
        self._machine = RerunMachine(self._options)
        self._machine.restore(records)
        yield from ()

    @on(lines, r"load (?:nothing|(\S+)/(\S+) step (\d+))")
    def load(self, tier: str | None, name: str | None, step: str | None) -> Iterator[str]:
        return self._hear(Loaded(int(step or 0), tier or "", name or ""))

    @on(lines, r"started on (.*)")
    def started(self, devices: str) -> Iterator[str]:
        self._devices = tuple(devices.split())
        return self._hear(Started(self._devices))

    @on(lines, r"step (\d+) passed")
    def passed(self, step: str) -> Iterator[str]:
        return self._hear(Passed(int(step)))

    @on(lines, r"step (\d+)(?: on ranks? ([\d, ]+))?: (\S+) is ([^;]+)((?:; [^;]+)*)")
    def found(self, step: str, ranks: str | None, name: str, what: str, means: str) -> Iterator[str]:
        rejected = _numbers(ranks)
        peers = {int(one): int(other) for one, other in re.findall(r"(\d+)-(\d+)", means)}
        ways = Means(peers, "another copy" in means, "spare" in means)
        return self._hear(Found(int(step), name, what, rejected, self._digests(rejected), ways))

    @on(lines, r"rerun (?:clean|rejected on ranks? ([\d, ]+))(?:; others on ranks? ([\d, ]+))?")
    def reran(self, ranks: str | None, others: str | None) -> Iterator[str]:
        rejected = _numbers(ranks)
        return self._hear(Reran(rejected, self._digests(rejected, _numbers(others))))

    @on(lines, r"swap (?:clean|rejected on ranks? ([\d, ]+))(; parameters differ)?")
    def swapped(self, ranks: str | None, differ: str | None) -> Iterator[str]:
        return self._hear(Swapped(_numbers(ranks), not differ))

    def _hear(self, event: Event) -> Iterator[str]:
        order: Order = self._machine.handle(event, self.now)
        if not order.reason:
            return
        culprit = order.device or order.place
        verdict = f" [{order.verdict.value}{f': {culprit}' if culprit else ''}]" if order.verdict else ""
        code = f" with exit code {order.exit_code}" if order.exit_code else ""
        pairs = "".join(f" {one} and {other}" for one, other in order.pairs)
        yield f"{order.remedy.value}{pairs}{code}{verdict}: {order.reason}"

    def _digests(self, rejected: tuple[int, ...], others: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Return by rank what stands for its result: good, bad, or another good one."""
        return tuple(
            f"{rank} {'bad' if rank in rejected else 'other' if rank in others else 'good'}"
            for rank in range(len(self._devices))
        )


def _seconds(text: str) -> dict[str, float]:
    return {name: float(one) for name, one in re.findall(r"(\w+)=(\S+)", text)}


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


STAGES: dict[str, Callable[[str], Stage]] = {
    "fleet": FleetStage,
    "preemption": PreemptionStage,
    "reentry": ReentryStage,
    "rerun": RerunStage,
}
