"""The log of the first failed rank of an incident: where it is, and its end.

Names come from the event log, which anybody may have written who may write to the run folder. So a file is
opened folder by folder from the run folder on, and no symbolic link is followed on that way.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from outlast.observe.policy.goodput import Incident

MOST_BYTES = 1 << 20  # of the end of a log
STREAMS = {"stderr": "stderr.log", "stdout": "stdout.log", "error": "error.json"}
_MOST_FOLDERS = 10_000
_GENERATION = re.compile(r"gen-(\d{4,})", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def place(run_dir: Path, incident: Incident) -> tuple[str, ...]:
    """Return the folder of the rank's log files, as names below the run folder; (): there is none.

    After a restart in process the files are those of the generation in which the rank's process began.
    """
    if incident.rank < 0:
        return ()
    rank = f"rank-{incident.rank:05d}"
    for above in (("nodes", incident.node, "logs"), ("logs",)):
        if not all(map(_is_name, above)):
            continue
        for generation in _generations(run_dir, above, incident.generation):
            found = (*above, generation, rank)
            try:
                os.close(_opened(run_dir, found, _FOLDER))
            except OSError:
                continue
            return found
    return ()


def files(run_dir: Path, folder: Sequence[str]) -> dict[str, str]:
    """Return the log files in a rank's folder that are not empty: name of the stream, name of the file."""
    found = {}
    for stream, name in STREAMS.items():
        try:
            descriptor = _opened(run_dir, (*folder, name), _FILE)
        except OSError:
            continue
        status = os.fstat(descriptor)
        os.close(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size:
            found[stream] = name
    return found


def end(run_dir: Path, path: Sequence[str], most: int = MOST_BYTES) -> bytes:
    """Return the last bytes of a file.

    Args:
        run_dir: the run folder.
        path: names below it.
        most: bytes; of a longer file the first line that is returned is whole.

    Raises:
        OSError: a name is none of a single file or folder, one is a symbolic link, or it is no regular file.
    """
    descriptor = _opened(run_dir, path, _FILE)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{'/'.join(path)} is no regular file")
        begin = max(0, status.st_size - most)
        found = os.pread(descriptor, most, begin)
    finally:
        os.close(descriptor)
    return found.partition(b"\n")[2] or found if begin else found


def _is_name(text: str) -> bool:
    return bool(text) and text not in (".", "..") and "/" not in text and "\0" not in text


def _opened(run_dir: Path, path: Sequence[str], flags: int) -> int:
    """Open what is at the end of a way of names, none of which may be a symbolic link."""
    if not path or not all(map(_is_name, path)):
        raise OSError(f"{'/'.join(path)!r} is no path below the run folder")
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, name in enumerate(path):
        try:
            inner = os.open(name, flags if number == len(path) - 1 else _FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def _generations(run_dir: Path, above: Sequence[str], newest: int) -> list[str]:
    """Return the folders of generations up to one, the newest first."""
    try:
        folder = _opened(run_dir, above, _FOLDER)
    except OSError:
        return []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_FOLDERS)]
    except OSError:
        return []
    finally:
        os.close(folder)
    numbers = {int(match[1]): match[0] for name in names if (match := _GENERATION.fullmatch(name))}
    return [numbers[one] for one in sorted(numbers, reverse=True) if one <= newest]
