"""Has a zygote import ahead what the ranks import, while they train: the next restart forks from it.

A zygote that had to leave something out, ends, or makes no progress is replaced by one that leaves more out,
a few times. Until one is ready, restarts fork from the zygote that is there.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast import files
from outlast.launcher.workers import learned
from outlast.launcher.workers.generation import LaunchContext
from outlast.launcher.workers.head_start import KEPT
from outlast.launcher.workers.learned import Learned
from outlast.launcher.workers.zygote import Zygote
from outlast.recovery.policy.events import ImportsSeen

_LOOK_EVERY = 1.0  # seconds
_STUCK_AFTER = 60.0  # seconds without a new import
_TORCH_WITHIN = 600.0  # seconds for what every zygote imports
_MOST_IN_A_ROW = 6  # zygotes that could not be used
_MOST = 20  # zygotes of a launch
_CAUSES = 3  # on the console
_SHOWN = 20  # modules left out, in the event log
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Imported:
    """What a zygote has imported ahead; see :class:`outlast.recovery.policy.events.ImportedAhead`."""

    modules: int
    seconds: float
    left_out: dict[str, str]
    reason: str


@dataclass
class _Attempt:
    """A zygote that imports ahead, and the files that it writes."""

    progress: Path
    result: Path
    began: float
    looked_at: float
    changed: float
    state: tuple[int, bytes] = (0, b"")

    def stuck(self, now: float, patience: float) -> bool:
        """Return whether no import has begun or ended for too long."""
        if now - self.looked_at < _LOOK_EVERY:
            return False
        self.looked_at = now
        found = self._state()
        if found != self.state:
            self.state, self.changed = found, now
        return now - self.changed > (patience if found[0] else _TORCH_WITHIN)

    def under_way(self) -> list[str]:
        """Return the imports that have begun and have not ended, the outermost first."""
        return self._state()[1].decode(errors="replace").split()

    def _state(self) -> tuple[int, bytes]:
        try:
            return self.progress.lstat().st_mtime_ns, files.read_whole(self.progress, _MOST_BYTES)
        except OSError:
            return 0, b""


class Warming:
    """Starts and watches zygotes that import ahead; one at a time.

    Args:
        around: the launcher's options and folders.
        start: starts a zygote with a plan, for ranks that wait (False) or behind those that run (True).
        selector: the zygote's socket is registered here.
        owner: the data of that registration.
        patience: seconds without a new import after which a module is taken for stuck.
    """

    def __init__(
        self,
        around: LaunchContext,
        start: Callable[[str, bool], Zygote],
        selector: selectors.BaseSelector,
        owner: object,
        patience: float = _STUCK_AFTER,
    ) -> None:
        self._around = around
        self._start = start
        self._selector = selector
        self._owner = owner
        self._patience = patience
        self._script = os.path.abspath(around.options.script.target)
        self._file = around.folder.own / KEPT
        self._listings: dict[int, dict[str, Any]] = {}
        self._generation = 0
        self._zygote: Zygote | None = None
        self._ready: Imported | None = None
        self._attempt: _Attempt | None = None
        self._first: _Attempt | None = None
        self._started = self._failed = 0
        self._due = False
        self.news: list[Imported] = []
        self.problems: list[str] = []
        self.originals: Mapping[str, str | None] = {}
        nothing: tuple[Learned, Sequence[str], str] = (Learned(), (), "")
        found = nothing
        if around.options.warm_imports:
            found = around.files.ask(lambda: learned.kept(self._file, self._script), nothing)
        self._learned, self.own, why = found
        if why:
            self.problems.append(why)

    @property
    def pids(self) -> tuple[int, ...]:
        """The zygote that imports ahead, if there is one."""
        return () if self._zygote is None else (self._zygote.pid,)

    def first_plan(self) -> str:
        """Return the plan of a launch's first zygote: what an earlier launch has kept; "": nothing."""
        if self._started or not self._learned.wanted():
            return ""
        try:
            path, self._first = self._plan(time.monotonic())
        except OSError as error:
            self.problems.append(f"nothing is imported ahead: {error.strerror}")
            return ""
        return path

    def first_done(self, left_out: bool) -> bool:
        """Take what the first zygote has done; return whether it may be used."""
        first, self._first = self._first, None
        if first is None:
            return True
        found = _result(first.result)
        if not left_out and found is not None:
            self.news.append(found)
            return True
        self._give_up_kept("not all of it can be imported ahead any more")
        return False

    def first_is_stuck(self, now: float) -> bool:
        """Return whether the first zygote makes no progress with what an earlier launch has kept."""
        return self._first is not None and self._first.stuck(now, self._patience)

    def first_lost(self) -> None:
        """Ignore what an earlier launch has kept: the zygote that imported it has ended."""
        if self._first is not None:
            self._first = None
            self._give_up_kept("the zygote that imported it ended or made no progress")

    def _give_up_kept(self, why: str) -> None:
        self.problems.append(f"{self._file} is ignored: {why}; what the ranks import is learned again")
        self._learned = Learned()

    def learn(self, seen: ImportsSeen, ranks: Sequence[int]) -> None:
        """Take what a rank of this node lists; a zygote follows when all ranks have."""
        if seen.generation != self._generation:
            self._generation, self._listings = seen.generation, {}
        path = self._around.runtime / f"imports-{seen.generation}-{seen.rank}.json"
        found = learned.listing(path)
        if found is None:
            return
        self._listings[seen.rank] = found
        if all(rank in self._listings for rank in ranks):
            self._due |= self._learned.add([self._listings[rank] for rank in ranks])

    def leave_out(self, package: str, why: str) -> bool:
        """Have ranks import a package themselves, which one could not use; return whether that is new."""
        news = package not in self._learned.left_out
        if news:
            self._learned.leave_out_package(package, why)
            self.again()
        return news

    def again(self) -> None:
        """Start over: the zygote that is used was not started for what is known now."""
        self._drop()
        self._due = bool(self._learned.wanted())

    def deadline(self) -> float | None:
        """Return when :meth:`tick` has work."""
        watched = [one for one in (self._attempt, self._first) if one is not None and self._ready is None]
        return min((one.looked_at + _LOOK_EVERY for one in watched), default=None)

    def tick(self, now: float) -> None:
        """Start a zygote if one is due, and give up one that makes no progress."""
        if self._due and self._zygote is None:
            self._begin(now)
        attempt = self._attempt
        if attempt is not None and self._ready is None and attempt.stuck(now, self._patience):
            self._lost(f"its import made no progress for {self._patience:.0f} s")

    def _begin(self, now: float) -> None:
        self._due = False
        if self._started >= _MOST or self._failed >= _MOST_IN_A_ROW or not self._learned.wanted():
            return
        try:
            path, self._attempt = self._plan(now)
            self._zygote = self._start(path, True)
        except OSError as error:
            self.problems.append(f"nothing is imported ahead: {error.strerror}")
            self._attempt, self._failed = None, _MOST_IN_A_ROW
            return
        self._selector.register(self._zygote, selectors.EVENT_READ, self._owner)

    def _plan(self, now: float) -> tuple[str, _Attempt]:
        self._started += 1
        folder, number = self._around.runtime, self._started
        attempt = _Attempt(folder / f"importing-{number}", folder / f"imported-{number}.json", now, now, now)
        plan = {
            "names": self._learned.wanted(),
            "changes": self._learned.changes,
            "originals": dict(self.originals),
            "own": list(self.own),
            "progress": str(attempt.progress),
            "result": str(attempt.result),
        }
        path = folder / f"plan-{number}.json"
        path.write_text(json.dumps(plan))
        return str(path), attempt

    def answers(self) -> None:
        """Read what the zygote says."""
        zygote, attempt = self._zygote, self._attempt
        if zygote is None or attempt is None:
            return
        found = zygote.answers()
        if found is None:
            self._lost("its import ends the process")
            return
        for answer in found:
            result = _result(attempt.result)
            if result is None or answer.get("obstacle"):
                self.problems.append(f"nothing is imported ahead: {answer.get('obstacle') or 'no result'}")
                self._failed = _MOST_IN_A_ROW
                self._drop()
                return
            if answer.get("left_out"):
                self._learned.leave_out(result.left_out)
                self._failed += 1
                self._drop()
                self._due = True
                return
            self._ready = result

    def _lost(self, why: str) -> None:
        """Leave out what was being imported."""
        names = [] if self._attempt is None else self._attempt.under_way()
        self._drop()
        self._failed += 1
        if names:
            self._learned.leave_out({names[-1]: why, **dict.fromkeys(names[:-1], f"it imports {names[-1]}")})
            self._due = True
        else:
            self.problems.append("nothing is imported ahead: the zygote that should do it ended")

    def take(self) -> Zygote | None:
        """Return a zygote that has imported everything, once; it is the caller's from then on."""
        zygote, ready = self._zygote, self._ready
        if zygote is None or ready is None:
            return None
        self._zygote = self._attempt = self._ready = None
        self._failed = 0
        left_out = dict(list(self._learned.left_out.items())[:_SHOWN])
        self.news.append(Imported(ready.modules, ready.seconds, left_out, _words(ready, self._learned)))
        known, own = self._learned, tuple(self.own)
        self._around.files.hand(lambda: learned.keep(self._file, known, self._script, own), self._file)
        return zygote

    def _drop(self) -> None:
        """End the zygote that imports."""
        zygote, self._zygote = self._zygote, None
        self._attempt = self._ready = None
        if zygote is not None:
            self._selector.unregister(zygote)
            zygote.end()
            self._around.family.drop(zygote.process)

    def close(self) -> None:
        """End what runs, and start nothing more."""
        self._first = None
        self._drop()
        self._due, self._failed = False, _MOST_IN_A_ROW


def _result(path: Path) -> Imported | None:
    """Return what a zygote wrote."""
    try:
        found = json.loads(files.read_whole(path, _MOST_BYTES))
        left_out = {str(name): str(why) for name, why in found["left_out"].items()}
        ready = Imported(int(found["modules"]), float(found["seconds"]), left_out, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Imported(ready.modules, ready.seconds, left_out, _words(ready, None))


def _words(ready: Imported, known: Learned | None) -> str:
    """Say what was imported ahead, and the first modules that were not."""
    text = f"{ready.modules} modules that the ranks import were imported ahead ({ready.seconds:.1f} s)"
    left_out = {} if known is None else known.left_out
    causes = [f"{name}: {why}" for name, why in left_out.items() if not why.startswith("it imports ")]
    more = len(left_out) - min(len(causes), _CAUSES)
    shown = "; ".join(causes[:_CAUSES]) + (f"; and {more} more" if more else "")
    return f"{text}; left to the ranks: {shown}" if left_out else text
