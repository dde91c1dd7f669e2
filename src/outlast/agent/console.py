"""What the launcher says on the screen: short lines on stderr, each with what happens next."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from outlast.core.events import Action, Fault, Rung

PREFIX = "[outlast]"


class Console:
    """Writes lines for people; a closed terminal is no reason to end a job."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._closed = False

    def say(self, text: str) -> None:
        """Write one message, each of its lines with the prefix and the seconds since the start."""
        if self._closed:
            return
        since = f"{time.monotonic() - self._began:8.2f}s"
        try:
            for line in text.splitlines():
                sys.stderr.write(f"{PREFIX} {since}  {line}\n")
            sys.stderr.flush()
        except OSError:
            self._closed = True

    def fault(self, fault: Fault, log: Path | None, error: str, action: Action) -> None:
        """Show the first failed rank, its exception, its log and what the launcher does about it."""
        lines = [f"FAULT {fault.kind.value}: {fault.reason}"]
        if error:
            lines += [f"  | {line}" for line in error.rstrip().splitlines()[-12:]]
        lines += [f"  {name}: {value}" for name, value in fault.evidence]
        if log is not None:
            lines.append(f"  log: {log}")
        verb = "stop" if action.rung is Rung.STOP else action.rung.value
        lines.append(f"  -> {verb}: {action.reason}")
        self.say("\n".join(lines))
