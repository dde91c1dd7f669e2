"""NeMo's local checkpoints for Lightning: files on each node, verified, beside the Trainer's own.

Local rank 0 of every node writes the checkpoint of all its ranks, which under DDP are alike. A checkpoint is
loaded from there if it is not older than the one that the Trainer names, every node has it, and its bytes
are those that were written; else the next older one, then the Trainer's.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.errors import UsageError
from outlast.fields import Fields
from outlast.integrations.collectives import from_all_ranks
from outlast.integrations.lightning.callback import package
from outlast.integrations.lightning.storage import OutlastCheckpointIO, can_be_read

KEPT = 2  # so that one is left while the other is written, or found damaged
_OPTIONS = {"local_ckpt_algo": "fully_parallel", "parallelization_group": None, "allow_cache": False}
_LOG = logging.getLogger("outlast")
_Callback: Any = importlib.import_module(f"{package()}.callbacks").Callback
_WrappingIO: Any = importlib.import_module(f"{package()}.plugins.io.wrapper")._WrappingCheckpointIO
_TorchIO: Any = importlib.import_module(f"{package()}.plugins.io").TorchCheckpointIO
_Strategy: Any = importlib.import_module(f"{package()}.strategies").Strategy


class LocalCheckpointCallback(_Callback):  # type: ignore[misc]
    """Saves local checkpoints during the fit; needs :func:`update_trainer_local_checkpoint_io`.

    Args:
        every_n_train_steps: optimizer steps between two of them.
        train_time_interval: time between two of them, by rank 0's clock.
        async_save: has to be False: the file is written before the next step begins.

    Raises:
        UsageError: not exactly one of the intervals is given, or an argument cannot take effect.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        async_save: bool = False,
    ) -> None:
        if async_save:
            raise UsageError(
                "LocalCheckpointCallback: async_save=True has no effect: the file is written before the next"
                " step; leave it out, or use a session (outlast.start), which saves beside training"
            )
        if (every_n_train_steps is None) == (train_time_interval is None):
            raise UsageError(
                "LocalCheckpointCallback: expected one of every_n_train_steps and train_time_interval"
            )
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise UsageError(f"every_n_train_steps: {every_n_train_steps} is not a positive number of steps")
        self._every, self._interval = every_n_train_steps, train_time_interval
        self._step, self._since = -1, 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Check that the Trainer knows where to put local checkpoints.

        Raises:
            UsageError: it does not.
        """
        if stage == "fit" and not isinstance(trainer.strategy.checkpoint_io, LocalCheckpointIO):
            raise UsageError(
                "LocalCheckpointCallback: nothing says where local checkpoints go; call"
                " update_trainer_local_checkpoint_io(trainer, folder, get_iteration_from_checkpoint) first"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's
        """Set newer checkpoints aside: the run has not gone on from them."""
        self._step, self._since = trainer.global_step, time.monotonic()
        if trainer.local_rank == 0:
            trainer.strategy.checkpoint_io.leave_behind(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Save after an optimizer step, if it is time."""
        if trainer.global_step == self._step:  # gradients are accumulated
            return
        self._step = trainer.global_step
        if self._is_due(trainer):
            trainer.strategy.checkpoint_io.save_local()
            self._since = time.monotonic()

    def _is_due(self, trainer: Any) -> bool:
        if self._interval is None:
            return bool(self._step % (self._every or 1) == 0)
        return bool(
            trainer.strategy.broadcast(time.monotonic() - self._since >= self._interval.total_seconds())
        )


class LocalCheckpointIO(_WrappingIO):  # type: ignore[misc]
    """Adds local checkpoints to what stores the Trainer's own.

    Args:
        trainer: whose ``checkpoint_io`` is wrapped.
        folder: of this run on this node.
        iteration_of: returns the step of one of the Trainer's checkpoints.
    """

    keeps_random_states = True
    saves_locally = False  # an OutlastCallback does not report what is lost with its node

    def __init__(self, trainer: Any, folder: Path, iteration_of: Callable[[Any], int]) -> None:
        super().__init__(trainer.strategy.checkpoint_io)
        self._trainer = trainer
        self._folder = folder
        self._iteration_of = iteration_of
        self._store = OutlastCheckpointIO()
        self._tried = False

    def save_local(self) -> None:
        """Write a local checkpoint on each node; every rank calls it. A full disk is logged."""
        trainer = self._trainer
        self.saves_locally = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.saves_locally = False
        if trainer.local_rank > 0:
            return
        try:
            self._store.save_checkpoint(checkpoint, self._path(trainer.global_step))
            for step in sorted(self._steps())[:-KEPT]:
                self._store.remove_checkpoint(self._path(step))
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides a full disk
            if not isinstance(cause, OSError):
                raise
            _LOG.warning("local checkpoint of step %d: not written (%s)", trainer.global_step, cause)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Load the newest local checkpoint that all nodes have whole, or the named one.

        The named one is loaded if it is newer, and for anything but a fit: a test means what it names.
        """
        store, chosen = self.checkpoint_io, path
        local = self._newest() if self._trainer.state.fn == "fit" else -1
        if local >= 0:
            named = self._iteration_of(os.path.realpath(path))  # last.ckpt may be a link
            if local >= named:
                store, chosen = _TorchIO(), self._path(local)
                text = "local checkpoint of step %d is loaded, since %s is of step %d"
                _LOG.warning(text, local, path, named)
        found: dict[str, Any] = store.load_checkpoint(chosen, *args, **options)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **options: Any) -> None:
        """Write one of the Trainer's own, and require of the first that its step can be told again.

        Raises:
            UsageError: it cannot, so no restart could choose between it and a local one.
        """
        self.checkpoint_io.save_checkpoint(checkpoint, path, *args, **options)
        if self._tried or type(self.checkpoint_io).__name__ == "AsyncCheckpointIO":  # it writes later
            return
        self._tried = True
        found = self._iteration_of(os.path.realpath(path))
        if found != checkpoint["global_step"]:
            raise UsageError(
                f"update_trainer_local_checkpoint_io: get_global_ckpt_iteration_fn({str(path)!r}) returned"
                f" {found!r}, expected {checkpoint['global_step']}, the step that was just saved there"
            )

    def leave_behind(self, step: int) -> None:
        """Rename checkpoints of later steps, which belong to an abandoned attempt; keep the newest two."""
        for other in [one for one in self._steps() if one > step]:
            path = self._path(other)
            _LOG.warning("%s: set aside, since training goes on from step %d", path, step)
            os.replace(path, f"{path}.stale")
        for path in sorted(self._folder.glob("step=*.ckpt.stale"), key=_written)[:-KEPT]:
            path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step={step}.ckpt"

    def _steps(self) -> list[int]:
        names = (re.fullmatch(r"step=(\d+)\.ckpt", path.name) for path in self._folder.glob("step=*.ckpt"))
        return [int(name[1]) for name in names if name]

    def _newest(self) -> int:
        """Return the newest step of which every rank finds a whole checkpoint; -1: there is none."""
        every = from_all_ranks({"steps": self._steps()}, "local checkpoints") or []
        common = set.intersection(*(set(Fields("local checkpoints", one).counts("steps")) for one in every))
        for step in sorted(common, reverse=True):
            answers = from_all_ranks(can_be_read(self._path(step)), "the look at a local checkpoint") or []
            if all(answer is True for answer in answers):
                return step
            _LOG.warning("local checkpoint of step %d: damaged on a node, passed over", step)
        return -1


def _written(path: Path) -> float:
    return path.lstat().st_mtime


def update_trainer_local_checkpoint_io(
    trainer: Any,
    local_checkpoint_base_dir: str,
    get_global_ckpt_iteration_fn: Callable[[Any], int],
    **kwargs: Any,
) -> None:
    """Let a Trainer with a :class:`LocalCheckpointCallback` save and load local checkpoints, too.

    They are in ``<local_checkpoint_base_dir>/local_ckpt/<node>/<run id>``. Without the callback nothing
    happens, as in NeMo.

    Args:
        trainer: whose strategy lets one rank write for all: a single device, or DDP.
        get_global_ckpt_iteration_fn: returns the step of a checkpoint, given the path that Trainer loads.
        kwargs: NeMo's further options; their defaults only.

    Raises:
        UsageError: an option cannot take effect, or the strategy writes its checkpoints itself.
    """
    if not any(isinstance(one, LocalCheckpointCallback) for one in trainer.callbacks):
        return
    strategy = trainer.strategy
    problems = [
        f"{name}={value!r} has no effect; leave it out: each node writes what its ranks hold alike once"
        for name, value in kwargs.items()
        if name not in _OPTIONS or value != _OPTIONS[name]
    ]
    if getattr(strategy, "async_save", False):
        problems.append("the strategy's async_save has no effect on local checkpoints; switch it off")
    if type(strategy).save_checkpoint is not _Strategy.save_checkpoint:
        problems.append(
            f"{type(strategy).__name__} writes its checkpoints itself; use a single device or DDP, or a"
            " session (outlast.start) with non_persistent_save_interval"
        )
    if problems:
        raise UsageError(f"update_trainer_local_checkpoint_io: {'; '.join(problems)}")
    place = settings.worker_context()
    folder = Path(local_checkpoint_base_dir, "local_ckpt", place.node or socket.gethostname(), place.run_id)
    strategy.checkpoint_io = LocalCheckpointIO(trainer, folder, get_global_ckpt_iteration_fn)
