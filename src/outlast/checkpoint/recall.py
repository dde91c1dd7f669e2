"""Before a load, and when nothing nearer can be used: copies come back from the global tier."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from outlast.checkpoint.remote import Remote
from outlast.checkpoint.surroundings import Surroundings
from outlast.core.errors import CheckpointError, CheckpointMismatch
from outlast.core.events import Note, Quarantined
from outlast.core.fields import DamagedCopy
from outlast.core.manifest import parse_copy_name
from outlast.core.marks import Marks


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
        self._untold = ""

    def newest(self) -> None:
        """Bring the newest copy if it is newer than all that is near.

        A store that does not answer is no error as long as there is something near.

        Raises:
            CheckpointError: nothing is near, and the store does not answer.
        """
        self._bring(lambda near: max(near, default=(-1, -1)))

    def next(self) -> bool:
        """Bring the newest copy that was not tried, since nothing near can be used; say whether one came.

        Raises:
            CheckpointError: the store does not answer.
        """
        return self._bring(lambda _: (-1, -1), needed=True)

    def _bring(self, above: Any, needed: bool = False) -> bool:
        around = self._around

        def part() -> dict[str, Any]:
            return self._work(above, needed) if around.leads else {}

        agreed = around.rounds.hold("global", part)
        agreed.raise_common(CheckpointError)
        said = agreed.reports[0].data
        if said.get("note"):
            around.record(Note, reason=said["note"])
        return bool(said["brought"])

    def _work(self, above: Any, needed: bool) -> dict[str, Any]:
        around = self._around
        near = [
            place
            for tier in around.tiers
            for name in tier.names()
            if not self._marks.doubted(name) and (place := parse_copy_name(name)) is not None
        ]
        url = around.settings.global_url
        try:
            remote = Remote(url, around.settings.global_options)
            names = sorted(remote.names(), key=lambda name: parse_copy_name(name) or (-1, -1), reverse=True)
        except OSError as error:
            if needed or not near:
                raise CheckpointError(
                    f"the global tier {url} cannot be looked into: {error}; nothing was loaded, and the run"
                    " does not start anew while it may have checkpoints there"
                ) from error
            return {"brought": False, "note": f"the global tier {url} cannot be looked into: {error}"}
        known = {*self._tried, *around.tier.names()}
        for name in names:
            place = parse_copy_name(name) or (-1, -1)
            if place > above(near) and name not in known and not self._marks.doubted(name):
                self._tried.add(name)
                if self._fetch(remote, name):
                    return {"brought": True}
        return {"brought": False}

    def _fetch(self, remote: Remote, name: str) -> bool:
        around, began = self._around, time.monotonic()
        step = (parse_copy_name(name) or (-1, -1))[0]
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
