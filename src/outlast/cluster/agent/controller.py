"""Who tells this agent what to do: its own decider, or the cluster where the job has several nodes.

What happens on the node goes in, orders come out; see :mod:`outlast.cluster.agent.cluster_controller` for
several nodes.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Sequence
from typing import Protocol

from outlast.agreement.policy.steps import NodeCoordinator, RanksSeen, TellRanks
from outlast.checkpoint.policy.copies import TrustChange
from outlast.cluster.policy.events import Judged, Lived, Log, StepSaved
from outlast.cluster.policy.messages import Assignment, Ending, NodeStatus, Quiesce
from outlast.errors import ExitCode
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.journal import Journal
from outlast.parallelism.policy.degrees import layout_for
from outlast.recovery.policy.events import Action, Fault, RecoveryAction
from outlast.recovery.policy.job import (
    CommitSeen,
    CopyGone,
    CopySetAside,
    Event,
    JobDecider,
    LoadSeen,
    OwnCheckpoint,
)
from outlast.stragglers.policy.gathering import TimingReport
from outlast.stragglers.policy.options import StragglerAction
from outlast.stragglers.policy.watch import Noticed, RankTimes, StragglerWatch

Order = (
    Assignment
    | Ending
    | Quiesce
    | TellRanks
    | StepSaved
    | Lived
    | Judged
    | Blamed
    | TrustChange
    | Log
    | Noticed
    | RankTimes
)


class Controller(Protocol):
    """What the agent needs of its controller."""

    @property
    def decides(self) -> bool:
        """Say whether faults of this node are judged at once, by this process."""

    def begin(self) -> Sequence[Order]:
        """Start."""

    def tell(self, event: Event, generation: int) -> Sequence[Order]:
        """Take something that happened on this node in a generation."""

    def tick(self) -> Sequence[Order]:
        """Do what is due."""

    def halted(self, generation: int) -> Sequence[Order]:
        """Take note that this node runs nothing that is older than a generation."""

    def offers(self, status: NodeStatus) -> Sequence[Order]:
        """Take note of what this node has for the next generation."""

    def seen(self, seen: Seen) -> Sequence[Order]:
        """Tell the leader what was seen of silent ranks; it can name a culprit on another node."""

    def timed(self, report: TimingReport) -> Sequence[Order]:
        """Compare what the ranks of this node measured with each other and with those of other nodes."""

    def steps(self, seen: RanksSeen) -> Sequence[Order]:
        """Take how the ranks stand; return what they are told of a step after which all act."""

    def deadline(self) -> float | None:
        """Return the monotonic time at which :meth:`tick` has to be called; None: it need not be."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`tick` has work; -1: there is none."""

    def settled(self) -> bool:
        """Say whether everybody knows that the job is over."""

    def close(self) -> None:
        """Let go."""


class Halts:
    """Orders to halt: they are repeated until they are answered, which takes as long as ranks to the gate."""

    def __init__(self) -> None:
        self._last = (0, False)
        self._due = 0

    def is_news(self, order: Quiesce, generation: int) -> bool:
        """Say whether something has to be ended for an order, of a node that runs a generation."""
        before, self._last = self._last, (order.generation, order.reenter)
        self._due = order.generation
        return generation < order.generation and before != self._last

    def answered(self) -> int:
        """Return, once, the generation before which nothing goes on any more; 0: nobody asks."""
        found, self._due = self._due, 0
        return found


class Ear:
    """Has a selector wake up for a chief's messages; the descriptor changes when an agent begins anew."""

    def __init__(self, chief: Controller, selector: selectors.BaseSelector) -> None:
        self._chief = chief
        self._selector = selector
        self._at = -1

    def listen(self) -> None:
        """Wait for the descriptor that it has now."""
        found = self._chief.fileno()
        if found == self._at:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._at)
        self._selector.register(found, selectors.EVENT_READ, None)
        self._at = found


class LocalController:
    """The decider of a job of one node.

    Args:
        options: the command line.
        journal: keeps what outlives this launcher.
    """

    decides = True

    def __init__(self, options: LaunchOptions, journal: Journal) -> None:
        self._journal = journal
        self._coordinator = NodeCoordinator()
        self._world = options.world.nproc_per_node
        self._name = options.nodes.name
        self._job = JobDecider(options.config.fault_tolerance, self._world)
        self._layout = layout_for(options.config.parallelism.chosen, self._world)
        self._stragglers = StragglerWatch(options.config.stragglers, self._job.signs)
        known, why = journal.recall(), "a new run"
        if known is not None:
            self._job.restore(known)
            self._job.begin_after(journal.newest_saved())
            why = f"the run goes on with generation {self._job.generation}"
        elif before := journal.lost_after():
            self._job.begin_after(before)
            why = (
                f"job_state.json is missing: the run goes on with generation {self._job.generation};"
                " budgets are full, and no checkpoint is a suspect"
            )
        journal.run_started(self._job.generation, self._world, why)

    def begin(self) -> Sequence[Order]:
        """Start."""
        changes = self._job.trust_changes()
        self._journal.keep(self._job.state())
        shortage = self._job.shortage(time.time())
        return (
            *changes,
            *([Log(shortage)] if shortage else []),
            self._assignment(Action(RecoveryAction.NONE, self._job.generation, "the job begins")),
        )

    def tell(self, event: Event, generation: int) -> Sequence[Order]:
        """Take something that happened on this node."""
        del generation  # what carries one says so itself
        actions = self._job.handle(event, time.time())
        orders: list[Order] = []
        fault = event if isinstance(event, Fault) else None
        for action in actions:
            orders.append(Judged(action, fault))
            if action.kind is RecoveryAction.STOP:
                orders.append(Ending(action.exit_code, action.reason))
            elif action.kind is not RecoveryAction.NONE:
                orders.append(self._assignment(action))
        orders += self._stop_if_slow(event)
        changes = self._job.trust_changes()
        lasting = isinstance(event, (CommitSeen, CopyGone, CopySetAside, LoadSeen, OwnCheckpoint))
        if lasting or changes or any(not isinstance(one, Judged) for one in orders):
            self._journal.keep(self._job.state())
        return (*orders[:1], *changes, *orders[1:])

    def _stop_if_slow(self, event: Event) -> list[Order]:
        """End the job after a save if a rank slows it and the options ask for that."""
        if not isinstance(event, (CommitSeen, OwnCheckpoint)):
            return []
        wanted = self._stragglers.wanted(time.time())
        if wanted is None or wanted.action is not StragglerAction.STOP:
            return []
        words = f"{wanted.reason}; [stragglers] action is stop, and step {event.step} is saved"
        return [Log(words), Ending(int(ExitCode.NODE_UNFIT), words)]

    def timed(self, report: TimingReport) -> Sequence[Order]:
        """Compare what the ranks measured."""
        found = self._stragglers.take(report, time.monotonic())
        self._coordinator.rebalance(self._stragglers.slow)
        return found

    def _assignment(self, action: Action) -> Assignment:
        self._stragglers.begin(action.generation, {self._name: range(self._world)})
        return Assignment(
            generation=action.generation,
            seated=True,
            world_size=self._world,
            master=True,
            avoid=self._job.avoid,
            state=action.state.value,
            reason=action.reason,
            reenter=action.reenter,
            hung_again=action.hung_again,
            wait=action.wait,
            layout="" if self._layout is None else self._layout.text,
        )

    def tick(self) -> Sequence[Order]:
        """Do nothing: nothing happens because time passes."""
        return ()

    def halted(self, generation: int) -> Sequence[Order]:
        """Take no note: nobody asked."""
        del generation
        return ()

    def offers(self, status: NodeStatus) -> Sequence[Order]:
        """Take no note: the ranks are told by this process."""
        del status
        return ()

    def seen(self, seen: Seen) -> Sequence[Order]:
        """Tell nobody: there is no other node."""
        del seen
        return ()

    def steps(self, seen: RanksSeen) -> Sequence[Order]:
        """Coordinate the ranks, which are all on this node."""
        return self._coordinator.look(seen)

    def deadline(self) -> float | None:
        """Return None."""
        return None

    def fileno(self) -> int:
        """Return -1."""
        return -1

    def settled(self) -> bool:
        """Return True: there is nobody else to know it."""
        return True

    def close(self) -> None:
        """Let go of nothing."""
