"""A callback of Lightning's Trainer that reports its steps, saves and validations to ``outlast run``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import sys
from typing import Any

import torch.distributed as dist

from outlast.checkpoint.content.state import capture_random, restore_random
from outlast.errors import UsageError
from outlast.integrations.announcing import AnnouncedLoop, require
from outlast.preemption import worker as preemption_worker

OLDEST = (2, 2)


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
_KEY = "outlast"  # of a checkpoint: the random states of all ranks


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
        self._resumed: dict[str, Any] | None = None  # the random states of this rank
        self._before_validation: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - theirs
        """Begin to report at the step that was resumed from."""
        others = [one for one in trainer.callbacks if isinstance(one, OutlastCallback) and one is not self]
        if not self._loop.active or (self._implied and others):
            return
        _take_signals_from(trainer)
        self._step = trainer.global_step
        self._loop.begin(self._step)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Report an optimizer step; save and exit where all ranks have agreed to.

        Raises:
            SystemExit: the job is given back: exit code 75.
        """
        if trainer.global_step == self._step:  # gradients are accumulated
            return
        self._step = trainer.global_step
        self._loop.step_done(self._step)
        if self._loop.should_save:
            _save(trainer, self._loop)
        if self._loop.should_stop:
            self._loop.end()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002 - theirs
        """Set the random states of this rank, if an OutlastCheckpointIO has kept them."""
        states = checkpoint.get(_KEY, {}).get("random", [])
        if len(states) == trainer.world_size:
            self._resumed = states[trainer.global_rank]
            restore_random(self._resumed)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - theirs
        """Set them again in mid-epoch: the loader has drawn from the generators meanwhile.

        Raises:
            UsageError: the loader has not gone on from its place.
        """
        states, self._resumed = self._resumed, None
        if states is None or batch_idx == 0:
            return
        loaders = trainer.fit_loop._combined_loader.flattened
        unable = [type(one).__name__ for one in loaders if not hasattr(one, "load_state_dict")]
        if unable:
            raise UsageError(
                f"OutlastCheckpointIO: resumed in mid-epoch, at batch {batch_idx}, with a {unable[0]} that"
                " cannot go on from there: it would give samples that were trained on; use a loader with"
                " state_dict, such as torchdata's StatefulDataLoader, or save at the end of epochs"
            )
        restore_random(states)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002 - theirs
        """Report a checkpoint of Lightning; not a local one, nor one written while training goes on."""
        if _keeps_all(trainer) and _KEY not in checkpoint:  # not by another callback of ours
            checkpoint[_KEY] = {"random": _gathered(trainer)}
        storage = trainer.strategy.checkpoint_io
        if type(storage).__name__ != "AsyncCheckpointIO" and not getattr(storage, "saves_locally", False):
            self._loop.saved(trainer.global_step)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Open the section of a validation."""
        self._loop.enter_section("validation")
        if _keeps_all(trainer):
            self._before_validation = capture_random()

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
        self._loop.end()

    def on_exception(self, *_: Any) -> None:
        """End the report: the fit was left."""
        self._loop.forget()


def _keeps_all(trainer: Any) -> bool:
    return getattr(trainer.strategy.checkpoint_io, "keeps_random_states", False)


def _gathered(trainer: Any) -> list[Any]:
    """Return the random states of all ranks, in their order."""
    states = [capture_random()] * trainer.world_size
    if trainer.world_size > 1:
        dist.all_gather_object(states, states[0])
    return states


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
