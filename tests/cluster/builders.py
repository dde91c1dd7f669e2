"""What the tests of the cluster's policies are made of: nodes, jobs, and what is decided about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from outlast.cluster.policy.events import (
    Heartbeat,
    HoldRanks,
    Judged,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    Rejected,
    StepSaved,
)
from outlast.cluster.policy.job_controller import JobController
from outlast.cluster.policy.members import (
    Answered,
    Decision,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
    Left,
    Lost,
    Member,
    Plan,
    Probe,
    Refused,
    RestartOrdered,
    SafeStep,
    TakenIn,
    TooFew,
    Unfit,
    Waits,
)
from outlast.cluster.policy.membership import Membership
from outlast.cluster.policy.messages import NodeStatus
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.attribution import Blamed
from outlast.hang.policy.diagnosis import GUESSED, WAITS
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    Event,
    LoadSeen,
    NoSaveComes,
    OwnCheckpoint,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from outlast.stragglers.policy.options import StragglerOptions

T = TypeVar("T")


def member(name: str, incarnation: str = "1", **other: Any) -> Member:
    return replace(Member(name, f"{name}:1", 1, "run", "1", "-", incarnation), **other)


def spec(least: int = 2, most: int = 2, spares: int = 0, **other: Any) -> JobSpec:
    return replace(JobSpec("run", "1", "-", 1, least, most, spares), **other)


def of_kind(kind: type[T], found: Iterable[object]) -> list[T]:
    return [one for one in found if isinstance(one, kind)]


def only(kind: type[T], found: Iterable[object]) -> T:
    (one,) = of_kind(kind, found)
    return one


def membership(wanted: JobSpec, *names: str) -> Membership:
    """Return a membership that nodes have joined at 0 s."""
    found = Membership(wanted, 0.0)
    for name in names:
        found.handle(Joined(member(name)), 0.0)
    return found


def shown(decision: Decision) -> str:
    """Return a decision about nodes as the scripts write it, without what is only said."""
    match decision:
        case Plan(generation=generation):
            return f"plan {generation}: {' '.join(decision.nodes)}"
        case Lost(name=name, ends=ends, excluded=excluded):
            return f"{'excluded' if excluded else 'lost'} {name}" + (f" ends {ends}" if ends else "")
        case Refused(name=name):
            return f"refused {name}"
        case TakenIn(name=name):
            return f"taken {name}"
        case Probe(names=names):
            return f"asks {' '.join(names)}"
        case GrowthWanted(nodes=nodes):
            return f"grows {nodes}"
        case Waits():
            return "waits"
        case TooFew():
            return "ends"
        case _:
            return "no"


def happens(found: Membership, now: float, what: str, *words: str) -> list[Decision]:
    """Let something happen to nodes, which the script writes in words."""
    names = [one for one in words if "=" not in one]
    options: dict[str, Any] = dict(one.split("=") for one in words if "=" in one)
    numbers = {key: int(options.pop(key)) for key in ("node_rank", "slots") & options.keys()}
    said: list[Decision] = []
    if what == "tick":
        said += found.tick(now)
    elif what == "look":  # at every interval until then, and hear of these each time
        while found.deadline <= now:
            at = found.deadline
            said += [*hear(found, at, *names), *found.tick(at)]
    elif what == "wait":
        found.wait_until(float(names[0]))
    elif what == "number":
        found.number(int(names[0]))
    elif what == "safe":
        said += found.handle(SafeStep(int(names[0]), 10, int(names[0]) + 1), now)
    elif what == "order":
        ended = found.generation
        said += found.handle(RestartOrdered(ended, ended + 1, "an error"), now)
        said += hear(found, now, *names)
    for name in names:
        if what == "join":
            said += found.handle(Joined(member(name, **{**options, **numbers})), now)
        elif what == "left":
            said += found.handle(Left(name, "gone"), now)
        elif what == "unfit":
            said += found.handle(Unfit(name, "bad"), now)
        elif what == "pong":  # of its channel; its agent may be busy
            said += found.handle(Answered(name, options.get("incarnation", "1"), 0.5), now)
        elif what == "hear":
            said += found.handle(Heard(name, options.get("incarnation", "1"), "busy" not in options), now)
    return said


def hear(found: Membership, now: float, *names: str) -> list[Decision]:
    return [one for name in names for one in found.handle(Heard(name, "1"), now)]


def played(found: Membership, script: str) -> list[str]:
    """Play ``TIME WHAT NAMES``, one a line or separated by ``;``; return each line with what was decided."""
    return transcript(script, lambda now, what, words: map(shown, happens(found, now, what, *words)))


def written(script: str) -> list[str]:
    """Return the lines of a script."""
    lines = [line.strip() for line in script.replace(";", "\n").splitlines()]
    return [line for line in lines if line]


READY = NodeStatus(5001)
ABLE = NodeStatus(5001, able=True, patience=20.0)


class Job:
    """A job's controller in the leader, and what happens to its nodes, which a script writes in words.

    Args:
        wanted: how many nodes; ``n0`` and so on, spares last, join at 0 s.
        status: that all of them report at the beginning.
        started: whether the ranks of the first generation have begun.
    """

    def __init__(
        self,
        wanted: JobSpec | None = None,
        options: FaultToleranceOptions | None = None,
        status: NodeStatus = READY,
        started: bool = True,
        stragglers: StragglerOptions | None = None,
    ) -> None:
        self.wanted = wanted or spec()
        self.lead = JobController(self.wanted, options or FaultToleranceOptions(), 0.0, 0.0, stragglers)
        self.status = dict.fromkeys((f"n{at}" for at in range(self.wanted.most + self.wanted.spares)), status)
        self.port = status.store
        if started:
            for name in self.status:
                self.lead.handle(Joined(member(name, slots=self.wanted.slots)), 0.0)
                self.lead.handle(Heartbeat(name, "1", status, 0), 0.0)
            for name in list(self.status)[: self.wanted.most]:
                self.lead.handle(NodeEvent(name, 1, AllStarted(1)), 0.0)
            self.lead.tick(0.3)  # all have heard of each other

    def play(self, script: str) -> list[str]:
        """Play ``TIME WHAT NAMES OPTIONS``; return the lines with what was decided."""
        return transcript(script, lambda now, what, words: map(decided, self.happens(now, what, words)))

    def happens(self, now: float, what: str, words: Sequence[str]) -> list[Any]:
        """Let something happen."""
        names = [one for one in words if one[0] == "n" and one[1:].isdigit()]
        number = next((int(one) for one in words if one.lstrip("-").isdigit()), 0)
        given = dict(one.split("=") for one in words if "=" in one)
        if what == "tick":
            return self.lead.tick(now)
        if what == "look":  # at every interval until then, and hear of these nodes each time
            said = []
            while self.lead.deadline <= now:
                at = self.lead.deadline
                said += [one for name in names for one in self._on_node(name, at, "beat", 0, given)]
                said += self.lead.tick(at)
            return said
        if what == "due":
            return [f"{self.lead.deadline:.2f}" if self.lead.deadline < 1e5 else "never"]
        if what == "held":
            return self.lead.held(number or None, now)
        if what == "wait":
            self.lead.wait_until(number)
            return []
        if what == "answers":  # every node has ended its ranks, and has another store
            self.port += 1
            names = names or list(self.lead.members())
            given = {"ended": str(self.lead.generation - 1), "store": str(self.port), **given}
        return [one for name in names for one in self._on_node(name, now, what, number, given)]

    def _on_node(self, name: str, now: float, what: str, number: int, given: dict[str, str]) -> list[Any]:
        incarnation = given.get("incarnation", "1")
        match what:
            case "join":
                return self.lead.handle(Joined(member(name, incarnation, slots=self.wanted.slots)), now)
            case "left":
                return self.lead.handle(Left(name, "gone"), now)
            case "unfit":
                return self.lead.handle(Unfit(name, "bad"), now)
            case "beat" | "answers":
                able = {"yes": True, "no": False}.get(given.get("able", ""), self.status[name].able)
                store, serial = int(given.get("store", self.port)), int(given.get("serial", "0"))
                now_at_risk, device = given.get("risk", ""), given.get("device", "")
                status = NodeStatus(store, able, self.status[name].patience, serial, now_at_risk, device)
                return self.lead.handle(
                    Heartbeat(name, incarnation, status, int(given.get("ended", "0"))), now
                )
            case _:
                generation = int(given.get("g", self.lead.generation))
                return self.lead.handle(
                    NodeEvent(name, generation, event(what, name, generation, number, given)), now
                )


def event(what: str, name: str, generation: int, number: int, given: dict[str, str]) -> Event:
    """Return what happened on a node; see the scripts."""
    rank, step = int(given.get("rank", name[1:])), number or 7
    match what:
        case "crash":
            return Fault(FaultKind.CRASH, name, rank, generation, step, f"crash of {rank}", "signal 9")
        case "victim":
            text = "connection closed by peer"
            return Fault(FaultKind.ERROR, name, rank, generation, step, f"victim {rank}", text, exit_code=1)
        case "error" | "raise":
            enters = True if what == "raise" else None
            return Fault(FaultKind.ERROR, name, rank, generation, step, f"E: {rank}", "E: x", reenters=enters)
        case "hang":
            seen = tuple(sign for word, sign in (("waits", WAITS), ("guessed", GUESSED)) if word in given)
            rank = int(given.get("rank", "-1"))
            return Fault(
                FaultKind.HANG, name, rank, generation, step, f"hang of {rank}", "hang", evidence=seen
            )
        case "failing":
            return Fault(FaultKind.FAILING, name, -1, generation, step, f"{name} fails", f"{name} fails")
        case "differ":
            return Fault(FaultKind.CORRUPT, name, rank, generation, 9, f"{rank} differs", "differ")
        case "started":
            return AllStarted(generation)
        case "steps":
            return StepsDone(number, counted="counted" in given)
        case "saved":
            return CommitSeen(number, f"step-{number:09d}.g{generation}")
        case "loaded":
            return LoadSeen(number, f"step-{number:09d}.g{generation}")
        case "own":
            return OwnCheckpoint(number, int(given.get("agreed", "-1")))
        case "nosave":
            return NoSaveComes("none is configured")
        case "finished":
            return WorkerFinished(int(name[1:]), generation)
        case "stop":
            return StopRequested(number)
        case _:
            raise ValueError(f"{what!r} is no event")


def decided(outcome: Any) -> str:
    """Return what a leader decided as the scripts write it, without what is only said."""
    match outcome:
        case str():
            return outcome
        case Judged(action=action):
            return " ".join(filter(None, [action.kind.value, action.exclude]))
        case QuiesceNodes(names=names, order=order):
            return (
                f"ends {' '.join(names)} for {order.generation}{' at the barrier' if order.reenter else ''}"
            )
        case Proposal(plan=plan) if plan.end is not None:
            return f"over {plan.end.exit_code}"
        case Proposal(generation=generation, active=active):
            barrier = " by the barrier" if outcome.plan.reenter else ""
            return f"plan {generation}: {' '.join(active)} at {outcome.plan.port}{barrier}"
        case Rejected(name=name, excluded=excluded):
            return f"{'excludes' if excluded else 'rejects'} {name}"
        case HoldRanks(over=over):
            return "releases" if over else "holds"
        case StepSaved(step=step):
            return f"saved {step}"
        case Blamed(names=names):
            return f"blames by {' '.join(names)}"
        case _:
            return ""


def transcript(script: str, play: Callable[[float, str, list[str]], Iterable[str]]) -> list[str]:
    """Play each line of a script; return the lines with what came of them, where ``->`` wants to see it."""
    done = []
    for line in written(script):
        event = line.partition(" -> ")[0].removesuffix(" ->").strip()
        now, what, *words = event.split()
        said = ", ".join(filter(None, play(float(now), what, words)))
        done.append(f"{event} -> {said}".strip() if "->" in line else event)
    return done
