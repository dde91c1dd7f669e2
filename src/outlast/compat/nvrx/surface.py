"""Which modules and names of NVRx are served, by which object, and what to use for the others.

The names are those of nvidia-resiliency-ext 0.6, and ``straggler``, which 0.4 has at the top.
docs/reference/nvrx.md shows both tables.
"""

from __future__ import annotations

from collections.abc import Mapping

PACKAGE = "nvidia_resiliency_ext"
VERSION = "0.6.0+outlast"  # Megatron-LM compares it with 0.6.0
_OURS = "outlast.compat"


def _all(home: str, *names: str) -> dict[str, str]:
    return {name: f"{_OURS}.{home}:{name}" for name in names}


_CLIENT = _all("nvrx.rank_monitor", "RankMonitorClient", "RankMonitorClientError")
_CALL = {"CallWrapper": "outlast.inprocess:CallWrapper", **_all("nvrx.wrapper", "Wrapper")}
_STRAGGLER = _all("straggler", "CallableId", "Detector", "Report", "Statistic", "StragglerId")
_FIT = _all("nemo", "FaultToleranceCallback", "SimulatedFaultParams")

SERVED: Mapping[str, Mapping[str, str]] = {
    f"{PACKAGE}{'.' if below else ''}{below}": names
    for below, names in {
        "": {"__version__": f"{_OURS}.nvrx.surface:VERSION"},
        "attribution": {},  # nothing of its own; importlib asks for it before what is below it
        "checkpointing": {},  # likewise: all below it is refused, and each says why
        "shared_utils": {},
        "attribution.straggler": _STRAGGLER,
        "attribution.straggler.reporting": _all("straggler", "Report", "StragglerId"),
        "attribution.straggler.statistics": _all("straggler", "Statistic"),
        "attribution.straggler.straggler": _all("straggler", "CallableId", "Detector"),
        "fault_tolerance": _CLIENT,
        "fault_tolerance.data": _all("nvrx.rank_monitor", "HeartbeatTimeouts", "SectionTimeouts"),
        "fault_tolerance.rank_monitor_client": _CLIENT,
        "inprocess": {**_CALL, **_all("nvrx.plugins", "Compose", "FrozenState", "Mode")},
        "inprocess.abort": _all("nvrx.plugins", "Abort", "AbortTorchDistributed"),
        "inprocess.completion": _all("nvrx.plugins", "Completion"),
        "inprocess.compose": _all("nvrx.plugins", "Compose"),
        "inprocess.exception": _all(
            "nvrx.plugins", "HealthCheckError", "RestartAbort", "RestartError", "TimeoutError"
        ),
        "inprocess.finalize": _all("nvrx.plugins", "Finalize", "ThreadedFinalize"),
        "inprocess.health_check": _all("nvrx.plugins", "CudaHealthCheck", "HealthCheck"),
        "inprocess.initialize": _all("nvrx.plugins", "Initialize", "RetryController"),
        "inprocess.monitor_thread": {"RankShouldRestart": "outlast.inprocess:Restart"},
        "inprocess.state": _all("nvrx.plugins", "FrozenState", "Mode"),
        "inprocess.terminate": _all("nvrx.plugins", "Terminate"),
        "inprocess.wrap": _CALL,
        "straggler": _STRAGGLER,
        "ptl_resiliency": {**_FIT, **_all("straggler_callback", "StragglerDetectionCallback")},
        "ptl_resiliency.fault_tolerance_callback": _FIT,
        "ptl_resiliency.straggler_det_callback": _all("straggler_callback", "StragglerDetectionCallback"),
    }.items()
}
"""Objects by module and name, as ``MODULE:ATTRIBUTE``."""

_LAUNCHER = "outlast run is the launcher and watches the ranks; its options have NVRx's names (--ft-...)"
_REQUEST = (
    "a rank asks for nothing: raise an error to be restarted; the launcher leaves out a node that keeps"
    " failing, and outlast slurm or a signal ends the job"
)
_LIGHTNING = "use outlast.integrations.lightning.OutlastCallback, which is attached by itself"

REFUSED: Mapping[str, str] = {
    "attribution": "faults are attributed by the launcher; see outlast report",
    "checkpointing.async_ckpt": (
        "saves of a session (outlast.start) are asynchronous; give Megatron-LM --async-strategy mcore, which"
        " is its own"
    ),
    "checkpointing.local": (
        "its files are pickled objects of one rank, outlast's copies are tensors and plain values, committed"
        " for the whole job; use outlast.start(checkpoints=CheckpointOptions("
        "non_persistent_save_interval=N)), which also keeps copies on other nodes"
    ),
    "fault_tolerance": _LAUNCHER,
    "fault_tolerance.WorkloadAction": _REQUEST,
    "fault_tolerance.WorkloadControlRequest": _REQUEST,
    "fault_tolerance.data": "the messages between ranks and monitors; there are none here",
    "inprocess": "the agent does this; see docs/how-to/in-process-restart.md",
    "inprocess.abort.AbortPersistentCheckpointProcesses": (
        "derive from Abort, and end processes of your own in it"
    ),
    "inprocess.abort.AbortTransformerEngine": "derive from Abort, and destroy its user buffers in it",
    "inprocess.health_check.FaultCounter": (
        "the launcher's budgets bound restarts; a node that keeps failing is replaced where that is possible"
    ),
    "inprocess.nested_restarter": "outlast run is the outer restarter, and knows what happens in its ranks",
    "inprocess.rank_assignment": (
        "ranks keep their numbers, and a lost one is forked again; spares are nodes (--spares). Leave"
        " Megatron-LM's --inprocess-restart out: outlast run restarts its processes"
    ),
    "inprocess.store": "a process of the launcher serves the store",
    "ptl_resiliency.FaultToleranceSectionsCallback": _LIGHTNING,
    "ptl_resiliency.fault_tolerance_sections_callback": _LIGHTNING,
    "ptl_resiliency.local_checkpoint_callback": (
        "it needs checkpointing.local, which is not here; use LocalCheckpointCallback and"
        " update_trainer_local_checkpoint_io of outlast.compat.nemo"
    ),
    "services": "outlast has no services; outlast report reads the event log",
    "shared_utils.health_check": "use outlast preflight, and [health] of the configuration while a job runs",
    "shared_utils.inject_fault": "use outlast chaos inject",
    "testing_utils": "use outlast chaos",
}
"""The reason, and what to use, by module or module and name; a module stands for all below it."""
