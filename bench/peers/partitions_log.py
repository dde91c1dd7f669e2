"""Checks the commits of bench/partitions.py: did two generations ever commit at once?

The lines of the file are in the order of the commits. Once a generation has committed, an older one must
not; and one generation is one set of ranks. There is one known window: a process that is stopped between
the request for the right and the write; the generation in a copy's name covers it. Such a commit is counted
separately, and only if the host was paused at that moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

STOPPED = 0.25  # seconds between asking and having written; it takes 0.1 ms, more where processors are few


@dataclass(frozen=True)
class Commit:
    """One line; times are seconds of the clock that all hosts share.

    Attributes:
        node, rank, world, master: the writer's place in the generation.
        before: when it asked for the right.
        after: when the line was written; None: the process ended in that moment.
    """

    generation: int
    node: str
    before: float
    after: float | None
    rank: int = 0
    world: int = 1
    master: str = ""


@dataclass(frozen=True)
class Pause:
    """A host's processes were stopped."""

    node: str
    start: float
    end: float


@dataclass
class Findings:
    """The results of one log.

    Attributes:
        overlaps: commits of a generation after a newer one, and generations with two sets of ranks.
        stopped_in_between: commits whose process was stopped between asking and writing, during a pause.
        stalled: commits that took as long without a pause of their host: the machine was busy.
    """

    commits: int = 0
    generations: list[int] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    stopped_in_between: list[str] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)


def read(lines: Iterable[str]) -> list[Commit]:
    """Return the commits in the order in which they were written.

    Raises:
        ValueError, KeyError: a line was not written by the worker.
    """
    written: dict[tuple[str, int, int, int], float] = {}
    found = []
    for line in map(json.loads, lines):
        key = (line["node"], line["pid"], line["generation"], line["number"])
        if "after" in line:
            written[key] = line["after"]
        else:
            found.append((key, line))
    return [
        Commit(
            one["generation"],
            one["node"],
            one["before"],
            written.get(key),
            one["rank"],
            one["world"],
            one["master"],
        )
        for key, one in found
    ]


def check(commits: Sequence[Commit], pauses: Sequence[Pause]) -> Findings:
    """Look for generations that committed at once.

    Args:
        commits: in the order in which they were written.
        pauses: of hosts, from the schedule.
    """
    found = Findings(len(commits), sorted({one.generation for one in commits}))
    youngest: Commit | None = None
    asked = 0.0  # by then, some earlier line had not been written
    seats: dict[tuple[int, int], str] = {}
    for commit in commits:
        asked = max(asked, commit.before)
        written = asked if commit.after is None else commit.after
        stopped = written - commit.before > STOPPED
        paused = stopped and any(_coincides(commit.node, commit.before, written, one) for one in pauses)
        if stopped:
            words = f"{commit} took {written - commit.before:.3f} s"
            (found.stopped_in_between if paused else found.stalled).append(words)
        if youngest is not None and commit.generation < youngest.generation and not paused:
            found.overlaps.append(f"{commit} after {youngest}")
        if youngest is None or commit.generation >= youngest.generation:
            youngest = commit
        found.overlaps += _twins(commit, seats)
    return found


def _coincides(node: str, start: float, end: float, pause: Pause) -> bool:
    return pause.node == node and pause.start <= end and start <= pause.end


def _twins(commit: Commit, seats: dict[tuple[int, int], str]) -> Iterable[str]:
    """Yield contradictions between the commits of a generation; -1 stands for all ranks."""
    parts = ((commit.rank, commit.node), (-1, f"{commit.world} rank(s) at {commit.master}"))
    for rank, says in parts:
        before = seats.setdefault((commit.generation, rank), says)
        if before != says:
            yield f"{commit}: generation {commit.generation} is {before}, too"
            seats[commit.generation, rank] = says
