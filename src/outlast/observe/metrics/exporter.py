"""The metrics of several runs, read from their event logs each time they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outlast.errors import UsageError
from outlast.observe.following import RunFollower
from outlast.observe.policy.metrics import exposition
from outlast.observe.policy.now import Now


class Exporter:
    """Follows runs; one that has no metrics is left out and named on standard error, once for each reason.

    Args:
        followers: of the runs, at least one.
    """

    def __init__(self, followers: Sequence[RunFollower]) -> None:
        self._followers = followers
        self._left_out: dict[RunFollower, str] = {}
        self._unreadable: set[RunFollower] = set()

    def begin(self) -> str:
        """Return the metrics for the first time.

        Raises:
            UsageError: no run can be read, or two run folders belong to one run.
        """
        text = self.text()
        if len(self._unreadable) == len(self._followers):
            raise UsageError("no run can be read; nothing was written")
        for reason in self._left_out.values():
            if reason.startswith(_TWICE):
                raise UsageError(f"{reason}; name each run once")
        return text

    def text(self) -> str:
        """Return the metrics of all runs that have some; never raises for a run that cannot be read."""
        runs: dict[str, Now] = {}
        self._unreadable.clear()
        for one in self._followers:
            reason = ""
            try:
                now = one.poll()
            except UsageError as error:
                self._unreadable.add(one)
                reason = str(error)
            else:
                if not now.run_id:
                    reason = f"{one.run_dir}: no start is in the event log yet"
                elif now.run_id in runs:
                    reason = f"{_TWICE} {now.run_id!r}: {one.run_dir} is the second"
                else:
                    runs[now.run_id] = now
            self._explain(one, reason)
        return exposition(list(runs.values()))

    def _explain(self, one: RunFollower, reason: str) -> None:
        if reason and self._left_out.get(one) != reason:
            sys.stderr.write(f"outlast metrics: {reason}; this run is left out\n")
        self._left_out[one] = reason


_TWICE = "two of the run folders belong to run"
