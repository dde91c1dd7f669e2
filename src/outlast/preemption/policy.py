"""How a job is given back after a notice: which step is saved, to which tier, and when the process exits.

A notice on any rank becomes a request to all ranks. They agree on a step, on the least time that any rank
has left and on the longest time that a save took on any of them, so all choose the same tier: the one that
outlives most among those for which there is time. The process exits when the save is durable, and no later
than the deadline, less a margin. If ranks do not agree in time (the group hangs), what is staged is flushed
without an agreement. A repeated notice changes nothing, unless it leaves less time.

Two times are kept. The deadline is hard: a margin before it the process exits. It follows from what the user
or the cluster says about the end of the job, and from ``timeout_sec``, after which the process exits, so a
margin is added to it. The expected end is earlier where nobody has said
anything: the tier is chosen for it, and a copy in any tier is enough once it has come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from outlast.config import ASSUMED_LEAD, PreemptionOptions
from outlast.errors import ExitCode

SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", 15: "SIGTERM"}
_SLACK = 1.25  # a save may take so much longer than the longest that was measured


@dataclass(frozen=True)
class Signal:
    """A signal came; ``rank``: to whom, -1 for the agent."""

    number: int
    rank: int = -1


@dataclass(frozen=True)
class Notice:
    """The cluster says when it ends: Slurm's end time, Kubernetes' grace, a spot notice."""

    source: str
    ends: float


@dataclass(frozen=True)
class Measured:
    """A save to a tier took so long; the longest counts."""

    tier: str
    seconds: float


@dataclass(frozen=True)
class Voted:
    """All ranks agreed to stop after a step.

    Args:
        left: seconds until the end that is expected, on the rank that has least.
        seconds: by tier, on the rank that takes longest.
        limit: seconds until a rank must have exited, on the rank that has least.
    """

    step: int
    left: float
    seconds: Mapping[str, float]
    limit: float = math.inf


@dataclass(frozen=True)
class Staged:
    """This step's state is in a buffer, on this rank."""

    step: int


@dataclass(frozen=True)
class Durable:
    """A copy of a step is safe in a tier."""

    step: int
    tier: str


@dataclass(frozen=True)
class Broken:
    """Ranks cannot agree any more: training has ended with an error on this rank."""

    reason: str


@dataclass(frozen=True)
class SaveFailed:
    """The save that was ordered cannot be had."""

    step: int
    reason: str


@dataclass(frozen=True)
class RolledBack:
    """Training goes on from an older step: what was staged after it is put away."""


News = Measured | Voted | Staged | Durable | SaveFailed | Broken | RolledBack
Event = Signal | Notice | News


class Order(Enum):
    """What is to be done."""

    VOTE = "vote"  # raise the flag of this rank
    SAVE = "save"  # after this step, into this tier
    FLUSH = "flush"  # what is staged, without an agreement
    EXIT = "exit"  # hard: nothing is waited for any more
    WARN = "warn"
    NONE = "none"


@dataclass(frozen=True)
class Decision:
    """An order with its reason; ``step`` -1 and an empty ``tier`` where there is none."""

    order: Order
    reason: str
    step: int = -1
    tier: str = ""
    exit_code: int = 0


class State(Enum):
    """How far giving back is."""

    TRAINING = "training"
    ASKED = "asked"  # the flag is up
    SAVING = "saving"
    ENDED = "ended"


class Preempted:
    """Decides for one rank.

    Args:
        options: of the user.
        tiers: the seconds that a save to each took, at most, by name, from the tier that outlives most to the
            quickest; infinite: none was measured.
        lead: seconds of notice that the cluster gives, if the environment says it; 0: it does not.
    """

    def __init__(self, options: PreemptionOptions, tiers: Mapping[str, float], lead: float = 0.0) -> None:
        self._options = options
        self._seconds = dict(tiers)
        self._granted = lead or options.preempt_time or math.inf
        self._lead = ASSUMED_LEAD if math.isinf(self._granted) else self._granted
        self._warned = False
        self._deadline = self._expected = math.inf
        self._staged = -1
        self._promised: tuple[int, str] | None = None
        self._reached: tuple[int, str] | None = None
        self._first = ""
        self._asked = math.inf
        self.state = State.TRAINING

    @property
    def deadline(self) -> float:
        """Return when the process must have exited; infinite: nobody asked for it, or there is no limit."""
        return self._deadline

    @property
    def expected(self) -> float:
        """Return when the job is expected to end; infinite: nobody asked for it."""
        return self._expected

    def start(self) -> tuple[Decision, ...]:
        """Say before training what is known to be too short; once."""
        return self._warn()

    def handle(self, event: Event, now: float) -> tuple[Decision, ...]:
        """Take one event."""
        if self.state is State.ENDED:
            return (Decision(Order.NONE, "the process exits already"),)
        if isinstance(event, (Signal, Notice)):
            return self._on_notice(event, now)
        return self._on_news(event, now)

    def _on_notice(self, event: Signal | Notice, now: float) -> tuple[Decision, ...]:
        match event:
            case Signal(number, rank):
                return self._on_signal(number, rank, now)
            case Notice(source, ends):
                return self._ask(source, ends, now, f"{source} ends this job in {ends - now:.0f} s")

    def _on_news(self, event: News, now: float) -> tuple[Decision, ...]:
        match event:
            case Measured(tier, seconds):
                known = self._seconds.get(tier, math.inf)
                self._seconds[tier] = seconds if math.isinf(known) else max(known, seconds)
                return self._warn()
            case Voted():
                return self._on_vote(event, now)
            case Staged(step):
                self._staged = max(self._staged, step)
                return ()
            case RolledBack():
                self._staged = -1
                return ()
            case Durable(step, tier):
                return self._on_durable(step, tier)
            case Broken(reason):
                return self._on_broken(reason)
            case SaveFailed(step, reason):
                return self._on_failure(step, reason, now)

    def tick(self, now: float) -> tuple[Decision, ...]:
        """Act when time runs out; to be called several times a second once a notice came."""
        if self.state in (State.TRAINING, State.ENDED):
            return ()
        if now >= self._expected - self._options.margin and self._reached:
            words = f"out of time: step {self._reached[0]} is durable in the {self._reached[1]} tier only"
            return (self._exit(int(ExitCode.PREEMPTED), words),)
        if now >= self._deadline - self._options.margin:
            what = (
                "nothing was staged" if self._promised is None else f"step {self._promised[0]} is not durable"
            )
            words = f"Graceful shutdown timed out — forcing exit: {what}"
            return (self._exit(int(ExitCode.FAILED), words),)
        if self.state is State.ASKED and self._staged >= 0:
            when, tier = self._last_call()
            if now >= when:
                return (self._flush(tier, "ranks did not agree in time: their group may hang"),)
        return ()

    def _on_signal(self, number: int, rank: int, now: float) -> tuple[Decision, ...]:
        name = SIGNALS.get(number, f"signal {number}")
        if not self._options.enable_exit_handler or name not in self._options.exit_signals:
            return (Decision(Order.NONE, f"{name} is no notice (exit_signals, enable_exit_handler)"),)
        where = f" on rank {rank}" if rank >= 0 else ""
        words = f"Received {name}{where} — requesting graceful shutdown"
        return self._ask(name, now + self._granted, now, words)

    def _ask(self, source: str, ends: float, now: float, words: str) -> tuple[Decision, ...]:
        again = self.state is not State.TRAINING
        own = self._options.timeout_sec + self._options.margin if self._options.timeout_sec else math.inf
        limit = math.inf if again else now + own
        sooner = min(ends, limit) < self._deadline
        self._deadline = min(self._deadline, ends, limit)
        left = max(0.0, self._deadline - now)
        if not again:
            self._first, self._asked, self.state = source, now, State.ASKED
            assumed = now + self._lead if math.isinf(ends) else math.inf
            self._expected = min(self._deadline, assumed)
            if math.isfinite(left):
                forced = max(0.0, left - self._options.margin)
                words += f"; Forced exit in {round(forced, 1):g}s if shutdown not complete"
            return (Decision(Order.VOTE, words), *self.tick(now))
        self._expected = min(self._expected, self._deadline)
        if not sooner:
            return (Decision(Order.NONE, f"{source} changes nothing: {self._first} came before"),)
        return (
            Decision(Order.NONE, f"{source} leaves only {left:.0f} s; the exit comes sooner"),
            *self.tick(now),
        )

    def _on_vote(self, vote: Voted, now: float) -> tuple[Decision, ...]:
        if self.state is State.SAVING:
            return (
                Decision(Order.NONE, f"a save is on its way; the vote for step {vote.step} changes nothing"),
            )
        if self.state is State.TRAINING:
            self._first = "another rank's notice"
        self._deadline = min(self._deadline, now + vote.limit)
        self._expected = min(self._expected, now + vote.left, self._deadline)
        self.state = State.SAVING
        self._seconds = {name: vote.seconds.get(name, math.inf) for name in self._seconds}
        tier, why = choose(self._seconds, vote.left - self._options.margin)
        self._promised = (vote.step, tier)
        words = (
            f"Shutdown requested at step {vote.step} — saving emergency checkpoint to the {tier} tier: {why}"
        )
        return (Decision(Order.SAVE, words, vote.step, tier), *self.tick(now))

    def _on_durable(self, step: int, tier: str) -> tuple[Decision, ...]:
        if self._promised is None or step < self._promised[0] or tier not in self._seconds:
            return ()
        if not self._as_good(tier, self._promised[1]):
            if self._reached is None or self._as_good(tier, self._reached[1]):
                self._reached = (step, tier)
            return ()
        words = f"Graceful shutdown complete: step {step} is durable in the {tier} tier"
        return (self._exit(int(ExitCode.PREEMPTED), words),)

    def _as_good(self, tier: str, other: str) -> bool:
        order = list(self._seconds)
        return order.index(tier) <= order.index(other)

    def _on_broken(self, reason: str) -> tuple[Decision, ...]:
        if self.state is not State.ASKED or self._staged < 0:
            return ()
        return (self._flush(self._last_call()[1], f"ranks cannot agree: {reason}"),)

    def _on_failure(self, step: int, reason: str, now: float) -> tuple[Decision, ...]:
        if self._promised is None or self._promised[0] != step:
            return ()
        order = list(self._seconds)
        later = order[order.index(self._promised[1]) + 1 :]
        if not later:
            words = f"step {step} could not be saved ({reason}), and no other tier is left"
            return (self._exit(int(ExitCode.FAILED), words),)
        left = self._expected - self._options.margin - now
        tier, why = choose({name: self._seconds[name] for name in later}, left)
        self._promised = (step, tier)
        return (Decision(Order.SAVE, f"{reason}; step {step} goes to the {tier} tier: {why}", step, tier),)

    def _last_call(self) -> tuple[float, str]:
        """Return until when an agreement is waited for, and the tier that needs the rest of the time.

        A quarter of the time is the agreement's in any case, and a margin the save's: a tick may come late.
        """
        end = self._expected - self._options.margin
        quarter = max(0.0, end - self._asked) / 4
        tier, _ = choose(self._seconds, 3 * quarter)
        needed = max(self._seconds[tier] * _SLACK, self._options.margin)
        return max(self._asked + quarter, end - needed), tier

    def _flush(self, tier: str, why: str) -> Decision:
        self._promised, self.state = (self._staged, tier), State.SAVING
        words = (
            f"{why}; step {self._staged}, which is staged, is flushed to the {tier} tier without an agreement"
        )
        return Decision(Order.FLUSH, words, self._staged, tier)

    def _exit(self, code: int, reason: str) -> Decision:
        self.state = State.ENDED
        step, tier = self._promised or (-1, "")
        return Decision(Order.EXIT, reason, step, tier, code)

    def _warn(self) -> tuple[Decision, ...]:
        lead = min(self._lead, self._options.timeout_sec or math.inf)
        left = min(self._lead - self._options.margin, self._options.timeout_sec or math.inf)
        known = {name: one for name, one in self._seconds.items() if math.isfinite(one)}
        late = [name for name, seconds in known.items() if seconds * _SLACK > left]
        if self._warned or not late:
            return ()
        self._warned = True
        name = late[0]
        words = f"a save to the {name} tier takes {known[name]:.1f} s and the lead is {lead:.0f} s"
        quick = [one for one in known if one not in late]
        after = (
            f"a preempted job saves to the {quick[0]} tier"
            if quick
            else "a preempted job may lose its last steps"
        )
        return (
            Decision(Order.WARN, f"{words}; {after} (a longer lead: --signal=TERM@SECONDS, preempt_time)"),
        )


def choose(seconds: Mapping[str, float], left: float) -> tuple[str, str]:
    """Return the tier for a save and why: the first for which there is time, else the quickest.

    Args:
        seconds: that a save takes, by tier, from the one that outlives most; infinite: not measured.
        left: seconds that there are.
    """
    for name, needed in seconds.items():
        if needed * _SLACK <= left:
            return name, f"it takes {needed:.1f} s and {left:.1f} s are left"
    known = {name: needed for name, needed in seconds.items() if math.isfinite(needed)}
    if not known:
        return next(iter(seconds)), f"no save was measured; {max(0.0, left):.1f} s are left"
    quickest = min(known, key=lambda name: known[name])
    return (
        quickest,
        f"no tier is quick enough for {left:.1f} s; this one is the quickest, {known[quickest]:.1f} s",
    )
