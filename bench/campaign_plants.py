"""Bugs that are planted into the processes of a campaign, to show that its oracle finds them.

Each bug replaces one function of the product in this process. The ranks inherit it by the fork; the
checkpoint writer, a separate program, plants the same bug when it starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outlast.checkpoint import writer_process

BETWEEN_RANKS = 0.03  # seconds
_PROGRAM = (
    "import sys; sys.path[:1] = [{folder!r}]; import campaign_plants; campaign_plants.plant({name!r});"
    " from outlast.checkpoint.writer.__main__ import main;"
    " sys.exit(main(*sys.argv[1:]))"
)


def plant(name: str) -> None:
    """Plant a bug in this process and in the writers that it and its children start."""
    PLANTS[name]()
    writer_process._PROGRAM = _PROGRAM.format(folder=str(Path(__file__).resolve().parent), name=name)


def _in_ranks() -> bool:
    return "torch" in sys.modules


class _EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def no_digests() -> None:
    """The loader does not compare the digests of the tensors."""
    if _in_ranks():
        from outlast.checkpoint.load import reading

        reading.chunk_digest = lambda _: _EqualToAll()  # type: ignore[assignment,return-value]


def stale_bytes() -> None:
    """A rank leaves out the last tensor of a state, so a buffer keeps its old bytes."""
    if _in_ranks():
        from outlast.checkpoint.content.transfers import CopyPlan

        whole: Callable[..., CopyPlan] = CopyPlan.of
        CopyPlan.of = lambda tensors, begins: whole(tensors[:-1], begins[:-1])  # type: ignore[method-assign,assignment]


def older_first() -> None:
    """Ranks prefer an older copy over the newest."""
    if _in_ranks():
        from outlast.checkpoint.load import restorer

        right = restorer.resolve

        def reversed_plans(*given: Any) -> Any:
            found = right(*given)
            return replace(found, plans=found.plans[::-1])

        restorer.resolve = reversed_plans


def fresh_start() -> None:
    """A run without an intact copy starts from scratch."""
    if _in_ranks():
        from outlast.checkpoint.checkpointer import Restorer
        from outlast.errors import NoUsableCheckpoint

        right = Restorer.restore

        def forgiving(*given: Any) -> Any:
            try:
                return right(*given)
            except NoUsableCheckpoint:
                return None

        Restorer.restore = forgiving  # type: ignore[method-assign]


def hasty_commit() -> None:
    """The writer commits when the first rank's record exists, without those of the others.

    The other ranks write theirs later here, so that the bug has an effect.
    """
    if _in_ranks():
        from outlast.checkpoint.save.staging import Stager

        leave: Callable[..., None] = Stager._leave_record

        def later(self: Stager, *given: Any) -> None:
            if self._identity.rank:
                time.sleep(BETWEEN_RANKS)
            leave(self, *given)

        Stager._leave_record = later  # type: ignore[method-assign]

    from outlast.checkpoint.writer.committer import CopyCommitter

    right: Callable[..., Any] = CopyCommitter._first_record

    def of_those_there(self: CopyCommitter, folder: Path) -> Any:
        found = right(self, folder)
        if found is not None and found.get("ranks"):
            there = [rank for rank in found["ranks"] if self.stage.record(folder, rank, found["world_size"])]
            found = {**found, "ranks": there}
        return found

    CopyCommitter._first_record = of_those_there  # type: ignore[method-assign]


def newest_pruned() -> None:
    """Retention removes the newest copy on disk together with the oldest."""
    from outlast.checkpoint.policy.resolve import Removal
    from outlast.checkpoint.tiers import inventory

    right = inventory.removals

    def and_the_newest(names: Any, *given: Any) -> Any:
        names = list(names)
        return (*right(names, *given), Removal(max(names), "planted")) if len(names) > 1 else ()

    inventory.removals = and_the_newest


def no_drain() -> None:
    """The writer of an owner that has ended does not bring the newest copy to disk."""
    from outlast.checkpoint.writer.committer import CopyCommitter

    CopyCommitter.finish = lambda _: None  # type: ignore[method-assign]
    CopyCommitter.keep_for_later = lambda _: False  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "no-digests": no_digests,
    "stale-bytes": stale_bytes,
    "older-first": older_first,
    "fresh-start": fresh_start,
    "hasty-commit": hasty_commit,
    "newest-pruned": newest_pruned,
    "no-drain": no_drain,
}
SHOWS = {  # with what a verdict of a campaign with that bug begins
    "no-digests": ("wrong bytes", "not whole"),
    "stale-bytes": ("wrong bytes",),
    "older-first": ("too old",),
    "fresh-start": ("fresh start",),
    "hasty-commit": ("error", "lost", "too old", "refused", "left"),
    "newest-pruned": ("lost", "too old", "left"),
    "no-drain": ("lost", "too old"),
}
