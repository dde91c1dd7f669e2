"""NeMo's callbacks for Lightning's Trainer, by their names and parameters, built on OutlastCallback.

They need ``outlast run``, as theirs need ``ft_launcher``. What only a launcher can decide is refused, with
the option that does it. Source: NVRx ``ptl_resiliency`` at d8686d9, NeMo ``lightning/pytorch`` 2.x.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.chaos import inprocess as chaos
from outlast.compat.nemo_local import LocalCheckpointCallback, update_trainer_local_checkpoint_io
from outlast.compat.shown import show
from outlast.compat.straggler_callback import StragglerDetectionCallback, straggler_det_callback
from outlast.config import PreemptionOptions
from outlast.errors import ExitCode, UsageError
from outlast.integrations.lightning.callback import OutlastCallback, package
from outlast.integrations.lightning.storage import step_of
from outlast.preemption import worker as preemption

__all__ = [
    "FaultToleranceCallback",
    "LocalCheckpointCallback",
    "PreemptionCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
    "get_global_step_from_global_checkpoint_path",
    "straggler_det_callback",
    "update_trainer_local_checkpoint_io",
]
FAULT_TYPES = ("random", "rank_killed", "rank_hung")
_FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"  # set by NeMo's and NVRx's batch scripts
_Callback: Any = importlib.import_module(f"{package()}.callbacks").Callback


@dataclass
class SimulatedFaultParams:
    """A fault for tests: ``base_delay`` plus a drawn part of ``rand_delay`` after the fit was set up.

    Args:
        fault_type: "rank_killed", "rank_hung" or "random".
        base_delay, rand_delay: seconds.
        rank_to_fail: None: drawn, the same in each run.
    """

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None


class FaultToleranceCallback(OutlastCallback):
    """Reports the steps of the fit to ``outlast run``, which detects hangs and restarts.

    Args:
        autoresume: when the training has ended, rank 0 makes the file that ``FAULT_TOL_FINISHED_FLAG_FILE``
            names. A fit of at most one batch that ends without an error has nothing left to do, as in NVRx.
            ``outlast slurm supervise`` goes by exit codes instead.
        calculate_timeouts: has to be True, since the launcher calculates them.
        simulated_fault_params: a :class:`SimulatedFaultParams`, or a mapping of its fields; a fault of the
            first start of the ranks.
        exp_dir: None or the run folder, where the launcher keeps its timeouts.
        logger_name: of the log.
        calculate_timeout: the same as ``calculate_timeouts``, by the name in NeMo's guide; one of them.

    Raises:
        UsageError: an argument cannot take effect here; the text says what to use.
    """

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool | None = None,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
        *,
        calculate_timeout: bool | None = None,
    ) -> None:
        super().__init__()
        if (calculate_timeouts is None) == (calculate_timeout is None):
            raise UsageError(
                "FaultToleranceCallback: expected one of calculate_timeouts and calculate_timeout, found"
                f" {calculate_timeouts} and {calculate_timeout}; pass calculate_timeouts=True"
            )
        if not (calculate_timeouts or calculate_timeout):
            raise UsageError(
                "FaultToleranceCallback: calculate_timeouts=False has no effect in a rank, since outlast run"
                " calculates timeouts; start it with --no-ft-calc-ft-timeouts, or with fixed ones such as"
                " --ft-rank-heartbeat-timeout=300, and pass calculate_timeouts=True"
            )
        if autoresume and not settings.inherited().get(_FINISHED_FLAG, ""):
            raise UsageError(
                f"FaultToleranceCallback: autoresume=True needs {_FINISHED_FLAG}, the file that"
                " says that the training has ended; set it in the batch script, or pass autoresume=False:"
                " outlast slurm supervise goes by exit codes"
            )
        self.autoresume = autoresume
        self._batches = 0  # of this fit
        self.logger = logging.getLogger(logger_name)
        self._exp_dir = exp_dir
        self._fault = _fault(simulated_fault_params)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Check that a launcher is there, and schedule the simulated fault.

        Raises:
            UsageError: there is none, or ``exp_dir`` is not its run folder.
        """
        if stage != "fit":
            return
        _require_launcher("FaultToleranceCallback")
        self._batches = 0
        folder = settings.worker_context().run_dir
        if self._exp_dir is not None and os.path.realpath(self._exp_dir) != os.path.realpath(folder):
            raise UsageError(
                f"FaultToleranceCallback: exp_dir: found {self._exp_dir}, but timeouts are kept in the run"
                f" folder {folder}; leave exp_dir out, or start outlast run with --run-dir={self._exp_dir}"
            )
        if trainer.is_global_zero:
            show(self.logger, "[FaultToleranceCallback@rank0] Fault tolerance dir: %s", folder)
        fault, self._fault = self._fault, None
        if fault is not None:
            chaos.schedule(
                fault.fault_type,
                fault.rank_to_fail,
                lambda draw: fault.base_delay + fault.rand_delay * draw(),
                Path(sys.argv[0]),
            )

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Count the batch, and report a step as OutlastCallback does."""
        self._batches += 1
        super().on_train_batch_end(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Make the file that says that the training has ended, if it has."""
        if stage != "fit" or not self.autoresume or not trainer.is_global_zero:
            return
        if self._batches <= 1 or _has_ended(trainer):  # one is done after max_time
            Path(settings.inherited()[_FINISHED_FLAG]).touch()


def _fault(given: SimulatedFaultParams | Mapping[str, Any] | None) -> SimulatedFaultParams | None:
    if given is None or isinstance(given, SimulatedFaultParams):
        found = given
    else:
        found = SimulatedFaultParams(**given)
    if found is not None and found.fault_type not in FAULT_TYPES:
        raise UsageError(
            f"FaultToleranceCallback: fault_type: found {found.fault_type!r}, expected one of"
            f" {', '.join(FAULT_TYPES)}; outlast chaos run has others"
        )
    return found


def _has_ended(trainer: Any) -> bool:
    steps, epochs = trainer.max_steps, trainer.max_epochs
    return 0 < steps <= trainer.global_step or (epochs is not None and 0 < epochs <= trainer.current_epoch)


def _require_launcher(who: str) -> None:
    if not settings.under_launcher():
        raise UsageError(
            f"{who}: has no effect without a launcher that takes part; start the script with outlast run in"
            " place of torchrun or ft_launcher, or leave the callback out"
        )


class PreemptionCallback(_Callback):  # type: ignore[misc]
    """Saves and ends the fit on all ranks after the same step, when a signal came to any of them.

    The OutlastCallback that ``outlast run`` attaches does it; the process exits with 75.

    Args:
        sig: the only signal that is heeded; None: SIGTERM.

    Raises:
        UsageError: the signal cannot be one that announces an end.
    """

    def __init__(self, sig: int | None = None) -> None:
        self.sig = signal.SIGTERM if sig is None else signal.Signals(sig)
        self.logger = logging.getLogger("nemo_logger")
        self._options = PreemptionOptions(exit_signals=[self.sig.name])
        self._listener: preemption.PreemptionHandler | None = None
        self._told = False
        problems = self._options.problems()
        if problems:
            raise UsageError(f"PreemptionCallback: {'; '.join(problems)}")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Begin to heed the signal.

        Raises:
            UsageError: there is no launcher, its configuration has switched signals off, or the process heeds
                other signals already.
        """
        if stage != "fit":
            return
        _require_launcher("PreemptionCallback")
        self._listener = preemption.install(self._options)
        if self._listener is None:
            raise UsageError(
                "PreemptionCallback: no signal is heeded, because the fit is not on the main thread or the"
                " launcher's [preemption] has enable_exit_handler = false; leave one of them out"
            )

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Log NeMo's line about the signal, once."""
        number = 0 if self._listener is None else self._listener.first_signal
        if number and not self._told:
            self._told = True
            show(self.logger, "Received signal %d, initiating graceful stop", number)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002 - Lightning's
        """Log NeMo's line on rank 0 where the fit ends because of a signal."""
        ends = isinstance(exception, SystemExit) and exception.code == int(ExitCode.PREEMPTED)
        if ends and trainer.is_global_zero:
            show(self.logger, "Preemption detected, saving checkpoint and exiting")


def get_global_step_from_global_checkpoint_path(path: str | os.PathLike[str]) -> int:
    """Return the step of a checkpoint, from its name ``{name}--{val_loss:.2f}-{step}-{consumed_samples}``.

    That of a file with another name, such as ``last.ckpt``, is read from it. A link stands for its target.

    Args:
        path: of the checkpoint, or of the folder ``weights`` or ``context`` in it.

    Raises:
        UsageError: the name has another form, and the path is no checkpoint file of Lightning.
    """
    folder = Path(os.path.realpath(path))
    name = folder.parent.name if folder.name in ("weights", "context") else folder.name
    found = re.match(r".*?--[^-]*-(?:[^-=]*=)?(\d+)(?:-|$)", name)
    step = int(found[1]) if found is not None else step_of(folder)
    if step is None:
        raise UsageError(
            f"{path}: found no step, expected a checkpoint file of Lightning or a name like"
            " llama--1.90-120-30720"
        )
    return step
