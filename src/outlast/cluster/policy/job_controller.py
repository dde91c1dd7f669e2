"""What a leader decides for its job: events of nodes in; plans, orders and the end out.

Puts three deciders together. Who is there, and who gets which ranks, is
:mod:`outlast.cluster.policy.membership`'s part; what is done about a fault is
:mod:`outlast.recovery.policy.job`'s; who leads, and whether that is believed, is
:mod:`outlast.cluster.policy.election`'s, and not looked at here. A proposed plan holds all that a successor
has to know.

Which fault. When a rank fails, ranks on other nodes fail because of it, and what they say may arrive
first. So a fault that looks like a victim's waits for a moment; whatever else is heard meanwhile comes
before it.

How far the nodes of a generation are: whether all have started, and which step all have completed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, replace
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import some
from outlast.cluster.policy.events import (
    Heartbeat,
    Judged,
    LeadEvent,
    LeadOutcome,
    Log,
    Looked,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    Rejected,
)
from outlast.cluster.policy.members import (
    Decision,
    GrowthWanted,
    Heard,
    JobSpec,
    Joined,
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
from outlast.cluster.policy.membership import Membership, Phase, Role
from outlast.cluster.policy.messages import Ending
from outlast.hang.policy.attribution import Pool
from outlast.inprocess.policy import Gates, late
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction, StateSource
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    Event,
    JobDecider,
    SpareCapacity,
    StepsDone,
    is_nobodys,
    laid_to_its_node,
    waits,
)

if TYPE_CHECKING:
    from outlast.config import FaultTolerance


class Progress:
    """Of the generation that runs."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self.begin(())

    def begin(self, names: Iterable[str]) -> None:
        """Expect every node of a generation to start, and to do steps."""
        self._unstarted = set(names)
        self._steps.clear()
        self._slowest = -1  # step of the nodes that are the furthest behind
        self._behind = set(self._unstarted)  # their names

    def started(self, node: str) -> bool:
        """Take note that a node has started its ranks; say whether all nodes have."""
        self._unstarted.discard(node)
        return not self._unstarted

    def done(self, node: str, step: int) -> int | None:
        """Take note of what all ranks of a node have completed; return the step of all nodes if it rose."""
        self._steps[node] = max(step, self._steps.get(node, step))
        if self._steps[node] > self._slowest:
            self._behind.discard(node)
        if self._behind:
            return None
        self._slowest = min(self._steps.values())
        self._behind = {name for name, one in self._steps.items() if one == self._slowest}
        return self._slowest

    def least(self) -> int:
        """Return the step of the node that is the furthest behind, of those that said one; -1: none did."""
        return min(self._steps.values(), default=-1)


TELL_EVERY = 0.25  # seconds; when many nodes join at once, who is told of whom changes with each of them


class JobController:
    """Decides for the job, in the leader.

    Args:
        terms: what every node has to agree with.
        config: budgets.
        now: in seconds of the agent's clock.
        epoch: wall time when that clock was 0; budgets outlive clocks.
    """

    def __init__(self, terms: JobSpec, config: FaultTolerance, now: float, epoch: float) -> None:
        self._epoch = epoch
        self._terms = terms
        self._job = JobDecider(config, terms.most * terms.slots)
        self._membership = Membership(terms, now)
        self._plan: Plan | None = None
        self._waits_for_store = False
        self._port = 0
        self._used: dict[str, tuple[int, int]] = {}  # port and serial
        self._stores: dict[str, tuple[int, int]] = {}
        self._warm: set[str] = set()  # nodes that could begin ranks at once: a store is ready, or was
        self._progress = Progress()
        self._counted = False  # the steps of this generation are optimizer steps of its processes
        self._running_since: float | None = None
        self._charge: tuple[Fault, float] | None = None
        self._pool = Pool()
        self._wants_growth = False
        self._gates = Gates(terms.ping_timeout)
        self._reenter = False  # workers that live go on in the plan
        self._told_at, self._again_at = -math.inf, math.inf
        self._why = Action(RecoveryAction.NONE, 1, "the job begins")
        self.ending: Ending | None = None

    @property
    def generation(self) -> int:
        """Return the number of the generation that runs, or is being formed."""
        return self._job.generation

    @property
    def began(self) -> bool:
        """Say whether there was a generation."""
        return self._membership.generation > 0

    def roles(self) -> Mapping[str, Role]:
        """Return what each node is."""
        return self._membership.roles()

    def recall(self, job_state: Mapping[str, Any] | None, after: int) -> Iterable[LeadOutcome]:
        """Go on after an earlier launch of the job, with a generation that is younger than any known one."""
        if job_state is not None:
            try:
                self._job.restore(job_state)
                yield Log(f"the run goes on with generation {self._job.generation}")
            except (KeyError, TypeError, ValueError) as error:
                yield Log(f"what the launch before left makes no sense ({error!r}): budgets start anew")
        self.after(after)

    def after(self, generation: int) -> None:
        """Let the first generation be younger than one that is known to have been."""
        if not self.began and self._job.generation <= generation:
            self._job.generation = generation
            self._job.next_generation()

    def wait_until(self, when: float) -> None:
        """Begin nothing with a part of the nodes before a time: another job of this name may still run."""
        self._membership.wait_until(when)

    def job_state(self) -> dict[str, Any]:
        """Return what the next launch of the job has to know."""
        return self._job.state()

    def take_over(self, plan: str, heard: Mapping[str, float], now: float) -> tuple[LeadOutcome, ...]:
        """Go on after another leader, with the plan that is in force.

        Args:
            plan: of its last proposal.
            heard: when nodes were last heard of, where that is known better than "just now".
            now: in seconds of the agent's clock.

        Raises:
            KeyError, TypeError, ValueError: the plan is not one of ours; nothing was taken over.
        """
        found = json.loads(plan)
        self._job.restore(found["job"], in_force=True)
        said = self._membership.restore(found["membership"], now)
        self._membership.heard_last(heard)
        self._why = Action(
            rung=RecoveryAction.NONE,
            generation=self._job.generation,
            reason=str(found["why"]),
            state=StateSource(str(found["state"])),
            hung_again=bool(found["hung_again"]),
        )
        self._port, self._reenter = int(found["port"]), bool(found["reenter"])
        self._plan = self._membership.plan_in_force(str(found["reason"]))
        self._progress.begin(() if self._plan is None else self._plan.nodes)
        self._pool = Pool() if self._plan is None else Pool(self._plan.generation, self._plan.seats)
        self._job.world_size = self._plan.world_size if self._plan is not None else self._job.world_size
        if found["end"] is not None:
            self.ending = Ending(int(found["end"]["exit_code"]), str(found["end"]["reason"]))
        return tuple(self._decided(said, now))

    @property
    def deadline(self) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        charge = math.inf if self._charge is None else self._charge[1]
        return min(self._membership.deadline, self._again_at, self._gates.until, charge, self._pool.due)

    def handle(self, event: LeadEvent, now: float) -> tuple[LeadOutcome, ...]:
        """Take one event."""
        if self.ending is not None:
            return ()
        if isinstance(event, Heartbeat):
            return tuple(self._reported(event, now))
        if isinstance(event, NodeEvent):
            return tuple(self._said(event, now))
        if isinstance(event, Looked):
            self._pool.take(event.node, event.seen, now)
            return ()
        if isinstance(event, Joined) and not self.began:
            self._membership.number(self._job.generation)
        return tuple(self._decided(self._membership.handle(event, now), now))

    def tick(self, now: float) -> tuple[LeadOutcome, ...]:
        """Do what is due."""
        if self.ending is not None:
            return ()
        said: list[LeadOutcome] = []
        if now >= self._membership.deadline:
            said += self._decided(self._membership.tick(now), now)
        if now >= self._again_at:
            said += self._again(now)
        if self._charge is not None and now >= self._charge[1]:
            said += self._judge(self._charge[0], now)
        if now >= self._gates.until:
            said += self._escalate(now)
        if now >= self._pool.due:
            blamed = self._pool.judge(now)
            said += [] if blamed is None or self._plan is None else [blamed]
        return tuple(said)

    def _reported(self, event: Heartbeat, now: float) -> Iterable[LeadOutcome]:
        store = (event.offer.store, event.offer.serial)
        if event.offer.store and store != self._used.get(event.node):
            self._stores[event.node] = store
            self._warm.add(event.node)
        elif not event.offer.store:
            self._stores.pop(event.node, None)
        self._gates.told(event.node, event.offer)
        answers = self._membership.phase is not Phase.FORMING or event.ended >= self._membership.generation
        if answers or self._gates.called is not None:
            heard = Heard(event.node, event.incarnation, answers)
            yield from self._decided(self._membership.handle(heard, now), now)
        yield from self._propose_if_ready()

    def _said(self, said: NodeEvent, now: float) -> Iterable[LeadOutcome]:
        event = said.event
        plan = self._plan
        ours = plan is not None and said.generation == plan.generation == self._job.generation
        if isinstance(event, Fault):
            yield from self._on_fault(event, now)
        elif isinstance(event, AllStarted):
            if ours and self._progress.started(said.node):
                self._running_since = now
                yield from self._ask_job(event, None, now)
        elif isinstance(event, StepsDone):
            step = self._progress.done(said.node, event.step) if ours else None
            if step is not None:
                self._counted = event.counted
                yield from self._clear_suspicion(step)
                yield from self._ask_job(replace(event, step=step), None, now)
        else:
            yield from self._ask_job(event, None, now)
            warm = self._warm >= set(self._membership.here())
            if isinstance(event, CommitSeen) and self._wants_growth and ours and warm:
                yield from self._grow(event.step, now)

    def _on_fault(self, fault: Fault, now: float) -> Iterable[LeadOutcome]:
        patience = waits(fault, self._terms.ping_timeout)
        if fault.generation != self._job.generation or not patience:
            yield from self._judge(fault, now)
        elif self._charge is None:
            self._charge = (fault, now + patience)

    def _clear_suspicion(self, step: int) -> Iterable[LeadOutcome]:
        """Drop a charge of silence, since every rank goes on."""
        charge = None if self._charge is None else self._charge[0]
        if charge is not None and charge.kind is FaultKind.HANG and step > charge.step:
            yield Log(f"the ranks go on at step {step}: {charge.reason}")
            self._charge = None

    def _judge(self, fault: Fault, now: float) -> Iterable[LeadOutcome]:
        if fault.generation == self._job.generation:
            self._charge = None
            fault = replace(fault, reenters=self._gates.able(fault, self._membership.with_ranks))
            if self._plan is not None:
                fault = laid_to_its_node(fault, self._plan.seats)
        yield from self._ask_job(fault, fault, now)

    def _ask_job(self, event: Event, fault: Fault | None, now: float) -> Iterable[LeadOutcome]:
        actions = self._job.handle(event, self._epoch + now, None if fault is None else self._room(fault))
        yield from self._job.trust_changes()
        for action in actions:
            if action.rung is not RecoveryAction.NONE:
                self._gates.call(action, fault, self._membership.with_ranks, now)
            order = RestartOrdered(self._membership.generation, action.generation, action.reason)
            yield from self._answered(action, fault, order, now)

    def _answered(
        self, action: Action, fault: Fault | None, order: RestartOrdered | QuiesceNodes, now: float
    ) -> Iterable[LeadOutcome]:
        yield Judged(action, fault)
        if action.rung is RecoveryAction.STOP:
            yield from self._end(action.exit_code, action.reason)
        elif action.rung is not RecoveryAction.NONE:
            self._why = action
            if isinstance(order, QuiesceNodes):
                yield order
            else:
                yield from self._decided(self._membership.handle(order, now), now)
            if action.exclude:
                bad = Unfit(action.exclude, action.reason)
                yield from self._decided(self._membership.handle(bad, now), now)

    def _escalate(self, now: float) -> Iterable[LeadOutcome]:
        """Have ranks that are not at the gate in time ended, and all others with them."""
        fault, why = self._gates.called, late(self._membership.silent)
        self._gates.close()
        if fault is not None:
            action = self._job.escalate(fault, why, self._epoch + now, self._room(fault))
            self._membership.because(action.reason)
            call = QuiesceNodes(tuple(sorted(self._membership.here())), action.generation, why)
            yield from self._answered(action, fault, call, now)

    def _room(self, fault: Fault) -> SpareCapacity | None:
        """Return what nodes are left without a fault's; None: it cannot be laid to a node."""
        plan, here = self._plan, fault.node in self._membership.here()
        alone = self._terms.most + self._terms.spares < 2
        if plan is None or alone or is_nobodys(fault) or (fault.kind is FaultKind.LOST and here):
            return None
        left = self._membership.seated_without(fault.node)
        return SpareCapacity(left >= len(plan.seats), self._terms.least <= left < len(plan.seats))

    def _grow(self, step: int, now: float) -> Iterable[LeadOutcome]:
        following = self._job.generation + 1
        said = self._membership.handle(SafeStep(self._job.generation, step, following), now)
        if any(isinstance(one, Probe) for one in said):
            self._wants_growth = False
            self._job.next_generation()
            self._why = Action(RecoveryAction.NONE, following, "the job grows")
            self._gates.close()
        yield from self._decided(said, now)

    def _decided(self, decisions: Iterable[Decision], now: float) -> Iterable[LeadOutcome]:
        for one in decisions:
            match one:
                case Plan():
                    yield from self._planned(one)
                case Probe(names, reason):
                    self._plan, self._waits_for_store = None, False
                    fault = self._gates.called
                    reason = reason if fault is None else fault.reason
                    yield QuiesceNodes(names, self._job.generation, reason, fault is not None)
                case Lost():
                    yield Rejected(one.name, one.reason, True) if one.excluded else Log(one.reason)
                    yield from self._lost(one, now)
                case TakenIn(_, reason):
                    yield Log(reason)
                    yield from self._again(now)
                case Refused(name, reason):
                    yield Rejected(name, reason)
                case Waits(reason):
                    yield Log(reason)
                case GrowthWanted(_, reason):
                    self._wants_growth = True
                    yield Log(reason)
                case TooFew(exit_code, reason):
                    yield from self._end(exit_code, reason)

    def _lost(self, lost: Lost, now: float) -> Iterable[LeadOutcome]:
        self._stores.pop(lost.name, None)
        self._warm.discard(lost.name)
        if not lost.ends:
            yield from self._again(now)
            return
        fault = Fault(
            kind=FaultKind.LOST,
            node=lost.name,
            rank=-1,
            generation=self._job.generation,
            step=self._progress.least(),
            reason=lost.reason,
            signature=f"{lost.name} is lost",
            since=lost.since,
            counted=self._counted,
            trained=0.0 if self._running_since is None else max(0.0, lost.since - self._running_since),
        )
        yield from self._judge(fault, now)

    def _planned(self, plan: Plan) -> Iterable[LeadOutcome]:
        self._plan, self._waits_for_store = plan, True
        self._progress.begin(plan.nodes)
        self._pool = Pool(plan.generation, plan.seats)
        self._counted, self._running_since = False, None
        self._charge = None
        same = plan.world_size == self._job.world_size  # then nobody's ranks have other numbers either
        self._reenter = same and self._gates.called is not None
        self._gates.close()
        self._job.world_size = plan.world_size
        yield Log(f"generation {plan.generation}: {some(plan.nodes)}: {plan.reason}")
        yield from self._propose_if_ready()

    def _propose_if_ready(self) -> Iterable[LeadOutcome]:
        plan = self._plan
        if plan is None or not self._waits_for_store or plan.master not in self._stores:
            return
        self._waits_for_store = False
        store = self._used[plan.master] = self._stores.pop(plan.master)
        self._port = store[0]
        yield self._proposal(plan)

    def _again(self, now: float) -> Iterable[LeadOutcome]:
        """Propose once more what is in force: who is told of it has changed; so often at most."""
        self._again_at = self._told_at + TELL_EVERY
        if now < self._again_at:
            return
        self._told_at, self._again_at = now, math.inf
        settled = self._plan is not None and not self._waits_for_store
        if settled or not self.began:
            yield self._proposal(self._plan)

    def _proposal(self, plan: Plan | None) -> Proposal:
        roles = self._membership.roles()
        here = tuple(name for name, role in roles.items() if role in (Role.ACTIVE, Role.SPARE))
        why = self._why
        ours = plan is not None and why.generation == plan.generation
        content = {
            "membership": self._membership.state(),
            "job": self._job.state(),
            "seats": [] if plan is None else [list(astuple(seat)) for seat in plan.seats],
            "reason": "" if plan is None else plan.reason,
            "why": why.reason if ours else "",
            "hung_again": ours and why.hung_again,
            "state": why.state.value,
            "avoid": list(self._job.avoid),
            "port": self._port,
            "reenter": self._reenter,
            "end": None if self.ending is None else asdict(self.ending),
        }
        active = () if plan is None else plan.nodes
        generation = self._membership.generation
        return Proposal(generation, active, here, json.dumps(content, separators=(",", ":")))

    def _end(self, exit_code: int, reason: str) -> Iterable[LeadOutcome]:
        self.ending = Ending(exit_code, reason)
        yield self._proposal(self._plan)

    def members(self) -> Mapping[str, Member]:
        """Return the nodes that are there, by name."""
        return self._membership.here()
