"""Play an incident, written as text, against the deciders: the answers make it a report.

A line is a comment (``#``), an event, or an answer (``> ...``). The first event begins a stage::

    begin 4 ranks [key=value ...]             a run with options of [fault_tolerance]: :class:`JobStage`
    begin fleet 4 nodes 2:3 spares 1 [resilient]    a simulated job of several nodes: see :mod:`.stages`
    begin preemption lead 20 global=40 local=8
    begin reentry 4 seats granularity rank patience 30 [suspect 2] [waits 0]
    begin rerun GPU-a GPU-b [key=value ...]

All others begin with ``at SECONDS``; the patterns beside each method of a stage are what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from outlast.checkpoint.policy.resolve import CopyStatus, Mark
from outlast.config import FaultToleranceOptions
from outlast.hang.policy.monitor import HeartbeatSeen, Liveness, RankStarted
from outlast.hang.policy.timeouts import Durations, Timeouts
from outlast.recovery.policy.actions import OOM_KILL
from outlast.recovery.policy.events import Action, Fault, FaultKind, RecoveryAction
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    Event,
    JobDecider,
    LoadSeen,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from tests.simulation.stages import STAGES, Lines, Stage, matched, on

_AT = r" at step (-?\d+)"


def play(script: str) -> str:
    """Return the script with the answers that the deciders give."""
    stage: Stage = JobStage("begin 1 ranks")
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        if line.startswith("begin "):
            stage = STAGES.get(line.split()[1], JobStage)(line)
        elif line.strip() and not line.startswith("#"):
            lines += [f"> {answer}" for answer in stage.take(line)]
    return "\n".join(lines) + "\n"


class JobStage(Stage):
    """The deciders of one run; a line that closes with ``of generation N`` comes from an older one."""

    lines: ClassVar[Lines] = {}

    def __init__(self, line: str) -> None:
        count, options = matched(r"begin (\d+) ranks((?: \w+=\S+)*)", line)
        given = dict(word.split("=") for word in options.split())
        values: dict[str, Any] = {name: _number(text) for name, text in given.items()}
        self._config = FaultToleranceOptions(**values)
        self._reenters: bool | None = None
        self._beats: dict[int, int] = {}
        self._ranks = int(count)
        self._begin()

    def _begin(self) -> None:
        self._timeouts = Timeouts(self._config)
        self._liveness = Liveness(self._timeouts, self._config.workload_check_interval)
        self._job = JobDecider(self._config, self._ranks)

    def take(self, line: str) -> Iterator[str]:
        line, _, older = line.partition(" of generation ")
        self._speaker = int(older) if older else self._job.generation
        yield from super().take(line)
        for change in self._job.trust_changes():
            yield f"{change.place} is {change.trust}: {change.reason}"

    def _hear(self, event: Event) -> Iterator[str]:
        return self._answer(self._job.handle(event, self.now))

    def _answer(self, actions: Iterable[Action]) -> Iterator[str]:
        for action in actions:
            stays = action.kind in (RecoveryAction.NONE, RecoveryAction.STOP)
            where = "" if stays else f" -> generation {action.generation}"
            code = f" with exit code {action.exit_code}" if action.kind is RecoveryAction.STOP else ""
            yield f"{action.kind.value}{where}{code}: {action.reason}{_avoided(action.avoid)}"

    def _fault(
        self, kind: FaultKind, rank: str, step: str, signature: str, code: int | None, **more: Any
    ) -> Iterator[str]:
        about = (kind, "n0", int(rank), self._speaker, int(step), signature, signature, code)
        return self._hear(Fault(*about, reenters=self._reenters, **more))

    @on(lines, r"started")
    def started(self) -> Iterator[str]:
        self._beats.clear()
        self._reenters = None
        for rank in range(self._ranks):
            self._liveness.handle(RankStarted(rank, self._job.generation, self.now), self.now)
        return self._hear(AllStarted(self._job.generation))

    @on(lines, r"heartbeat (\d+) step (-?\d+)((?: in \S+ since \S+)*)( done)?( stopped)?")
    def heartbeat(self, one: str, step: str, within: str, done: str, stopped: str) -> Iterator[str]:
        rank = int(one)
        beats = self._beats[rank] = self._beats.get(rank, 0) + 1
        sections = tuple((name, float(at)) for name, at in re.findall(r"in (\S+) since (\S+)", within))
        seen = HeartbeatSeen(
            *(rank, self._speaker, beats, self.now, int(step), sections),
            done=bool(done),
            stopped=bool(stopped),
        )
        self._liveness.handle(seen, self.now)
        yield from ()

    @on(lines, r"look")
    def look(self) -> Iterator[str]:
        """Who has been silent? The culprit is the first of them."""
        silents = self._liveness.tick(self.now)
        if not silents:
            yield "nobody is silent for too long"
            return
        first = silents[0]
        yield first.reason
        yield from self._fault(
            FaultKind.HANG, str(first.rank), str(first.step), f"hang in {first.section}", None
        )

    @on(lines, r"watch until (\S+)")
    def watch(self, until: str) -> Iterator[str]:
        """Look four times a second until somebody is silent."""
        while self.now < float(until):
            self.now += self._config.workload_check_interval
            if self._liveness.tick(self.now):
                yield f"{self.now:.2f} s"
                break
        yield from self.look()

    @on(lines, r"rank (\d+) killed by signal (\d+)" + _AT)
    def killed(self, rank: str, signal: str, step: str) -> Iterator[str]:
        return self._fault(FaultKind.CRASH, rank, step, f"signal {signal}", -int(signal))

    @on(lines, r"rank (\d+) raised (.+)" + _AT)
    def raised(self, rank: str, error: str, step: str) -> Iterator[str]:
        return self._fault(FaultKind.ERROR, rank, step, error, 1)

    @on(lines, r"rank (\d+) raised (.+) after (\S+) s and no known step")
    def raised_unwatched(self, rank: str, error: str, trained: str) -> Iterator[str]:
        return self._fault(FaultKind.ERROR, rank, "-1", error, 1, counted=True, trained=float(trained))

    @on(lines, r"rank (\d+) killed by the kernel for want of memory" + _AT)
    def starved(self, rank: str, step: str) -> Iterator[str]:
        return self._fault(FaultKind.CRASH, rank, step, "signal 9", -9, evidence=(OOM_KILL,))

    @on(lines, r"rank (\d+) exited with status (\d+)" + _AT)
    def exited(self, rank: str, code: str, step: str) -> Iterator[str]:
        return self._fault(FaultKind.ERROR, rank, step, f"exit {code}", int(code))

    @on(lines, r"rank (\d+) refused with (\d+)")
    def refused(self, rank: str, code: str) -> Iterator[str]:
        return self._fault(FaultKind.REFUSED, rank, "-1", "refused", int(code))

    @on(lines, r"rank (\d+) found (.+) not finite" + _AT)
    def not_finite(self, rank: str, name: str, step: str) -> Iterator[str]:
        signature = f"NonFinite: {name} is nan in step {step}"
        return self._fault(FaultKind.NON_FINITE, rank, step, signature, 1)

    @on(lines, rf"rank (\d+) differs{_AT}, they agreed after step (-?\d+)")
    def differs(self, rank: str, step: str, agreed: str) -> Iterator[str]:
        signature = f"ReplicasDiffer: rank {rank} differs from the majority"
        return self._fault(FaultKind.CORRUPT, rank, step, signature, 1, agreed=int(agreed))

    @on(lines, r"commit (\S+) step (\d+)")
    def commit(self, place: str, step: str) -> Iterator[str]:
        return self._hear(CommitSeen(int(step), place))

    @on(lines, r"load (\S+) step (\d+)(?: digest (\S+))?")
    def load(self, place: str, step: str, digest: str | None) -> Iterator[str]:
        return self._hear(LoadSeen(int(step), place.rpartition("/")[2], (place,), digest or ""))

    @on(lines, r"steps (\d+)")
    def steps(self, step: str) -> Iterator[str]:
        return self._hear(StepsDone(int(step)))

    @on(lines, r"pruned (\S+)")
    def pruned(self, name: str) -> Iterator[str]:
        return self._hear(CopyGone(name))

    @on(lines, r"rank (\d+) finished")
    def finished(self, rank: str) -> Iterator[str]:
        return self._hear(WorkerFinished(int(rank), self._speaker))

    @on(lines, r"ranks (can|cannot) be entered again")
    def reentrant(self, word: str) -> Iterator[str]:
        """In their processes, should this generation end."""
        self._reenters = word == "can"
        yield from ()

    @on(lines, r"signal (\d+)")
    def signal(self, number: str) -> Iterator[str]:
        return self._hear(StopRequested(int(number)))

    @on(lines, r"learned (\S+) (\d+) (\S+) (\S+)")
    def learned(self, section: str, count: str, p99: str, longest: str) -> Iterator[str]:
        observed = Durations(int(count), float(p99), float(longest))
        for name, limit in self._timeouts.learn({section: observed}).items():
            yield f"timeout of {name} is {limit:.2f} s"

    @on(lines, r"agent killed|released (\S+)")
    def succeed(self, place: str | None) -> Iterator[str]:
        """Let another agent go on with what it left, with a person's word about a copy."""
        released = {"released": {place: "a person has looked at it"}} if place else {}
        job, timeouts = {**self._job.state(), **released}, self._timeouts.state()
        self._begin()
        self._job.restore(job)
        self._timeouts.restore(timeouts)
        yield f"generation {self._job.generation} begins"
        yield from filter(None, (self._job.shortage(self.now),))


def _avoided(avoid: tuple[str, ...]) -> str:
    """Return which single copies the workers are told to load last or never."""
    marks = [Mark.parse(one) for one in avoid]
    parts = (
        (title, [mark.place for mark in marks if mark.bearing is bearing])
        for title, bearing in (("last", CopyStatus.SUSPECT), ("never", CopyStatus.QUARANTINED))
    )
    named = "; ".join(f"{title}: {', '.join(places)}" for title, places in parts if places)
    return f" ({named})" if named else ""


def _number(text: str) -> float | int:
    return int(text) if text.isdigit() else float(text)
