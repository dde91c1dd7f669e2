"""Run folders near a place: what ``outlast report`` lists, and what an error about a missing run names."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

DEFAULT = "outlast-runs"  # the folder in which outlast run makes run folders
_MOST_ENTRIES = 10_000  # of a folder that are looked at
_NAMED = 5  # runs that an error names


def find(place: Path) -> list[Path]:
    """Return the run folders in a folder, newest first.

    These are the folder itself, those in it, and those in its ``outlast-runs``. A folder that cannot be
    read is passed over. The age is that of the newest event log.
    """
    places = [place, *_folders(place), *_folders(place / DEFAULT)]
    found = {path: age for path in dict.fromkeys(places) if (age := newest_change(path)) is not None}
    return sorted(found, key=lambda path: (-found[path], path))


def newest_change(run_dir: Path) -> float | None:
    """Return the wall time of the newest change of a run's event logs, or of run.json; None: it is no run."""
    files = [run_dir / "events.jsonl", *run_dir.glob("nodes/*/events.jsonl")]
    return max(
        (at for one in files if (at := _changed(one)) is not None), default=_changed(run_dir / "run.json")
    )


def nearby(run_dir: Path) -> str:
    """Return the rest of an error about a run that is not there: the runs beside it; "": there are none."""
    place = run_dir.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    here = Path.cwd()
    found = dict.fromkeys(path for folder in (place, here) for path in find(folder))
    if not found:
        return ""
    shown = [os.path.relpath(path) if path.is_relative_to(here) else str(path) for path in found]
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return f"; runs nearby, newest first: {', '.join(shown[:_NAMED])}{more}"


def _folders(place: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in itertools.islice(entries, _MOST_ENTRIES):
            if entry.is_dir():
                yield Path(entry.path)


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
