"""Runs as their pages show them, from logs that may still grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outlast.errors import UsageError
from outlast.observe import runs
from outlast.observe.dashboard import logs
from outlast.observe.dashboard.document import RankLog, Shown
from outlast.observe.following import RunFollower
from outlast.observe.policy.now import Now
from outlast.observe.policy.page import History, Numbered, View
from outlast.recovery.policy.events import Record

MOST_RUNS = 20
_RECENT = 16 << 20  # bytes at the end of a log of which every line is read: a week of progress
_REST = 10.0  # times as long as a view took, until the next one is made
_MOST_REST = 60.0  # seconds
_LOOK_AGAIN = 5.0  # seconds, after which folders are searched for new runs

Links = Callable[[int, str], str]  # number of an incident, stream


class _PageFollower(RunFollower):
    """Follows a run and keeps what its page needs."""

    changes = 0  # records that were taken

    def _begin(self) -> None:
        super()._begin()
        self.history = History()

    def _take(self, record: Record, name: str) -> None:
        super()._take(record, name)
        self.history.take(record, name)
        self.changes += 1


class Reader:
    """Reads one run.

    Args:
        run_dir: the run folder.
        name: shown for it.
        link: of its own page; empty: it has none.
        links: where the page gets the logs of ranks; None: nowhere.
    """

    def __init__(self, run_dir: Path, name: str, link: str = "", links: Links | None = None) -> None:
        self.run_dir = run_dir
        self.name = name
        self._link = link
        self._links = links
        self._follower = _PageFollower(run_dir, recent=_RECENT)
        self._now, self._view = Now(), View()
        self._logs: Mapping[int, Sequence[RankLog]] = {}
        self._seen = -1  # changes at the latest view
        self._due = 0.0
        self._trouble = ""

    def poll(self, clock: Callable[[], float]) -> None:
        """Read what was appended; the ledger is made again when something was, and not too often.

        A run that cannot be read keeps what was read last.

        Args:
            clock: monotonic seconds.
        """
        try:
            self._now = self._follower.poll()
            self._trouble = ""
        except UsageError as error:
            self._trouble = str(error)
            return
        began = clock()
        if self._follower.changes != self._seen and began >= self._due:
            self._seen = self._follower.changes
            self._view = self._follower.history.view()
            self._logs = {one.number: found for one in self._view.incidents if (found := self._logs_of(one))}
            self._due = clock() + min(_MOST_REST, _REST * (clock() - began))

    @property
    def state(self) -> tuple[object, ...]:
        """Equal as long as :meth:`shown` returns the same, apart from its time."""
        follower = self._follower
        return follower.changes, self._seen, follower.skipped, follower.unknown, self._trouble

    def shown(self, wall: float) -> Shown:
        """Return the run as it was read last."""
        return Shown(
            self.name,
            self._now,
            self._view,
            wall,
            logs=self._logs,
            skipped=self._follower.skipped,
            unknown=self._follower.unknown,
            trouble=self._trouble,
            link=self._link,
        )

    def incident(self, number: int) -> Numbered | None:
        """Return an incident that the page shows; None: it shows none of that number."""
        return next((one for one in self._view.incidents if one.number == number), None)

    def _logs_of(self, one: Numbered) -> list[RankLog]:
        if self._links is None or one.incident.rank < 0:
            return []
        folder = logs.place(self.run_dir, one.incident)
        found = logs.files(self.run_dir, folder) if folder else {}
        return [
            RankLog("/".join((*folder, name)), self._links(one.number, stream))
            for stream, name in found.items()
        ]


class Watch:
    """Reads several runs.

    Args:
        places: run folders, and folders of run folders, in which new ones are looked for.

    Attributes:
        readers: of the runs, in the order in which they were found.
        left_out: runs beyond ``MOST_RUNS``.
        several: there may be more than one run.

    Raises:
        UsageError: there is no run.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._looked = -_LOOK_AGAIN
        self.readers: list[Reader] = []
        self.left_out = 0
        self.several = len(places) > 1 or runs.newest_change(places[0]) is None
        self._look(0.0)
        if not self.readers:
            named = ", ".join(map(str, places))
            raise UsageError(
                f"{named}: no run folder is there or in it; name the folder that outlast run was given as"
                f" --run-dir, or the one above it{runs.nearby(places[0])}"
            )

    def poll(self, clock: Callable[[], float]) -> None:
        """Read what was appended to all runs, and look for new ones."""
        self._look(clock())
        for one in self.readers:
            one.poll(clock)

    def _look(self, now: float) -> None:
        if now - self._looked < _LOOK_AGAIN:
            return
        self._looked = now
        known = {one.run_dir for one in self.readers}
        found = [path for place in self._places for path in self._runs_at(place) if path not in known]
        room = MOST_RUNS - len(self.readers)
        self.left_out = max(0, len(found) - room)
        for path in found[: max(0, room)]:
            number = len(self.readers)
            name = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
            self.readers.append(Reader(path, name, f"/run/{number}", _links(number)))

    @staticmethod
    def _runs_at(place: Path) -> list[Path]:
        here = place.absolute()
        return [here] if runs.newest_change(here) is not None else runs.find(here)


def _links(run: int) -> Links:
    return lambda number, stream: f"/run/{run}/log/{number}/{stream}"
