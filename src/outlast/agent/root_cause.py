"""The launcher's own error file: what schedulers read to learn why a job has failed.

Where ``TORCHELASTIC_ERROR_FILE`` is set in the launcher's environment, torchrun copies the error file of
the rank that failed first there, with its exit code, and writes its own exception there if it fails itself.

Source: torch 2.13, elastic/multiprocessing/errors/error_handler.py.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class RootCause:
    """The failure that a job ends with.

    Args:
        generation: in which it happened.
        error_file: of the rank.
        exit_code: of the rank's process, negative for a signal; 0: it had not ended.
        reason: in words.
    """

    generation: int
    error_file: Path
    exit_code: int
    reason: str


def hand_over(target: str, cause: RootCause | None, reason: str) -> str:
    """Write the launcher's error file; return what went wrong, "" when nothing did.

    Args:
        target: its path; empty: nobody wants one.
        cause: the failure of a rank; None: the job ended for another reason.
        reason: why the job ended.
    """
    if not target:
        return ""
    found = _read(cause.error_file) if cause is not None else None
    found = found or message(reason if cause is None else cause.reason)
    if cause is not None and cause.exit_code and isinstance(found["message"], dict):
        found["message"]["errorCode"] = cause.exit_code
    try:
        descriptor = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        with open(descriptor, "w") as file:  # a FIFO that nobody reads is an error, not a wait
            json.dump(found, file)
    except OSError as error:
        return f"TORCHELASTIC_ERROR_FILE={target} could not be written: {error.strerror}"
    return ""


def message(text: str) -> dict[str, Any]:
    """Return the content of an error file that says no more than a text."""
    return {
        "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_READ_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "message" in found else None
