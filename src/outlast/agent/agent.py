"""The agent: waits for an input or a deadline, asks the deciders, carries out their answers.

One thread, one selector. Inputs are signals, ends of workers (pidfd), answers of the zygote,
lines on the control socket, and time. Decisions are made in :mod:`outlast.core`; this file
only says what happened and does what it is told.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace

from outlast import settings
from outlast.agent import environment, logs, processes, runtime
from outlast.agent.console import Console
from outlast.agent.ends import Ends
from outlast.agent.generation import Generation, Surroundings
from outlast.agent.guard import Guard
from outlast.agent.hangs import Hangs
from outlast.agent.journal import Journal
from outlast.agent.liveness import Watch
from outlast.agent.logs import Tails
from outlast.agent.nursery import Nursery
from outlast.agent.options import LaunchOptions
from outlast.agent.processes import Reaper
from outlast.agent.saving import Saving
from outlast.agent.screen import PATIENCE, Screen
from outlast.agent.signals import Signals
from outlast.core.events import Action, Fault, Loaded, Pruned, Quarantined, Rung, Saved
from outlast.core.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    LoadSeen,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from outlast.core.trust import Trust
from outlast.observe.run_folder import RunFolder
from outlast.transport.control import Inbox
from outlast.transport.processes import adopt_orphans

_PROGRESS_EVERY = 5.0
_TAIL_EVERY = 0.1


def launch(options: LaunchOptions) -> int:
    """Run a script to its end, through whatever happens to its workers; return the exit code.

    Raises:
        OutlastError: nothing was started.
    """
    folder = RunFolder(options.run_dir)
    run_id = folder.claim(options.run_id)
    try:
        options = replace(options, logs=logs.with_folder_of_run(options.logs, run_id))
        adopt_orphans()
        with Agent(options, folder, run_id) as agent:
            return agent.run()
    finally:
        folder.release()


class Agent:
    """One launcher's hold on its workers; a context manager that leaves no process and no file behind."""

    def __init__(self, options: LaunchOptions, folder: RunFolder, run_id: str) -> None:
        self._node = os.uname().nodename
        self._options = options
        self._screen = Screen()
        self._console = Console(self._screen)
        self._journal = Journal(folder, self._node, options, run_id)
        self._runtime = runtime.make()
        self._guard = Guard(self._runtime)
        self._signals = Signals(options.signals)
        self._reaper = Reaper()
        self._inbox = Inbox(self._runtime / "control")
        self._watch = Watch(options.config.fault_tolerance, folder)
        self._hangs = Hangs(self._node, folder.incidents, options.config.fault_tolerance.capture_stacks)
        self._ends = Ends(self._node)
        self._tails = Tails(self._screen)
        self._job = self._journal.decider()
        self._generation: Generation | None = None
        self._exit: Action | None = None
        self._first_step_owed = False
        self._loaded: str | None = None
        self._progress_at = 0.0
        self._steps_told = -1
        self._selector = selectors.DefaultSelector()
        self._saving = Saving(options.config.checkpoints, folder, self._runtime, run_id)
        for source in (self._signals, self._inbox, self._saving):
            self._selector.register(source, selectors.EVENT_READ, source)
        inherited = settings.inherited()
        notice = environment.notice(options, inherited)
        if notice:
            self._console.say(notice)
        common = environment.common_environment(options, inherited)
        around = Surroundings(options, folder, self._runtime, run_id, common, self._saving.root)
        self._nursery = Nursery(around, self._selector, self._tell)
        if self._nursery.pid:
            self._guard.watch(self._nursery.pid)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self._generation is not None:
            self._end_generation(self._generation)
        self._nursery.close()
        self._saving.close()
        processes.kill_strays(keep=(self._guard.pid,))
        self._reaper.collect()
        self._show_the_rest()
        self._inbox.close()
        self._signals.close()
        self._selector.close()
        self._guard.dismiss()

    def _tell(self, text: str) -> None:
        self._console.say(text)
        self._journal.note(text)

    def run(self) -> int:
        """Serve until the job has ended; return its exit code."""
        for problem in self._watch.problems:
            self._tell(problem)
        first = self._job.generation
        self._begun(self._nursery.request(first, self._job.avoid))
        while self._exit is None:
            self._wait()
            self._tick(time.monotonic())
        action = self._exit
        self._finish_saving()
        self._show_the_rest()
        if action.exit_code:
            self._console.say(f"ended with exit code {action.exit_code}: {action.reason}")
            self._show_the_rest()
        if self._screen.dropped:
            self._journal.note(
                f"{self._screen.dropped} messages of the launcher were not shown on the console"
            )
        self._journal.ended(self._watch.slowest_step(), action)
        return action.exit_code

    def _finish_saving(self) -> None:
        """Let the saver bring the newest staged state to disk; a further signal ends the wait."""
        deadline = time.monotonic() + self._options.config.checkpoints.timeout
        self._saving.hang_up()
        while not self._saving.ended() and time.monotonic() < deadline:
            for key, _ in self._selector.select(_TAIL_EVERY):
                if key.data is self._signals and self._signals.taken():
                    deadline = 0.0
                elif key.data is self._saving:
                    self._read_inbox()
        self._read_inbox()

    def _show_the_rest(self) -> None:
        """Wait while the console takes what it has not been given yet; a signal makes the wait short."""
        limit = math.inf
        while self._tails.active or self._screen.waiting:
            self._tails.finish()
            if self._signals.taken():
                limit = min(limit, time.monotonic() + PATIENCE)
            if self._screen.wait(PATIENCE) and time.monotonic() < limit:
                continue
            left = self._tails.unshown
            self._tails.give_up()
            left += self._screen.give_up()
            self._journal.note(
                f"the console took too long: {left} bytes were not shown; the ranks' are in their logs"
            )

    def _wait(self) -> None:
        now = time.monotonic()
        limits = [self._watch.deadline(now), now + _TAIL_EVERY if self._tails.active else None]
        limits += [self._ends.deadline(), self._nursery.deadline()]
        soonest = min(limit for limit in limits if limit is not None)
        for key, _ in self._selector.select(max(0.0, soonest - now)):
            source = key.data
            if source is self._signals:
                for number in self._signals.taken():
                    self._carry_out(self._job.handle(StopRequested(number), time.time()), None)
            elif source is self._inbox or source is self._saving:
                self._read_inbox()
            elif source is self._nursery:
                self._begun(self._nursery.answers())

    def _tick(self, now: float) -> None:
        self._reaper.collect()
        trouble = self._saving.tend()
        if trouble:
            self._tell(trouble)
        self._tails.pump()
        self._begun(self._nursery.tick(now))
        generation = self._generation
        if generation is None or self._exit is not None:
            return
        self._look_for_ends(generation, now)
        if self._generation is not generation or self._exit is not None:
            return
        silents = self._watch.look(now)
        self._note_progress(generation, now)
        if silents:
            fault, why = self._hangs.examine(silents, generation, self._watch)
            if fault is None:
                self._watch.excuse(silents, now)
                self._tell(why)
            else:
                self._carry_out(self._job.handle(fault, time.time()), fault)

    def _look_for_ends(self, generation: Generation, now: float) -> None:
        for end in self._ends.collect(generation, self._reaper, now):
            worker = generation.workers[end.rank]
            self._selector.unregister(worker.pidfd)
            self._guard.forget(worker.pid)
            self._watch.ended(end.rank, now)
            self._note_steps(generation)
            if end.exit_code == 0:
                self._carry_out(
                    self._job.handle(WorkerFinished(end.rank, generation.number), time.time()), None
                )
        fault = self._ends.fault(generation, self._watch.slowest_step(), now)
        if fault is not None:
            self._read_inbox()
            self._carry_out(self._job.handle(fault, time.time()), fault)

    def _read_inbox(self) -> None:
        reported = self._journal.take(self._inbox.lines(), self._job.generation)
        for record in (*reported, *self._journal.take(self._saving.lines(), None)):
            if isinstance(record, Saved):
                self._job.handle(CommitSeen(record.step, record.checkpoint), time.time())
                self._journal.keep(self._job)
            elif isinstance(record, Pruned):
                self._job.handle(CopyGone(record.checkpoint), time.time())
                self._journal.keep(self._job)
            elif isinstance(record, Quarantined):
                self._job.handle(CopySetAside(record.checkpoint, record.reason), time.time())
                self._journal.keep(self._job)
            elif isinstance(record, Loaded):
                self._loaded = record.checkpoint
                seen = LoadSeen(record.step, record.checkpoint, record.places, record.digest)
                self._job.handle(seen, time.time())
                self._journal.keep(self._job)
                self._console.say(f"loaded {record.checkpoint} (step {record.step}): {record.reason}")
        self._note_trust()

    def _note_progress(self, generation: Generation, now: float) -> None:
        pulses = self._watch.pulses
        self._note_steps(generation)
        if self._first_step_owed and len(pulses) == generation.world_size:
            if all("first_step" in pulse.marks for pulse in pulses.values()):
                self._first_step_owed = False
                self._journal.first_step(pulses)
                learned = self._watch.learn_start(self._loaded)
                if learned:
                    self._journal.learned(learned)
        elif now - self._progress_at > _PROGRESS_EVERY:
            self._progress_at = now
            self._journal.progress(self._watch.slowest_step())
        changed = self._watch.learn(now)
        if changed:
            self._journal.learned(changed)

    def _note_trust(self) -> None:
        for change in self._journal.trust(self._job):
            if change.trust == Trust.QUARANTINED.value:
                self._console.say(f"{change.place} is {change.trust}: {change.reason}")

    def _note_steps(self, generation: Generation) -> None:
        """Tell the decider how far every rank is: training that goes on proves what was loaded."""
        if len(self._watch.pulses) < generation.world_size:
            return
        step = self._watch.slowest_step()
        if step > self._steps_told:
            self._steps_told = step
            self._job.handle(StepsDone(step), time.time())
            self._note_trust()

    def _begun(self, generation: Generation | None) -> None:
        """Take charge of a generation whose workers have been started."""
        if generation is None:
            return
        self._generation = generation
        self._ends.begin()
        self._first_step_owed = True
        self._loaded = None
        self._steps_told = -1
        now = time.monotonic()
        for worker in generation.workers:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
            self._guard.watch(worker.pid)
        for pid in self._nursery.hosts:
            self._guard.watch(pid)
        self._watch.begin(generation, now)
        self._tails.follow(generation.logs)
        self._journal.started(generation)
        self._carry_out(self._job.handle(AllStarted(generation.number), time.time()), None)

    def _end_generation(self, generation: Generation) -> None:
        for worker in generation.living():
            self._selector.unregister(worker.pidfd)
        stuck = generation.end(self._reaper)
        self._generation = None
        for worker in generation.workers:
            self._guard.forget(worker.pid)
        self._nursery.retire_host(generation.meeting)
        self._tails.finish()
        for worker in stuck:
            self._tell(
                f"rank {worker.rank} (pid {worker.pid}) did not end {processes.KILL_PATIENCE:.0f} s after "
                "SIGKILL: it sits in the kernel; its generation is over and can write no checkpoint"
            )

    def _carry_out(self, actions: Sequence[Action], fault: Fault | None) -> None:
        for action in actions:
            if action.rung is Rung.NONE:
                self._journal.note(action.reason)
                continue
            self._announce(action, fault)
            self._note_trust()
            self._journal.keep(self._job)
            if action.rung is Rung.STOP:
                self._stop(action)
            else:
                self._restart(action)

    def _announce(self, action: Action, fault: Fault | None) -> None:
        if fault is not None:
            generation = self._generation
            log, text = None, ""
            if generation is not None and fault.rank >= 0:
                place = generation.logs[fault.rank]
                log = place.stderr or place.stdout
                failure = generation.failure(fault.rank) if (fault.exit_code or 0) > 0 else None
                text = failure.traceback if failure is not None else ""
            self._journal.fault(fault)
            self._console.fault(fault, log, text, action)
        elif action.exit_code:
            self._console.say(f"{action.rung.value}: {action.reason}")
        self._journal.action(action)

    def _restart(self, action: Action) -> None:
        if self._generation is not None:
            self._end_generation(self._generation)
        keep = (self._guard.pid, self._nursery.pid, self._saving.pid, *self._nursery.hosts)
        processes.kill_strays(keep=keep)
        self._begun(self._nursery.request(action.generation, action.avoid))

    def _stop(self, action: Action) -> None:
        """End the job: politely when a person or the cluster asked for it, at once after a fault."""
        self._exit = action
        generation = self._generation
        if generation is None:
            return
        asked = self._signals.last
        if asked and generation.living():
            self._console.say(
                f"signal {asked} goes to the workers; they have "
                f"{self._options.config.fault_tolerance.workers_stop_timeout:.0f} s"
            )
            for worker in generation.living():
                processes.signal_worker(worker, asked)
            self._wait_politely(generation)
        self._end_generation(generation)

    def _wait_politely(self, generation: Generation) -> None:
        deadline = time.monotonic() + self._options.config.fault_tolerance.workers_stop_timeout
        while (now := time.monotonic()) < deadline and processes.wait_for_end(generation.living(), 0.05):
            self._tails.pump()
            self._read_inbox()
            if self._signals.taken():
                self._console.say("asked again: the workers are killed now")
                return
            self._ends.collect(generation, self._reaper, now)
