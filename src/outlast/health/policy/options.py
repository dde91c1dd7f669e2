"""The options of the table ``[health]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.health.policy import simulation
from outlast.health.policy.weighted import THRESHOLD

_DAY = 86400.0
INTERVAL = 10.0  # Megatron_GpuFailureRecoveryMechanism, MONITORING_INTERVAL
REPLAY, SIMULATE = "replay:", "simulate:"
MODES, MODELS = ("observe", "act"), ("hazard", "weighted")
SOURCES = ("off", "auto", "nvml", f"{REPLAY}FILE", f"{SIMULATE}SCENARIO")


@dataclass(frozen=True)
class HealthOptions:
    """What is read of a node's devices and host while a job runs.

    Args:
        telemetry: where samples come from: "off"; "auto": NVML where its library is, else nothing; "nvml":
            an error where it is not; "replay:FILE": samples from a file; "simulate:SCENARIO": made up, see
            :mod:`outlast.health.policy.simulation`.
        telemetry_interval: seconds between two readings (Megatron_GpuFailureRecoveryMechanism,
            MONITORING_INTERVAL, 10).
        call_timeout: seconds after which one call of a driver counts as silent; the first call of a driver
            may take six times as long.
        record_interval: seconds between two records of one device in the event log.
        kernel_log: where XIDs are read from: /dev/kmsg, or a text file that grows.
        mode: "observe": risks are written down; "act": the job is saved, and the node replaced, by cost.
        model: "hazard", or "weighted": the score of Megatron_GpuFailureRecoveryMechanism, which saves and
            never replaces a node.
        model_file: parameters of the hazard, which ``outlast health fit`` writes; empty: the built-in ones.
        horizon: seconds for which a probability holds: about the time between two saves that survive the loss
            of a node.
        save_cost: seconds for which training stands still for a save.
        drain_at: probability from which on a node is replaced by a spare; a hard rule does so in any case.
        risk_threshold: score from which on ``model = "weighted"`` saves (RISK_THRESHOLD).
        threshold_frac: share of ``checkpoints.save_interval`` that must be over before an emergency save
            (should_emergency_save, 0.25 there); None: cost alone decides.
        ledger: folder of the node ledger, which all jobs of a site may share; empty: in the run folder.
        quarantine_after: faults of a node within 30 days (or 2 within 7) after which it gets ranks last; 0:
            only a person puts a node into quarantine.
    """

    telemetry: str = "auto"
    telemetry_interval: float = INTERVAL
    call_timeout: float = 5.0
    record_interval: float = 60.0
    kernel_log: str = "/dev/kmsg"
    mode: str = "observe"
    model: str = "hazard"
    model_file: str = ""
    horizon: float = 1800.0
    save_cost: float = 5.0
    drain_at: float = 0.5
    risk_threshold: float = THRESHOLD
    threshold_frac: float | None = None
    ledger: str = ""
    quarantine_after: int = 3

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        for name in ("telemetry_interval", "call_timeout", "record_interval", "horizon", "save_cost"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                found.append(f"{name}: {value} is not a positive number of seconds")
            elif name in ("telemetry_interval", "call_timeout") and value > _DAY:
                found.append(f"{name}: {value} is more than a day ({_DAY:.0f} seconds)")
        if problem := source_problem(self.telemetry):
            found.append(f"telemetry: {problem}")
        if not self.kernel_log.startswith("/"):
            found.append(f"kernel_log: {self.kernel_log!r} is no absolute path")
        return (*found, *self._problems_of_risk(), *self._without_effect())

    def _problems_of_risk(self) -> list[str]:
        found = [
            f"{name}: found {value!r}, expected one of {', '.join(known)}"
            for name, value, known in (("mode", self.mode, MODES), ("model", self.model, MODELS))
            if value not in known
        ]
        shares = [("drain_at", self.drain_at), ("risk_threshold", self.risk_threshold)]
        shares += [] if self.threshold_frac is None else [("threshold_frac", self.threshold_frac)]
        found += [
            f"{name}: {value} is not above 0 and up to 1" for name, value in shares if not 0 < value <= 1
        ]
        if self.quarantine_after < 0:
            found.append(f"quarantine_after: {self.quarantine_after} is negative")
        if self.ledger and not self.ledger.startswith("/"):
            found.append(f"ledger: {self.ledger!r} is no absolute path")
        return found

    def _without_effect(self) -> list[str]:
        acting = ("save_cost", "drain_at", "threshold_frac")
        by_model = {"weighted": ("model_file", "horizon", "drain_at"), "hazard": ("risk_threshold",)}
        given = [name for name, value in vars(self).items() if value != getattr(_DEFAULTS, name)]
        found = [
            f'{name}: has no effect with model = "{self.model}"'
            for name in by_model.get(self.model, ())
            if name in given
        ]
        if self.mode == "observe":
            found += [f'{name}: has no effect with mode = "observe"' for name in acting if name in given]
        if self.telemetry == "off" and self.mode == "act":
            found.append('mode: "act" has no effect with telemetry = "off"')
        return found


_DEFAULTS = HealthOptions()


def source_problem(text: str) -> str:
    """Return what is wrong with the name of a source; empty: nothing."""
    if text.startswith(SIMULATE):
        try:
            simulation.parse(text.removeprefix(SIMULATE))
        except ValueError as error:
            return f"{text!r}: {error}"
        return ""
    if text in ("off", "auto", "nvml") or (text.startswith(REPLAY) and len(text) > len(REPLAY)):
        return ""
    return f"found {text!r}, expected one of {', '.join(SOURCES)}"
