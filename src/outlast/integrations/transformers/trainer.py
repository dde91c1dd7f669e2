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
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from outlast.checkpoint.content.state import capture_random, restore_random
from outlast.config import CheckpointOptions
from outlast.errors import UsageError
from outlast.integrations.announcing import require
from outlast.integrations.transformers.callback import OLDEST
from outlast.worker.session import Session, start

require("transformers", OLDEST, "outlast.integrations.transformers")
_trainer: Any = importlib.import_module("transformers.trainer")
_STATE = "trainer_state.json"
_OVERRIDDEN = (
    *("train", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"),
    *("_save_checkpoint", "_maybe_log_save_evaluate"),
)
OUTLAST = "outlast"


class _TrainerState:
    """The state of a Trainer that is neither model, optimizer nor scheduler.

    Args:
        trainer: whose.
        folder: where its state is written when it was loaded.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of TrainerState, with the states of callbacks that have one."""
        trainer = self._trainer
        state = dataclasses.replace(trainer.state, stateful_callbacks=_states_of_callbacks(trainer))
        state.save_to_json(str(self._folder / "saved.json"))
        return {"json": (self._folder / "saved.json").read_text()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the state where the Trainer reads it."""
        (self._folder / _STATE).write_text(state["json"])


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
    and ``save_steps`` say when a checkpoint is due; the session also saves by its own options. What else is
    given to ``resume_from_checkpoint`` works as without the mixin.

    Raises:
        UsageError: a class in between overrides the same methods, or an option could not take effect.
    """

    checkpoint_options: CheckpointOptions | None = None
    _session: Session | None = None
    _wants_save = False
    _waits_for_epoch = -1
    _random: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does; with ``"outlast"`` go on from the newest checkpoint of the session.

        Raises:
            SystemExit: the job was given back: exit code 75.
            NoUsableCheckpoint: as :meth:`outlast.Session.restore` raises it.
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
            return before.train(folder, *args, **options) if done is None else done

    @contextlib.contextmanager
    def _saving(self, folder: Path) -> Iterator[None]:
        """Open the session, and restore what the Trainer is about to use."""
        trainer = cast(Any, self)
        with start(checkpoints=self.checkpoint_options) as session:
            fresh = capture_random()
            trainer.create_optimizer_and_scheduler(_steps_of(trainer))
            trainer._created_lr_scheduler = False  # else the Trainer would make another one
            session.register(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler)
            scaler = getattr(trainer.accelerator, "scaler", None)
            if scaler is not None:
                session.register(scaler=scaler)
            restored = session.restore(trainer=_TrainerState(trainer, folder))
            self._random = capture_random() if restored else None
            restore_random(fresh)  # the Trainer draws the order of its data from it, as in the first run
            self._session, self._wants_save, self._waits_for_epoch = session, False, -1
            try:
                yield
            finally:
                self._session = None

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
        elif self._random is not None:
            restore_random(self._random)

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
        "save_total_limit has no effect; use keep_last_n of checkpoint_options": (
            options.save_total_limit is not None
        ),
    }
    problems += [text for text, found in wrong.items() if found]
    if problems:
        raise UsageError(f'resume_from_checkpoint="outlast": {"; ".join(problems)}')
