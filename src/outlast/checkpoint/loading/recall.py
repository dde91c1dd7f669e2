"""Before a load, and when nothing nearer can be used: copies come back from the global tier."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from outlast.checkpoint.surroundings import Surroundings
from outlast.checkpoint.tiers.object_access import ObjectStoreError
from outlast.checkpoint.tiers.remote import Remote
from outlast.core.errors import CheckpointError, CheckpointMismatch, TierUnreachable
from outlast.core.events import Note, Quarantined
from outlast.core.fields import DamagedCopy
from outlast.core.manifest import parse_copy_name
from outlast.core.marks import Marks

_NOWHERE = (-1, -1)


def _place(name: str) -> tuple[int, int]:
    return parse_copy_name(name) or _NOWHERE


class Recall:
    """Brings copies from the global tier into the durable folder; every rank calls it, the leading one works.

    Args:
        around: this rank's ties to the world.
        avoid: marks, see :mod:`outlast.core.marks`; a copy that something speaks against is not brought.
    """

    def __init__(self, around: Surroundings, avoid: Collection[str]) -> None:
        self._around = around
        self._marks = Marks(avoid)
        self._tried: set[str] = set()
        self._silent = False

    def newer(self, than: tuple[int, int] | None) -> bool:
        """Bring the newest copy that was not tried and is newer than what is near; say whether one came.

        Args:
            than: step and generation of the copy that would be loaded; None: there is none, or only suspects.

        Raises:
            TierUnreachable: nothing is near, and the store does not answer: it may not be empty.
            CheckpointError: nothing is near, and the store refuses.
        """
        around = self._around
        agreed = around.rounds.hold("global", lambda: self._work(than) if around.leads else {})
        agreed.raise_common(CheckpointError)
        said = agreed.reports[0].data
        if said.get("note"):
            around.record(Note, reason=said["note"])
        return bool(said["brought"])

    def _work(self, than: tuple[int, int] | None) -> dict[str, Any]:
        around, url = self._around, self._around.settings.global_url
        if self._silent and than is not None:
            return {"brought": False}
        try:
            remote = Remote(url, around.settings.global_options)
            names = sorted(remote.names(), key=_place, reverse=True)
        except OSError as error:
            return self._without(f"the global tier {url} cannot be looked into: {error}", error, than)
        known = {*self._tried, *around.tier.names()}
        for name in names:
            if _place(name) > (than or _NOWHERE) and name not in known and not self._marks.doubted(name):
                self._tried.add(name)
                try:
                    if self._fetch(remote, name):
                        return {"brought": True}
                except ObjectStoreError as error:
                    return self._without(f"{name} did not come from the global tier: {error}", error, than)
        return {"brought": False}

    def _without(self, why: str, error: OSError, than: tuple[int, int] | None) -> dict[str, Any]:
        """Say that what is near has to do; raise where nothing is."""
        if than is not None:
            self._silent = True
            return {"brought": False, "note": why}
        passes = isinstance(error, ObjectStoreError) and error.passes
        raise (TierUnreachable if passes else CheckpointError)(
            f"{why}; nothing was loaded, and the run does not start anew while it may have checkpoints there"
        ) from error

    def _fetch(self, remote: Remote, name: str) -> bool:
        around, began = self._around, time.monotonic()
        step, _ = _place(name)
        try:
            run_id = remote.manifest(name).run_id
            if run_id != around.identity.run_id:
                raise CheckpointMismatch(
                    f"{remote.url}: {name} was written by run {run_id!r}, this is"
                    f" run {around.identity.run_id!r}; nothing was changed; each run needs its own URL"
                )
            nbytes = remote.get(name, around.tier)
        except DamagedCopy as error:
            reason = f"in the global tier: {error}"
            remote.tier.quarantine(name, {"name": name, "reason": reason, "time": around.clock.wall()})
            around.record(Quarantined, step=step, checkpoint=f"global/{name}", reason=reason)
            return False
        seconds = time.monotonic() - began
        reason = f"{name} came from the global tier {remote.url}: {nbytes} bytes in {seconds:.1f} s"
        around.record(Note, reason=reason)
        return True
