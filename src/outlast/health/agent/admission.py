"""The preflight that a node passes before it joins a job of several nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from outlast import settings
from outlast.errors import NodeUnfit
from outlast.health.agent import devices, preflight
from outlast.health.policy import Check, Finding, unfit
from outlast.launcher.command.options import LaunchOptions

QUICK = 10.0  # seconds in which what needs no torch must answer
_KINDS = ("auto", "full", "off")


def examine(options: LaunchOptions) -> Sequence[Finding]:
    """Check this node; return what somebody should look at.

    With ``auto``, what needs torch is checked where there are GPUs; elsewhere the zygote imports torch
    anyway, and nothing of NCCL needs room in /dev/shm.

    Raises:
        NodeUnfit: it must not join.
    """
    if options.nodes.preflight == "off":
        return ()
    environment = settings.inherited()
    gpus = devices.gpu_count(environment)
    skip = set()
    if options.nodes.preflight == "auto":
        skip = {Check.ADDRESS} if gpus else {Check.ADDRESS, Check.SHARED_MEMORY, Check.TORCH, Check.COMPUTE}
    wanted = preflight.PreflightOptions(
        run_dir=Path(options.run_dir),
        nproc_per_node=str(options.world.nproc_per_node),
        gpus=-1 if gpus else 0,
        skip=frozenset(skip),
        environment=environment,
    )
    begun = preflight.begin(wanted)
    found = preflight.quick(wanted, time.monotonic() + QUICK)
    found += preflight.finish(wanted, begun, time.monotonic() + preflight.TIMEOUT)
    why = unfit(found)
    if why:
        raise NodeUnfit(f"node {options.nodes.name}: {why} (--preflight off joins all the same)")
    return [finding for finding in found if not finding.ok]
