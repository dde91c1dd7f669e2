"""Lines that the users of other systems look for: shown also where a script has not set up logging."""

from __future__ import annotations

import logging


def show(log: logging.Logger, text: str, *args: object) -> None:
    """Log a line at INFO. Where no logger has a handler, write it to stderr, as Python does with warnings.

    A level above INFO that was set for the logger or one of its parents, but for the root's, hides the line.
    """
    if log.hasHandlers():
        log.info(text, *args)
    elif logging.lastResort is not None and _wanted(log):
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, text, args, None)
        logging.lastResort.handle(record)


def _wanted(log: logging.Logger) -> bool:
    if log.disabled or log.manager.disable >= logging.INFO:
        return False
    one: logging.Logger | None = log
    while one is not None and one.parent is not None:  # the root has a level from the start
        if one.level:
            return one.level <= logging.INFO
        one = one.parent
    return True
