"""What a session does between two steps for all ranks at once: agree, and give the job back in time."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from outlast import _torch_compat
from outlast.agreement.policy.steps import WANT_OF, Want
from outlast.agreement.policy.votes import Flag, Reading, StepAction, StepOutcome, Vote, action_of
from outlast.agreement.worker.agent_agreement import AgentAgreement, Terms
from outlast.agreement.worker.store_agreement import StoreAgreement
from outlast.agreement.worker.vote import Ballot, GroupBallot, Numbers, SoloBallot
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.config import TripwireOptions
from outlast.consistency.policy import MOST_ROLLBACKS, Act, Difference
from outlast.consistency.worker import Tripwire, over_the_store
from outlast.errors import OutlastError, ReplicasDiffer, UsageError
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker.cleanup import when_left
from outlast.ipc.exchange import Seal, SystemClock
from outlast.numerics.policy.numerics import Finding
from outlast.numerics.policy.options import Action, Check
from outlast.numerics.policy.tally import Tally
from outlast.parallelism.policy.shares import FULL_SPEED, Slow
from outlast.preemption.policy import (
    Decision,
    Durable,
    Event,
    Measured,
    RolledBack,
    SaveFailed,
    Staged,
    Voted,
)
from outlast.preemption.worker import PreemptionHandler
from outlast.recovery.policy.events import Note, Record
from outlast.settings import WorkerContext
from outlast.stragglers.worker import benchmark

_HELD = "this generation is about to end"
HOLD_PATIENCE = 30.0  # seconds that ranks wait, with all saved, for the generation that follows
if TYPE_CHECKING:
    from outlast.parallelism.worker import Batches

_MOST_TOLD = 64  # shares in a line of the event log


class Saves:
    """Knows what has become of a rank's saves, and how long they took.

    Args:
        checkpointer: of the session.
        record: takes records.
        context: what the launcher said.
        on_preempted: is called when this process is told to end, from any thread.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        record: Callable[[Record], None],
        context: WorkerContext,
        on_preempted: Callable[[], None],
    ) -> None:
        self.preempted = on_preempted
        self._checkpointer = checkpointer
        self._record = record
        self._context = context
        self._clock = SystemClock()
        self._began: dict[int, float] = {}
        self._arrived = dict.fromkeys(checkpointer.tiers, -1)
        self._lost = -1
        self._at_it = (
            threading.Lock()
        )  # steps that have arrived are told by one thread and forgotten by another
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seconds: dict[str, float] = {}

    @property
    def tiers(self) -> Sequence[str]:
        """Where a save can go, from the tier that outlives most to the quickest."""
        return self._checkpointer.tiers

    @property
    def busy(self) -> bool:
        """Whether a save is on its way."""
        return bool(self._began)

    def began(self, step: int, at: float) -> None:
        """Take note of a save that is on its way."""
        self._began[step] = at

    def done(self, step: int) -> None:
        """Take note of a save that the ranks made by themselves."""
        for event in (Staged(step), *self._arrive("local", step, self._clock.monotonic())):
            self._news.put(event)
        self._began.pop(step, None)

    def failed(self, step: int, reason: str) -> None:
        """Take note of a save that was lost."""
        self._began.pop(step, None)
        self._news.put(SaveFailed(step, reason))

    def news(self, now: float) -> Sequence[Event]:
        """Return what has become of saves since the last call."""
        with self._at_it:
            return self._take(now)

    def _take(self, now: float) -> Sequence[Event]:
        found: list[Event] = []
        while not self._news.empty():
            found.append(self._news.get_nowait())
        status = self._checkpointer.progress()
        if status is None:
            return found
        steps = {"memory": status.memory_step, "local": status.durable_step, "global": status.global_step}
        for tier in reversed(self._checkpointer.tiers):
            if steps[tier] > self._arrived[tier]:
                found += [Staged(steps[tier]), *self._arrive(tier, steps[tier], now)]
        if status.lost_step > self._lost:
            self._lost = status.lost_step
            found.append(SaveFailed(status.lost_step, status.error))
        last = self._arrived[self._checkpointer.tiers[0]]
        over = max(last, self._lost)
        for step in [step for step in list(self._began) if step <= over]:
            self._began.pop(step, None)
        return found

    def _arrive(self, tier: str, step: int, now: float) -> list[Event]:
        self._arrived[tier] = step
        began = self._began.get(step)
        if began is None:
            return [Durable(step, tier)]
        self.seconds[tier] = max(now - began, self.seconds.get(tier, 0.0))
        return [Measured(tier, now - began), Durable(step, tier)]

    def begin_anew(self) -> None:
        """Forget which steps have arrived: training goes on from an older one."""
        with self._at_it:
            self._began.clear()
            self._arrived, self._lost = dict.fromkeys(self._arrived, -1), -1
            self._news.put(RolledBack())

    def flush(self) -> None:
        """Bring what is staged to disk without the other ranks."""
        self._arrived = dict.fromkeys(self._arrived, -1)  # so that what is durable already is told again
        self._checkpointer.flush()

    def tell(self, text: str) -> None:
        """Write a line into the event log."""
        reason = f"rank {self._context.rank}: {text}"
        clock, generation = self._clock, self._context.generation
        self._record(Note(time=clock.wall(), clock=clock.monotonic(), generation=generation, reason=reason))


class AfterStep:
    """Says what follows each step; every rank makes one at the same time, and calls it in the same order.

    Ranks agree through their agent where it takes part, else through the store and with a vote. With a guard,
    they vote in each step.

    Args:
        checkpointer: of the session.
        context: what the launcher said.
        record: takes records.
        listener: hears notices; None: the job cannot be preempted, and nobody votes, but for a guard.
        guarded: a guard votes in each step, before the optimizer, for everything else as well.
        seal: authenticates what ranks set in their store.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        context: WorkerContext,
        record: Callable[[Record], None],
        listener: PreemptionHandler | None,
        guarded: bool = False,
        seal: Seal | None = None,
    ) -> None:
        self._seal = seal
        alone = context.world_size == 1 or (listener is None and not guarded)
        self._ballot: Ballot = SoloBallot() if alone else GroupBallot()
        self._heeds_agent = not alone or context.world_size == 1  # else nobody votes, and none saves alone
        self._agreement: AgentAgreement | StoreAgreement | None = None
        if not (alone or guarded):
            self._agreement = self._open_agreement(context)
        self._rank = context.rank
        self._leads = context.rank == 0
        self._guarded = guarded
        self._heard: tuple[int, Vote] | None = None  # by the guard, in the step of this index
        self._finding: Finding | None = None
        self._quiet = Vote()
        self._calm = action_of(self._quiet)
        self._asked: frozenset[Flag] = frozenset()
        self._saves = Saves(checkpointer, record, context, lambda: self._pass_on({Flag.PREEMPTED}))
        self._clock = SystemClock()
        self._listener = listener
        if listener is not None:
            listener.equip(self._saves)
        self._flags: set[Flag] = set()
        self._batches: Batches | None = None
        self._tripwire: Tripwire | None = None
        self._goes_back = False
        self._differed = -1
        self._times_back = 0
        self.way_back: tuple[Finding, bool] | None = None
        self._since = (0, 0.0)
        self._page = heartbeat.attach(context.heartbeat_path or None)
        self._agent_asks = self._page.agreement
        self._saves_seen = self._agent_asks.saves_asked
        self.preempted = False
        self.stopped = False

    def _open_agreement(self, context: WorkerContext) -> AgentAgreement | StoreAgreement:
        page = heartbeat.attach(context.heartbeat_path or None)
        if page.agreement.served:
            through_agent = AgentAgreement(page, context.control_path, self._terms)
            when_left(through_agent.end)
            return through_agent
        store = _torch_compat.own_store()
        assert store is not None, "the ranks have met over it"
        found = StoreAgreement(
            store, context.rank, context.world_size, context.generation, lambda: self._wants_vote, self._seal
        )
        when_left(found.end)
        return found

    def _terms(self) -> Terms:
        """Return when the job is expected to end, when this rank must have exited, how long saves took."""
        listener, now, seconds = self._listener, self._clock.monotonic(), dict(self._saves.seconds)
        if listener is None or not listener.asked:
            return math.inf, math.inf, seconds
        return now + listener.left(now), now + listener.limit(now), seconds

    @property
    def asks_when_due(self) -> bool:
        """Whether a save that is due by time is asked for, rather than agreed on at the save before."""
        return isinstance(self._agreement, AgentAgreement)

    def save_is_due(self) -> None:
        """Ask all ranks for a save, since the time between two of them is over."""
        if self._leads and isinstance(self._agreement, AgentAgreement):
            self._agreement.ask(Want.DUE)

    def saved(self) -> None:
        """Take note of a save of all ranks: none is due by time."""
        if isinstance(self._agreement, AgentAgreement):
            self._agreement.take_back(Want.DUE)

    def _pass_on(self, flags: Iterable[Flag]) -> None:
        """Let the agent know what this rank asks for, where it takes part; else the next vote tells."""
        if isinstance(self._agreement, AgentAgreement):
            for flag in flags:
                self._agreement.ask(WANT_OF[flag])

    @property
    def _wants_vote(self) -> bool:
        asked = self._listener is not None and self._listener.asked
        by_agent = self._heeds_agent and self._agent_asks.saves_asked != self._saves_seen
        return bool(self._flags) or asked or by_agent

    @property
    def votes(self) -> bool:
        """Whether ranks agree on what a single one asks for."""
        return self._listener is not None or self._guarded

    def ask(self, flag: Flag) -> None:
        """Raise a flag in the next vote.

        Raises:
            UsageError: nobody votes.
        """
        if not self.votes:
            raise UsageError(
                f"session.{flag.value}_soon: enable_exit_handler is off, or the session is not on the main"
                " thread, so ranks do not vote; call session.save on every rank"
            )
        self._raise({flag})

    def _raise(self, flags: Set[Flag]) -> None:
        """Ask all ranks for something after one of the next steps."""
        if isinstance(self._agreement, AgentAgreement):
            self._pass_on(flags)
        else:
            self._flags |= flags

    def compare(
        self, state: Mapping[str, object], context: WorkerContext, record: Callable[[Record], None]
    ) -> None:
        """Compare what ranks should hold alike, where the launcher's file asks for it."""
        options = TripwireOptions(**context.tripwire)
        if options.tripwire_interval is not None:
            exchange = over_the_store(context.generation, self._seal)
            self._tripwire = Tripwire(state, options, exchange, record, context.generation)
            self._goes_back = options.tripwire_action == Act.ROLLBACK.value

    def begin(self, step: int) -> bool:
        """Vote before the first step of a loop; return whether the job is to end at once.

        Raises:
            OutlastError: ranks have completed different steps: they did not restore the same state.
        """
        if self._tripwire is not None:
            self._tripwire.begin(step)
        self._since = (step, self._clock.monotonic())
        if self.preempted or self._listener is None:
            return self.preempted
        self._listener.look()
        self._ballot.hand_in(replace(self._vote(step), lowest=step, highest=step))
        action = action_of(self._ballot.outcome())
        if action.vote.lowest != action.vote.highest:
            raise OutlastError(
                f"ranks begin after different steps: rank {self._rank} after {step}, others after"
                f" {action.vote.lowest:.0f} to {action.vote.highest:.0f}; equal steps expected, so this"
                " rank trains no step"
            )
        if action.do is not StepOutcome.GIVE_BACK:
            self._raise(action.vote.flags)  # they are heard after the first step
            if self._agreement is not None:
                self._agreement.begin(step)
            return False
        self.preempted = self.stopped = True
        reason = f"the job ends before step {step} was trained on; nothing is lost"
        self._listener.resign(reason, action.vote.limit)
        return True

    def after(self, step: int) -> StepAction:
        """Return what all ranks do after a step.

        Raises:
            UsageError: there is a guard, and the step was not run through it.
        """
        heard = self._heard
        if heard == (step - 1, self._calm.vote) and self._finding is None and self._tripwire is None:
            self._heard = None
            return self._calm
        action = self._after_guard(step) if self._guarded else self._after_vote(step)
        self.stopped = self.stopped or action.do in (StepOutcome.STOP, StepOutcome.GIVE_BACK)
        found = None if self._tripwire is None else self._tripwire.after(step)
        if found is None or not self._goes_back or action.do is StepOutcome.GIVE_BACK:
            return action
        self._raise(action.vote.flags - {Flag.PREEMPTED})  # they are heard after the rollback
        return self._go_back(found, action.vote)

    def _after_vote(self, step: int) -> StepAction:
        agreement = self._agreement
        if isinstance(agreement, AgentAgreement):
            said = agreement.decided(step)
            if said is None:
                return self._calm
            action = action_of(said.vote(self._clock.monotonic()))
            if action.do is StepOutcome.GO_ON and Want.DUE in said.wants:
                action = StepAction(StepOutcome.SAVE, "", action.vote)
            if Want.HOLD in said.wants:
                action = replace(action, hold=True, reason=action.reason or _HELD)
            if Want.REBALANCE in said.wants:
                self._rebalance(step, said.slow)
            if Want.BENCHMARK in said.wants and action.do not in (StepOutcome.STOP, StepOutcome.GIVE_BACK):
                benchmark.compute(self._page)
        else:
            if not (self._wants_vote if agreement is None else agreement.due(step)):
                return self._calm
            action = self._hold_vote(step)
        if agreement is not None and action.do in (StepOutcome.STOP, StepOutcome.GIVE_BACK):
            agreement.close()
        elif agreement is not None:
            agreement.begin(step)
        return action

    def hold(self, step: int) -> None:
        """Wait at a step that is saved for the generation that follows, for a while."""
        agreement = self._agreement
        if not isinstance(agreement, AgentAgreement):
            return
        goes_on = agreement.hold(HOLD_PATIENCE)
        if self._leads and goes_on:
            self._saves.tell(f"training goes on after step {step}: this generation stays")
        elif self._leads:
            words = f"no other generation has begun within {HOLD_PATIENCE:.0f} s of the save"
            self._saves.tell(f"training goes on after step {step}: {words}")

    def divide(self, batches: Batches | None, context: WorkerContext) -> None:
        """Have micro-batches divided as all ranks agree.

        Raises:
            UsageError: the launcher's file asks for it, and the ranks do not agree through their agent.
        """
        self._batches = batches
        asked = context.stragglers.get("action") == "rebalance" and context.world_size > 1
        if asked and not isinstance(self._agreement, AgentAgreement):
            raise UsageError(
                "session.restore: the launcher's file says [stragglers] action = 'rebalance', and the ranks"
                " cannot agree on a step for it: there is a guard, or enable_exit_handler is off; leave that"
                " out, or use another action"
            )

    def _rebalance(self, step: int, slow: Slow) -> None:
        """Divide the micro-batches from the next step on."""
        if self._batches is None:
            return
        shares = self._batches.rebalance(slow)
        if self._leads:
            speeds = ", ".join(f"rank {rank} has {speed / FULL_SPEED:.0%} of" for rank, speed in slow)
            why = f"{speeds} the speed of its peers" if slow else "no rank is slow any more"
            some = ", ".join(map(str, shares[:_MOST_TOLD])) + (", ..." if len(shares) > _MOST_TOLD else "")
            self._saves.tell(f"from step {step} on ranks take {some} micro-batches: {why}")

    def _hold_vote(self, step: int) -> StepAction:
        self._ballot.hand_in(self._vote(step))
        return action_of(self._ballot.outcome())

    def _go_back(self, found: Difference, vote: Vote) -> StepAction:
        """Return that all ranks go back to a step at which they held the same.

        Raises:
            ReplicasDiffer: they never did, or going back has not helped.
        """
        self._times_back = 1 if found.agreed > self._differed else self._times_back + 1
        self._differed = found.step
        below = found.agreed if found.agreed >= 0 else found.step - 1
        if below < 0 or self._times_back > MOST_ROLLBACKS:
            why = f"{found.reason}; it is rollback {self._times_back}, and {MOST_ROLLBACKS} are made at most"
            raise ReplicasDiffer(why, found.step, found.agreed, found.ranks)
        reason = f"{found.reason}; all ranks go back to what was saved after step {below} or before"
        about = (Check.RANK_OUTLIER, Action.ROLLBACK, found.step, found.ranks, "parameters", float("nan"))
        self.way_back = (Finding(*about, reason, below), self._times_back == 1)
        if self._leads:
            self._saves.tell(reason)
        return StepAction(StepOutcome.ROLL_BACK, reason, vote)

    def hear(self, index: int, reading: Reading, mismatch: bool) -> Tally:
        """Vote within a step, with its numbers, and wait for the outcome.

        Args:
            index: of the step.
            reading: of this rank.
            mismatch: this rank has done the step again, and it came to something else.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        vote = self._vote(index + 1)
        if mismatch:
            vote = replace(vote, flags=vote.flags | {Flag.MISMATCH})
        tally = self._ballot.tally(vote.flags, reading)
        self._finding = None
        if not (tally.flags or self._heard):
            self._heard = (index, self._calm.vote)
            return tally
        again = self._heard is not None and self._heard[0] == index
        before = self._heard[1].flags if again and self._heard is not None else frozenset()
        self._heard = (index, self._outcome(vote, tally.flags | before))
        return tally

    def _outcome(self, vote: Vote, flags: frozenset[Flag]) -> Vote:
        """Return what votes come to whose flags are known; asks how much time is left where that counts."""
        if not flags:
            return self._calm.vote
        if Flag.PREEMPTED in flags:
            self._ballot.hand_in(vote)
            return replace(self._ballot.outcome(), flags=flags - {Flag.MISMATCH})
        return Vote(flags - {Flag.MISMATCH})

    def each(self, reading: Reading) -> tuple[Numbers, Numbers]:
        """Return losses and norms of all ranks, in their order.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        return self._ballot.numbers(reading)

    def found(self, finding: Finding | None) -> None:
        """Take note of what the guard has found in the step, and of what is done about it."""
        self._finding = finding
        if finding is not None and self._leads:
            self._saves.tell(finding.reason)

    def _after_guard(self, step: int) -> StepAction:
        heard, finding = self._heard, self._finding
        self._heard, self._finding = None, None
        if heard is None or heard[0] != step - 1:
            raise UsageError(
                f"step {step - 1} was not run through the guard that session.restore was given: `while"
                " guard.should_run_forward_backward():` belongs round forward and backward of every step"
            )
        if finding is None and not heard[1].flags:
            return self._calm
        action = action_of(heard[1])
        if finding is None or finding.action is not Action.ROLLBACK or action.do is StepOutcome.GIVE_BACK:
            self._asked = frozenset()
            return action
        self._flags |= self._asked  # they are heard after the rollback
        return StepAction(StepOutcome.ROLL_BACK, finding.reason, heard[1])

    def _vote(self, step: int) -> Vote:
        asked = self._listener is not None and self._listener.asked
        if (saves := self._agent_asks.saves_asked) != self._saves_seen:
            self._saves_seen = saves
            self._flags.add(Flag.SAVE)
        if self._guarded and not (self._flags or asked or self._saves.seconds != self._quiet.seconds):
            return self._quiet
        now = self._clock.monotonic()
        since, at = self._since
        a_step = (now - at) / max(step - since, 1)
        self._since = (step, now)
        flags = frozenset(self._flags.pop() for _ in range(len(self._flags)))  # other threads may add to them
        seconds = dict(self._saves.seconds)
        if self._guarded:
            self._asked |= flags
            self._quiet = Vote(seconds=seconds)
        left = limit = float("inf")
        if self._listener is not None and asked:
            flags |= {Flag.PREEMPTED}
            left = self._listener.left(now) - (
                a_step if self._guarded else 0.0
            )  # a guard votes within the step
            limit = self._listener.limit(now)
        return Vote(flags, left, seconds, limit)

    def rolled_back(self, step: int) -> None:
        """Go on from an older step: those after it will be saved again."""
        self._since = (step, self._clock.monotonic())
        self._saves.begin_anew()
        self.way_back = None
        if self._agreement is not None:
            self._agreement.begin(step)
        if self._tripwire is not None:
            self._tripwire.begin(step)

    def orders(self, step: int, action: StepAction) -> Iterator[Decision]:
        """Yield the saves that give the job back; ends when the state is durable."""
        self.preempted = True
        if self._listener is not None:
            vote = action.vote
            yield from self._listener.agreed(Voted(step, vote.left, vote.seconds, vote.limit))

    def watched(self, step: int, save: Callable[[], bool]) -> bool:
        """Make a save of this rank, and follow where it arrives; return whether it is on its way."""
        self._saves.began(step, self._clock.monotonic())
        well = save()
        if not well:
            self._saves.failed(step, "it was lost")
        elif "memory" not in self._saves.tiers:
            self._saves.done(step)
        if self._listener is not None:
            self._listener.wake()
        return well

    def close(self) -> None:
        """End the loop of steps: wait for comparisons that are on their way."""
        if self._agreement is not None:
            self._agreement.close()
        if self._tripwire is not None:
            self._tripwire.close()

    def end(self, error: BaseException | None = None) -> None:
        """Let go of what runs beside training; tell the others of an error, so that none waits."""
        match self._agreement:
            case AgentAgreement():
                self._agreement.end()  # of the error the agent hears by itself
            case StoreAgreement() if error is None:
                self._agreement.end()
            case StoreAgreement():
                self._agreement.fail(f"{type(error).__name__}: {error}")
