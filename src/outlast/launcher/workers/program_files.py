"""A digest of the files of the user's program: whether a start failed with the files that trained before.

It is taken in a thread of its own, because the files may be on a file server that does not answer.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from outlast.launcher.command.options import ScriptKind, ScriptSpec

_MOST_ENTRIES = 5_000  # of folders, looked at
_MOST_BYTES = 16 << 20  # of files, read
_DIGITS = 16


def digest_of(script: ScriptSpec) -> str:
    """Return the digest of a script and of the sources beside it; empty: the program is no Python source.

    Of a large tree the first part counts, in the order of the names.

    Raises:
        OSError: a file cannot be read.
    """
    if script.kind is ScriptKind.COMMAND:
        return ""
    root = Path(os.path.realpath(script.target if script.kind is ScriptKind.FILE else "."))
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    left = _MOST_BYTES
    if root.is_file():
        left -= _add(found, root, root.name, left)
        root = root.parent
    for path in _sources(root):
        if left <= 0:
            break
        left -= _add(found, path, os.path.relpath(path, root), left)
    return found.hexdigest()


def _add(found: hashlib.blake2b, path: Path, name: str, most: int) -> int:
    with path.open("rb") as file:
        content = file.read(most)
    found.update(os.fsencode(name) + b"\0" + str(len(content)).encode() + b"\0" + content)
    return len(content)


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python sources below a folder, without hidden folders and installed packages."""
    left = _MOST_ENTRIES
    folders = [root]
    while folders and left > 0:
        with os.scandir(folders.pop(0)) as entries:
            names = sorted(entries, key=lambda one: one.name)
        left -= len(names)
        for one in names:
            if one.is_dir(follow_symlinks=False):
                if not one.name.startswith((".", "__pycache__")) and one.name != "site-packages":
                    folders.append(Path(one.path))
            elif one.name.endswith(".py") and one.is_file():
                yield Path(one.path)


class ProgramFiles:
    """Takes the digest when a generation starts.

    Args:
        script: the program.
    """

    def __init__(self, script: ScriptSpec) -> None:
        self._script = script
        self._found: list[str] = []
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Have the digest taken anew; while the file system does not answer, it is unknown."""
        found: list[str] = []
        self._found = found
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._read, args=(found,), name="program", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this node limits threads: the digest stays unknown
            self._thread = None

    @property
    def digest(self) -> str:
        """The digest; empty: unknown."""
        return self._found[0] if self._found else ""

    def _read(self, found: list[str]) -> None:
        try:
            found.append(digest_of(self._script))
        except (OSError, ValueError):  # an outage, or a name that no file can have
            return
