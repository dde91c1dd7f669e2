"""The agent's side of a zygote: its process, and what is sent to it and read from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 1 << 20
_SCRIPT = Path(__file__).parents[2] / "worker" / "zygote.py"


class Zygote:
    """The agent's side of the zygote; ``fileno()`` is readable when there is an answer.

    Args:
        kind, target, args: the program of every rank ("file" or "module").
        environment: the variables that all ranks share; the zygote imports under them.
        preload: modules to import besides torch.
        plan: file with what the ranks import, which is imported ahead; "": it is not known.
        behind: import at low priority, behind the ranks that run.
        early: fork the first ranks, and answer the first order of a store, before anything is imported.
    """

    def __init__(
        self,
        program: tuple[str, str, Sequence[str]],
        environment: Mapping[str, str],
        preload: Sequence[str],
        plan: str = "",
        behind: bool = False,
        early: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind, target, args = program
        settings = {
            "kind": kind,
            "target": target,
            "agent": os.getpid(),
            "channel": theirs.fileno(),
            "preload": list(preload),
            "plan": plan,
            "behind": behind,
            "early": early,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(_SCRIPT), json.dumps(settings), target, *args],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def order(self, message: Mapping[str, Any]) -> None:
        """Send one order.

        Raises:
            OSError: the zygote is gone.
        """
        self._socket.send(json.dumps(message).encode())

    def answers(self) -> list[dict[str, Any]] | None:
        """Return the answers that have arrived; None: the zygote has closed the connection."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                message = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if not message:
                return found or None
            found.append(json.loads(message))

    def close(self) -> None:
        """Close the connection; then the zygote ends."""
        self._socket.close()
