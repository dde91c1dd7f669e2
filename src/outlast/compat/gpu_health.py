"""KempnerForge's check of a GPU whose answer is logged."""

from __future__ import annotations

import logging

from outlast.compat.shown import show
from outlast.health.worker import check_gpu_health

_LOG = logging.getLogger("outlast")


def log_health_status(device: int = 0) -> dict[str, bool | str]:
    """Check one GPU and log the answer, a problem in a second line: KempnerForge's function.

    Returns:
        What :func:`check_gpu_health` returns.
    """
    health = check_gpu_health(device)
    fine = not health["error"]
    show(
        _LOG,
        "GPU %d health: %s | cuda=%s, device=%s, compute=%s, memory=%s",
        device,
        "HEALTHY" if fine else "UNHEALTHY",
        *(health[name] for name in ("cuda_available", "device_accessible", "compute_ok", "memory_ok")),
    )
    if not fine:
        _LOG.warning("GPU %d error: %s", device, health["error"])
    return health
