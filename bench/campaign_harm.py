"""How a campaign damages files, and the events in its folders at which it kills or stops processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import struct
from collections import Counter
from pathlib import Path

from campaign_job import Setup
from campaign_oracle import Copies

PAGE = 4096
_CREATE, _MOVED_FROM, _MOVED_TO, _ONLY_FOLDER = 0x100, 0x40, 0x80, 0x01000000
_LIBC = ctypes.CDLL(None, use_errno=True)
WAYS = ("bit flipped", "bit flipped", "page zeroed", "truncated", "deleted")

MOMENTS = (
    "a staging begins",
    "a record is left",
    "a copy is sealed",
    "a copy is in memory",
    "a copy gives way in memory",
    "a copy begins on disk",
    "a file is on disk",
    "a copy is on disk",
)


def spoil(dice: random.Random, copy: Path, copies: Copies) -> str:
    """Damage one file of a copy; return what was done.

    A file that cannot be damaged (it is empty, or already zero) is deleted.

    Raises:
        OSError: the copy is being removed.
    """
    files = sorted(path for path in copy.iterdir() if path.suffix != ".staged")
    if not files:
        raise FileNotFoundError(copy)
    path = dice.choice([*files, *[one for one in files if one.suffix == ".safetensors"] * 4])
    way, content = dice.choice(WAYS), path.read_bytes()
    pages = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]
    copies.note(path)
    if not content or (way == "page zeroed" and not pages):
        way = "deleted"
    if way == "bit flipped":
        bit = dice.randrange(len(content) * 8)
        _write(path, bit // 8, bytes([content[bit // 8] ^ 1 << bit % 8]))
        way = f"bit {bit} flipped"
    elif way == "page zeroed":
        begin = dice.choice(pages)
        _write(path, begin, bytes(len(content[begin : begin + PAGE])))
        way = f"page at {begin} zeroed"
    elif way == "truncated":
        size = dice.randrange(len(content))
        os.truncate(path, size)
        way = f"truncated to {size}"
    else:
        path.unlink()
    return f"{path.name} {way}"


def _write(path: Path, begin: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content)


class Moments:
    """Counts the events in the folders of a campaign, as inotify reports them.

    Args:
        setup: of the campaign.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._places: dict[int, tuple[str, Path]] = {}
        self.counts: Counter[str] = Counter()
        self.look()

    def fileno(self) -> int:
        return int(self._descriptor)

    def look(self) -> None:
        """Watch the folders that exist."""
        memory = self._setup.memory
        for kind, path in (("staged", memory / "staged"), ("memory", memory / "memory")):
            self._watch(kind, path)
        self._watch("root", memory)
        self._watch("disk", self._setup.disk)

    def _watch(self, kind: str, path: Path) -> None:
        flags = _CREATE | _MOVED_FROM | _MOVED_TO | _ONLY_FOLDER
        number = _LIBC.inotify_add_watch(self._descriptor, os.fsencode(path), flags)
        if number >= 0:
            self._places[number] = (kind, path)

    def hear(self) -> list[str]:
        """Return the new events."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            content = os.read(self._descriptor, 1 << 16)
            while content:
                number, mask, _, length = struct.unpack_from("iIII", content)
                name = content[16 : 16 + length].rstrip(b"\0").decode()
                content = content[16 + length :]
                if number in self._places:
                    found += self._moment(*self._places[number], mask, name)
        self.counts.update(found)
        return found

    def _moment(self, kind: str, folder: Path, mask: int, name: str) -> list[str]:
        arrived, moment = mask & (_CREATE | _MOVED_TO), ""
        if kind == "root" and arrived:
            self.look()
        elif kind == "staged" and mask & _CREATE:
            self._watch("staging", folder / name)
            moment = "a staging begins"
        elif kind == "staging" and arrived:
            sealed = "a copy is sealed" if name == "COMMIT" else ""
            moment = "a record is left" if name.endswith(".staged") and mask & _MOVED_TO else sealed
        elif kind == "memory":
            moment = "a copy is in memory" if arrived else "a copy gives way in memory"
        elif kind == "disk" and name.startswith(".tmp-") and mask & _CREATE:
            self._watch("writing", folder / name)
            moment = "a copy begins on disk"
        elif kind == "disk" and name.startswith("step-") and mask & _MOVED_TO:
            moment = "a copy is on disk"
        elif kind == "writing" and arrived:
            moment = "a file is on disk"
        return [moment] if moment else []

    def close(self) -> None:
        os.close(self._descriptor)
