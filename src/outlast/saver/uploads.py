"""Copies that go on to the global tier, one at a time, the newest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from outlast.checkpoint.tiers.memory_folder import Members
from outlast.checkpoint.tiers.remote import Remote
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.core.errors import CheckpointMismatch
from outlast.core.fields import DamagedCopy
from outlast.core.manifest import parse_copy_name
from outlast.core.retention import removals
from outlast.saver.durable import Task, Tasks


class Uploads:
    """Brings some of the copies on disk to the global tier.

    Args:
        members: say where to, and which.
        source: the durable folder.
        note: takes a sentence for the event log.
        ring: called when there is something to look at.
    """

    def __init__(
        self,
        members: Members,
        source: DirectoryTier,
        note: Callable[[str], None],
        ring: Callable[[], None],
    ) -> None:
        self._members = members
        self._url = members.global_url
        self._source = source
        self._note = note
        self._tasks = Tasks("uploads", ring)
        self._seen = 0
        self.newest = -1  # step of the newest copy that arrived
        self._next = ""
        self._began = 0.0

    @property
    def owed(self) -> frozenset[str]:
        """The copies that must stay on disk: they are on their way, or the next to go."""
        task = self._tasks.task
        return frozenset(filter(None, (self._next, task.name if task is not None else "")))

    def offer(self, name: str, last: bool = False) -> None:
        """Take note of a new copy on disk.

        Args:
            name: of the copy.
            last: it is the last one of the job, so it goes there in any case.
        """
        due = last or self._seen % self._members.global_every == 0
        self._seen += 0 if last else 1
        if not due or name in self.owed:
            return
        if self._next:
            self._note(f"{self._next} did not go to the global tier: it takes less than is to go there")
        self._next = name

    def look(self, avoid: tuple[str, ...]) -> None:
        """Take note of what was done, and begin with the next."""
        done = self._tasks.result()
        if done is not None and done.error:
            self._note(f"{done.task.name} did not go to the global tier {self._url}: {done.error}")
        elif done is not None:
            seconds = time.monotonic() - self._began
            self.newest = max(self.newest, (parse_copy_name(done.task.name) or (-1,))[0])
            self._note(
                f"{done.task.name} is in the global tier {self._url}: {done.value} bytes in {seconds:.1f} s"
            )
        if self._tasks.task is None and self._next:
            name, self._next, self._began = self._next, "", time.monotonic()
            self._tasks.begin(Task("upload", name, partial(self._upload, name, avoid)))

    def _upload(self, name: str, avoid: tuple[str, ...]) -> int:
        members = self._members
        remote = Remote(self._url, members.global_options)
        nbytes = remote.put(name, self._source)
        ours = [one for one in remote.names() if self._is_of(remote, one, members.run_id)]
        for removal in removals(ours, members.keep_last_n, {name}, avoid, members.keep_ancestors):
            remote.tier.discard(removal.name)
        return nbytes

    @staticmethod
    def _is_of(remote: Remote, name: str, run_id: str) -> bool:
        """Say whether a copy is a sound one of a run; others are not for retention to count or to remove."""
        try:
            return remote.manifest(name).run_id == run_id
        except (DamagedCopy, CheckpointMismatch):
            return False
