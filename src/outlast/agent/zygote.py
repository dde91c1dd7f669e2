"""The agent's side of the zygote: start it, order workers and store hosts, read its answers."""

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
_SCRIPT = Path(__file__).parent.parent / "worker" / "zygote.py"


class Zygote:
    """A warm process to fork workers from; ``fileno()`` is readable when an answer waits.

    Args:
        kind, target, args: the program of every rank ("file" or "module").
        environment: the variables that all ranks share; the zygote imports under them.
        preload: modules to import besides torch.
    """

    def __init__(
        self, program: tuple[str, str, Sequence[str]], environment: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind, target, args = program
        settings = {
            "kind": kind,
            "target": target,
            "agent": os.getpid(),
            "channel": theirs.fileno(),
            "preload": list(preload),
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
        """Return the answers that have arrived; None when the zygote has hung up."""
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
        """Hang up; the zygote ends by itself."""
        self._socket.close()
