"""KempnerForge's ``kempnerforge.resilience``: the same names, signatures and types, under one import.

Importing it does not import torch, so that a script can register its ShutdownHandler first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast._lazy import lazily

if TYPE_CHECKING:
    from outlast.agreement.worker.ping import check_nccl_health
    from outlast.compat.gpu_health import log_health_status
    from outlast.compat.nan_detector import NaNDetector, NaNState
    from outlast.compat.shutdown_handler import ShutdownHandler
    from outlast.compat.slurm_job import (
        SLURMInfo,
        get_slurm_info,
        is_slurm_job,
        is_slurm_requeue,
        log_job_info,
        resolve_resume_path,
    )
    from outlast.health.worker import check_gpu_health

__all__ = [
    "NaNDetector",
    "NaNState",
    "SLURMInfo",
    "ShutdownHandler",
    "check_gpu_health",
    "check_nccl_health",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_health_status",
    "log_job_info",
    "resolve_resume_path",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "NaNDetector": "outlast.compat.nan_detector",
        "NaNState": "outlast.compat.nan_detector",
        "SLURMInfo": "outlast.compat.slurm_job",
        "ShutdownHandler": "outlast.compat.shutdown_handler",
        "check_gpu_health": "outlast.health.worker",
        "check_nccl_health": "outlast.agreement.worker.ping",
        "get_slurm_info": "outlast.compat.slurm_job",
        "is_slurm_job": "outlast.compat.slurm_job",
        "is_slurm_requeue": "outlast.compat.slurm_job",
        "log_health_status": "outlast.compat.gpu_health",
        "log_job_info": "outlast.compat.slurm_job",
        "resolve_resume_path": "outlast.compat.slurm_job",
    },
)
