"""Does to an announced loop what each line of a pipe says, and answers with what it is told to do.

A word ``when:PATH`` is a save in the background: it is complete when the file is there.
"""

from __future__ import annotations

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


with open(sys.argv[1]) as lines:
    for line in lines:
        name, *words = line.split()
        getattr(loop, name)(*map(argument, words))
        with open(sys.argv[2], "a") as answers:
            answers.write(f"{name} {loop.should_save} {loop.should_stop}\n")
