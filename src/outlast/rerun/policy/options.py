"""The table ``[rerun]``: what is done about a result that was rejected, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.rerun.policy.events import Remedy, RerunMode

_ACTIONS = {"skip_batch": Remedy.SKIP_BATCH, "roll_back": Remedy.ROLL_BACK, "stop": Remedy.STOP}
_EFFECTIVE = {  # options that have an effect although nothing is rerun
    RerunMode.DISABLED.value: (
        "rerun_mode",
        "rejected_action",
        "result_rejected_tracker_filename",
        "megatron_exit_codes",
    ),
    RerunMode.REPORT_DETERMINISM_STATS.value: ("rerun_mode",),
}


@dataclass(frozen=True)
class RerunOptions:
    """The table ``[rerun]``; the first two names are Megatron-LM's.

    Args:
        rerun_mode: "validate_results" reruns a step whose result was rejected; "report_determinism_stats"
            runs every step twice and reports how far the results differ; "disabled" does neither.
        result_rejected_tracker_filename: a file that gets a line for each rejected result; empty: none.
        tolerance: relative difference of two losses up to which they are the same result; 0: bit for bit
            (Megatron-LM, ``validate_result``).
        rejected_action: what is done if the cause is not found: "stop", "skip_batch", "roll_back".
        suspect_steps: steps after a load within which the copy is tested before the device.
        max_attempts: restarts for one incident.
        max_incidents_per_hour: more than that end the job.
        max_incident_seconds: after that no further remedy is tried for an incident.
        max_transients_per_day: transient incidents after which a device counts as faulty.
        megatron_exit_codes: end with 16 to be restarted and with 17 to be stopped, for launchers that know
            the exit codes of Megatron-LM.
    """

    rerun_mode: str = RerunMode.VALIDATE_RESULTS.value
    result_rejected_tracker_filename: str = ""
    tolerance: float = 0.0
    rejected_action: str = "stop"
    suspect_steps: int = 10
    max_attempts: int = 3
    max_incidents_per_hour: int = 6
    max_incident_seconds: float = 3600.0
    max_transients_per_day: int = 3
    megatron_exit_codes: bool = False

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        modes = [mode.value for mode in RerunMode]
        if self.rerun_mode not in modes:
            found.append(f"rerun_mode: found {self.rerun_mode!r}, expected one of {', '.join(modes)}")
        if self.rejected_action not in _ACTIONS:
            found.append(
                f"rejected_action: found {self.rejected_action!r}, expected one of {', '.join(_ACTIONS)}"
            )
        if not 0 <= self.tolerance < math.inf:
            found.append(f"tolerance: {self.tolerance} is not a relative difference")
        for name in ("suspect_steps", "max_attempts"):
            if getattr(self, name) < 0:
                found.append(f"{name}: {getattr(self, name)} is negative")
        for name in ("max_incidents_per_hour", "max_incident_seconds", "max_transients_per_day"):
            if not getattr(self, name) > 0:
                found.append(f"{name}: {getattr(self, name)} is not positive")
        if self.rerun_mode in _EFFECTIVE:
            off = f" has no effect with rerun_mode {self.rerun_mode}"
            found += [
                f"{name}:{off}"
                for name, value in vars(self).items()
                if name not in _EFFECTIVE[self.rerun_mode] and value != vars(RerunOptions())[name]
            ]
        return tuple(found)

    @property
    def action(self) -> Remedy:
        """The remedy if the cause is not found."""
        return _ACTIONS[self.rejected_action]
