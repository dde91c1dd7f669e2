"""Play an incident, written as text, against the deciders: the answers make it a report.

A line is a comment (``#``), an event, or an answer (``> ...``). Events, with ``at SECONDS`` first::

    begin 4 ranks [key=value ...]             a run with options of [fault_tolerance]
    at 1 started                              the workers of the generation run
    at 2 heartbeat 0 step 3 [in NAME since T ...] a rank's page says so (done, stopped as flags)
    at 9 look                                 who has been silent? the culprit is the first of them
    at 9 watch until 20                       look four times a second until somebody is
    at 9 rank 2 killed by signal 9 at step 14
    at 9 rank 2 killed by the kernel for want of memory at step 14
    at 9 rank 2 raised RuntimeError: boom at step 14
    at 9 rank 2 raised RuntimeError: boom after 90 s and no known step    (it has no session)
    at 9 rank 2 exited with status 16 at step 14
    at 9 rank 2 refused with 65
    at 9 rank 2 found NAME not finite at step 14
    at 9 rank 2 differs at step 14, they agreed after step 9     (-1: never)
    at 9 commit step-000000010.g1 step 10     at 9 load step-000000010.g1 step 10
    at 9 commit replica/step-000000010.g1 step 10
    at 9 load memory/step-000000010.g1 step 10 digest 12ab
    at 9 steps 14                             every rank has completed them
    at 9 pruned step-000000010.g1
    at 9 rank 0 finished                      at 9 signal 2
    at 9 ranks can be entered again           in their processes, should this generation end (or: cannot)
    at 9 learned NAME count p99 longest
    at 9 agent killed                         another one goes on with what it left
    at 9 released step-000000010.g1           as it does after a person's word about a copy

Incidents of many nodes have events of their own: :mod:`tests.simulation.nodes`, :mod:`.fleet_stage`; so have
those of rejected results, :mod:`.rerun_stage`, and of workers between two generations, :mod:`.reentry_stage`.

A heartbeat, a fault or an end may close with ``of generation N``: it comes from an older one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

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
    JobDecider,
    LoadSeen,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from tests.simulation import nodes
from tests.simulation.fleet_stage import FleetStage
from tests.simulation.reentry_stage import ReentryStage
from tests.simulation.rerun_stage import RerunStage


def play(script: str) -> str:
    """Return the script with the answers that the deciders give."""
    stage: _Stage | nodes.Stage | FleetStage | ReentryStage | RerunStage = _Stage()
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        kind = line.split()[1] if line.startswith("begin ") else ""
        if kind == "fleet":
            stage = FleetStage(line)
        elif kind == "reentry":
            stage = ReentryStage(line)
        elif kind == "rerun":
            stage = RerunStage(line)
        elif kind in nodes.STAGES:
            stage = nodes.STAGES[kind](line)
        elif line.strip() and not line.startswith("#"):
            lines += [f"> {answer}" for answer in stage.take(line)]
    return "\n".join(lines) + "\n"


class _Stage:
    """The deciders of one run and the clock that the script moves."""

    def __init__(self) -> None:
        self._config = FaultToleranceOptions()
        self._now = 0.0
        self._reenters: bool | None = None
        self._beats: dict[int, int] = {}
        self._speaker = 1  # the generation that the present line comes from
        self._begin(1)

    def _begin(self, ranks: int) -> None:
        self._ranks = ranks
        self._timeouts = Timeouts(self._config)
        self._liveness = Liveness(self._timeouts, self._config.workload_check_interval)
        self._job = JobDecider(self._config, ranks)

    def take(self, line: str) -> Iterator[str]:
        if line.startswith("begin"):
            words = line.split()
            options = dict(word.split("=") for word in words[3:])
            values: dict[str, Any] = {name: _number(text) for name, text in options.items()}
            self._config = FaultToleranceOptions(**values)
            self._begin(int(words[1]))
            return
        match = re.fullmatch(r"at (\S+) (.*?)(?: of generation (\d+))?", line)
        if match is None:
            raise ValueError(f"transcript: {line!r} is no event")
        self._now = float(match[1])
        self._speaker = int(match[3]) if match[3] else self._job.generation
        for pattern, handle in _EVENTS:
            found = re.fullmatch(pattern, match[2])
            if found is not None:
                yield from handle(self, found)
                for change in self._job.trust_changes():
                    yield f"{change.place} is {change.trust}: {change.reason}"
                return
        raise ValueError(f"transcript: {line!r} is no event")

    def _say(self, actions: tuple[Action, ...]) -> Iterator[str]:
        for action in actions:
            where = (
                f" -> generation {action.generation}"
                if action.kind not in (RecoveryAction.NONE, RecoveryAction.STOP)
                else ""
            )
            code = f" with exit code {action.exit_code}" if action.kind is RecoveryAction.STOP else ""
            yield f"{action.kind.value}{where}{code}: {action.reason}{_told(action.avoid)}"

    def _fault(
        self,
        kind: FaultKind,
        rank: int,
        step: int,
        signature: str,
        code: int | None,
        **more: Any,
    ) -> Iterator[str]:
        fault = Fault(
            kind,
            "n0",
            rank,
            self._speaker,
            step,
            signature,
            signature,
            code,
            reenters=self._reenters,
            **more,
        )
        yield from self._say(self._job.handle(fault, self._now))

    def started(self, _: re.Match[str]) -> Iterator[str]:
        self._beats.clear()
        self._reenters = None
        for rank in range(self._ranks):
            self._liveness.handle(RankStarted(rank, self._job.generation, self._now), self._now)
        yield from self._say(self._job.handle(AllStarted(self._job.generation), self._now))

    def heartbeat(self, found: re.Match[str]) -> Iterator[str]:
        rank, rest = int(found[1]), found[3]
        beats = self._beats[rank] = self._beats.get(rank, 0) + 1
        sections = tuple((name, float(at)) for name, at in re.findall(r"in (\S+) since (\S+)", rest))
        seen = HeartbeatSeen(
            rank,
            self._speaker,
            beats,
            self._now,
            int(found[2]),
            sections,
            done="done" in rest,
            stopped="stopped" in rest,
        )
        self._liveness.handle(seen, self._now)
        yield from ()

    def look(self, _: re.Match[str]) -> Iterator[str]:
        silents = self._liveness.tick(self._now)
        if not silents:
            yield "nobody is silent for too long"
            return
        first = silents[0]
        yield first.reason
        yield from self._fault(FaultKind.HANG, first.rank, first.step, f"hang in {first.section}", None)

    def watch(self, found: re.Match[str]) -> Iterator[str]:
        while self._now < float(found[1]):
            self._now += self._config.workload_check_interval
            if self._liveness.tick(self._now):
                yield f"{self._now:.2f} s"
                yield from self.look(found)
                return
        yield "nobody is silent for too long"

    def killed(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._fault(
            FaultKind.CRASH, int(found[1]), int(found[3]), f"signal {found[2]}", -int(found[2])
        )

    def raised(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._fault(FaultKind.ERROR, int(found[1]), int(found[3]), found[2], 1)

    def raised_unwatched(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._fault(
            FaultKind.ERROR, int(found[1]), -1, found[2], 1, counted=True, trained=float(found[3])
        )

    def starved(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._fault(
            FaultKind.CRASH, int(found[1]), int(found[2]), "signal 9", -9, evidence=(OOM_KILL,)
        )

    def exited(self, found: re.Match[str]) -> Iterator[str]:
        code = int(found[2])
        yield from self._fault(FaultKind.ERROR, int(found[1]), int(found[3]), f"exit {code}", code)

    def refused(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._fault(FaultKind.REFUSED, int(found[1]), -1, "refused", int(found[2]))

    def not_finite(self, found: re.Match[str]) -> Iterator[str]:
        step = int(found[3])
        yield from self._fault(
            FaultKind.NON_FINITE, int(found[1]), step, f"NonFinite: {found[2]} is nan in step {step}", 1
        )

    def differs(self, found: re.Match[str]) -> Iterator[str]:
        rank, step, agreed = map(int, found.groups())
        words = f"ReplicasDiffer: rank {rank} differs from the majority"
        yield from self._fault(FaultKind.CORRUPT, rank, step, words, 1, agreed=agreed)

    def commit(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._say(self._job.handle(CommitSeen(int(found[2]), found[1]), self._now))

    def load(self, found: re.Match[str]) -> Iterator[str]:
        place, step, digest = found[1], int(found[2]), found[3] or ""
        event = LoadSeen(step, place.rpartition("/")[2], (place,), digest)
        yield from self._say(self._job.handle(event, self._now))

    def steps(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._say(self._job.handle(StepsDone(int(found[1])), self._now))

    def pruned(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._say(self._job.handle(CopyGone(found[1]), self._now))

    def finished(self, found: re.Match[str]) -> Iterator[str]:
        event = WorkerFinished(int(found[1]), self._speaker)
        yield from self._say(self._job.handle(event, self._now))

    def reentrant(self, found: re.Match[str]) -> Iterator[str]:
        self._reenters = found[1] == "can"
        yield from ()

    def signal(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._say(self._job.handle(StopRequested(int(found[1])), self._now))

    def learned(self, found: re.Match[str]) -> Iterator[str]:
        observed = Durations(int(found[2]), float(found[3]), float(found[4]))
        for name, limit in self._timeouts.learn({found[1]: observed}).items():
            yield f"timeout of {name} is {limit:.2f} s"

    def succeed(self, _: re.Match[str]) -> Iterator[str]:
        yield from self._go_on({})

    def released(self, found: re.Match[str]) -> Iterator[str]:
        yield from self._go_on({"released": {found[1]: "a person has looked at it"}})

    def _go_on(self, word: dict[str, Any]) -> Iterator[str]:
        job, timeouts = {**self._job.state(), **word}, self._timeouts.state()
        self._begin(self._ranks)
        self._job.restore(job)
        self._timeouts.restore(timeouts)
        yield f"generation {self._job.generation} begins"
        yield from filter(None, (self._job.shortage(self._now),))


def _told(avoid: tuple[str, ...]) -> str:
    """Return what the workers are told of single copies, apart from those that are proven."""
    marks = [
        mark
        for mark in map(Mark.parse, avoid)
        if mark.bearing in (CopyStatus.SUSPECT, CopyStatus.QUARANTINED)
    ]
    parts = (
        (title, [mark.place for mark in marks if mark.bearing is bearing])
        for title, bearing in (("last", CopyStatus.SUSPECT), ("never", CopyStatus.QUARANTINED))
    )
    said = "; ".join(f"{title}: {', '.join(places)}" for title, places in parts if places)
    return f" ({said})" if said else ""


def _number(text: str) -> float | int:
    return int(text) if text.isdigit() else float(text)


_EVENTS: tuple[tuple[str, Callable[[_Stage, re.Match[str]], Iterator[str]]], ...] = (
    (r"started", _Stage.started),
    (r"heartbeat (\d+) step (-?\d+)(.*)", _Stage.heartbeat),
    (r"look", _Stage.look),
    (r"watch until (\S+)", _Stage.watch),
    (r"rank (\d+) killed by signal (\d+) at step (-?\d+)", _Stage.killed),
    (r"rank (\d+) raised (.+) at step (-?\d+)", _Stage.raised),
    (r"rank (\d+) raised (.+) after (\S+) s and no known step", _Stage.raised_unwatched),
    (r"rank (\d+) killed by the kernel for want of memory at step (-?\d+)", _Stage.starved),
    (r"rank (\d+) exited with status (\d+) at step (-?\d+)", _Stage.exited),
    (r"rank (\d+) refused with (\d+)", _Stage.refused),
    (r"rank (\d+) found (.+) not finite at step (-?\d+)", _Stage.not_finite),
    (r"rank (\d+) differs at step (-?\d+), they agreed after step (-?\d+)", _Stage.differs),
    (r"commit (\S+) step (\d+)", _Stage.commit),
    (r"load (\S+) step (\d+)(?: digest (\S+))?", _Stage.load),
    (r"steps (\d+)", _Stage.steps),
    (r"pruned (\S+)", _Stage.pruned),
    (r"rank (\d+) finished", _Stage.finished),
    (r"ranks (can|cannot) be entered again", _Stage.reentrant),
    (r"signal (\d+)", _Stage.signal),
    (r"learned (\S+) (\d+) (\S+) (\S+)", _Stage.learned),
    (r"agent killed", _Stage.succeed),
    (r"released (\S+)", _Stage.released),
)
