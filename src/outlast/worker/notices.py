"""Notices beside signals: when the scheduler ends the job, and a file that the cluster makes."""

from __future__ import annotations

import datetime
import json
import math
import os

from outlast import files
from outlast.core.ports import Clock
from outlast.core.preemption import Notice


def scheduled_end(job_end_time: int, clock: Clock) -> float:
    """Return when the scheduler ends the job, by the monotonic clock; infinite: it did not say.

    Args:
        job_end_time: Slurm's SLURM_JOB_END_TIME, seconds since the epoch; 0: not set.
        clock: of this host.
    """
    return clock.monotonic() + job_end_time - clock.wall() if job_end_time else math.inf


def read_notice(path: str, lead: float, clock: Clock) -> Notice | None:
    """Return the notice that a file is, None while it is not there.

    Args:
        path: of the file. Its content may be empty, a number of seconds that are left, or JSON with a
            ``time`` like AWS' spot/instance-action; anything else counts as empty.
        lead: seconds that are left where it does not say.
        clock: of this host.
    """
    try:
        with open(files.open_regular(path, follow=True), encoding="utf-8") as file:
            made, text = os.fstat(file.fileno()).st_mtime, file.read(4096).strip()
    except (OSError, UnicodeDecodeError):
        return None
    now, wall = clock.monotonic(), clock.wall()
    left = _left(text, wall)
    return Notice(f"notice file {path}", now + (lead - max(0.0, wall - made) if left is None else left))


def _left(text: str, wall: float) -> float | None:
    try:
        said = json.loads(text)
        if isinstance(said, dict):
            at = datetime.datetime.fromisoformat(str(said["time"]).replace("Z", "+00:00"))
            return at.timestamp() - wall
        return max(0.0, float(said))
    except (ValueError, KeyError, TypeError):
        return None
