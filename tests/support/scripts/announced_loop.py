"""Does to an announced loop what each line of a pipe says, and answers with what it is told to do."""

from __future__ import annotations

import sys

from outlast.integrations.announcing import AnnouncedLoop

loop = AnnouncedLoop("a test")
with open(sys.argv[1]) as lines:
    for line in lines:
        name, *words = line.split()
        getattr(loop, name)(*(int(word) if word.isdigit() else word for word in words))
        with open(sys.argv[2], "a") as answers:
            answers.write(f"{name} {loop.should_save} {loop.should_stop}\n")
