"""Whether the generations of a job were fenced: who committed what, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Commit:
    """A generation brought a step to disk."""

    at: float
    node: str
    generation: int
    step: int
    session: str = ""


def overlaps(commits: Iterable[Commit]) -> list[str]:
    """Return where a generation committed after a younger one had, or two jobs committed under one number."""
    found = []
    youngest: Commit | None = None
    jobs: dict[int, str] = {}
    for commit in sorted(commits, key=lambda one: one.at):
        if youngest is not None and commit.generation < youngest.generation:
            found.append(f"{commit} after {youngest}")
        if jobs.setdefault(commit.generation, commit.session) != commit.session:
            found.append(f"{commit} beside the job of {jobs[commit.generation]}")
        if youngest is None or commit.generation >= youngest.generation:
            youngest = commit
    return found
