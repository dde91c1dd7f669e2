"""Requests to a running job: a file in the folder of the node whose agent is asked.

Whoever asks makes the file and waits until it is gone: the agent removes it when it has taken it. Only the
account that runs the agent can ask, since an agent takes no file of another account.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outlast import files
from outlast.errors import OutlastError, UsageError
from outlast.observe.run_folder import RunFolder

FORMAT = 1
PATIENCE = 15.0  # seconds for an agent to take a request; it looks once a second
_LOOK_EVERY = 0.05
_BYTES = 4096
_MOST_TEXT = 200


class What(str, Enum):
    """What a running job is asked for."""

    SAVE = "save"
    DRAIN = "drain"
    STOP = "stop"


@dataclass(frozen=True)
class Request:
    """What somebody asks for, and who that is."""

    what: What
    by: str


def ask(run_dir: Path, what: What, node: str = "") -> str:
    """Ask a running job for something; return which node's agent has taken the request.

    Args:
        run_dir: the run folder.
        what: a save of all ranks, the end of the job, or a spare in the place of a node.
        node: to be drained, or whose agent is asked; empty: any.

    Raises:
        UsageError: no agent runs, the node is none of the run, or nobody took the request in time.
    """
    folder = _folder(run_dir, what, node)
    path = folder.request
    written = {"version": FORMAT, "what": what.value, "by": f"{_user()} on {socket.gethostname()}"}
    try:
        file = files.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(file, json.dumps(written).encode())
        finally:
            os.close(file)
        until = time.monotonic() + PATIENCE
        while path.exists() and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        try:
            path.unlink()
        except FileNotFoundError:  # the agent has removed it
            return folder.own.name if folder.own != folder.root else ""
    except FileExistsError as error:
        raise UsageError(f"{path}: another request waits there; nothing was asked") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; nothing was asked") from error
    raise UsageError(
        f"{path}: no launcher took the request within {PATIENCE:.0f} s; it was withdrawn: is the job running?"
    )


def take(path: Path) -> Request | str | None:
    """Take the request out of a file; a text says why there is one that is ignored; None: there is none."""
    if not os.path.lexists(path):
        return None
    try:
        content = files.read_private(path, _BYTES)
        if not content:
            return None  # it is being written
        found = json.loads(content)
        if found["version"] != FORMAT:
            raise ValueError(f"version {found['version']!r}, {FORMAT} is expected")
        result: Request | str = Request(What(found["what"]), str(found["by"])[:_MOST_TEXT])
    except (OSError, OutlastError, ValueError, KeyError, TypeError, RecursionError) as error:
        result = f"ignored: the request in {path}: {error}"
    remove(path)
    return result


def remove(path: Path) -> None:
    """Remove what is in the place of a request; a folder stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def _folder(run_dir: Path, what: What, node: str) -> RunFolder:
    """Return the folder of the node whose agent is asked."""
    names = sorted(RunFolder(run_dir).node_events())
    if node and node not in names:
        raise UsageError(f"--node {node}: not one of this run's nodes ({', '.join(names) or 'it has one'})")
    if what is What.DRAIN and not node:
        raise UsageError("drain: --node NAME is needed: the node that a spare is to replace")
    for name in [node] if node else names or [""]:
        folder = RunFolder(run_dir, name)
        if folder.is_held():
            return folder
    raise UsageError(
        f"{run_dir}: no launcher runs here{f' for node {node}' if node else ''}; nothing was asked"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        return f"uid {os.getuid()}"
