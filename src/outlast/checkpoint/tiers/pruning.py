"""Retention carried out: the copies of this run that are not kept are removed, and each removal recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection

from outlast.checkpoint.tiers.inventory import inspect
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.core.events import Note, Pruned
from outlast.core.resolve import CopyState
from outlast.core.retention import removals


class Pruner:
    """Removes copies from one tier.

    Args:
        tier: where.
        run_id: other runs' copies are neither counted nor removed.
        keep_last_n: how many stay.
        record: takes a record's kind and fields.
    """

    def __init__(
        self, tier: DirectoryTier, run_id: str, keep_last_n: int, record: Callable[..., None]
    ) -> None:
        self._tier = tier
        self._run_id = run_id
        self._keep_last_n = keep_last_n
        self._record = record
        self._ours: set[str] = set()

    def committed(self, name: str) -> None:
        """Take note of a copy that this process has written, so that it need not be looked at."""
        self._ours.add(name)

    def prune(self, protected: Collection[str], avoid: Collection[str]) -> None:
        """Remove what retention gives up; see :func:`outlast.core.retention.removals`."""
        try:
            names = [name for name in self._tier.names() if self._is_ours(name)]
        except OSError as error:
            self._record(Note, reason=f"retention: {error}; nothing was removed")
            return
        for removal in removals(names, self._keep_last_n, protected, avoid):
            try:
                self._tier.discard(removal.name)
            except OSError as error:
                self._record(Note, reason=f"retention: {removal.name} could not be removed: {error}")
            else:
                self._ours.discard(removal.name)
                self._record(Pruned, checkpoint=removal.name, reason=removal.reason)

    def _is_ours(self, name: str) -> bool:
        """Whether a copy is a sound one of this run; others are not for retention to count or to remove."""
        if name not in self._ours:
            found = inspect(self._tier, name, ())
            if found.state is not CopyState.WHOLE or found.run_id != self._run_id:
                return False
            self._ours.add(name)
        return True
