"""Names and signatures of other projects, so that their users can move.

They are KempnerForge's, but for ``get_iteration_from_checkpoint``, which is Megatron Bridge's, and for
straggler detection, which is NeMo's and Bridge's. NVRx's own module is ``outlast.compat.straggler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.agreement.worker.ping import check_nccl_health
    from outlast.compat.bridge import get_iteration_from_checkpoint
    from outlast.compat.nan_detector import NaNDetector
    from outlast.compat.shutdown_handler import ShutdownHandler
    from outlast.compat.slurm_job import (
        SLURMInfo,
        get_slurm_info,
        is_slurm_job,
        is_slurm_requeue,
        log_job_info,
        resolve_resume_path,
    )
    from outlast.compat.straggler_callback import (
        NVRxStragglerDetectionConfig,
        NVRxStragglerDetectionManager,
        StragglerDetectionCallback,
        straggler_det_callback,
    )
    from outlast.health.worker import check_gpu_health

__all__ = [
    "NVRxStragglerDetectionConfig",
    "NVRxStragglerDetectionManager",
    "NaNDetector",
    "SLURMInfo",
    "ShutdownHandler",
    "StragglerDetectionCallback",
    "check_gpu_health",
    "check_nccl_health",
    "get_iteration_from_checkpoint",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_job_info",
    "resolve_resume_path",
    "straggler_det_callback",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "NVRxStragglerDetectionConfig": "outlast.compat.straggler_callback",
        "NVRxStragglerDetectionManager": "outlast.compat.straggler_callback",
        "NaNDetector": "outlast.compat.nan_detector",
        "SLURMInfo": "outlast.compat.slurm_job",
        "ShutdownHandler": "outlast.compat.shutdown_handler",
        "StragglerDetectionCallback": "outlast.compat.straggler_callback",
        "check_gpu_health": "outlast.health.worker",
        "check_nccl_health": "outlast.agreement.worker.ping",
        "get_iteration_from_checkpoint": "outlast.compat.bridge",
        "get_slurm_info": "outlast.compat.slurm_job",
        "is_slurm_job": "outlast.compat.slurm_job",
        "is_slurm_requeue": "outlast.compat.slurm_job",
        "log_job_info": "outlast.compat.slurm_job",
        "resolve_resume_path": "outlast.compat.slurm_job",
        "straggler_det_callback": "outlast.compat.straggler_callback",
    },
)
