"""A callback of Lightning's Trainer that reports its steps, saves and validations to ``outlast run``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.errors import UsageError
from outlast.integrations.announcing import AnnouncedLoop, require
from outlast.integrations.collectives import from_all_ranks
from outlast.integrations.lightning.place import Place
from outlast.preemption import worker as preemption_worker
from outlast.worker.trainings import Training

OLDEST = (2, 2)
_LOG = logging.getLogger("outlast")


@functools.cache
def package() -> str:
    """Return the name of the package that the script has imported, else of the one that is installed.

    Raises:
        UsageError: there is none, or it is too old.
    """
    packages = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(packages, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{name}.callbacks")
            require(name.partition(".")[0].replace("_", "-"), OLDEST, "outlast.integrations.lightning")
            return name
    raise UsageError(
        "outlast.integrations.lightning: found neither lightning nor pytorch-lightning, needs one of them;"
        " pip install lightning"
    )


_Callback: Any = importlib.import_module(f"{package()}.callbacks").Callback
_OWN_FOLDER = (
    "the fit ends; give the ModelCheckpoint of each training of the script a dirpath of its own: a restart"
    " then skips the trainings that are complete"
)
_KEY = "outlast"  # of a checkpoint: the places of all ranks in the data


class OutlastCallback(_Callback):  # type: ignore[misc]
    """Reports ``trainer.global_step`` and Lightning's checkpoints; inert outside of ``outlast run``.

    When the job is told to end, all ranks save after the same step, where a ModelCheckpoint says where, and
    the process exits with 75.

    Args:
        implied: it was attached by the entry point; it gives way to one that the script has attached.
    """

    def __init__(self, implied: bool = False) -> None:
        self._implied = implied
        self._loop = AnnouncedLoop("OutlastCallback", implied)
        self._step = 0
        self._place = Place(self._loop.alive)
        self._before_validation: dict[str, Any] | None = None
        self._trainings: dict[Path, Training] = {}  # the present fit, by the folders of its checkpoints

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - theirs
        """Begin to report at the step that was resumed from."""
        if not self._leads(trainer):
            return
        if not trainer.ckpt_path:  # else they began with the load
            self._trainings.clear()
        if self._loop.active:
            self._report(trainer)
        if _keeps_all(trainer):
            self._place.start(trainer)

    def _leads(self, trainer: Any) -> bool:
        """Return whether this one does the work, of the Trainer's callbacks of this kind."""
        every = [one for one in trainer.callbacks if isinstance(one, OutlastCallback)]
        return next((one for one in every if not one._implied), every[0]) is self

    def _report(self, trainer: Any) -> None:
        _take_signals_from(trainer)
        self._step = trainer.global_step
        self._loop.begin(self._step)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Report an optimizer step; save and exit where all ranks have agreed to.

        Raises:
            SystemExit: the job is given back: exit code 75.
        """
        if _keeps_all(trainer) and _validates_next(trainer):
            self._before_validation = capture_random()  # its loaders draw before its first hook
        if trainer.global_step == self._step:  # gradients are accumulated
            return
        self._step = trainer.global_step
        self._loop.step_done(self._step)
        if self._loop.should_save:
            _save(trainer, self._loop)
        if self._loop.should_stop:
            self._loop.end()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Note the place of this rank in the data, if an OutlastCheckpointIO has kept it.

        Raises:
            UsageError: it is the last checkpoint of another training of this process.
        """
        if not self._leads(trainer) or trainer.state.fn != "fit":
            return
        self._trainings.clear()
        named = Path(os.path.abspath(trainer.ckpt_path))
        if named.name.startswith("last"):
            training = Training(Path(os.path.realpath(named.parent)), "OutlastCallback", _OWN_FOLDER)
            training.begin({"model": pl_module})
            training.completed = checkpoint["global_step"]
            self._trainings[training.folder] = training
        kept = checkpoint.get(_KEY)
        if kept is None:
            return
        places = kept.get("places", ())
        if len(places) == trainer.world_size:
            self._place.resume(places[trainer.global_rank])
            return
        _LOG.warning(
            "OutlastCallback: the checkpoint has the place in the data of %d ranks, and these are %d: the run"
            " goes on, not bit for bit, and in mid-epoch Lightning may repeat samples or leave some out",
            len(places),
            trainer.world_size,
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - theirs
        """Keep the generators as they are when an epoch begins."""
        if _keeps_all(trainer) and self._leads(trainer):
            self._place.begin_epoch(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - theirs
        """Note that an epoch has begun."""
        self._place.first_batch()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Report a checkpoint of Lightning; not a local one, nor one written while training goes on."""
        if self._leads(trainer) and trainer.state.fn == "fit":
            self._note_training(trainer, pl_module)
        if _keeps_all(trainer) and self._leads(trainer) and trainer.state.fn == "fit":
            checkpoint[_KEY] = {"places": from_all_ranks(self._place.state(trainer), "the place in the data")}
        storage = trainer.strategy.checkpoint_io
        if type(storage).__name__ != "AsyncCheckpointIO" and not getattr(storage, "saves_locally", False):
            self._loop.saved(trainer.global_step)

    def _note_training(self, trainer: Any, module: Any) -> None:
        """Record whose checkpoints are in the folders to which this fit saves."""
        for keeper in trainer.checkpoint_callbacks:
            if getattr(keeper, "dirpath", None):
                folder = Path(os.path.realpath(keeper.dirpath))
                if folder not in self._trainings:
                    self._trainings[folder] = Training(folder, "OutlastCallback", _OWN_FOLDER)
                    self._trainings[folder].begin({"model": module}, loads=False)
                self._trainings[folder].completed = trainer.global_step

    def on_validation_start(self, *_: Any) -> None:
        """Open the section of a validation."""
        self._loop.enter_section("validation")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Report that a validation goes on."""
        self._loop.enter_section("validation")

    def on_validation_end(self, *_: Any) -> None:
        """Close the section of a validation; what it drew does not count, since it may be left out."""
        self._loop.leave_section()
        states, self._before_validation = self._before_validation, None
        if states is not None:
            restore_random(states)

    def on_train_end(self, *_: Any) -> None:
        """End the report."""
        self._before_validation = None
        self._loop.end()

    def on_exception(self, *_: Any) -> None:
        """End the report: the fit was left, and another may go on from its checkpoints."""
        for training in self._trainings.values():
            training.left()
        self._trainings.clear()
        self._loop.forget()


def _keeps_all(trainer: Any) -> bool:
    return getattr(trainer.strategy.checkpoint_io, "keeps_random_states", False)


def _validates_next(trainer: Any) -> bool:
    """Return whether a validation may follow this batch."""
    fit = trainer.fit_loop
    timed = getattr(trainer, "_val_check_time_interval", None) is not None  # the clock decides a moment later
    return bool(trainer.enable_validation) and (
        timed or bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))
    )


def _take_signals_from(trainer: Any) -> None:
    """Take Lightning's part out of the handlers of signals that are heeded here.

    Its part calls a collective in the handler.
    """
    connector = trainer._signal_connector
    for number in preemption_worker.heeded():
        composed = getattr(signal.getsignal(number), "signal_handlers", None)
        if composed is None:
            continue
        others = [one for one in composed if getattr(one, "__self__", None) is not connector]
        signal.signal(number, others[-1] if others else signal.SIG_DFL)


def _save(trainer: Any, loop: AnnouncedLoop) -> None:
    """Save where ``ckpt_path="last"`` looks for it."""
    keeper = trainer.checkpoint_callback
    if keeper is None:
        loop.cannot_save(trainer.global_step, "the Trainer has no ModelCheckpoint")
        return
    where = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    path = keeper.last_model_path or keeper.format_checkpoint_name(where, keeper.CHECKPOINT_NAME_LAST)
    trainer.save_checkpoint(path)
    keeper.last_model_path = path
