"""Every option of outlast: one frozen class for each table of the configuration file, checked on demand.

A script imports the classes from here; :mod:`outlast.settings` reads files and variables. A duration is
seconds as float. ``None`` for a timeout means *learned*; ``math.inf`` ("off" on the command line) means that
nothing is watched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from outlast.consistency.policy import TripwireOptions
from outlast.health.policy.options import HealthOptions
from outlast.inprocess.policy import InProcessOptions
from outlast.numerics.policy.options import NumericsOptions
from outlast.parallelism.policy.degrees import ParallelismOptions
from outlast.rerun.policy.options import RerunOptions
from outlast.stragglers.policy.options import StragglerOptions

__all__ = [
    "CheckpointOptions",
    "Config",
    "FaultToleranceOptions",
    "HealthOptions",
    "InProcessOptions",
    "NumericsOptions",
    "ParallelismOptions",
    "PreemptionOptions",
    "RerunOptions",
    "StragglerOptions",
    "TripwireOptions",
]
RESTARTS_PER_DAY = 20
LEARNED_INITIAL_START = 1800.0  # Megatron Bridge FaultTolerancePlugin.initial_rank_heartbeat_timeout
LEARNED_SILENCE_START = 300.0  # Megatron Bridge FaultTolerancePlugin.rank_heartbeat_timeout
LEARNED_FLOOR = 1.4  # below this a busy host looks like a hang
ASSUMED_LEAD = 60.0  # NeMo PreemptionPlugin.preempt_time
STAGING = ("eager", "lazy")
_ASYNC = ("non_persistent_save_interval", "staging", "buffers", "disk_bandwidth")
NOTICES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGINT")
_GLOBAL = ("global_options", "global_every", "keep_ancestors")
_REPLICAS = ("replication_factor", "replication_jump", "replication_bandwidth")
_CURES = {
    "async_save": "each save waits for the disk: set async_save = true (session.save(wait=True) then waits)",
    "replication": "set replication = true",
    "global_url": "name the global tier with global_url",
}


@dataclass(frozen=True)
class FaultToleranceOptions:
    """Hang detection and restarts, under NVRx's names.

    Args:
        initial_rank_heartbeat_timeout: silence allowed between the spawn of a rank and its
            first heartbeat; None: 1800 s, then learned (Bridge FaultTolerancePlugin).
        rank_heartbeat_timeout: silence allowed between two heartbeats outside of sections with their own
            timeout; None: 300 s, then learned (same source).
        rank_section_timeouts: seconds a named section may stay open; others are learned.
        rank_out_of_section_timeout: seconds allowed between two sections; None: learned.
        calc_ft_timeouts: learn the timeouts that are not fixed (Bridge; there off by default).
        safety_factor: learned timeout over the observed 99th percentile (NVRx, 5.0).
        num_warmup_iterations: first steps of a generation, from which no timeout is learned (NVRx, 5).
        workload_check_interval: longest time between two checks of the heartbeats (NVRx 5.0).
        max_restarts: restarts without progress in between (torchrun; NeMo-Run's default, 3).
        max_restarts_per_day: restarts in any 24 h, with or without progress in between; None: 20, or
            max_restarts where that is more.
        workers_stop_timeout: seconds from SIGTERM to SIGKILL of the ranks when the job is stopped (NVRx, 15);
            the checkpoint writer then has the `timeout` of checkpoints.
        capture_stacks: seconds to collect stacks before a hung rank is killed; 0: none are collected.
        busy_rank_timeout: seconds of silence beyond a timeout that is not fixed, after which a rank counts as
            hung although it computes, if others wait for it in a collective and its stack stays the same.
    """

    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: dict[str, float] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    calc_ft_timeouts: bool = True
    safety_factor: float = 5.0
    num_warmup_iterations: int = 5
    workload_check_interval: float = 0.25
    max_restarts: int = 3
    max_restarts_per_day: int | None = None
    workers_stop_timeout: float = 15.0
    capture_stacks: float = 1.0
    busy_rank_timeout: float = LEARNED_SILENCE_START

    @property
    def restarts_per_day(self) -> int:
        """How many restarts any 24 h may have."""
        given = self.max_restarts_per_day
        return max(RESTARTS_PER_DAY, self.max_restarts) if given is None else given

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, bool) or value is None:
                continue
            if isinstance(value, dict):
                found += [
                    f"{spec.name}.{name}: {seconds} is not a positive number of seconds"
                    for name, seconds in value.items()
                    if not seconds > 0
                ]
            elif math.isnan(value) or value < 0:
                found.append(f"{spec.name}: {value} is negative")
        if self.safety_factor < 1:
            found.append(f"safety_factor: {self.safety_factor} is below 1: every late step would be a hang")
        if not self.workload_check_interval > 0:
            found.append(f"workload_check_interval: {self.workload_check_interval} is not positive")
        return tuple(found)


@dataclass(frozen=True)
class CheckpointOptions:
    """When a session saves and what it keeps.

    Args:
        save_interval: steps between two checkpoints; None: only by seconds (Megatron's name).
        save_interval_seconds: seconds between two checkpoints, counted from the end of the last.
        keep_last_n: committed checkpoints kept (KempnerForge, 3); at least 2, in case the newest is bad.
        timeout: seconds for which ranks wait for each other in a save or a load.
        max_failed_saves: consecutive saves that may fail before the job stops.
        max_failed_seconds: seconds over which saves may fail before the job stops, and for which a disk that
            refuses the last state is asked again: an outage up to that long costs saves only.
        async_save: training continues while a checkpoint is written (Megatron's name; off by default there);
            off: a save is the same, and returns when it is on disk.
        staging: "eager" copies the state before the next step begins; "lazy" during its forward and
            backward, for scripts in which only optimizers change parameters.
        buffers: copies of the state in host memory: the newest, the one being filled, one on its way to disk.
        disk_bandwidth: most bytes that a node writes to disk in a second while ranks train; None: no limit.
        ckpt_fully_parallel_save: tensors that are equal on all ranks are written once: to memory once per
            node, to a shared folder once for the job (Megatron's name).
        global_url: the place of copies that must outlive this cluster: an object store's URL, or the absolute
            path of a folder; empty: none.
        global_options: settings of the object store by obstore's names, ``{"allow_http": "true"}``;
            credentials belong in the environment, which is read too.
        global_every: the first of every so many checkpoints on disk is copied there.
        keep_ancestors: older checkpoints kept there besides the newest keep_last_n, at doubling distances,
            for corruption that is noticed late.
        non_persistent_save_interval: steps between two checkpoints in memory (Megatron's name); None: chosen
            by cost and fault rate.
        non_persistent_local_ckpt_dir: folder of the memory tier (Megatron's name); empty: /dev/shm.
        replication: with several nodes, other nodes keep copies of what a node has in memory (NVRx).
        replication_factor: nodes that have a copy, including the owner (NVRx, Megatron; 2).
        replication_jump: distance in ranks between holders of the same copies (NVRx, Megatron);
            None: chosen so that the loss of any one failure domain leaves a copy.
        replication_bandwidth: most bytes that a node sends to others in a second; None: no limit.
    """

    save_interval: int | None = None
    save_interval_seconds: float | None = None
    keep_last_n: int = 3
    timeout: float = 600.0
    max_failed_saves: int = 3
    max_failed_seconds: float = 60.0
    async_save: bool = True
    staging: str = "eager"
    buffers: int = 3
    disk_bandwidth: float | None = None
    ckpt_fully_parallel_save: bool = True
    global_url: str = ""
    global_options: dict[str, str] = field(default_factory=dict)
    global_every: int = 1
    keep_ancestors: int = 4
    non_persistent_save_interval: int | None = None
    non_persistent_local_ckpt_dir: str = ""
    replication: bool = True
    replication_factor: int = 2
    replication_jump: int | None = None
    replication_bandwidth: float | None = None

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        for name in ("save_interval", "non_persistent_save_interval"):
            steps = getattr(self, name)
            if steps is not None and steps < 1:
                found.append(f"{name}: {steps} is not a positive number of steps")
        for name in ("save_interval_seconds", "timeout", "max_failed_saves"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name}: {value} is not positive")
        if not 0 <= self.max_failed_seconds < math.inf:
            found.append(f"max_failed_seconds: {self.max_failed_seconds} is not a number of seconds from 0")
        for name in ("replication_bandwidth", "disk_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value >= 1e5:
                found.append(f"{name}: {value} is not at least 100,000 bytes/s")
        if self.keep_last_n < 2:
            found.append(
                f"keep_last_n: {self.keep_last_n} leaves nothing to fall back to when the newest is bad;"
                " at least 2"
            )
        if self.buffers < 2:
            found.append(
                f"buffers: {self.buffers} leaves no complete copy while the next is made; at least 2"
            )
        if self.staging not in STAGING:
            found.append(f"staging: found {self.staging!r}, expected one of {', '.join(STAGING)}")
        found += self._problems_of_tiers()
        found += self._without_effect()
        return tuple(found)

    def _without_effect(self) -> list[str]:
        defaults = vars(CheckpointOptions())
        switches = (
            ("async_save", _ASYNC),
            ("replication", _REPLICAS),
            ("global_url", _GLOBAL),
        )
        return [
            f"{name}: has no effect with {switch} off; {_CURES[switch]}, or leave {name} out"
            for switch, names in switches
            for name in names
            if not getattr(self, switch) and getattr(self, name) != defaults[name]
        ]

    def _problems_of_tiers(self) -> list[str]:
        found: list[str] = []
        if self.global_every < 1:
            found.append(f"global_every: {self.global_every} is not a positive number of checkpoints")
        if self.keep_ancestors < 0:
            found.append(f"keep_ancestors: {self.keep_ancestors} is negative")
        if self.global_url and not (self.global_url.startswith("/") or "://" in self.global_url):
            found.append(f"global_url: {self.global_url!r} is no URL and no absolute path of a folder")
        if self.replication_jump is not None and self.replication_jump < 1:
            found.append(f"replication_jump: {self.replication_jump} is not a positive number of ranks")
        if self.replication_factor < 2:
            alone = "leaves no copy but the owner's; at least 2, or replication = false"
            found.append(f"replication_factor: {self.replication_factor} {alone}")
        return found


@dataclass(frozen=True)
class PreemptionOptions:
    """Preemption; the first three names are of NeMo's PreemptionPlugin, the next KempnerForge's.

    Args:
        preempt_time: seconds from a signal to the end of the job, as granted by the cluster (NeMo); None:
            not known. Then 60 (NeMo's default) are assumed for the choice of a tier, and no process is ended
            after them.
        enable_exit_handler: handle signals.
        enable_exit_handler_for_data_loader: shield child processes such as a DataLoader's workers from them
            (NeMo; off by default there).
        timeout_sec: seconds after the first notice at which the process exits whatever happens; 0: no such
            limit (KempnerForge ShutdownHandler, 600).
        exit_signals: names of the signals that announce the end (KempnerForge: SIGTERM and SIGUSR1).
        notice_file: a file that the cluster creates before it ends the job; empty: none.
        margin: seconds before the end that the cluster or ``preempt_time`` sets, in which the process exits;
            after half of them a script whose state is safe, and that has not ended, is ended.
    """

    preempt_time: float | None = None
    enable_exit_handler: bool = True
    enable_exit_handler_for_data_loader: bool = True
    timeout_sec: float = 600.0
    exit_signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1"])
    notice_file: str = ""
    margin: float = 2.0

    @property
    def notices(self) -> tuple[str, ...]:
        """The names of the handled signals."""
        return tuple(self.exit_signals) if self.enable_exit_handler else ()

    def problems(self) -> tuple[str, ...]:
        """Return one line for each invalid value."""
        found: list[str] = []
        if self.preempt_time is not None and not self.preempt_time > 0:
            found.append(f"preempt_time: {self.preempt_time} is not a positive number of seconds")
        for name in ("timeout_sec", "margin"):
            value = getattr(self, name)
            if not value >= 0:
                found.append(f"{name}: {value} is not a number of seconds")
        unknown = [name for name in self.exit_signals if name not in NOTICES]
        if unknown:
            found.append(f"exit_signals: found {', '.join(unknown)}, expected some of {', '.join(NOTICES)}")
        if not self.enable_exit_handler:
            off = " has no effect with enable_exit_handler off"
            found += [
                f"{name}:{off}"
                for name, value in vars(self).items()
                if name != "enable_exit_handler" and value != vars(_ON)[name]
            ]
        return tuple(found)


_ON = PreemptionOptions()


@dataclass(frozen=True)
class Config:
    """Everything that a configuration file can say; the tables are the attributes."""

    fault_tolerance: FaultToleranceOptions = field(default_factory=FaultToleranceOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    preemption: PreemptionOptions = field(default_factory=PreemptionOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    tripwire: TripwireOptions = field(default_factory=TripwireOptions)
    inprocess_restart: InProcessOptions = field(default_factory=InProcessOptions)
    rerun: RerunOptions = field(default_factory=RerunOptions)
    stragglers: StragglerOptions = field(default_factory=StragglerOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)

    def problems(self) -> tuple[str, ...]:
        """Return the problems of all tables, each with the path of its key."""
        found = [
            f"{spec.name}.{problem}"
            for spec in fields(self)
            for problem in getattr(self, spec.name).problems()
        ]
        if self.health.threshold_frac is not None and self.checkpoints.save_interval is None:
            found.append("health.threshold_frac: is a share of checkpoints.save_interval, which is not set")
        return tuple(found)
