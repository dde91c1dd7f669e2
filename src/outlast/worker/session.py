"""The session: the object through which a training script is watched, saved and resumed.

``outlast.start()`` works the same under ``outlast run``, under torchrun and in a plain
``python train.py``: without an agent nobody reads the heartbeat page, and rank 0 writes the event log.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from outlast import _torch_compat, settings
from outlast.agreement.policy.votes import Flag, StepAction, StepOutcome
from outlast.agreement.worker.after_step import AfterStep
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.load.restorer import Restored
from outlast.checkpoint.policy.cadence import NextSave, PutOff
from outlast.checkpoint.policy.manifest import is_training, some
from outlast.checkpoint.policy.resolve import marks_for
from outlast.checkpoint.save.memory_saves import MemorySaves
from outlast.checkpoint.save.staging import Order
from outlast.config import CheckpointOptions, PreemptionOptions, TripwireOptions
from outlast.errors import StaleGeneration, UsageError
from outlast.hang.policy.timeouts import WARMUP, section_of_user
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker import cleanup, interrupt
from outlast.inprocess.worker.cleanup import when_left
from outlast.ipc.exchange import SystemClock
from outlast.ipc.heartbeat_page import RankState, Section
from outlast.numerics.worker.guard import Guard, guard_of
from outlast.numerics.worker.numerics import Rollback
from outlast.observe.run_folder import RunFolder
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.worker import batches_of
from outlast.ports import Stateful
from outlast.preemption import worker as preemption_worker
from outlast.stragglers.policy.rows import LAST_MICRO_STEP, MICRO_STEP
from outlast.worker import bootstrap, foreign_loops, trainings
from outlast.worker.loaders import Loaders
from outlast.worker.opening import Opening
from outlast.worker.reporting import Reporting
from outlast.worker.underway import GRADIENTS, Underway
from outlast.worker.unsaved import Unsaved

if TYPE_CHECKING:
    import torch

    from outlast.stragglers.worker.sections import DeviceSection

_LOG = logging.getLogger("outlast")
DEFAULT_SAVE_SECONDS = 60.0
_BEGUN = "begun"  # what a rank says of its step to the others
State: TypeAlias = "Stateful | torch.Tensor | dict[str, Any] | list[Any]"


class _Place(Enum):
    """Where the script is in its loop of steps."""

    BETWEEN = "between two steps"
    WITHIN = "within a step"  # in the body of the loop over Session.steps
    LEFT = "after a step that was left before its end"  # by break, return or an exception


def start(
    run_dir: str | None = None,
    *,
    name: str = "",
    save_interval: int | None = None,
    save_interval_seconds: float | None = None,
    checkpoints: CheckpointOptions | None = None,
    preemption: PreemptionOptions | None = None,
    tripwire: TripwireOptions | None = None,
) -> Session:
    """Begin to watch and save this rank.

    Args:
        run_dir: the run folder when no launcher has named one; default ``outlast-runs/<script>``.
        name: of this training, where a script has several, one after the other: the folds of a
            cross-validation, stages, a sweep. Each has its own checkpoints; a restart skips those that are
            complete. Letters, digits, points and dashes.
        save_interval: steps between two checkpoints on disk; wins over ``checkpoints``.
        save_interval_seconds: seconds between two checkpoints on disk; wins over ``checkpoints``. 60 when
            neither interval is given.
        checkpoints: everything else about saving.
        preemption: which signals announce the end of the job, and how much time there is then.
        tripwire: whether replicas are compared.

    Raises:
        UsageError: an option makes no sense, or the launcher and ``run_dir`` name different folders.
    """
    context = settings.worker_context()
    intervals = {"save_interval": save_interval, "save_interval_seconds": save_interval_seconds}
    named: dict[str, Any] = {name: value for name, value in intervals.items() if value is not None}
    wanted = dataclasses.replace(checkpoints or CheckpointOptions(), **named)
    options = settings.in_force(wanted, "checkpoints", context)
    compared = settings.in_force(tripwire or TripwireOptions(), "tripwire", context)
    problems = [*options.problems(), *compared.problems()]
    if name and not is_training(name):
        problems.append(
            f"name={name!r}: letters, digits, points and dashes expected, and no name of outlast's own"
        )
    if problems:
        raise UsageError(f"outlast.start: {'; '.join(problems)}")
    if options.save_interval is None and options.save_interval_seconds is None:
        options = dataclasses.replace(options, save_interval_seconds=DEFAULT_SAVE_SECONDS)
    if run_dir is not None and context.run_dir and RunFolder(run_dir).root != RunFolder(context.run_dir).root:
        raise UsageError(
            f"outlast.start: run_dir={run_dir!r}, but the launcher was started with --run-dir "
            f"{context.run_dir!r}; leave run_dir out, or name the same folder"
        )
    folder = RunFolder(run_dir or context.run_dir or settings.default_run_dir())
    marks = marks_for(context.avoid, name)
    context = dataclasses.replace(context, tripwire=settings.changed(compared), avoid=marks)
    if name and options.global_url:
        options = dataclasses.replace(options, global_url=f"{options.global_url.rstrip('/')}/{name}")
    return Session(context, options, folder, preemption, name)


@functools.cache
def _warn_that_nothing_is_saved() -> None:
    _LOG.warning(
        "session.restore was not called: nothing is saved, and a restart begins at step 0; call"
        " session.restore(model=..., optimizer=...) before the loop"
    )


class Session:
    """One rank's part of a run; use it as a context manager, on the main thread.

    Args:
        context: what the launcher said.
        options: of checkpoints.
        folder: the run folder.
        preemption_options: of the script; None: it names none.
        name: of the training; empty: it is the only one of the script.
    """

    def __init__(
        self,
        context: settings.WorkerContext,
        options: CheckpointOptions,
        folder: RunFolder,
        preemption_options: PreemptionOptions | None = None,
        name: str = "",
    ) -> None:
        self._context = context
        self._options = options
        self._folder = folder
        self._page = heartbeat.attach(context.heartbeat_path or None)
        heartbeat.take_over()
        _torch_compat.let_gloo_finish_at_exit()
        if context.launched:
            bootstrap.report_uncaught()
        self._page.mark("session")
        self._clock = SystemClock()
        self._reporting = Reporting(context, folder)
        self._checkpointer: Checkpointer | None = None
        self._state: dict[str, object] = {}
        self._saved_step = -1
        self._staged_step = -1
        self._steps_here = 0
        self._total = 0  # of the latest loop of steps
        self._training = trainings.Training(folder.training(name))
        self._opening = Opening(context, options, folder, self._reporting, name)
        self._cadence = NextSave(options.save_interval, options.save_interval_seconds)
        interval = options.non_persistent_save_interval
        began = self._clock.monotonic()
        self._in_memory = MemorySaves(interval, context.restart_count, options.timeout, began)
        self._put_off = PutOff(0, None, None)
        self._after: AfterStep | None = None
        self._guard: Guard | None = None
        self._listener = preemption_worker.install(preemption_options)
        self._completed = 0
        self._counted_by = ""  # "steps" or "step_done"
        self._open_step: Section | None = None  # of step_done: from the end of one call to the next
        self._step_began = 0.0
        self._place = _Place.BETWEEN
        self._underway = Underway({})
        self._unsaved: Unsaved | None = None
        self._loaders: Loaders | None = None  # of a run that was resumed, until its first step
        self._asked_in = -1  # the step within which the script has asked for a save; -1: none is owed
        self._owed = ""  # why, where ranks do not vote

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with preemption_worker.children_end_quietly():
            if self._after is not None:
                self._after.end(error if isinstance(error, Exception) else None)
            self._opening.close()
            if isinstance(error, Exception) and self._listener is not None:
                self._listener.broken(f"{type(error).__name__}: {error}")

    @property
    def completed_steps(self) -> int:
        """The number of completed steps, over all restarts."""
        return self._completed

    @property
    def parallelism(self) -> Layout | None:
        """The layout that the launcher gives the ranks of this generation, equal on every rank.

        It is the one of the table ``[parallelism]`` for the present number of ranks. None: there is no such
        table, or no launcher.
        """
        return self._opening.layout

    @property
    def preempted(self) -> bool:
        """Whether all ranks have saved because the job is to end; equal on every rank."""
        return self._after is not None and self._after.preempted

    @property
    def should_stop(self) -> bool:
        """Whether the loop of steps has ended before its time; equal on every rank."""
        return self._after is not None and self._after.stopped

    def save_soon(self) -> None:
        """Ask all ranks to save after one of the next steps; any rank or thread may."""
        self._ask(Flag.SAVE)

    def stop_soon(self) -> None:
        """Ask all ranks to save after one of the next steps and end the loop; any rank or thread may."""
        self._ask(Flag.STOP)

    def _ask(self, flag: Flag) -> None:
        if self._after is None:
            raise UsageError(f"session.{flag.value}_soon: nothing is registered; call session.restore first")
        self._after.ask(flag)

    def section(self, name: str) -> Section | DeviceSection:
        """Return the named section of the step: ``with session.section("forward"): ...``."""
        return heartbeat.timed(self._page.section(section_of_user(name)))

    def heartbeat(self) -> None:
        """Say that the rank is alive, in a stretch that is longer than its timeout."""
        self._page.heartbeat(self._completed)

    def register(self, **state: State) -> None:
        """Name what makes up the training state: what is saved, and what :meth:`restore` loads into.

        May be called several times before :meth:`restore`.

        Args:
            state: anything with ``state_dict`` and ``load_state_dict`` (model, optimizer, scheduler,
                sampler, ...), a tensor, or a dict or list of values and tensors, by a name that stays the
                same between runs. The random states of python, numpy and torch are kept besides. An
                :class:`outlast.Guard` among it looks at every step.

        Raises:
            UsageError: a name is registered already, or the state was restored already.
        """
        if self._checkpointer is not None:
            raise UsageError(
                "session.register: the state was restored already; register all of it before session.restore"
            )
        known = sorted(self._state.keys() & state.keys())
        if known:
            raise UsageError(f"session.register: {some(known)}: registered already; use another name")
        self._state |= state

    def restore(self, **state: State) -> int:
        """Load the newest checkpoint that can be trusted into what is registered.

        Args:
            state: registered first, as by :meth:`register`.

        Returns:
            The number of completed steps; 0 when the run is new.

        Raises:
            UsageError: nothing is registered, the state was restored already, or a loop of Transformers or
                Lightning is under way, which would not go on from it. Or an earlier session of this process
                has trained other objects under the same name.
            NoUsableCheckpoint: copies exist or existed, none can be used; there is no silent fresh start.
            CheckpointMismatch: the checkpoint is of another world size, model or run.
            ObjectReused: the run is new, but a resilient function has trained one of the objects before.
        """
        foreign_loops.refuse()
        self.register(**state)
        if not self._state:
            raise UsageError(
                "session.restore: nothing is registered; call session.restore(model=..., optimizer=..., ...)"
            )
        self._guard = guard_of(self._state, self._context)
        batches = batches_of(self._state, self._context)
        if batches is not None:
            timed, last = (lambda: self.section(MICRO_STEP)), (lambda: self.section(LAST_MICRO_STEP))
            batches.measure(timed, last, self._context.generation)
        self._training.begin(self._state)
        exchange = self._opening.exchange()
        self._page.mark("group")
        self._checkpointer = self._opening.checkpointer(exchange)
        self._underway = Underway(self._state)
        when_left(self._underway.close)
        with self._page.section("checkpointing"):
            found = self._checkpointer.restore(self._loadable, self._context.avoid)
        self._completed = self._saved_step = 0 if found is None else found.step
        options = self._options
        self._put_off = PutOff(options.buffers, options.save_interval, options.save_interval_seconds)
        self._training.completed = self._completed
        self._underway.begin()
        if found is None:
            cleanup.refuse(self._state)
            self._saved_step = -1
        else:
            cleanup.loaded()
            self._loaders = Loaders(self._state.values())
        self._page.mark("loaded")
        if self._context.rank == 0:
            for note in () if found is None else found.notes:
                _LOG.warning("%s", note)
            self._unsaved = Unsaved(self._state)
            self._unsaved.restored({} if found is None else found.flags)
        told = (self._context, self._reporting.record, self._listener)
        self._after = AfterStep(self._checkpointer, *told, self._guard is not None, self._opening.seal)
        self._after.compare(self._state, self._context, self._reporting.record)
        self._after.divide(batches, self._context)
        if self._after.asks_when_due:
            self._cadence.follow_clock()
        self._rollback = Rollback(self._checkpointer, self._context, self._options.timeout)
        if self._guard is not None:
            self._guard.bind(
                self._after, lambda: self._completed, self._context.rank, self._context.world_size
            )
            if self._guard.reruns is not None:
                self._tell_reruns(found)
                self._guard.reruns.begin(self._folder.root / "incidents", exchange, self._checkpointer.names)
        self._cadence.begin(self._completed, self._clock.monotonic())
        return self._completed

    @property
    def _loadable(self) -> dict[str, object]:
        return {**self._state, GRADIENTS: self._underway.gradients}

    def steps(self, total: int) -> Iterator[int]:
        """Yield the index of each step still to do; after each, save when due and agree with all ranks.

        The state is saved once more after the last step, so that the same command run again
        finds nothing to do. The loop ends early when a rank was told that the job ends, or asked for it:
        after the same step on all ranks, and when that is saved.

        Raises:
            UsageError: the steps of this session are counted with :meth:`step_done`.
        """
        if self._begin_loop("steps"):
            return
        self._total = total
        self._reporting.planned(total, self._clock)
        loaders, self._loaders = self._loaders, None
        if loaders is not None:
            loaders.begin()
        while self._completed < total:
            with self._begin_step():
                self._place = _Place.WITHIN
                try:
                    yield self._completed
                except BaseException:
                    self._place = _Place.LEFT
                    raise
            self._place = _Place.BETWEEN
            if self._end_step(total):
                return
        self._end_loop()

    def step_done(self, step: int) -> int:
        """Do what follows a step, in a loop that the script or a framework owns; every rank calls it.

        Saves, votes, rollbacks and preemption happen here as they do between two steps of :meth:`steps`.
        When the session is closed without an error, the state is saved once more. Where the loop is to end
        before its time, :attr:`should_stop` is true and further calls change nothing.

        Args:
            step: completed steps, this one included, counted over all restarts.

        Returns:
            The completed steps from which the loop goes on: ``step``, or fewer after a rollback.

        Raises:
            UsageError: the step does not follow the one before, or :meth:`steps` counts the steps.
        """
        if self._open_step is not None:
            self._open_step.__exit__(None, None, None)
            self._open_step = None
        if self._counted_by != "step_done" and self._begin_loop("step_done"):
            return self._completed
        if self.should_stop:
            return self._completed
        if step != self._completed + 1:
            raise UsageError(
                f"session.step_done: found step {step!r}, expected {self._completed + 1}, since"
                f" {self._completed} steps are completed; go on from what session.restore or the last call"
                " of step_done returned"
            )
        if not self._end_step(None):
            self._open_step = self._begin_step().__enter__()
        return self._completed

    def _begin_loop(self, counted_by: str) -> bool:
        """Begin to count steps; return whether the job is to end at once.

        Raises:
            UsageError: they are counted otherwise.
        """
        if self._counted_by not in ("", counted_by):
            raise UsageError(
                f"session.{counted_by}: the steps of this session are counted with"
                f" session.{self._counted_by}; use one of the two"
            )
        self._counted_by = counted_by
        if self._checkpointer is None and self._context.rank == 0:
            _warn_that_nothing_is_saved()
        if self._listener is not None and self._checkpointer is None:
            self._listener.release()
        if self._after is not None and self._after.begin(self._completed):
            return True
        cleanup.training(self._state)
        heartbeat.tell_of_collectives()
        self._page.set_state(RankState.RUNNING)
        return False

    def _begin_step(self) -> Section:
        """Return the section of a step, which its caller opens."""
        self._page.outside()
        self._step_began = self._clock.monotonic()
        warm = self._steps_here >= self._context.num_warmup_iterations
        return self._page.section("step" if warm else WARMUP)

    def _end_step(self, total: int | None) -> bool:
        """Count a step, do what follows it, and say whether the loop ends before its time.

        Args:
            total: steps of the whole loop; None: not known.
        """
        page = self._page
        self._completed += 1
        self._steps_here += 1
        self._training.completed = self._completed
        self._underway.step_ended()
        if self._unsaved is not None:
            self._unsaved.step_ended()
        page.heartbeat(self._completed)
        now = self._clock.monotonic()
        if self._step_began:
            self._in_memory.trained(now - self._step_began)
        if self._after is not None and self._put_off.due is None and self._cadence.overdue(now):
            self._after.save_is_due()
        page.learning = self._steps_here > self._context.num_warmup_iterations
        if self._steps_here == 1:
            page.mark("first_step")
            if self._checkpointer is not None:
                with page.section("checkpointing"):
                    self._checkpointer.prepare(self._underway.state(self._state))
        return self._checkpointer is not None and self._ends_after_step(self._checkpointer, total)

    def _end_loop(self) -> None:
        """Save the state after the last step, and wait until it is on disk."""
        if self._after is not None:
            self._after.close()
        if self._checkpointer is not None and self._saved_step != self._completed:
            saved = self._save("the last step is done", wait=True)
        else:
            saved = self._wait_for_disk()
        if not saved and self._context.rank == 0:
            _LOG.warning(
                "step %d, the last one, is not on disk: outlast report names the reason; older ones stay",
                self._completed,
            )

    def _ends_after_step(self, checkpointer: Checkpointer, total: int | None) -> bool:
        """Do what all ranks agreed on, or else what is due; say whether the loop ends before its time."""
        last = total is not None and self._completed >= total
        if last and self._guard is None:
            return False
        action = None if self._after is None else self._after.after(self._completed)
        if action is not None and action.do is StepOutcome.ROLL_BACK:
            self._roll_back()
            return False
        if last:
            return False
        if action is None or action.do is StepOutcome.GO_ON:
            if self._owed:
                self._require_all("")
                self._save(self._owed)
            else:
                self._save_what_is_due(checkpointer)
            return False
        if action.do is StepOutcome.SAVE and not (action.reason or action.hold):
            assert self._after is not None
            self._put_off.is_due(True, self._cadence.every_so_often, self._completed, self._clock.monotonic())
            self._save_unless_put_off(checkpointer)
            self._after.saved()
            return False
        if action.do is StepOutcome.GIVE_BACK:
            self._give_back(action)
        else:
            saved = self._save(action.reason, wait=action.hold or action.do is StepOutcome.STOP)
            if saved and action.hold and action.do is StepOutcome.SAVE and self._after is not None:
                self._after.hold(self._completed)
        return action.do is not StepOutcome.SAVE

    def _roll_back(self) -> None:
        """Load an older checkpoint with all ranks, and go on from its step."""
        assert self._after is not None
        way = self._after.way_back
        if way is None:
            assert self._guard is not None
            assert self._guard.finding is not None
            way = (self._guard.finding, self._guard.rollbacks == 1)
        self._fence()
        self._wait_for_disk()
        with self._page.section("checkpointing"):
            found = self._rollback.go(*way, self._loadable)
        self._completed = self._saved_step = found.step
        self._staged_step = self._asked_in = -1
        self._owed = ""
        self._put_off.begin()
        self._underway.begin()
        self._cadence.begin(self._completed, self._clock.monotonic())
        self._after.rolled_back(self._completed)
        self._tell_reruns(found)
        self._page.heartbeat(self._completed)

    def _tell_reruns(self, found: Restored | None) -> None:
        """Let what does steps again know what training goes on from."""
        if self._guard is not None and self._guard.reruns is not None:
            self._guard.reruns.loaded(self._completed, "" if found is None else f"{found.tier}/{found.name}")

    def _give_back(self, action: StepAction) -> None:
        """Save to the tier that all ranks choose, and wait until that is durable or the process is ended."""
        assert self._after is not None
        assert self._checkpointer is not None
        with self._page.section("checkpointing"):
            for order in self._after.orders(self._completed, action):
                self._save_state(self._checkpointer, order.reason, order.tier != "memory", urgent=True)
        self._saved_step, self._asked_in = self._completed, -1

    def save(self, why: str = "the script asked for it", *, wait: bool = False) -> bool:
        """Save the state after the last complete step; return False when it could not be written.

        **Between steps** (before or after the loop, directly after :meth:`step_done`) every rank calls it,
        and it saves at once. Training goes on while the saver writes; with ``async_save`` off, the call
        returns when the checkpoint is on disk. After a save that failed the older checkpoints stay.

        **Within a step** (in the body of the loop over :meth:`steps`; after work for the next step) the state
        is not whole. Then the call is a request like :meth:`save_soon`: all ranks save after this step or one
        of the next, also if one rank alone has asked.

        Args:
            why: one sentence for the event log.
            wait: return only when it is on disk, or lost; between steps only.

        Raises:
            UsageError: nothing is registered; ``wait`` within a step; a step was left before its end; ranks
                are at different steps; the step is saved already, and what is registered has changed since.
            SaveFailed: it failed several times in a row, on every rank alike.
        """
        if self._checkpointer is None:
            raise UsageError(
                "session.save: nothing is registered; call session.restore(model=..., ...) first"
            )
        interrupt.check()
        if self._place is _Place.LEFT:
            raise UsageError(
                f"session.save: step {self._completed} was left before its end, by break, return or an"
                " exception, so the state may hold a part of it; nothing was saved; session.stop_soon() ends"
                " the loop after a complete step, which is saved"
            )
        if self._place is _Place.WITHIN:
            return self._save_later(why, wait)
        changed = self._checkpointer.changed(self._completed, self._underway.state(self._state))
        goes_on = self._counted_by != "steps" and not self.should_stop
        begun = _BEGUN if goes_on and (self._underway.begun or changed) else ""
        if self._require_all(begun):
            return self._save_later(why, wait)
        if changed:
            raise UsageError(
                f"session.save: step {self._completed} is saved already, and {some(changed)} changed since; a"
                " checkpoint is never changed, so this state was not saved; change what is registered before"
                " the step ends"
            )
        return self._save(why, wait)

    def _save_later(self, why: str, wait: bool) -> bool:
        """Have all ranks save after this step or one of the next."""
        if wait:
            raise UsageError(
                f"session.save(wait=True): called within step {self._completed}, whose state is not whole"
                " before the step ends, so it cannot be on disk when the call returns; leave wait out, and"
                " all ranks save after this step or one of the next; or call it between steps: after the"
                " loop, or directly after session.step_done"
            )
        assert self._after is not None
        if self._after.votes:
            self._after.ask(Flag.SAVE)
        else:
            self._owed = why
        self._asked_in = self._completed
        return True

    def _require_all(self, state: str) -> bool:
        """Hear from all ranks that they are about to save; return whether any says something.

        Args:
            state: what this rank says of its step.

        Raises:
            UsageError: they are at different steps.
            ExchangeFailed: a rank does not save.
        """
        assert self._checkpointer is not None
        exchange = self._checkpointer.exchange
        with self._page.section("checkpointing"):
            said = exchange.gather("save", f"{self._completed} {state}", self._options.timeout)
        steps = [one.split(" ", 1)[0] for one in said]
        for rank, step in enumerate(steps):
            if step != steps[0]:
                raise UsageError(
                    f"session.save: rank 0 is at step {steps[0]}, rank {rank} at step {step}; nothing was"
                    " written; between steps, every rank calls it at the same step"
                )
        return any(one.split(" ", 1)[1] for one in said)

    def _save(self, why: str, wait: bool = False) -> bool:
        """Save the state after the last complete step, with all ranks."""
        assert self._checkpointer is not None
        with self._page.section("checkpointing"):
            saved = self._save_state(self._checkpointer, why, durable=True, wait=wait)
            if saved:
                self._staged_step = self._completed
            if saved and wait:
                saved = self._wait_for_disk()
            self._settle()
        if self._after is not None:
            self._after.saved()
        self._page.touch()
        self._asked_in, self._owed = -1, ""
        if saved:
            self._saved_step = self._completed
        return saved

    def _save_state(
        self, to: Checkpointer, why: str, durable: bool, urgent: bool = False, wait: bool = False
    ) -> bool:
        interrupt.check()  # after an abort the state may be undefined
        self._put_off.saved()

        def save() -> bool:
            order = Order(self._completed, durable, why, urgent=urgent, waits=wait)
            state = self._underway.state(self._state)
            return (
                to.save(order, state) if durable and not self._options.async_save else to.stage(order, state)
            )

        if self._after is None or not (durable or urgent):
            return save()
        return self._after.watched(self._completed, save)

    def _save_what_is_due(self, checkpointer: Checkpointer) -> None:
        """Make the save that is due after this step, or was put off before."""
        step, now = self._completed, self._clock.monotonic()
        reason = self._cadence.due(step)
        if reason:
            if self._cadence.measuring:
                self._settle()
            else:
                self._put_off.is_due(True, reason, step, now)
        elif self._options.async_save and (reason := self._in_memory.due(step)):
            self._put_off.is_due(False, reason, step, now)
        self._save_unless_put_off(checkpointer)

    def _save_unless_put_off(self, checkpointer: Checkpointer) -> None:
        """Make the save that is due, as soon as all ranks have a buffer for it."""
        put_off, step, now = self._put_off, self._completed, self._clock.monotonic()
        due = put_off.due
        if due is None:
            return
        if put_off.compares(step):
            answer = put_off.answer(checkpointer.ready, step, now)
            with self._page.section("checkpointing"):
                put_off.compared(checkpointer.exchange.gather("ready", answer, self._options.timeout), step)
        if put_off.put_off(step):
            return
        if due.durable:
            self._save(due.since(step, now))
        else:
            self._save_in_memory(checkpointer, due.since(step, now))

    def _save_in_memory(self, checkpointer: Checkpointer, why: str) -> None:
        """Save for the memory tier alone."""
        with self._page.section("checkpointing"):
            began = self._in_memory.settle(self._clock.monotonic)
            self._save_state(checkpointer, why, durable=False)
            now = self._clock.monotonic()
            seconds = now - began - checkpointer.waited  # the next step would have waited as long
            self._in_memory.saved(seconds, checkpointer.exchange, now)
        self._page.touch()

    def _wait_for_disk(self) -> bool:
        """Wait until the latest state that this process saved is on disk; return whether it is."""
        if self._checkpointer is None or self._staged_step < 0:
            return True
        with self._page.section("checkpointing"):
            return self._checkpointer.durable(self._staged_step)

    def _fence(self) -> None:
        """Refuse to write once the agent has started a newer generation.

        What the writer brings to disk needs no such look, which waits for the file system: the writer drops
        what older generations stage.
        """
        if not self._context.launched:
            return
        state = self._folder.peek(self._folder.job_state) or {}
        newest = state.get("generation", 0)
        if newest > self._context.generation:
            raise StaleGeneration(
                f"rank {self._context.rank} of generation {self._context.generation} tried to save step "
                f"{self._completed}, but generation {newest} is in force; nothing was written"
            )

    def close(self) -> None:
        """End the session: save what :meth:`step_done` has counted, and announce its last heartbeat.

        Raises:
            SystemExit: the job was given back, and is not done: exit code 75.
        """
        if self._open_step is not None:
            self._open_step.__exit__(None, None, None)
            self._open_step = None
        if self._counted_by == "step_done" and not self.should_stop:
            self._end_loop()
        self._report_unsaved()
        self._say_if_nothing_was_left()
        self._page.repeat()  # what follows is counted from here on, also where no step was done
        self._page.set_state(RankState.DONE)
        if self._checkpointer is not None:
            self._checkpointer.settle()
            self._checkpointer.close()  # the next training needs the memory
        self._opening.close()
        self._underway.close()
        if self._after is not None:
            self._after.end()
        if self._listener is not None:
            self._listener.release()
            if self.preempted:
                sys.exit(self._listener.exit_code)

    def _report_unsaved(self) -> None:
        if self._asked_in >= 0:
            _LOG.warning(
                "session.save was called within step %d, and no step has ended since: nothing was saved",
                self._asked_in,
            )

    def _say_if_nothing_was_left(self) -> None:
        nothing = self._steps_here == 0 and 0 < self._total <= self._completed
        if nothing and self._context.rank == 0:
            another = "another --run-dir" if self._context.launched else "another run_dir"
            _LOG.warning(
                "all %d steps are done already: nothing is left to train; %s begins anew",
                self._total,
                another,
            )

    def _settle(self) -> None:
        """Agree on the next save; rank 0's clock counts, since no two clocks agree."""
        now = self._clock.monotonic()
        rate = self._cadence.seconds_per_step(self._completed, now)
        by_time = self._options.save_interval_seconds is not None and not (
            self._after is not None and self._after.asks_when_due
        )
        if by_time and self._checkpointer is not None:
            answers = self._checkpointer.exchange.gather("rate", rate.hex(), self._options.timeout)
            rate = float.fromhex(answers[0])
        self._cadence.settle(rate, self._completed, now)
