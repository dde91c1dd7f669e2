"""What the launcher says on the screen: short lines on stderr, each with what happens next."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from outlast.agent.screen import Screen, descriptor_of
from outlast.core.events import Fault

PREFIX = "[outlast]"


class Console:
    """Makes lines for people.

    Args:
        screen: writes them.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Show one message, each of its lines with the prefix and the seconds since the start."""
        since = f"{time.monotonic() - self._began:8.2f}s"
        lines = "".join(f"{PREFIX} {since}  {line}\n" for line in text.splitlines())
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._screen.say(descriptor_of(sys.stderr), lines.encode(encoding, "backslashreplace"))

    def line(self, text: str) -> None:
        """Show one line as it is, without the prefix: it is for programs."""
        self._screen.say(descriptor_of(sys.stderr), f"{text}\n".encode(errors="backslashreplace"))

    def fault(self, fault: Fault, log: Path | None, error: str, follows: str) -> None:
        """Show the first failed rank, its exception, its log and what follows."""
        lines = [f"FAULT {fault.kind.value}: {fault.reason}"]
        if error:
            lines += [f"  | {line}" for line in error.rstrip().splitlines()[-12:]]
        lines += [f"  {name}: {value}" for name, value in fault.evidence]
        if log is not None and str(log) != os.devnull:
            lines.append(f"  log: {log}")
        lines.append(f"  -> {follows}")
        self.say("\n".join(lines))
