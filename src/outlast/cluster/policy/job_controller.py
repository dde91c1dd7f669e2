"""What a leader decides for its job: events of nodes in; plans, orders and the end out.

Three deciders are put together here. Which nodes there are, and who gets which ranks, is
:mod:`outlast.cluster.policy.membership`'s part; what is done about a fault is
:mod:`outlast.recovery.policy.job`'s; who leads is :mod:`outlast.cluster.policy.election`'s, and not looked at
here. A proposed plan holds all that a successor has to know.

When a rank fails, ranks on other nodes fail because of it, and what they report may arrive first. So a fault
that looks like a victim's waits for a moment (:mod:`outlast.recovery.policy.pending`); a fault that is
certain is judged before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.policy.manifest import some
from outlast.cluster.policy.events import (
    Heartbeat,
    HoldRanks,
    Judged,
    LeadEvent,
    LeadOutcome,
    Lived,
    Log,
    Looked,
    NodeEvent,
    Proposal,
    QuiesceNodes,
    Rejected,
    StepSaved,
    Timed,
)
from outlast.cluster.policy.members import (
    Decision,
    GrowthWanted,
    Heard,
    JobSpec,
    Lost,
    Member,
    Plan,
    Probe,
    Refused,
    RestartOrdered,
    Role,
    SafeStep,
    TakenIn,
    TooFew,
    Unfit,
    Waits,
)
from outlast.cluster.policy.membership import Membership, Phase
from outlast.cluster.policy.messages import Ending, Quiesce
from outlast.cluster.policy.plan import JobPlan
from outlast.cluster.policy.progress import Progress, SavedSteps
from outlast.errors import ExitCode
from outlast.hang.policy.attribution import Pool
from outlast.inprocess.policy import Gates, late
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyEvent,
    Event,
    JobDecider,
    NoSaveComes,
    OwnCheckpoint,
    SpareCapacity,
    StepsDone,
    is_nobodys,
    laid_to_its_node,
    waits,
)
from outlast.recovery.policy.pending import Pending, PendingFaults, Why
from outlast.stragglers.policy.options import StragglerAction, StragglerOptions
from outlast.stragglers.policy.watch import StragglerWatch, Wanted

if TYPE_CHECKING:
    from outlast.config import FaultToleranceOptions


DRAIN_PATIENCE = 600.0  # seconds for a save, before a failing node is replaced without one
STATUS_PATIENCE = 0.5  # seconds that a fault waits for the nodes to say whether ranks can restart in process
TELL_EVERY = 0.25  # seconds; when many nodes join at once, who is told of whom changes with each of them


class JobController:
    """Decides for the job, in the leader.

    Args:
        terms: what every node has to agree with.
        config: budgets.
        now: in seconds of the agent's clock.
        epoch: wall time when that clock was 0; budgets outlive clocks.
        stragglers: what is done about slow ranks.
    """

    def __init__(
        self,
        terms: JobSpec,
        config: FaultToleranceOptions,
        now: float,
        epoch: float,
        stragglers: StragglerOptions | None = None,
    ) -> None:
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
        self._program = ""  # digest of the program's files in this generation
        self._running_since: float | None = None
        self._failing: list[Fault] = []  # of nodes that a fault kept from being replaced; taken up again
        self._pending = PendingFaults()
        self._pool = Pool()
        self._stragglers = StragglerWatch(stragglers or StragglerOptions(), self._job.signs)
        self._devices: dict[str, str] = {}  # the model of those of each node
        self.saved = -1  # the step that the job would go on from
        self._kept = SavedSteps()  # by this generation
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
    def stragglers(self) -> StragglerWatch:
        """Return what compares the ranks."""
        return self._stragglers

    def asks_benchmark(self, now: float) -> str:
        """Return why all ranks are to compute the same product now; "": they need not."""
        return self._stragglers.asks_benchmark(now, self._epoch + now)

    @property
    def began(self) -> bool:
        """Say whether there was a generation."""
        return self._membership.generation > 0

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the generation that runs, or is about to; None: one is being formed."""
        return self._plan

    def roles(self) -> Mapping[str, Role]:
        """Return what each node is."""
        return self._membership.roles()

    def recall(self, job_state: Mapping[str, Any] | None, after: int, now: float) -> list[Log]:
        """Go on after an earlier launch of the job, with a generation that is younger than any known one."""
        said = []
        if job_state is not None:
            try:
                self._job.restore(job_state)
                self.saved = self._job.saved
                said.append(Log(f"the run goes on with generation {self._job.generation}"))
                shortage = (
                    "" if after else self._job.shortage(self._epoch + now)
                )  # after: this launch began anew
                said += [Log(shortage)] if shortage else []
            except (KeyError, TypeError, ValueError) as error:
                said.append(Log(f"malformed job state of an earlier launch ({error!r}): budgets start anew"))
        self.after(after)
        return said

    def after(self, generation: int) -> None:
        """Let the first generation be younger than one that is known to have been."""
        if not self.began:
            self._job.begin_after(generation)
            self._membership.number(self._job.generation)

    def wait_until(self, when: float) -> None:
        """Begin nothing before a time if another job of this name may run on nodes that are not here."""
        self._membership.wait_until(when)

    def job_state(self) -> dict[str, Any]:
        """Return what the next launch of the job has to know."""
        return self._job.state()

    def take_over(self, plan: JobPlan, heard: Mapping[str, float], now: float) -> list[LeadOutcome]:
        """Go on after another leader, with the plan that is in force.

        Args:
            plan: of its last proposal.
            heard: when nodes were last heard of, where that is known better than "just now".
            now: in seconds of the agent's clock.

        Raises:
            KeyError, TypeError, ValueError: the job in the plan is malformed; nothing was taken over.
        """
        self._job.restore(plan.job, in_force=True)
        self.saved = self._job.saved
        said = self._membership.restore(plan.membership, now)
        self._membership.heard_last(heard)
        self._why = Action(
            kind=RecoveryAction.NONE,
            generation=self._job.generation,
            reason=plan.why,
            state=plan.state,
            hung_again=plan.hung_again,
            wait=plan.wait,
        )
        self._port, self._reenter, self.ending = plan.port, plan.reenter, plan.end
        self._plan = self._membership.plan_in_force(plan.reason)
        self._progress.begin(() if self._plan is None else self._plan.nodes)
        self._pool = Pool() if self._plan is None else Pool(self._plan.generation, self._plan.seats)
        if self._plan is not None:
            self._compare(self._plan)
        self._job.world_size = self._plan.world_size if self._plan is not None else self._job.world_size
        return self._decided(said, now)

    @property
    def deadline(self) -> float:
        """Return when :meth:`tick` has to be called at the latest."""
        return min(self._membership.deadline, self._again_at, self._pending.deadline, self._pool.due)

    def handle(self, event: LeadEvent, now: float) -> list[LeadOutcome]:
        """Take one event."""
        if self.ending is not None:
            return []
        if isinstance(event, Heartbeat):
            return self._heard(event, now)
        if isinstance(event, NodeEvent):
            return self._on_node_event(event, now)
        if isinstance(event, Looked):
            self._pool.take(event.node, event.seen, now)
            return []
        if isinstance(event, Timed):
            return [*self._stragglers.take(event.report, now, event.node)]
        return self._decided(self._membership.handle(event, now), now)

    def quiet(self, before: float) -> tuple[str, ...]:
        """Return the nodes that were last heard before a time."""
        return self._membership.quiet(before)

    def tick(self, now: float) -> list[LeadOutcome]:
        """Do what is due."""
        said: list[LeadOutcome] = []
        if self.ending is not None:
            return said
        if now >= self._membership.deadline:
            said += self._decided(self._membership.tick(now), now)
        if now >= self._again_at:
            said += self._again(now)
        while (one := self._pending.take_due(now)) is not None:
            said += self._answer(one, now)
        if now >= self._pool.due:
            blamed = self._pool.judge(now)
            said += [] if blamed is None or self._plan is None else [blamed]
        return said

    def _answer(self, one: Pending, now: float) -> list[LeadOutcome]:
        """Answer a fault that waits no longer."""
        match one.why:
            case Why.CAUSE | Why.STATUS:
                return self._judge(one.fault, now)
            case Why.SAVE:
                return self._drain(one.fault, now)
            case Why.BARRIER:
                return self._escalate(one.fault, now)

    def _heard(self, event: Heartbeat, now: float) -> list[LeadOutcome]:
        store = (event.status.store, event.status.serial)
        if not event.status.store:
            self._stores.pop(event.node, None)
        elif store != self._used.get(event.node):
            self._stores[event.node] = store
            self._warm.add(event.node)
        self._gates.told(event.node, event.status)
        answers = self._membership.phase is not Phase.FORMING or event.ended >= self._membership.generation
        said: list[LeadOutcome] = []
        self._know_device(event)
        risk = event.status.at_risk
        if self._membership.at_risk(event.node, risk) and risk:
            said.append(Log(f"{event.node} is at risk: {risk}: as a spare it is passed over"))
        waiting = self._pending.first(Why.STATUS)
        if waiting is not None and not self._lacks_status(waiting.fault):
            self._pending.remove(waiting)
            said += self._judge(waiting.fault, now)
        heard = Heard(event.node, event.incarnation, answers)
        said += self._decided(self._membership.handle(heard, now), now)
        return said + self._propose_if_ready()

    def _on_node_event(self, told: NodeEvent, now: float) -> list[LeadOutcome]:
        event = told.event
        plan = self._plan
        ours = plan is not None and told.generation == plan.generation == self._job.generation
        if isinstance(event, Fault):
            return self._on_fault(event, now)
        if isinstance(event, AllStarted):
            if not ours or not self._progress.started(told.node):
                return []
            self._running_since = now
            said = self._ask_job(event, None, now)
            failing, self._failing = self._failing, []
            for fault in failing:
                again = replace(fault, generation=self._job.generation, step=self._progress.least())
                said += self._on_failing(again, now)
            return said
        if isinstance(event, StepsDone):
            step = self._progress.done(told.node, event.step) if ours else None
            if step is None:
                return []
            self._counted = event.counted
            said = self._clear_suspicion(step)
            self._program = event.program or self._program
            return said + self._ask_job(replace(event, step=step, program=self._program), None, now)
        return self._ask_job(event, None, now) + self._on_save(event, ours, now)

    def _on_save(self, event: Event, ours: bool, now: float) -> list[LeadOutcome]:
        """Do what waits for a save, if that is what happened; ``ours``: in the generation that runs."""
        said: list[LeadOutcome] = []
        if self._job.saved != self.saved:
            self.saved = self._job.saved
            said.append(StepSaved(self.saved))
        if ours and isinstance(event, CopyEvent):
            self._kept.take(event)
        if not isinstance(event, (CommitSeen, OwnCheckpoint, NoSaveComes)) or not ours:
            return said
        if self._pending.first(Why.SAVE) is not None or isinstance(event, NoSaveComes):
            return said + self._drain_if_saved(now)
        if self._warm >= set(self._membership.here()):
            grown = self._grow(event.step, now)
            if grown:
                return said + grown
        wanted = self._stragglers.wanted(self._epoch + now)
        return said + ([] if wanted is None else self._against(wanted, event.step, now))

    def _against(self, wanted: Wanted, step: int, now: float) -> list[LeadOutcome]:
        """Replace the node of a slow rank, or end the job, since a step is saved."""
        plan = self._plan
        if wanted.action is StragglerAction.STOP:
            words = f"{wanted.reason}; [stragglers] action is stop, and step {step} is saved"
            return [Log(words), *self._end(Ending(int(ExitCode.NODE_UNFIT), words))]
        if plan is None or self._membership.seated_without(wanted.node, healthy=True) < len(plan.seats):
            return []
        reason = f"{wanted.reason}; step {step} is saved, so a spare takes the place of {wanted.node}"
        following = self._job.next_generation()
        action = Action(RecoveryAction.REPLACE_NODE, following, reason, exclude=wanted.node)
        order = RestartOrdered(self._membership.generation, following, reason)
        return self._answered(action, None, order, now)

    def _on_failing(self, fault: Fault, now: float) -> list[LeadOutcome]:
        """Have a spare replace a node that is failing, after the next save."""
        known = any(one.why is Why.SAVE and one.fault.node == fault.node for one in self._pending)
        if fault.generation != self._job.generation or known:
            return []
        kept = self._job.keeps(fault, self._epoch + now, self._room(fault))
        if kept:
            passed = self._membership.passed_over()
            words = f"; passed over: {passed}" if passed else ""
            return [Log(f"{fault.reason}: {kept}, so the job goes on with {fault.node}{words}")]
        asked = self._pending.first(Why.SAVE)
        step, agreed = (None, False) if asked is None else (asked.step, asked.agreed)
        self._pending.add(Pending(fault, now + DRAIN_PATIENCE, Why.SAVE, step, agreed))
        said: list[LeadOutcome] = [Log(f"{fault.reason}: a spare replaces {fault.node} after the next save")]
        if asked is None:
            self._kept.ask()
            said.append(HoldRanks())
        return said

    def held(self, step: int | None, now: float) -> list[LeadOutcome]:
        """Take the step after which all ranks save and wait; None: they cannot be held."""
        return self._drain_if_saved(now) if self._pending.hold(step) else []

    def _drain_if_saved(self, now: float) -> list[LeadOutcome]:
        said: list[LeadOutcome] = []
        for one in self._pending:
            if one.why is Why.SAVE and one.fault.generation == self._job.generation and self._kept.reach(one):
                self._pending.remove(one)
                said += self._drain(one.fault, now)
        return said

    def _drain(self, fault: Fault, now: float) -> list[LeadOutcome]:
        said = self._judge(fault, now)
        if fault.generation == self._job.generation and self._pending.first(Why.SAVE) is None:
            said.append(HoldRanks(over=True))  # the node stays
        return said

    def _on_fault(self, fault: Fault, now: float) -> list[LeadOutcome]:
        if fault.kind is FaultKind.FAILING:
            return self._on_failing(fault, now)
        if fault.generation != self._job.generation:
            return self._judge(fault, now)
        waiting = self._pending.first(Why.STATUS)
        if waiting is not None:
            self._pending.remove(waiting)
            return self._judge(waiting.fault, now)
        patience = waits(fault, self._terms.ping_timeout)
        if not patience and not self._lacks_status(fault):
            return self._judge(fault, now)
        if patience:
            self._pending.add(Pending(fault, now + patience, Why.CAUSE))
        else:
            self._pending.add(Pending(fault, now + STATUS_PATIENCE, Why.STATUS))
        return []

    def _lacks_status(self, fault: Fault) -> bool:
        """Return whether the ranks of one node can restart in process and those of another could not so far.

        All ranks enter at about the same time, but the status of a busy node may come after the fault.
        """
        return bool(fault.reenters) and self._gates.able(fault, self._membership.with_ranks) is False

    def _clear_suspicion(self, step: int) -> list[LeadOutcome]:
        """Drop faults of silence, since every rank goes on."""
        return [Log(f"the ranks go on at step {step}: {fault.reason}") for fault in self._pending.go_on(step)]

    def _judge(self, fault: Fault, now: float) -> list[LeadOutcome]:
        if fault.generation == self._job.generation:
            fault = replace(fault, reenters=self._gates.able(fault, self._membership.with_ranks))
            if self._plan is not None:
                fault = laid_to_its_node(fault, self._plan.seats)
        return self._ask_job(fault, fault, now)

    def _ask_job(self, event: Event, fault: Fault | None, now: float) -> list[LeadOutcome]:
        actions = self._job.handle(event, self._epoch + now, None if fault is None else self._room(fault))
        said: list[LeadOutcome] = [*self._job.trust_changes()]
        for action in actions:
            if action.kind is not RecoveryAction.NONE:
                self._drop_pending()
                if action.reenter and fault is not None:
                    due = now + self._gates.patience(self._membership.with_ranks)
                    self._pending.add(Pending(fault, due, Why.BARRIER))
            order = RestartOrdered(self._membership.generation, action.generation, action.reason)
            said += self._answered(action, fault, order, now)
        return said

    def _answered(
        self, action: Action, fault: Fault | None, order: RestartOrdered | QuiesceNodes, now: float
    ) -> list[LeadOutcome]:
        said: list[LeadOutcome] = [Judged(action, fault)]
        if action.kind is RecoveryAction.STOP:
            return said + self._end(Ending(action.exit_code, action.reason))
        if action.kind is RecoveryAction.NONE:
            return said
        self._why = action
        if isinstance(order, QuiesceNodes):
            said.append(order)
        else:
            said += self._decided(self._membership.handle(order, now), now)
        if action.exclude:
            bad = Unfit(action.exclude, action.reason)
            said += self._decided(self._membership.handle(bad, now), now)
        return said

    def _escalate(self, fault: Fault, now: float) -> list[LeadOutcome]:
        """Have ranks that are not at the barrier in time ended, and all others with them."""
        why = late(self._membership.silent)
        action = self._job.escalate(fault, why, self._epoch + now, self._room(fault))
        self._membership.because(action.reason)
        names = tuple(sorted(self._membership.here()))
        return self._answered(action, fault, QuiesceNodes(names, Quiesce(action.generation, why)), now)

    def _room(self, fault: Fault) -> SpareCapacity | None:
        """Return what nodes are left without a fault's; None: it cannot be laid to a node."""
        plan, here = self._plan, fault.node in self._membership.here()
        alone = self._terms.most + self._terms.spares < 2
        if plan is None or alone or is_nobodys(fault) or (fault.kind is FaultKind.LOST and here):
            return None
        left = self._membership.seated_without(fault.node, fault.kind is FaultKind.FAILING)
        return SpareCapacity(left >= len(plan.seats), self._terms.least <= left)

    def _grow(self, step: int, now: float) -> list[LeadOutcome]:
        following = self._job.generation + 1
        decisions = self._membership.handle(SafeStep(self._job.generation, step, following), now)
        if any(isinstance(one, Probe) for one in decisions):
            self._why = Action(RecoveryAction.NONE, self._job.next_generation(), "the job grows")
        return self._decided(decisions, now)

    def _decided(self, decisions: Iterable[Decision], now: float) -> list[LeadOutcome]:
        said: list[LeadOutcome] = []
        for one in decisions:
            match one:
                case Plan():
                    said += self._planned(one)
                case Probe(names, reason):
                    self._plan = None
                    called = self._pending.first(Why.BARRIER)
                    reason = reason if called is None else called.fault.reason
                    order = Quiesce(self._job.generation, reason, called is not None)
                    said.append(QuiesceNodes(names, order))
                case Lost():
                    said.append(Rejected(one.name, one.reason, True) if one.excluded else Log(one.reason))
                    said += self._lost(one, now)
                case TakenIn(name, reason, lived):
                    said += [Log(reason), *([Lived(name)] if lived else [])]
                    said += self._again(now)
                case Refused(name, reason):
                    said.append(Rejected(name, reason))
                case Waits(reason) | GrowthWanted(_, reason):
                    said.append(Log(reason))
                case TooFew(exit_code, reason):
                    said += self._end(Ending(exit_code, reason))
        return said

    def _lost(self, lost: Lost, now: float) -> list[LeadOutcome]:
        self._stores.pop(lost.name, None)
        self._warm.discard(lost.name)
        if not lost.ends:
            return self._again(now)
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
        return self._judge(fault, now)

    def _planned(self, plan: Plan) -> list[LeadOutcome]:
        self._plan, self._waits_for_store = plan, True
        self._progress.begin(plan.nodes)
        self._pool = Pool(plan.generation, plan.seats)
        self._compare(plan)
        self._counted, self._running_since, self._program = False, None, ""
        self._kept.begin()
        same = plan.world_size == self._job.world_size  # then nobody's ranks have other numbers either
        self._reenter = same and self._pending.first(Why.BARRIER) is not None
        self._drop_pending()
        self._failing = [fault for fault in self._failing if fault.node in plan.nodes]
        self._job.world_size = plan.world_size
        words = f"generation {plan.generation}: {some(plan.nodes)}: {plan.reason}"
        return [Log(words), *self._propose_if_ready()]

    def _drop_pending(self) -> None:
        """Drop the faults that a new generation ends; nodes that are failing are so in the next one, too."""
        self._failing += [one.fault for one in self._pending if one.why is Why.SAVE]
        self._pending.clear()

    def _compare(self, plan: Plan) -> None:
        """Compare the ranks of a plan from now on."""
        ranks = {seat.name: seat.ranks for seat in plan.seats}
        self._stragglers.begin(plan.generation, ranks, self._devices)

    def _know_device(self, event: Heartbeat) -> None:
        """Take the model of a node's devices; ranks are compared anew where it was not known."""
        node, device = event.node, event.status.device
        if device != self._devices.get(node, "") and node in self._membership.here():
            self._devices[node] = device
            if self._plan is not None and node in self._plan.nodes:
                self._compare(self._plan)

    def _propose_if_ready(self) -> list[LeadOutcome]:
        plan = self._plan
        if plan is None or not self._waits_for_store or plan.master not in self._stores:
            return []
        self._waits_for_store = False
        store = self._used[plan.master] = self._stores.pop(plan.master)
        self._port = store[0]
        return [self._proposal(plan)]

    def _again(self, now: float) -> list[LeadOutcome]:
        """Propose once more what is in force: who is told of it has changed; so often at most."""
        self._again_at = self._told_at + TELL_EVERY
        if now < self._again_at:
            return []
        self._told_at, self._again_at = now, math.inf
        settled = self._plan is not None and not self._waits_for_store
        return [self._proposal(self._plan)] if settled or not self.began else []

    def _proposal(self, plan: Plan | None) -> Proposal:
        roles = self._membership.roles()
        here = tuple(name for name, role in roles.items() if role in (Role.ACTIVE, Role.SPARE))
        why = self._why
        ours = plan is not None and why.generation == plan.generation
        content = JobPlan(
            membership=self._membership.state(),
            job=self._job.state(),
            seats=() if plan is None else plan.seats,
            reason="" if plan is None else plan.reason,
            why=why.reason if ours else "",
            hung_again=ours and why.hung_again,
            wait=why.wait if ours else 0.0,
            state=why.state,
            avoid=self._job.avoid,
            port=self._port,
            reenter=self._reenter,
            layout="" if plan is None else plan.layout,
            end=self.ending,
        )
        return Proposal(self._membership.generation, () if plan is None else plan.nodes, here, content)

    def _end(self, ending: Ending) -> list[LeadOutcome]:
        self.ending = ending
        return [self._proposal(self._plan)]

    def members(self) -> Mapping[str, Member]:
        """Return the nodes that are there, by name."""
        return self._membership.here()
