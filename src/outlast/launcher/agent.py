"""The agent: waits for an input or a deadline, asks the deciders, carries out their answers.

One thread, one selector. Inputs are signals, ends of workers (pidfd), answers of the zygote,
lines on the control socket, and time. Detectors report faults, policies decide; this file
passes on what happened and carries out the answers.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outlast import settings
from outlast.agreement.agent import StepAgreements
from outlast.agreement.policy.steps import TellRanks
from outlast.checkpoint.agent import Saving, Trust
from outlast.checkpoint.policy.copies import TrustChange
from outlast.checkpoint.replica.handshake import Credentials
from outlast.cluster.agent.controller import Controller, Ear, Halts, LocalController, Order
from outlast.cluster.lease_file import LeaseFile
from outlast.cluster.policy.events import Judged, Lived, Log, StepSaved
from outlast.cluster.policy.messages import Assignment, Ending, Quiesce
from outlast.errors import ExitCode, OutlastError, RunFolderUnusable
from outlast.hang.agent.monitor import Watch
from outlast.hang.agent.response import Hangs
from outlast.hang.policy.attribution import Blamed, Seen
from outlast.health.agent.node_health import NodeHealth
from outlast.health.agent.telemetry.watching import Telemetry
from outlast.health.policy.telemetry import Sample
from outlast.inprocess.agent import Reentries
from outlast.ipc.control import Inbox
from outlast.launcher import runtime
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.detectors import Exits, Registered, Silences, Stores
from outlast.launcher.ending import FILES_PATIENCE, NOTHING_RAN, Living, finish_saving, show_the_rest
from outlast.launcher.journal import Journal
from outlast.launcher.output.file_thread import FileThread
from outlast.launcher.output.logs import Tails, terminals_for
from outlast.launcher.output.screen import Console, Screen
from outlast.launcher.output.status import StatusLine
from outlast.launcher.planned import Planned, Requests
from outlast.launcher.signals import Signals
from outlast.launcher.torchelastic import Torchelastic
from outlast.launcher.workers import environment, processes
from outlast.launcher.workers.cleaner import Cleaner
from outlast.launcher.workers.generation import Generation, LaunchContext
from outlast.launcher.workers.head_start import HeadStart
from outlast.launcher.workers.mp_spawn import Spawning
from outlast.launcher.workers.processes import Family, Worker
from outlast.launcher.workers.program_files import ProgramFiles
from outlast.launcher.workers.spawner import WorkerSpawner
from outlast.launcher.workers.warming import Imported
from outlast.observe.run_folder import RunFolder
from outlast.ports import Detector, NodeView, RankView
from outlast.recovery.agent import Announcer, Ends
from outlast.recovery.policy.events import (
    CannotSave,
    Fault,
    FaultKind,
    ImportsSeen,
    Loaded,
    Pruned,
    Quarantined,
    RecoveryAction,
    Saved,
    ScriptSaved,
    StartedAgain,
    StepSource,
)
from outlast.recovery.policy.job import (
    AllStarted,
    CommitSeen,
    CopyGone,
    CopySetAside,
    Event,
    LoadSeen,
    NoSaveComes,
    OwnCheckpoint,
    StepsDone,
    StopRequested,
    WorkerFinished,
)
from outlast.stragglers.agent import TimesOfRanks
from outlast.stragglers.policy.options import StragglerAction
from outlast.stragglers.policy.watch import Noticed, RankTimes

_TAIL_EVERY = 0.1
_RUNTIME_EVERY = 1.0  # seconds between two looks at the runtime folder


class Agent:
    """Supervises the workers of one node; a context manager that leaves no process and no file behind."""

    def __init__(
        self, options: LaunchOptions, folder: RunFolder, run_id: str, signals: Signals, zygotes: HeadStart
    ) -> None:
        self._node, self._options = options.nodes.name, options
        self._screen = Screen()
        self._console = Console(self._screen)
        self._files, self._folder = FileThread(folder.root), folder
        self._moved = [False, False]  # the run folder: as it was found, and as was reported
        self._journal = Journal(folder, self._node, options, run_id, self._files)
        self._runtime = runtime.make()
        self._cleaner = Cleaner(self._runtime, environment.mark())
        self._family = Family(self._cleaner, self._workers_end)
        self._signals = signals
        self._inbox = Inbox(self._runtime / "control")
        self._watch = Watch(options.config.fault_tolerance, folder, self._files)
        self._hangs = Hangs(self._node, folder.incidents, options.config.fault_tolerance, self._files)
        self._agreements = StepAgreements()
        self._times = TimesOfRanks(options.nodes.most if options.nodes.several else 1)
        self._spawning, self._ends = Spawning(), Ends(self._node)
        self._program = ProgramFiles(options.script)
        self._tails = Tails(self._screen, self._files)
        self._terminals = terminals_for(options.logs, options.world.nproc_per_node, self._files)
        self._generation: Generation | None = None
        self._number = self._accused = 0  # the generation; the one for which a fault was reported
        self._suspects = False  # that fault was a hang
        self._halts = Halts()
        self._exit: Ending | None = None
        self._first_step_owed = False
        self._loaded: str | None = None
        self._steps_told, self._announced = -1, False  # whether the script says how far it is
        self._shared_files: dict[Path, Callable[[], None]] = {}  # in the runtime folder; how each is made
        self._looked_at_runtime = 0.0
        self._selector = selectors.DefaultSelector()
        inherited = settings.inherited()
        self._torchelastic = Torchelastic(options, run_id, self._runtime, self._console, inherited)
        common = environment.common_environment(options, inherited) | self._torchelastic.variables
        self._health, self._telemetry, self._planned = self._probes(folder, inherited)
        self._status = StatusLine(self._screen, self._journal.now, options, inherited)
        credentials = self._runtime / "credentials"
        self._controller, common, trust, address = self._join(folder, run_id, common, credentials)
        settings.withdraw_token()
        self._ear = Ear(self._controller, self._selector)
        self._say = Announcer(self._console, self._journal, self._controller.decides)
        self._saving = Saving(options, folder, self._runtime, run_id, trust)
        gone = (self._gone, self._let_go)
        self._reentries = Reentries(self._runtime / "gate", self._watch.timeouts.fix, gone, self.note)
        self._fault: Fault | None = None  # the latest
        self._registered = Registered(self.note)
        self._detectors: tuple[Detector, ...] = (
            Exits(self._ends),
            Silences(self._watch, self._hangs, self._ends, self.note, self._tell_nodes),
            Stores(self._store_is_gone),
            self._registered,
        )
        self._listen()
        notices = (environment.notice(options, inherited), runtime.caveat(self._runtime), *options.caveats)
        for notice in filter(None, notices):
            self._console.say(notice)
        around = LaunchContext(
            *(options, folder, self._runtime, run_id, common, zygotes, self._files, self._family),
            self._saving.root,
            *(None if trust is None else trust.lease, self._terminals),
            credentials=credentials,
            address=address,
            may_start=self._may_start,
        )
        self._spawner = WorkerSpawner(around, self._selector, self.note, self._imported)

    def _join(
        self, folder: RunFolder, run_id: str, common: dict[str, str], credentials: Path
    ) -> tuple[Controller, dict[str, str], Trust | None, str]:
        """Return the controller, the environment of all ranks, this node's credentials, and its address.

        Ranks read their key from the file at the path `credentials`.
        """
        options = self._options
        if not options.nodes.several:
            self._share(Credentials(secrets.token_hex(32)), credentials)
            return LocalController(options, self._journal), common, None, "127.0.0.1"
        from outlast.cluster.agent.cluster_controller import (  # the channel takes 0.1 s to import
            ClusterController,
            with_network,
        )

        lease = LeaseFile(self._runtime / "lease")
        shared = (lease, self._files)
        choice = self._health.last_choice
        team = ClusterController(options, folder, self._journal, run_id, shared, choice)
        trust = Trust(lease.path, team.credentials)
        self._shared_files[trust.lease] = lease.make_again
        self._share(trust.credentials, credentials)
        return team, with_network(options, team.address, common), trust, team.address

    def _share(self, known: Credentials, path: Path) -> None:
        known.write(path)
        self._shared_files[path] = lambda: known.write(path)

    def _probes(
        self, folder: RunFolder, inherited: Mapping[str, str]
    ) -> tuple[NodeHealth, Telemetry, Planned]:
        config, folders = self._options.config, (folder.root, folder.own)
        health = NodeHealth(config, self._node, folders, self._files, self.note)
        node = (self._node, folder.root, inherited.get("LD_LIBRARY_PATH", ""))
        telemetry = Telemetry(config.health, *node, self._journal.telemetry, self.note)
        requests, several = Requests(folder.request, self._files), self._options.nodes.several
        return health, telemetry, Planned(self._node, several, requests, self._agreements, self.note)

    def _listen(self) -> None:
        for source in (self._signals, self._inbox, self._saving.inbox, self._reentries, self._terminals):
            self._selector.register(source, selectors.EVENT_READ, source)
        self._torchelastic.listen(self._selector)
        self._telemetry.listen(self._selector)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        steps = (
            *(self._end_workers, self._registered.close, self._telemetry.close, self._spawner.close),
            *(self._saving.close, self._controller.close, lambda: self._family.end((self._cleaner.pid,))),
            *(self._terminals.close, self._status.close, self._show_the_rest, self._inbox.close),
            *(self._reentries.close, self._torchelastic.close, self._signals.close, self._selector.close),
            *(lambda: self._files.settle(FILES_PATIENCE), self._cleaner.dismiss),
        )
        with contextlib.ExitStack() as stack:  # each is done although one before it fails
            for step in reversed(steps):
                stack.callback(step)

    def note(self, text: str) -> None:
        """Say something on the console and in the event log."""
        self._console.say(text)
        self._journal.note(text)

    def _imported(self, what: Imported) -> None:
        self._console.say(what.reason)
        self._journal.imported(what)

    def run(self) -> int:
        """Serve until the job has ended; return its exit code.

        However that goes, the newest state in memory is brought to disk, and the end is in the event log.
        """
        try:
            return self._finish(self._serve())
        except BaseException as error:
            self._fail(error)
            raise

    def _serve(self) -> Ending:
        for problem in (*self._signals.problems, *self._watch.problems):
            self.note(problem)
        self._health.start()
        self._obey(self._controller.begin())
        while self._exit is None or not (self._controller.settled() and self._family.at_rest):
            self._wait()
            self._tick(time.monotonic())
        return self._exit

    def _fail(self, error: BaseException) -> None:
        """End the job although this process cannot go on; whatever fails here, the rest is done."""
        code, reason = ExitCode.FAILED, f"the launcher has failed: {type(error).__name__}: {error}"
        if isinstance(error, OutlastError):
            code, reason = error.exit_code, str(error)
        ending = self._exit = Ending(int(code), reason)
        for step in (
            self._end_workers,
            lambda: self._family.end(self._helpers),
            self._save_the_rest,
            self._note_last_step,
            lambda: self._journal.ended(self._watch.slowest_step(), ending),
        ):
            try:
                step()
            except Exception:  # noqa: BLE001 - the error that is raised is the first one
                continue

    def _end_workers(self) -> None:
        if self._generation is not None:
            self._end_generation(self._generation)

    def _save_the_rest(self) -> None:
        patience = self._options.config.checkpoints.timeout if self._number else NOTHING_RAN
        finish_saving(
            self._saving, patience, self._selector, self._signals, self._read_inbox, self._console.say
        )

    def _finish(self, ending: Ending) -> int:
        self._status.close()
        for line in self._watch.without_effect() if self._watch.slowest_step() >= 0 else ():
            self.note(line)
        self._telemetry.ignore(self._selector)
        self._note_last_step()
        self._save_the_rest()
        if not ending.exit_code and (unsaved := self._saving.unsaved()):
            ending = Ending(int(ExitCode.SAVE_FAILED), f"{ending.reason}, but {unsaved}")
        self._show_the_rest()
        if trouble := self._torchelastic.over(ending, self._number):
            self.note(trouble)
        outcome = self._journal.outcome(self._watch.slowest_step(), ending)
        if ending.exit_code or outcome != ending.reason:
            self._console.say(f"ended with exit code {ending.exit_code}: {outcome}")
            self._show_the_rest()
        if self._screen.dropped:
            self._journal.note(
                f"{self._screen.dropped} messages of the launcher were not shown on the console"
            )
        self._journal.ended(self._watch.slowest_step(), ending)
        return ending.exit_code

    def _note_last_step(self) -> None:
        self._journal.last_step(self._watch.slowest_step(), self._watch.source, self._watch.stepped())

    def _show_the_rest(self) -> None:
        show_the_rest(self._tails, self._screen, self._signals, self._journal)

    def _wait(self) -> None:
        now = time.monotonic()
        limits = [now + _TAIL_EVERY if self._tails.active else None]
        limits += [one.deadline(now) for one in self._detectors]
        limits += [one.deadline() for one in (self._spawner, self._controller, self._reentries, self._family)]
        limits += [self._torchelastic.deadline(now), self._agreements.deadline(now)]
        limits += [self._telemetry.deadline(), self._planned.requests.deadline()]
        soonest = min(limit for limit in limits if limit is not None)
        self._ear.listen()
        found = self._selector.select(max(0.0, soonest - now))
        self._files.turn()
        for key, _ in found:
            source = key.data
            if source is self._signals:
                for number in self._signals.taken():
                    self._report(StopRequested(number))
            elif source is self._inbox or source is self._saving.inbox:
                self._read_inbox()
            elif source is self._spawner:
                self._begun(self._spawner.answers())

    def _tick(self, now: float) -> None:
        self._look_at_steps()
        self._reap()
        self._tend()
        self._terminals.pump()
        self._tails.pump()
        self._status.look(now)
        self._torchelastic.tick(self.note)
        self._plan(self._telemetry.tick(now), now)
        self._begun(self._spawner.tick(now))
        self._offer()
        self._obey(self._controller.tick())
        self._tend_reentries(now)
        self._answer()
        generation = self._generation
        if generation is None or self._exit is not None:
            return
        self._collect_ends(generation, now)
        if self._generation is not generation or self._exit is not None:
            return
        self._watch.look(now)
        self._note_progress(generation, now)
        if (report := self._times.look(now)) is not None:
            self._obey(self._controller.timed(report))
            if self._options.config.stragglers.action == StragglerAction.REBALANCE.value:
                self._look_at_steps()
        if explained := self._spawning.explain(generation, self._watch, now):
            self.note(explained)
        self._detect(generation, now)

    def _plan(self, samples: Sequence[Sample], now: float) -> None:
        """Carry out what the health of this node or a person asks for."""
        runs = self._generation is not None and self._exit is None and self._accused != self._number
        number, step = self._number if runs else 0, self._watch.slowest_step()
        requests = self._planned.requests.look(now)
        decisions = self._health.look(samples, number, step) if self._telemetry.active else []
        if not requests and not decisions:
            return
        events = [one for each in requests for one in self._planned.asked(each, number, step)]
        events += [one for each in decisions for one in self._planned.decided(each, number, step)]
        self._look_at_steps()
        for event in events:
            self._obey(self._controller.tell(event, self._number))

    def _look_at_steps(self) -> None:
        """Have the ranks agree on a step, if any of them asks for it."""
        seen = self._agreements.look()
        if seen is not None:
            self._obey(self._controller.steps(seen))

    def _detect(self, generation: Generation, now: float) -> None:
        """Ask every detector; the first fault of a generation is reported.

        The end of a rank is reported after a hang, too: the leader drops a hang if the ranks go on.
        """
        view = self._view(generation)
        for detector in self._detectors:
            if self._accused == self._number and not (self._suspects and isinstance(detector, Exits)):
                continue
            for fault in detector.poll(now, view):
                self._read_inbox()
                self._report(fault)
                return
            if self._generation is not generation or self._exit is not None:
                return

    def _store_is_gone(self) -> bool:
        generation = self._generation
        return (
            generation is not None and self._first_step_owed and self._spawner.store_ended(generation.meeting)
        )

    def _view(self, generation: Generation) -> NodeView:
        heartbeats = self._watch.heartbeats
        ranks = (
            RankView(one.rank, one.pid, heartbeats[one.rank].step if one.rank in heartbeats else -1)
            for one in generation.living()
        )
        return NodeView(self._node, generation.number, self._watch.slowest_step(), tuple(ranks))

    def _tell_nodes(self, seen: Seen) -> None:
        self._obey(self._controller.seen(seen))

    def _offer(self) -> None:
        """Tell the controller what this node has for the next generation."""
        store = (self._spawner.store_port, self._spawner.store_serial)
        status = self._reentries.offer(self._generation, *store)
        told = replace(status, at_risk=self._health.at_risk, device=self._health.device)
        self._obey(self._controller.offers(told))

    def _tend_reentries(self, now: float) -> None:
        """Take what workers say at the gate, and replace those that were to be kept and have ended."""
        for pid, number in self._reentries.hear(now, self._ends.failed):
            self._watch.read()
            self._ends.raised(self._generation, pid, number, now)
        short = self._reentries.tick(now)
        if short is not None:
            self._begun(self._spawner.refill(short))

    def _let_go(self, worker: Worker) -> None:
        """Kill a worker if it has not ended."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.pidfd)
        self._family.drop(worker)

    def _may_start(self) -> bool:
        """Return whether workers may start: those before them and their processes are gone."""
        return self._family.at_rest and self._telemetry.memory_is_free() and self._keep_runtime_folder()

    def _tend(self) -> None:
        """Replace helpers that have ended, and report trouble."""
        self._cleaner.tend()
        for trouble in filter(None, (self._saving.tend(), self._files.trouble(), self._journal.trouble())):
            self.note(trouble)

        if time.monotonic() >= self._looked_at_runtime + _RUNTIME_EVERY:
            self._keep_runtime_folder()
            self._look_at_run_folder()

    def _look_at_run_folder(self) -> None:
        """Report that the run folder was moved away, or is back."""
        moved = self._moved
        self._files.hand(lambda: moved.__setitem__(0, self._folder.moved()), "run folder", patience=0.0)
        found, told = moved
        moved[1] = found
        if found and not told:
            most = self._options.config.checkpoints.max_failed_saves
            self.note(
                f"run folder {self._folder.root} was moved, renamed or removed while the job runs: nothing"
                f" can be saved there; put it back; after {most} lost saves in a row the job ends"
            )
        elif told and not found:
            self.note(f"run folder {self._folder.root} is back")

    def _keep_runtime_folder(self) -> bool:
        """Make again what a cleaner of temporary files has removed of it; return whether it is there."""
        self._looked_at_runtime = time.monotonic()
        sources = {one.path: one for one in (self._inbox, self._saving.inbox, self._reentries)}
        lost = [path for path in (*sources, *self._shared_files) if not path.exists()]
        if not lost:
            return True
        try:
            if not self._runtime.exists():
                runtime.make_again(self._runtime)
            for path in lost:
                if path in sources:
                    self._selector.unregister(sources[path])
                    sources[path].bind_again()
                    self._selector.register(sources[path], selectors.EVENT_READ, sources[path])
                else:
                    self._shared_files[path]()
        except (OSError, RunFolderUnusable) as error:
            self.note(f"runtime folder {self._runtime} was removed and cannot be made again: {error}")
            return False
        self.note(f"runtime folder {self._runtime} was removed by another process; it has been made again")
        return True

    def _reap(self) -> None:
        """Reap what has ended, and kill the remaining processes of past generations."""
        for one in self._family.tick(self._helpers, self._spawner.pids, self._spawner.owes):
            who = f"rank {one.rank}" if isinstance(one, Worker) else "a process of a past generation"
            self.note(
                f"{who} (pid {one.pid}) did not end {processes.KILL_PATIENCE:.0f} s after SIGKILL: it is"
                " blocked in the kernel; its generation has ended and cannot write a checkpoint"
            )

    @property
    def _helpers(self) -> tuple[int, ...]:
        return self._cleaner.pid, self._saving.pid, self._telemetry.pid

    def _workers_end(self, pids: set[int]) -> frozenset[int]:
        return self._telemetry.workers_end(pids, self._watch.timeouts.initial())

    def _gone(self, worker: Worker) -> None:
        self._workers_end({worker.pid})
        self._let_go(worker)

    def _collect_ends(self, generation: Generation, now: float) -> None:
        for end in self._ends.collect(generation, now, self._reentries.called):
            worker = generation.worker(end.rank)
            self._let_go(worker)
            self._reentries.forget((worker,))
            self._watch.ended(end.rank, now)
            self._note_steps(generation)
            if end.exit_code == 0:
                self._report(WorkerFinished(end.rank, generation.number))

    def _read_inbox(self) -> None:
        reported = self._journal.take(self._inbox.lines(), self._number)
        for record in (*reported, *self._journal.take(self._saving.inbox.lines(), None)):
            if isinstance(record, Saved):
                self._health.saved(record.step, record.seconds)
                self._report(CommitSeen(record.step, record.checkpoint))
            elif isinstance(record, ScriptSaved):
                self._health.saved(record.step, 0.0)
                self._report(OwnCheckpoint(record.step, record.agreed))
            elif isinstance(record, CannotSave):
                self._report(NoSaveComes(record.reason))
            elif isinstance(record, Pruned):
                self._report(CopyGone(record.checkpoint))
            elif isinstance(record, Quarantined):
                self._report(CopySetAside(record.checkpoint, record.reason))
            elif isinstance(record, Loaded):
                self._loaded = record.checkpoint
                self._report(LoadSeen(record.step, record.checkpoint, record.places, record.digest))
                self._console.say(f"loaded {record.checkpoint} (step {record.step}): {record.reason}")
            elif isinstance(record, StartedAgain):
                self._spawner.prepare_for(record)
            elif isinstance(record, ImportsSeen) and self._generation is not None:
                self._spawner.learn(record, self._generation)

    def _note_progress(self, generation: Generation, now: float) -> None:
        heartbeats = self._watch.heartbeats
        self._note_steps(generation)
        if self._first_step_owed and len(heartbeats) == len(generation.ranks):
            if all("first_step" in heartbeat.marks for heartbeat in heartbeats.values()):
                self._first_step_owed = False
                self._journal.first_step(heartbeats, self._watch.slowest_step(), self._watch.source)
                learned = self._watch.learn_start(self._loaded)
                if learned:
                    self._journal.learned(learned)
        else:
            self._journal.progress(self._watch.slowest_step(), self._watch.source, now)
        if changed := self._watch.learn(now):
            self._journal.learned(changed)

    def _note_steps(self, generation: Generation) -> None:
        """Tell the controller how far every rank is: steps after a load are evidence for what was loaded."""
        if len(self._watch.heartbeats) < len(generation.ranks):
            return
        step, counted = self._watch.slowest_step(), self._watch.source is StepSource.COUNTED
        began, resumed = self._watch.announced_from()
        if began >= 0 and not self._announced:
            self._announced, self._steps_told = True, -1
            self._journal.announced(began, resumed)
        if step > self._steps_told:
            self._steps_told = step
            if not self._ends.failed:
                self._accused = 0  # the rank that was taken for hung goes on
            self._report(StepsDone(step, counted, began, self._program.digest))

    def _begun(self, generation: Generation | None) -> None:
        """Take charge of a generation whose workers have been started."""
        if generation is None:
            return
        for worker in self._reentries.arrived(generation):
            if worker.pidfd not in self._selector.get_map():
                self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
                self._watch.replaced(worker.rank, time.monotonic())
        if generation is self._generation:
            return
        self._generation = generation
        self._ends.begin()
        self._program.look()
        self._first_step_owed = True
        self._loaded = None
        self._steps_told, self._announced = -1, False
        now = time.monotonic()
        self._watch.begin(generation, now)
        self._agreements.begin(generation)
        self._times.begin(generation.number, generation.pages)
        self._tails.follow(tuple(generation.logs.values()))
        self._journal.started(generation)
        self._torchelastic.begun(generation)
        self._reentries.started(generation, now)
        self._report(AllStarted(generation.number))

    def _end_generation(self, generation: Generation, kept: Collection[Worker] = ()) -> None:
        generation.release(kept)
        for worker in generation.workers:
            self._let_go(worker)
        self._watch.over()
        self._agreements.over()
        self._times.over()
        generation.end()
        self._generation = None
        self._spawner.retire(generation)
        (self._tails.linger if kept else self._tails.finish)()

    def _report(self, event: Event) -> None:
        """Tell the controller what happened, and carry out its answers."""
        if isinstance(event, Fault):
            if event.kind is not FaultKind.LOST:
                event = self._watch.placed(event)
            able = self._reentries.able(self._generation) or None
            event = replace(event, reenters=able, program=self._program.digest)
            self._fault = event
            self._accused, self._suspects = event.generation, event.kind is FaultKind.HANG
            self._torchelastic.failed(event, self._generation)
            self._say.reported(event, self._generation)
        self._obey(self._controller.tell(event, self._number))

    def _obey(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Judged():
                    self._health.faulted(None if order.action.kind is RecoveryAction.NONE else order.fault)
                    self._say.judged(order, self._generation)
                case TrustChange() | Noticed() | RankTimes() | Log() | StepSaved():
                    self._hear(order)
                case Lived(node):
                    self._health.lived(node)
                case Blamed():
                    self._hangs.named(order)
                case TellRanks():
                    self._agreements.tell(order)
                case Quiesce():
                    self._halt(order)
                case Assignment():
                    self._take_place(order)
                case Ending():
                    self._stop(order)

    def _hear(self, news: TrustChange | Noticed | RankTimes | Log | StepSaved) -> None:
        if isinstance(news, Log):
            self.note(news.reason)
        elif isinstance(news, StepSaved):
            self._health.saved(news.step, 0.0)
        else:
            self._say.found(news)

    def _halt(self, order: Quiesce) -> None:
        """End what is older than a generation, or call its workers to the gate."""
        if self._halts.is_news(order, self._number):
            self._end_present(Assignment(order.generation, reason=order.reason, reenter=order.reenter))
        self._answer()

    def _answer(self) -> None:
        """Answer an order to halt once the workers wait at the gate, if they were called, or have ended."""
        generation = self._halts.answered() if self._reentries.at_rest and self._family.ended else 0
        if generation:
            self._offer()
            self._obey(self._controller.halted(generation))

    def _end_present(self, following: Assignment) -> dict[int, Worker]:
        """End what runs, but for the workers that go on in what follows; return those, by local rank."""
        self._spawner.give_up()
        kept, dropped = self._reentries.begin(following, self._generation, self._fault, time.monotonic())
        ends = [*dropped, *(() if self._generation is None else self._generation.workers)]
        self._workers_end({one.pid for one in ends} - {one.pid for one in kept.values()})
        if self._generation is not None:
            self._end_generation(self._generation, kept.values())
        for worker in dropped:
            self._let_go(worker)
        self._family.sweep()
        return kept

    def _take_place(self, mine: Assignment) -> None:
        """Start the workers of a generation, or wait as a spare."""
        if mine.generation <= self._number or self._exit is not None:
            return
        kept = self._end_present(mine) if self._number else {}
        self._number = mine.generation
        if mine.hung_again:
            self._watch.came_back()
        if not mine.seated:
            self.note(f"generation {mine.generation}: this node is a spare")
            return
        if mine.host and mine.master and mine.port != self._spawner.store_port:
            reason = f"the store prepared at port {mine.port} has ended"
            self._report(Fault(FaultKind.LOST, self._node, -1, self._number, -1, reason, "store gone"))
            return
        self._begun(self._spawner.request(mine, kept))

    def _stop(self, ending: Ending) -> None:
        """End the job, once: politely when a person or the cluster asked for it, at once after a fault."""
        if self._exit is not None:
            return
        self._exit = ending
        self._spawner.give_up()
        generation = self._generation
        if generation is not None:
            asked = self._signals.last or max(0, ending.exit_code - ExitCode.SIGNAL_BASE)
            if asked and generation.living():
                living = Living(generation, self._options.config, self._console, self._signals)
                living.end_politely(asked, self._meanwhile)
                self._watch.read()  # steps that ranks have completed since the signal
            self._torchelastic.stopped(generation)
            self._end_generation(generation)
        self._family.sweep()  # workers that are still to be forked must end before the checkpoint writer does

    def _meanwhile(self, generation: Generation, now: float) -> None:
        self._files.turn()
        self._look_at_steps()
        self._obey(one for one in self._controller.tick() if not isinstance(one, Quiesce))
        self._terminals.pump()
        self._tails.pump()
        self._read_inbox()
        self._reap()
        self._tend()
        self._ends.collect(generation, now)
