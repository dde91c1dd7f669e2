"""What the agent writes: the event log, and the state of the job that outlives the agent."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from outlast.checkpoint.policy.copies import TrustChange
from outlast.cluster.policy.messages import Ending
from outlast.errors import RunFolderUnusable
from outlast.health.agent.telemetry.recording import values_of, words_of
from outlast.health.policy.telemetry import DeviceSample, Sample, XidEvent, kind_of
from outlast.ipc.heartbeat_page import MARKS, RankHeartbeat
from outlast.ipc.processes import boot_id
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.workers.generation import Generation
from outlast.launcher.workers.warming import Imported
from outlast.observe.policy import codec
from outlast.observe.policy.codec import CodecError
from outlast.observe.policy.now import Now, NowFold
from outlast.observe.recorder import Recorder
from outlast.observe.run_folder import CURES, WRITER, RunFolder
from outlast.recovery.policy import events
from outlast.recovery.policy.events import Action, Fault, Record, StepSource
from outlast.recovery.policy.job import JobDecider, with_saved
from outlast.stragglers.policy.watch import Noticed, RankTimes

_PROGRESS_EVERY = 5.0  # seconds
_RECORDS, _NOTES = (20_000.0, 500.0), (1_000.0, 20.0)  # of the ranks: at once, and a second


class _Allowance:
    """How much may be taken: some at once, and so much a second.

    Args:
        most: at once.
        a_second: that is added.
    """

    def __init__(self, most: float, a_second: float) -> None:
        self._most, self._a_second = most, a_second
        self._left, self._at = most, -math.inf

    def take(self, now: float) -> bool:
        """Take one; say whether there was one."""
        self._left = min(self._most, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Journal:
    """Writes records with the time and the generation they belong to.

    Args:
        folder: the run folder.
        node: this node's name.
        options: the command line.
        run_id: the run's identity.
        files: writes, since the run folder's file system may hang.
    """

    def __init__(
        self, folder: RunFolder, node: str, options: LaunchOptions, run_id: str, files: FileThread
    ) -> None:
        self._folder = folder
        self._files = files
        self._node = node
        self._options = options
        self._recorder = Recorder(folder.events)
        self._said_lost = self._said_too_many = False
        self._records, self._notes = _Allowance(*_RECORDS), _Allowance(*_NOTES)
        self._too_many = 0  # records of the ranks that were not written
        self._generation = 0
        self._run_id = run_id
        self._progress_at = -math.inf
        self._announced_at = 0.0  # when the first step of the script was written
        self._fold = NowFold()
        self._saved_since: int | None = None  # the step saved last since a stop was ordered, -1 before

    def now(self) -> Now:
        """Return what the run does now, from what this launcher wrote."""
        return self._fold.now()

    def recall(self) -> dict[str, Any] | None:
        """Return the decider's state from an earlier launch of this run; None: there is none.

        Raises:
            RunFolderUnusable: it cannot be read, or a decider cannot go on with it.
        """
        found = self._folder.recall()
        if found is not None:
            try:
                JobDecider(self._options.config.fault_tolerance, 1).restore(found)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RunFolderUnusable(
                    f"{self._folder.job_state}: it is not the state of a job ({error!r});"
                    f" nothing was started; {CURES['job_state.json']}"
                ) from error
        return found

    def trouble(self) -> str:
        """Return, once each, that records could not be written, or that the ranks sent too many."""
        if self._too_many and not self._said_too_many:
            self._said_too_many = True
            return (
                f"the ranks send more than {_NOTES[1]:g} notes or {_RECORDS[1]:g} records a second;"
                " the rest is dropped"
            )
        if self._said_lost or not self._recorder.lost:
            return ""
        self._said_lost = True
        return (
            f"{self._folder.events}: records cannot be written: {self._recorder.why};"
            " the job goes on, and outlast report will not know of them"
        )

    def newest_saved(self) -> int:
        """Return the newest generation that saved, also in a session without a launcher; 0: none."""
        return self._folder.newest_copy_generation()

    def lost_after(self) -> int:
        """Return the newest generation of a run whose job_state.json is missing; 0: the run is new."""
        return self._folder.newest_generation()

    def run_started(self, generation: int, world_size: int, why: str) -> None:
        """Write that this launcher has started."""
        self._generation = generation
        self._record(
            events.RunStarted,
            run_id=self._run_id,
            node=self._node,
            pid=os.getpid(),
            boot_id=boot_id(),
            command=(self._options.script.target, *self._options.script.args),
            world_size=world_size,
            reason=why,
        )

    def keep(self, state: dict[str, Any]) -> None:
        """Write the decider's state, so that budgets outlive this launcher."""
        kept = copy.deepcopy(state)  # it may change before a file system that hangs answers
        self._files.hand(lambda: self._keep(kept), self._folder.job_state)

    def _keep(self, state: dict[str, Any]) -> None:
        try:
            self._folder.write(self._folder.job_state, {**WRITER, **state})
        except OSError as error:
            path = self._folder.job_state
            words = f"{path} could not be written ({error.strerror}); budgets are kept in memory"
            self._recorder.record(self._made(events.Note, reason=words))

    def trust(self, change: TrustChange) -> None:
        """Write that a copy became suspect, quarantined, proven or released."""
        self._record(
            events.TrustChanged,
            step=change.step,
            checkpoint=change.place,
            trust=change.trust,
            reason=change.reason,
        )

    def _record(self, kind: type[Record], **fields: Any) -> None:
        self._write(self._made(kind, **fields))

    def _write(self, record: Record) -> None:
        self._fold.take(record)
        self._files.hand(lambda: self._recorder.record(record))

    def _made(self, kind: type[Record], **fields: Any) -> Record:
        return kind(time=time.time(), clock=time.monotonic(), generation=self._generation, **fields)

    def take(self, lines: Iterable[str], generation: int | None) -> Iterator[Record]:
        """Write what workers of this generation, or for None the saver, reported, and yield it."""
        for line in lines:
            try:
                record = codec.decode(line)
            except CodecError as error:
                if self._may_write(self._notes):
                    self.note(f"ignored: a line on the control socket is no record: {error}")
                continue
            if not isinstance(record, Record):
                continue
            stale = generation is not None and record.generation != generation
            of_ranks = self._notes if stale or isinstance(record, events.Note) else self._records
            if generation is not None and not self._may_write(of_ranks):
                continue
            if stale:
                self.note(f"ignored: record from stale generation {record.generation} (current {generation})")
                continue
            if isinstance(record, events.Saved) and self._saved_since is not None:
                self._saved_since = max(self._saved_since, record.step)
            self._fold.take(record)
            self._files.hand(functools.partial(self._recorder.record, record))
            yield record

    def _may_write(self, allowance: _Allowance) -> bool:
        allowed = allowance.take(time.monotonic())
        self._too_many += not allowed
        return allowed

    def started(self, generation: Generation) -> None:
        """Write that the workers of a generation run."""
        self._generation = generation.number
        self._record(
            events.GenerationStarted,
            world_size=generation.world_size,
            pids=tuple(worker.pid for worker in generation.workers),
            start=generation.start,
            reason=f"{generation.world_size} workers, {generation.start}",
        )

    def first_step(self, heartbeats: Mapping[int, RankHeartbeat], slowest: int, source: StepSource) -> None:
        """Write that the job is running again, and when each phase of the start was over on every rank."""
        marks = {
            name: max(heartbeat.marks[name] for heartbeat in heartbeats.values() if name in heartbeat.marks)
            for name in MARKS
            if any(name in heartbeat.marks for heartbeat in heartbeats.values())
        }
        self._record(events.FirstStep, step=slowest, marks=marks, source=source.value)

    def announced(self, first: int, resumed: bool) -> None:
        """Write the step that the script announced first in a generation, or that it resumed from."""
        step = first - resumed
        self._record(
            events.Progress, step=step, source=StepSource.ANNOUNCED.value, resumed=step if resumed else -1
        )
        self._announced_at = time.monotonic()

    def progress(self, step: int, source: StepSource, now: float) -> None:
        """Write how far the slowest rank is, every few seconds of a clock at most."""
        if now - self._progress_at > _PROGRESS_EVERY:
            self._progress_at = now
            if step >= 0:
                self._record(events.Progress, step=step, source=source.value)

    def learned(self, timeouts: dict[str, float]) -> None:
        """Write the timeouts that are in force from now on."""
        self._record(
            events.TimeoutsLearned, timeouts=timeouts, reason="computed from what the ranks measured"
        )

    def fault(self, fault: Fault) -> None:
        """Write a fault."""
        self._record(
            events.FaultSeen,
            fault=fault.kind.value,
            node=fault.node,
            rank=fault.rank,
            step=fault.step,
            since=fault.since,
            reason=fault.reason,
            signature=fault.signature,
            evidence=dict(fault.evidence),
            source=StepSource.COUNTED.value if fault.counted else "",
        )

    def action(self, action: Action) -> None:
        """Write what is done."""
        self._saved_since = -1 if action.kind is events.RecoveryAction.STOP else None
        self._record(
            events.ActionTaken,
            action=action.kind.value,
            next_generation=action.generation,
            state=action.state.value,
            reason=action.reason,
            wait=action.wait,
        )

    def straggler(self, noticed: Noticed) -> None:
        """Write a verdict about a rank that slows the job."""
        one = noticed.verdict
        self._record(
            events.StragglerSeen,
            step=noticed.step,
            rank=one.rank,
            node=one.node,
            state=one.state.value,
            activity=one.kind.value,
            section=one.section,
            slowdown=one.slowdown,
            job_slowdown=one.job_slowdown,
            share_of_steps=one.share_of_steps,
            confidence=one.confidence,
            windows=one.windows,
            reason=one.reason,
        )

    def times(self, times: RankTimes) -> None:
        """Write how long the ranks were busy in a step."""
        ratios = {str(rank): round(ratio, 4) for rank, ratio in times.ratios.items()}
        self._record(events.StepTimes, step=times.step, seconds=times.typical, ratios=ratios)

    def telemetry(self, sample: Sample) -> None:
        """Write a sample of this node."""
        device = sample if isinstance(sample, (DeviceSample, XidEvent)) else None
        self._record(
            events.Telemetry,
            node=self._node,
            what=kind_of(sample),
            device=-1 if device is None else device.index,
            uuid=getattr(sample, "uuid", ""),
            values=values_of(sample),
            reason=words_of(sample),
        )

    def imported(self, what: Imported) -> None:
        """Write what was imported ahead of restarts."""
        self._record(
            events.ImportedAhead,
            modules=what.modules,
            seconds=what.seconds,
            left_out=what.left_out,
            reason=what.reason,
        )

    def note(self, reason: str) -> None:
        """Write something worth keeping."""
        self._record(events.Note, reason=reason)

    def outcome(self, step: int, ending: Ending) -> str:
        """Return why the run ended; with what was saved after that was decided, or a step before the last."""
        total = self._fold.now().total
        if not ending.exit_code and 0 <= step < total:
            return f"{ending.reason}, after step {step} of {total}"
        saved = -1 if self._saved_since is None or not ending.exit_code else self._saved_since
        return with_saved(ending.reason, saved) if saved >= 0 else ending.reason

    def last_step(self, step: int, source: StepSource, at: float) -> None:
        """Write the last step of the slowest rank, and when it was completed; the ranks have ended.

        The step that the script announced first stays the first one, also where it was seen later than that.

        Args:
            step: completed steps; -1: none.
            source: of the step.
            at: seconds of the monotonic clock.
        """
        if step >= 0 and at > 0:
            record = self._made(events.Progress, step=step, source=source.value)
            at = min(record.clock, max(at, self._announced_at))
            self._write(replace(record, time=record.time - (record.clock - at), clock=at))

    def ended(self, step: int, ending: Ending) -> None:
        """Write how the run ended."""
        reason = self.outcome(step, ending)
        self._record(events.RunEnded, step=step, exit_code=ending.exit_code, reason=reason)
