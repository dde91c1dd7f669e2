"""The status line of ``outlast run``: one line below all others on a terminal, and nothing anywhere else."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.output.screen import PREFIX, Screen, descriptor_of

if TYPE_CHECKING:
    from outlast.observe.policy.now import Now

_EVERY = 1.0  # seconds; progress is in the event log every 5 s
_USUAL = 80  # columns of a terminal that does not say
_NARROWEST = 40  # columns; a line that is wrapped could not be removed


class StatusLine:
    """Keeps the line up to date.

    It is shown where standard error is a terminal that can erase a line, and where all that the ranks write
    comes through the launcher: with ``--redirects`` or ``--tee`` they may write to the terminal themselves.
    A job in the background shows nothing, since the line of the shell's prompt is where it would be.

    Args:
        screen: writes it.
        view: returns what the run does now.
        options: the command line.
        environment: of the launcher; ``TERM=dumb`` is a terminal that cannot erase a line.
    """

    def __init__(
        self, screen: Screen, view: Callable[[], Now], options: LaunchOptions, environment: Mapping[str, str]
    ) -> None:
        self._screen = screen
        self._view = view
        self._terminal = descriptor_of(sys.stderr)
        direct = options.logs.redirects is not None or options.logs.tee is not None
        dumb = environment.get("TERM", "") in ("", "dumb")
        is_terminal = self._terminal >= 0 and os.isatty(self._terminal)
        self._due = math.inf if direct or dumb or not is_terminal else 0.0

    def look(self, now: float) -> None:
        """Show what the run does now, once a second."""
        if now < self._due:
            return
        self._due = now + _EVERY
        if not self._in_foreground():
            self._screen.drop_status()
            return
        width = self._columns() - 1
        text = line(self._view(), time.time(), width) if width >= _NARROWEST - 1 else ""
        self._screen.status(self._terminal, text.encode("ascii", "replace"))

    def close(self) -> None:
        """Remove the line for good."""
        if self._due < math.inf:
            self._due = math.inf
            if self._in_foreground():
                self._screen.status(self._terminal, b"")
            else:
                self._screen.drop_status()

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # it is not the terminal of this session, or is gone
            return False

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._terminal).columns or _USUAL
        except OSError:
            return _USUAL


def line(now: Now, wall: float, width: int) -> str:
    """Return the line, at most ``width`` characters; empty after the end.

    Before the first step of a generation it is empty, too, unless the next start waits. What has no room is
    left out from the end: step, rate, time left, restarts, checkpoint.
    """
    from outlast.observe import top

    waits = now.starts_at > wall
    if now.end is not None or (now.step < 0 and not waits):
        return ""
    total = f" of {now.total}" if now.total > 0 else ""
    parts = [f"step {now.step}{total}{top.counted(now.source)}"] if now.step >= 0 else []
    training = now.state.value == "training"
    if not training:
        parts.append(top.doing(now, wall))
    elif now.rate is not None:
        parts.append(top.rate(now.rate))
        if (left := now.seconds_left) is not None:
            parts.append(f"{top.ago(left)} left")
    if now.restarts:
        parts.append(f"{now.restarts} restart{'' if now.restarts == 1 else 's'}")
    parts += [f"saved {one.step} {top.ago(wall - one.time)} ago" for one in now.checkpoints]
    text = f"{PREFIX} {parts[0]}"
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text += f", {part}"
    return text[:width]
