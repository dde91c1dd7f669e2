"""What the ranks of this node import, and the file that keeps it for the next launch.

A module counts if every rank of the node has imported it, after the same changes to the environment. The
order is that of the lowest rank. ``imports.json`` in the node's run folder keeps the modules that were
imported ahead without trouble; a file that another account could have written, or that does not fit the
interpreter, the script or the installed packages, is ignored with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast import files

FORMAT = 1  # of imports.json
_MOST_BYTES = 8 << 20
_MOST_NAMES = 20_000
_MOST_REASON = 200
Changes = Mapping[str, str | None]


@dataclass
class Learned:
    """The modules that ranks import, in order.

    Args:
        names: each with the index of its environment.
        changes: what the script had changed in its environment, by index; None: removed.
        places: file, size and time of each package.
        left_out: modules that ranks import themselves, and why.
    """

    names: dict[str, int] = field(default_factory=dict)
    changes: list[Changes] = field(default_factory=lambda: [{}])
    places: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, listings: Sequence[Mapping[str, Any]]) -> bool:
        """Add what the ranks of a generation listed; return whether anything is new."""
        first, *others = listings
        theirs = [
            {name: one["changes"][change] for name, change in one["names"] if change < len(one["changes"])}
            for one in others
        ]
        new = {
            name: len(self.changes) + change
            for name, change in first["names"][:_MOST_NAMES]
            if name not in self.names
            and all(name in one and one[name] == first["changes"][change] for one in theirs)
        }
        if new:
            self.changes += first["changes"]
            self.names |= new
            self.places |= first["places"]
        return bool(new)

    def leave_out(self, found: Mapping[str, str]) -> None:
        """Have ranks import modules themselves from now on."""
        for name, why in found.items():
            self.left_out.setdefault(name, why[:_MOST_REASON])

    def leave_out_package(self, top: str, why: str) -> None:
        """Have ranks import a whole package themselves."""
        self.leave_out({name: why for name in (top, *self.names) if name.partition(".")[0] == top})

    def wanted(self) -> list[tuple[str, int]]:
        """Return what is to be imported ahead."""
        return [(name, change) for name, change in self.names.items() if name not in self.left_out]


def listing(path: Path) -> dict[str, Any] | None:
    """Return what a rank listed in a file of the runtime folder; None: it is no such file."""
    try:
        found = json.loads(files.read_private(path, _MOST_BYTES))
        names = [(str(name), int(change)) for name, change in found["names"]]
        changes = [dict(one) for one in found["changes"]]
        places = {str(top): (str(place[0]), place[1], place[2]) for top, place in found["places"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if any(not 0 <= change < len(changes) for _, change in names):
        return None
    return {"names": names, "changes": changes, "places": places}


def keep(path: Path, learned: Learned, script: str, own: Sequence[str]) -> None:
    """Write what the next launch imports ahead.

    Values of variables are not written: the list ends at the first module that the script imports after it
    has changed any.

    Raises:
        OSError: the file system refused.
    """
    names = []
    for name, change in learned.wanted():
        if learned.changes[change]:
            break
        names.append(name)
    tops = {name.partition(".")[0] for name in names}
    document = {
        "format": FORMAT,
        "python": [sys.executable, sys.version],
        "script": script,
        "own": sorted(own),
        "places": {top: place for top, place in learned.places.items() if top in tops},
        "names": names,
    }
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w"
        ) as file:
            json.dump(document, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def kept(path: Path, script: str) -> tuple[Learned, Sequence[str], str]:
    """Read what an earlier launch has kept.

    Returns:
        what was learned; the names of variables that differ from rank to rank; why the file is ignored.
    """
    nothing: list[str] = []
    if not os.path.lexists(path):
        return Learned(), nothing, ""
    try:
        descriptor = files.open_regular(path)
        status = os.fstat(descriptor)
        why = _foreign(status)
        content = files.read_open(descriptor, path, _MOST_BYTES)
        document = {} if why else json.loads(content)
        why = why or _unfit(document, script)
        if not why:
            learned = Learned(places={top: tuple(place) for top, place in document["places"].items()})
            learned.names = {str(name): 0 for name in document["names"][:_MOST_NAMES]}
            return learned, [str(name) for name in document["own"]], ""
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        why = f"it is torn or another program wrote it ({type(error).__name__})"
    return Learned(), nothing, f"{path} is ignored: {why}; what the ranks import is learned again"


def _foreign(status: os.stat_result) -> str:
    """Return why a file may be another account's, "": it is not."""
    if status.st_uid != os.geteuid():
        return f"it belongs to uid {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it (its mode is {stat.S_IMODE(status.st_mode):o})"
    return f"it has {status.st_nlink} names (hard links)" if status.st_nlink > 1 else ""


def _unfit(document: Mapping[str, Any], script: str) -> str:
    """Return why a list does not fit this launch, "": it does."""
    if document.get("format") != FORMAT:
        return f"its format is {document.get('format')!r}, {FORMAT} is expected"
    if document["python"] != [sys.executable, sys.version]:
        return f"it was made with another interpreter ({document['python'][0]})"
    if document["script"] != script:
        return f"it was made for another script ({document['script']})"
    for top, (place, size, changed) in document["places"].items():
        try:
            status = os.stat(str(place))  # a number would be a descriptor
        except OSError:
            return f"{top} is no longer at {place}"
        if (status.st_size, status.st_mtime_ns) != (size, changed):
            return f"{top} has changed since"
    return ""
