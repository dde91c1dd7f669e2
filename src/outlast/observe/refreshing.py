"""What is shown or written again and again until Ctrl-C, and the option that says how often."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

_LONGEST = 3600.0  # seconds


def until_ctrl_c(show: Callable[[], object], interval: float) -> None:
    """Call ``show`` now and then every ``interval`` seconds; return on Ctrl-C. What it raises is raised."""
    try:
        while True:
            show()
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def seconds_from(least: float) -> Callable[[str], float]:
    """Return argparse's reader of an interval of ``least`` to 3600 seconds."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= _LONGEST:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of seconds from {least:g} to {_LONGEST:.0f}"
            )
        return found

    return read
