"""Does to an announced loop what each line of a pipe says, and answers with what it is told to do.

A word ``when:PATH`` is a save in the background: it is complete when the file is there. ``imports`` makes a
collection of old objects due, as the import of a framework does; ``due`` answers whether one is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

from outlast.integrations.announcing import AnnouncedLoop, SaveState

loop = AnnouncedLoop("a test")


def argument(word: str) -> int | str | Callable[[], bool | None]:
    if word.startswith("when:"):
        written = Path(word.removeprefix("when:"))
        return lambda: SaveState.COMPLETED if written.exists() else SaveState.UNDER_WAY
    return int(word) if word.isdigit() else word


def due() -> bool:
    return gc.get_count()[2] > gc.get_threshold()[2]


def imports() -> None:
    gc.collect()
    for _ in range(1000):
        if due():
            break
        [[] for _ in range(1000)]


with open(sys.argv[1]) as lines:
    for line in lines:
        name, *words = line.split()
        if name == "imports":
            imports()
        elif name != "due":
            getattr(loop, name)(*map(argument, words))
        said = f"{due()}" if name in ("imports", "due") else f"{loop.should_save} {loop.should_stop}"
        with open(sys.argv[2], "a") as answers:
            answers.write(f"{name} {said}\n")
