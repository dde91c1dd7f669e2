"""A mixin for Transformers' Trainer: it saves through a session and resumes from it, bit for bit.

The Trainer reads at which step it goes on from a ``trainer_state.json``, skips the batches of that epoch, and
then calls its ``_load_*`` methods. So the session restores model, optimizer and scheduler before that, the
state is written into a temporary folder, and those methods find everything loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.config import CheckpointOptions
from outlast.errors import UsageError
from outlast.fields import Fields
from outlast.integrations.announcing import require
from outlast.integrations.collectives import from_all_ranks, from_rank0
from outlast.integrations.resuming import keep_seed, set_loader, state_of_loader
from outlast.integrations.transformers.callback import OLDEST
from outlast.worker.session import Session, start

require("transformers", OLDEST, "outlast.integrations.transformers")
_trainer: Any = importlib.import_module("transformers.trainer")
_Callback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback
_LOG = logging.getLogger("outlast")
_STATE = "trainer_state.json"
_OVERRIDDEN = (
    *("train", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"),
    *("_save_checkpoint", "_maybe_log_save_evaluate", "_init_training_state"),
)
OUTLAST = "outlast"


class _TrainerState:
    """The state of a Trainer that is neither model, optimizer nor scheduler; rank 0 saves it for all ranks.

    Args:
        trainer: whose.
        place: in its data.
        folder: where its state is written when it was loaded.
    """

    def __init__(self, trainer: Any, place: _Place, folder: Path) -> None:
        self._trainer = trainer
        self._place = place
        self._folder = folder
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of TrainerState, with the states of callbacks that have one, and the place."""
        trainer = self._trainer
        state = dataclasses.replace(trainer.state, stateful_callbacks=_states_of_callbacks(trainer))
        state.save_to_json(str(self._folder / "saved.json"))
        return {"json": (self._folder / "saved.json").read_text(), "place": self._place.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until every rank can have it."""
        self._loaded = state

    def share(self) -> None:
        """Write the state that rank 0 has loaded where the Trainer of each rank reads it."""
        state = Fields("the Trainer's state", from_rank0(self._loaded, "the Trainer's state"))
        (self._folder / _STATE).write_text(state.text("json"))
        self._place.resume(state.mapping("place"))


class _Place(_Callback):  # type: ignore[misc]
    """The place in the data: with what its epoch began on each rank, and how many steps it has made.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch = -1
        self._began_at = 0  # the step
        self._began: dict[str, Any] = {}  # on rank 0: the generators of all ranks when the epoch began
        self._steps: int | None = None  # of the epoch that is resumed
        self._resumed: dict[str, Any] | None = None  # the generators of this rank when that epoch began
        self.after: dict[str, Any] | None = None  # the random states of the last completed step

    def state(self) -> dict[str, Any]:
        """Return what rank 0 saves."""
        steps = self._trainer.state.global_step - self._began_at
        return {"epoch": max(self._epoch, 0), "steps": steps, "began": self._began}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a place that was saved."""
        fields = Fields("the place in the data", state)
        self._epoch, self._steps = fields.count("epoch"), fields.count("steps")
        kept = fields.mapping("began")
        if not kept:
            return
        began, args = Fields("the place in the data", kept), self._trainer.args
        of_ranks, states = began.counts("of_ranks"), began.value("states", list)
        if len(of_ranks) == args.world_size:
            self._resumed = states[of_ranks[args.process_index]]
            return
        _LOG.warning(
            "OutlastTrainer: saved by %d ranks and resumed by %d: the data are divided otherwise, so the run"
            " is not equal to one without the fault; in its first epoch samples may repeat or be left out",
            len(of_ranks),
            args.world_size,
        )

    def taken(self) -> tuple[int, int] | None:
        """Return the epoch that is resumed and the batches taken in it, which the Trainer may not know."""
        if self._steps is None or _trainer.has_length(self._trainer.get_train_dataloader()):
            return None
        return self._epoch, self._steps * self._trainer.args.gradient_accumulation_steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - theirs
        """Keep the generators as they are when an epoch begins; in a resumed one, set them so."""
        loader = kwargs["train_dataloader"]
        steps, began = self._steps, self._resumed
        self._steps = self._resumed = None
        if steps is not None and _trainer.has_length(loader):
            steps = steps if steps * args.gradient_accumulation_steps < len(loader) else None
        if steps is None:
            self._epoch += 1
        if self._epoch:
            keep_seed(loader)
        self._began_at = state.global_step - (steps or 0)
        if steps is not None and began is not None:
            restore_random(began["random"])
            set_loader(loader, began["loader"])
        elif self.after is not None and self._began == {}:
            restore_random(self.after)
        own = {"random": capture_random(), "loader": state_of_loader(loader)}
        every = from_all_ranks(own, "the generators of an epoch", only_rank0=True) or [own]
        states: list[Any] = []
        for one in every:
            if one not in states:
                states.append(one)
        self._began = {"of_ranks": [states.index(one) for one in every], "states": states}


def _states_of_callbacks(trainer: Any) -> dict[str, Any]:
    exportable = importlib.import_module("transformers.trainer_callback").ExportableState
    found: dict[str, Any] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, exportable):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


class OutlastTrainerMixin:
    """Makes ``train(resume_from_checkpoint="outlast")`` save and resume through a session.

    Name it before the Trainer's class: ``class MyTrainer(OutlastTrainerMixin, Trainer)``. ``save_strategy``
    and ``save_steps`` say when a checkpoint is due, ``save_total_limit`` how many are kept on disk, at least
    two; the session also saves by its own options. What else is given to ``resume_from_checkpoint`` works as
    without the mixin. Where a script has several trainings, each has a ``training_name`` and checkpoints of
    its own.

    Raises:
        UsageError: a class in between overrides the same methods, or an option could not take effect.
    """

    checkpoint_options: CheckpointOptions | None = None
    training_name = ""
    _session: Session | None = None
    _wants_save = False
    _waits_for_epoch = -1
    _place: _Place | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does; with ``"outlast"`` go on from the newest checkpoint of the session.

        Raises:
            SystemExit: the job was given back: exit code 75.
            NoUsableCheckpoint: as :meth:`outlast.Session.restore` raises it.
            UsageError: another training of this process has the same name.
        """
        before = cast(Any, super())
        if resume_from_checkpoint != OUTLAST:
            return before.train(resume_from_checkpoint, *args, **options)
        _refuse(self)
        with tempfile.TemporaryDirectory(prefix="outlast-trainer-") as folder, self._saving(Path(folder)):
            found = Path(folder) / _STATE
            if not found.exists():
                return before.train(None, *args, **options)
            done = _done(self, found)
            if done is None:
                return before.train(folder, *args, **options)
            self._load_rng_state()  # what the script draws next, it draws as without the restart
            return done

    @contextlib.contextmanager
    def _saving(self, folder: Path) -> Iterator[None]:
        """Open the session, and restore what the Trainer is about to use."""
        trainer = cast(Any, self)
        with start(name=self.training_name, checkpoints=_options_of(trainer)) as session:
            fresh = capture_random()
            trainer.create_optimizer_and_scheduler(_steps_of(trainer))
            trainer._created_lr_scheduler = False  # else the Trainer would make another one
            session.register(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler)
            scaler = getattr(trainer.accelerator, "scaler", None)
            if scaler is not None:
                session.register(scaler=scaler)
            place = _Place(trainer)
            kept = _TrainerState(trainer, place, folder)
            if trainer.args.process_index == 0:
                session.register(trainer=kept)
            if session.restore():
                place.after = capture_random()
                kept.share()
            restore_random(fresh)  # the Trainer draws the order of its data from it, as in the first run
            self._session, self._wants_save, self._waits_for_epoch = session, False, -1
            self._place = place
            trainer.add_callback(place)
            try:
                yield
            finally:
                self._session = self._place = None
                trainer.remove_callback(place)

    def _load_from_checkpoint(self, *args: Any, **options: Any) -> Any:
        return (
            None if self._session is not None else cast(Any, super())._load_from_checkpoint(*args, **options)
        )

    def _load_optimizer_and_scheduler(self, *args: Any, **options: Any) -> Any:
        if self._session is None:
            cast(Any, super())._load_optimizer_and_scheduler(*args, **options)

    def _load_scaler(self, *args: Any, **options: Any) -> Any:
        if self._session is None:
            cast(Any, super())._load_scaler(*args, **options)

    def _load_rng_state(self, *args: Any, **options: Any) -> Any:
        if self._session is None:
            cast(Any, super())._load_rng_state(*args, **options)
        elif self._place is not None and self._place.after is not None:
            restore_random(self._place.after)

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Return the epochs that are done, and the batches that were taken in the next one."""
        found: tuple[int, int] = cast(Any, super())._init_training_state(*args, **options)
        return found if self._place is None else self._place.taken() or found

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        if self._session is None:
            cast(Any, super())._save_checkpoint(*args, **options)
        else:
            self._wants_save = True  # the step is not counted yet

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate or predict, in a section of its own."""
        loop = cast(Any, super()).evaluation_loop
        if self._session is None:
            return loop(*args, **options)
        with self._session.section("evaluation"):
            return loop(*args, **options)

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> Any:
        """Log and evaluate, then count the step and save: what follows a step belongs to its state.

        The Trainer calls it after each step, and again at the end of an epoch. The last step of an epoch is
        counted by the second call.
        """
        session, trainer = self._session, cast(Any, self)
        if session is not None and session.should_stop:
            return
        cast(Any, super())._maybe_log_save_evaluate(*args, **options)
        step = trainer.state.global_step
        if session is None or step == session.completed_steps:
            return
        if float(trainer.state.epoch).is_integer() and self._waits_for_epoch != step:
            self._waits_for_epoch = step
            return
        done = session.step_done(step)
        if done != step and not session.should_stop:  # the job may end before the first step is counted
            raise RuntimeError(
                f"OutlastTrainer: all ranks went back from step {step} to {done}, which the Trainer's loop"
                " cannot; this rank ends, and all ranks restart from there"
            )
        if self._wants_save and not session.should_stop:
            session.save("the Trainer's save_strategy")
        self._wants_save = False
        if session.should_stop:
            trainer.control.should_training_stop = True


class OutlastTrainer(OutlastTrainerMixin, _trainer.Trainer):  # type: ignore[misc]
    """Transformers' Trainer, saved and resumed by ``train(resume_from_checkpoint="outlast")``."""


def _steps_of(trainer: Any) -> int:
    """Return the optimizer steps of the whole training; the Trainer works them out in the same way."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    values = trainer.set_initial_training_values
    arguments = [trainer.args, trainer.get_train_dataloader()]
    if len(inspect.signature(values).parameters) > len(arguments):  # until 5.1
        arguments.append(trainer.get_total_train_batch_size(trainer.args))
    return int(values(*arguments)[-1])


def _done(trainer: Any, found: Path) -> Any:
    """Return the result of a training whose steps are all done; None: it goes on.

    The Trainer itself would train one more step where the last one is within an epoch.
    """
    state = _trainer.TrainerState.load_from_json(str(found))
    if state.global_step < _steps_of(trainer):
        return None
    trainer.state = state
    return _trainer.TrainOutput(state.global_step, math.nan, {})


def _limit_of(trainer: Any) -> int | None:
    """Return how many checkpoints the Trainer's options keep; None: they do not say."""
    limit = trainer.args.save_total_limit
    return None if limit is None or limit < 1 else max(int(limit), 2)  # one may be damaged


def _options_of(trainer: Any) -> CheckpointOptions:
    """Return the options of the session: those of the script, with the Trainer's limit if they have none."""
    options, limit = trainer.checkpoint_options or CheckpointOptions(), _limit_of(trainer)
    if limit is None or options.keep_last_n != CheckpointOptions.keep_last_n:
        return options
    return dataclasses.replace(options, keep_last_n=limit)


def _refuse(trainer: Any) -> None:
    """Raise for what would not be restored, or would have no effect."""
    mro, options = type(trainer).__mro__, trainer.args
    ours = (OutlastTrainerMixin, OutlastTrainer, _trainer.Trainer)
    problems = [
        f"{kind.__module__}.{kind.__qualname__} overrides {name}, which the mixin needs; do it in a callback"
        for kind in mro
        if kind not in ours
        for name in _OVERRIDDEN
        if name in vars(kind)
    ]
    wrong = {
        "FSDP and DeepSpeed make the optimizer later; use OutlastCallback, and resume as usual": (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        ),
        "model_init makes the model anew in train(); give the Trainer a model": trainer.model_init
        is not None,
        "ignore_data_skip begins the epoch's data again; leave it off": options.ignore_data_skip,
        "load_best_model_at_end needs the Trainer's own checkpoints; leave it off": (
            options.load_best_model_at_end
        ),
        "auto_find_batch_size trains again with other batches; set the batch size": (
            options.auto_find_batch_size
        ),
        "save_only_model cannot be resumed from; leave it off": options.save_only_model,
        f"save_total_limit={_limit_of(trainer)}, and keep_last_n={_options_of(trainer).keep_last_n} of"
        " checkpoint_options: both say how many checkpoints are kept; give one": (
            _limit_of(trainer) not in (None, _options_of(trainer).keep_last_n)
        ),
    }
    problems += [text for text, found in wrong.items() if found]
    if problems:
        raise UsageError(f'resume_from_checkpoint="outlast": {"; ".join(problems)}')
