"""KempnerForge's functions about the Slurm job that a script runs in; they work under any launcher."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from outlast import settings
from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.compat.shown import show
from outlast.errors import UsageError

_LOG = logging.getLogger("outlast")


@dataclass(frozen=True)
class SLURMInfo:
    """The Slurm job, as its environment describes it.

    Args:
        ntasks_per_node: 1 if not given to Slurm; the first number of a list such as "2(x3)".
        restart_count: requeues so far.
        array_task_id: None outside of an array.
    """

    job_id: str
    job_name: str
    node_list: str
    num_nodes: int
    ntasks_per_node: int
    restart_count: int
    partition: str
    array_task_id: str | None

    @property
    def is_requeued(self) -> bool:
        """Whether an earlier allocation of this job has run."""
        return self.restart_count > 0


def get_slurm_info() -> SLURMInfo | None:
    """Return the job that the environment describes; None outside of Slurm.

    Raises:
        UsageError: a variable that should hold a number does not.
    """
    variables = settings.inherited()
    if not variables.get("SLURM_JOB_ID"):
        return None

    def number(name: str, default: int) -> int:
        text = variables.get(name, "") or str(default)
        match = re.match(r"\d+", text)
        if match is None:
            raise UsageError(f"{name}={text!r}: expected a whole number, as Slurm sets it")
        return int(match[0])

    return SLURMInfo(
        job_id=variables["SLURM_JOB_ID"],
        job_name=variables.get("SLURM_JOB_NAME", ""),
        node_list=variables.get("SLURM_JOB_NODELIST", ""),
        num_nodes=number("SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in variables else "SLURM_NNODES", 1),
        ntasks_per_node=number("SLURM_NTASKS_PER_NODE", 1),
        restart_count=number("SLURM_RESTART_COUNT", 0),
        partition=variables.get("SLURM_JOB_PARTITION", ""),
        array_task_id=variables.get("SLURM_ARRAY_TASK_ID") or None,
    )


def is_slurm_job() -> bool:
    """Return whether this process runs in a Slurm job."""
    return get_slurm_info() is not None


def is_slurm_requeue() -> bool:
    """Return whether an earlier allocation of this Slurm job has run."""
    info = get_slurm_info()
    return info is not None and info.is_requeued


def log_job_info() -> None:
    """Log the job in one line, and a requeue in a second one."""
    info = get_slurm_info()
    if info is None:
        show(_LOG, "Not running under SLURM")
        return
    show(
        _LOG,
        "SLURM job: id=%s, name=%s, nodes=%d, tasks/node=%d, partition=%s, restart_count=%d",
        info.job_id,
        info.job_name,
        info.num_nodes,
        info.ntasks_per_node,
        info.partition,
        info.restart_count,
    )
    if info.is_requeued:
        show(_LOG, "Job was requeued (restart #%d) — will auto-resume", info.restart_count)


def resolve_resume_path(checkpoint_dir: str) -> Path | None:
    """Return the newest finished checkpoint in a folder; None: there is none.

    Looks for copies of outlast (in the folder, or in ``checkpoints`` below it), then for
    KempnerForge's layout: ``latest``, then the highest ``step_N``. Unlike there, a folder without
    ``.metadata``, which torch writes last, is skipped, because its save did not finish. Nothing is
    verified; ``session.restore`` does that.
    """
    root = Path(checkpoint_dir)
    for folder in (root, root / "checkpoints"):
        tier = DirectoryTier(folder)
        for name in sorted(tier.names(), key=lambda name: parse_copy_name(name) or (-1, -1), reverse=True):
            if inspect(tier, name, None).state is CopyState.WHOLE:
                return folder / name
    steps = [(int(path.name[5:]), path) for path in root.glob("step_*") if path.name[5:].isdigit()]
    ordered = [root / "latest", *(path for _, path in sorted(steps, reverse=True))]
    for path in ordered:
        if path.is_dir() and any(path.rglob(".metadata")):
            return path.resolve() if path.name == "latest" else path
    return None
