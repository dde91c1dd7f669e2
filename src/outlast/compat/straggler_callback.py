"""Straggler detection in the training loops of NeMo and Megatron Bridge: their options, their report.

The text of the report, the warnings and the names of the figures are theirs, line for line. A tracker gets
the figures through a callable, so that no tracker is a dependency.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from outlast.compat.shown import show
from outlast.compat.straggler import INDIVIDUAL, RELATIVE, CallableId, Detector, Report
from outlast.integrations.collectives import group_device
from outlast.stragglers.policy.nvrx import report_lines, tail

Track = Callable[[Mapping[str, float]], None]


@dataclass
class NVRxStragglerDetectionConfig:
    """Megatron Bridge's options of straggler detection.

    Args:
        report_time_interval: seconds between two reports.
        calc_relative_gpu_perf: compare with the fastest rank.
        calc_individual_gpu_perf: compare each rank with its own fastest interval.
        num_gpu_perf_scores_to_print: of the best and of the worst ranks each; 0: only stragglers are told.
        gpu_relative_perf_threshold, gpu_individual_perf_threshold: scores below them are stragglers; 0 to 1.
        stop_if_detected: :meth:`NVRxStragglerDetectionManager.check_stragglers` says so, on every rank.
        enable_logging: least, median and largest score go to the log and to the trackers.
        profiling_interval: calls of the training step of which one is timed.
        logger_name: of the log.
        profile_kernels: ours; see :meth:`.straggler.Detector.initialize`.
    """

    enabled: bool = False
    report_time_interval: float = 300.0
    calc_relative_gpu_perf: bool = True
    calc_individual_gpu_perf: bool = True
    num_gpu_perf_scores_to_print: int = 5
    gpu_relative_perf_threshold: float = 0.7
    gpu_individual_perf_threshold: float = 0.7
    stop_if_detected: bool = False
    enable_logging: bool = True
    profiling_interval: int = 1
    logger_name: str = "megatron.bridge.NVRxStragglerDetection"
    profile_kernels: bool = False

    def finalize(self) -> None:
        """Check the options, if enabled.

        Raises:
            ValueError: with a line for each one that is not valid.
        """
        if not self.enabled:
            return
        found = []
        if not (self.calc_relative_gpu_perf or self.calc_individual_gpu_perf):
            found.append("calc_relative_gpu_perf, calc_individual_gpu_perf: both are False; one is needed")
        if not self.report_time_interval > 0:
            found.append(f"report_time_interval: {self.report_time_interval} is not a positive time")
        for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                found.append(f"{name}: {getattr(self, name)} is not between 0 and 1")
        if self.num_gpu_perf_scores_to_print < 0:
            found.append(f"num_gpu_perf_scores_to_print: {self.num_gpu_perf_scores_to_print} is negative")
        if self.profiling_interval < 1:
            found.append(f"profiling_interval: {self.profiling_interval} is not a positive number of calls")
        if found:
            raise ValueError("\n".join(found))

    @property
    def scores(self) -> list[str]:
        """What the detector is to compute."""
        wanted = {RELATIVE: self.calc_relative_gpu_perf, INDIVIDUAL: self.calc_individual_gpu_perf}
        return [name for name, asked in wanted.items() if asked]


class _Reports:
    """Reads the detector's reports on rank 0 and tells every rank whether there is a straggler.

    Args:
        lead: stands before a report; Lightning's begins on a new line.
        track: takes the figures.
    """

    def __init__(
        self, config: NVRxStragglerDetectionConfig, log: logging.Logger, track: Track, lead: str = ""
    ) -> None:
        self._config = config
        self._log = log
        self._track = track
        self._lead = lead

    def after_step(self) -> bool:
        """Count a step; report if it ends an interval.

        Returns:
            There are stragglers and the job is to stop.
        """
        started = time.monotonic()
        report = Detector.generate_report_if_interval_elapsed()
        found = report is not None and self._tell(report)
        if not Detector.is_interval_elapsed():
            return False
        stop = self._config.stop_if_detected and _of_rank0(found)
        if report is not None:  # on rank 0
            show(self._log, "Straggler report processing time: %.3f sec.", time.monotonic() - started)
        return stop

    def _tell(self, report: Report) -> bool:
        config = self._config
        slow = report.identify_stragglers(
            gpu_rel_threshold=config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=config.gpu_individual_perf_threshold,
        )
        relative, individual = slow["straggler_gpus_relative"], slow["straggler_gpus_individual"]
        for what, ranks in (
            ("have worse relative performance", relative),
            ("performance dropped", individual),
        ):
            if ranks:
                self._log.warning(f"STRAGGLER DETECTION WARNING: Some GPUs {what}. Affected ranks: {ranks}")
        kinds = [
            ("relative", config.calc_relative_gpu_perf, report.gpu_relative_perf_scores),
            ("individual", config.calc_individual_gpu_perf, report.gpu_individual_perf_scores),
        ]
        shown = config.num_gpu_perf_scores_to_print
        for kind, _, scores in (one for one in kinds if one[1] and shown > 0):
            text = report_lines(scores, report.rank_to_node, shown)
            show(self._log, "%sGPU %s performance:\n%s", self._lead, kind, text)
        for kind, _, scores in (one for one in kinds if one[1] and config.enable_logging):
            prefix, ends = f"gpu_{kind}_perf", tail(scores)
            self._track(
                {f"{prefix}/min": ends.least, f"{prefix}/median": ends.median, f"{prefix}/max": ends.largest}
            )
        return bool(relative or individual)


def _of_rank0(flag: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    number = torch.tensor([1.0 if flag else 0.0], device=group_device())
    dist.broadcast(number, 0)
    return bool(number.item() > 0)


@dataclass
class _TrainStep:
    """Holds the function that is timed, because what is wrapped is an attribute."""

    train_step: Callable[..., Any]


class NVRxStragglerDetectionManager:
    """Times the training step of Megatron Bridge's loop and reports; the same calls on every rank.

    Args:
        track: takes least, median and largest score of a kind, as the ``log`` of a tracker does.

    Raises:
        ValueError: an option is not valid.
    """

    def __init__(self, config: NVRxStragglerDetectionConfig, track: Track | None = None) -> None:
        config.finalize()
        self.config = config
        self.initialized = False
        self.logger = logging.getLogger(config.logger_name)
        self._extra = track
        self._reports = _Reports(config, self.logger, self._tracked)

    def initialize(self) -> None:
        """Begin, if enabled.

        Raises:
            RuntimeError: it has begun already.
        """
        if self.initialized:
            raise RuntimeError("NVRxStragglerDetectionManager is already initialized.")
        if not self.config.enabled:
            return
        Detector.initialize(
            scores_to_compute=self.config.scores,
            profiling_interval=self.config.profiling_interval,
            report_time_interval=self.config.report_time_interval,
            profile_kernels=self.config.profile_kernels,
        )
        self.initialized = True
        interval = self.config.report_time_interval
        show(self.logger, "NVRx straggler detection enabled (report_interval=%ss)", interval)

    def wrap_train_step_function(self, train_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with each call timed; the same function if not enabled."""
        if not self.initialized:
            return train_step_func
        holder = _TrainStep(train_step_func)
        Detector.wrap_callables([CallableId(holder, "train_step")])
        return holder.train_step

    def check_stragglers(self, global_rank: int) -> bool:  # noqa: ARG002 - theirs
        """Report if an interval ends; every rank calls it after each step.

        Args:
            global_rank: not used; the detector knows it.

        Returns:
            The job should stop: there are stragglers, and ``stop_if_detected``.
        """
        if not self.initialized:
            return False
        stop = self._reports.after_step()
        if stop:
            self.logger.error("Detected stragglers. Training should be stopped.")
        return stop

    def shutdown(self) -> None:
        """End."""
        if self.initialized:
            Detector.shutdown()
            self.initialized = False

    def _tracked(self, figures: Mapping[str, float]) -> None:
        prefix = next(iter(figures)).partition("/")[0]
        self.logger.info("%s scores: %s", prefix, dict(figures))
        if self._extra is not None:
            self._extra(figures)


def _callback_class() -> Any:
    for module in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        try:
            return importlib.import_module(module).Callback
        except ModuleNotFoundError:
            continue
    return object


_Callback: Any = _callback_class()


@dataclass(eq=False)
class StragglerDetectionCallback(_Callback):  # type: ignore[misc]
    """NeMo's callback for Lightning: times ``trainer.strategy.training_step`` and reports.

    Args:
        enable_ptl_logging: least, median and largest score go to the trainer's loggers.
        stop_if_detected: the fit ends after the step; NVRx's callback ends the process with code 1.

    The others are as in :class:`NVRxStragglerDetectionConfig`.

    Raises:
        ValueError: an option is not valid.
    """

    report_time_interval: float
    calc_relative_gpu_perf: bool
    calc_individual_gpu_perf: bool
    num_gpu_perf_scores_to_print: int
    gpu_relative_perf_threshold: float
    gpu_individual_perf_threshold: float
    stop_if_detected: bool
    enable_ptl_logging: bool
    profiling_interval: int = 1
    logger_name: str | None = "nemo_logger.StragglerDetectionCallback"
    profile_kernels: bool = False

    def __post_init__(self) -> None:
        self.logger = logging.getLogger(self.logger_name)
        self.initialized = False
        self._config = NVRxStragglerDetectionConfig(
            enabled=True,
            report_time_interval=self.report_time_interval,
            calc_relative_gpu_perf=self.calc_relative_gpu_perf,
            calc_individual_gpu_perf=self.calc_individual_gpu_perf,
            num_gpu_perf_scores_to_print=self.num_gpu_perf_scores_to_print,
            gpu_relative_perf_threshold=self.gpu_relative_perf_threshold,
            gpu_individual_perf_threshold=self.gpu_individual_perf_threshold,
            stop_if_detected=self.stop_if_detected,
            enable_logging=self.enable_ptl_logging,
            profiling_interval=self.profiling_interval,
        )
        self._config.finalize()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Begin, once."""
        if self.initialized:
            return
        Detector.initialize(
            scores_to_compute=self._config.scores,
            profiling_interval=self.profiling_interval,
            report_time_interval=self.report_time_interval,
            profile_kernels=self.profile_kernels,
        )
        Detector.wrap_callables([CallableId(trainer.strategy, "training_step")])
        self.initialized = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """End."""
        if self.initialized:
            Detector.shutdown()
            self.initialized = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Report if an interval ends."""

        def track(figures: Mapping[str, float]) -> None:
            pl_module.log_dict(dict(figures), logger=True, batch_size=1, rank_zero_only=True)

        if _Reports(self._config, self.logger, track, lead="\n").after_step():
            self.logger.error("Detected stragglers. Terminating training...")
            trainer.should_stop = True


def straggler_det_callback(
    straggler_report_time_interval: float = 300,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> StragglerDetectionCallback:
    """Return the callback with the options of NeMo's recipes; theirs is a configuration of nemo_run."""
    return StragglerDetectionCallback(
        report_time_interval=straggler_report_time_interval,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_print=5,
        gpu_relative_perf_threshold=gpu_relative_perf_threshold,
        gpu_individual_perf_threshold=gpu_individual_perf_threshold,
        stop_if_detected=stop_if_detected_straggler,
        enable_ptl_logging=True,
    )
