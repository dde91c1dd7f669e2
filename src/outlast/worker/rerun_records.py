"""Where incidents of rejected results are written down: one JSON file each, outside of any checkpoint."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast import files, settings
from outlast.core.numerics import Finding
from outlast.core.rerun_incident import Incident
from outlast.observe.run_folder import RunFolder
from outlast.transport.clock import SystemClock

_RECORD_BYTES = 16 << 20
_LOG = logging.getLogger("outlast")


class Records:
    """The files of a job's incidents; rank 0 keeps them.

    Args:
        folder: for them; made when there is one.
        tracker: a file that gets a line for each rejected result, in Megatron-LM's form; empty: none.
        rank: this rank.
    """

    def __init__(self, folder: Path, tracker: str, rank: int) -> None:
        self._folder = folder
        self._tracker = tracker
        self._rank = rank
        self._written: dict[int, Mapping[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return every incident that was written down; one that cannot be read is named and left alone."""
        found = []
        for path in sorted(self._folder.glob("rerun-step-*.json")):
            try:
                record = json.loads(files.read_whole(path, _RECORD_BYTES))
                Incident.of_record(record)
            except (OSError, ValueError) as error:
                _LOG.warning("incident %s cannot be read and counts for nothing: %s", path, error)
                continue
            found.append(record)
        return found

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write down what has changed."""
        for record in records if self._rank == 0 else ():
            step = int(record["step"])
            if self._written.get(step) == record:
                continue
            path = self._folder / f"rerun-step-{step:09d}.json"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                RunFolder(self._folder).write(path, dict(record))
            except OSError as error:
                _LOG.warning("incident %s was not written down, a restart will not know it: %s", path, error)
            self._written[step] = record

    def track(self, finding: Finding, status: str, device: str) -> None:
        """Add a line about a rejected result of this rank."""
        if not self._tracker:
            return
        job = settings.inherited().get("SLURM_JOB_ID", "N/A")
        line = (
            f"ts={SystemClock().wall():.3f} node={platform.node()} device={device} jobID={job}"
            f" rank={self._rank} iteration={finding.step} status={status} result={finding.value}"
            f" message='{finding.what}'\n"
        )
        with open(self._tracker, "a") as file:
            file.write(line)
