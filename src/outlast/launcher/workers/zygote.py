"""The agent's side of a zygote: its process, and what is sent to it and read from it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.ipc.descriptors import give_back
from outlast.ipc.processes import Child, start

MESSAGE_BYTES = 1 << 20
_WORKER = Path(__file__).parents[2] / "worker"


class Answering:
    """A process that answers over a socket; ``fileno()`` is readable when there is an answer.

    Args:
        program: name of its file.
        settings: what it is told at its start, besides the agent's pid and the socket.
        environment: its variables.
        words: ends its command line.
    """

    def __init__(
        self, program: str, settings: Mapping[str, Any], environment: Mapping[str, str], words: Sequence[str]
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = json.dumps({**settings, "agent": os.getpid(), "channel": theirs.fileno()})
        command = [sys.executable, "-u", str(_WORKER / program), told, *words]
        with theirs:
            self.process = Child(
                start(command, env=dict(environment), pass_fds=[theirs.fileno()], start_new_session=True)
            )
        give_back(self.process.pid)  # its forks are ranks
        ours.setblocking(False)
        self._socket = ours
        self.pid = self.process.pid

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def order(self, message: Mapping[str, Any]) -> None:
        """Send one order.

        Raises:
            OSError: the process is gone.
        """
        self._socket.send(json.dumps(message).encode())

    def answers(self) -> list[dict[str, Any]] | None:
        """Return the answers that have arrived; None: the connection is closed, or others write to it."""
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
            try:
                answer = json.loads(message)
            except (ValueError, RecursionError):
                return None  # what the script has it import wrote to its connection
            if not isinstance(answer, dict):
                return None
            found.append(answer)

    def close(self) -> None:
        """Close the connection; a zygote ends then."""
        self._socket.close()

    def end(self) -> None:
        """Kill the process and what it has started that is no worker; close the connection."""
        self.process.kill_group()
        self.close()


class Zygote(Answering):
    """The agent's side of the zygote.

    Args:
        program: of every rank: kind ("file" or "module"), target and arguments; and how many ranks there are,
            which is how many workers are forked ahead.
        environment: the variables that all ranks share; the zygote imports under them.
        imports: modules to import besides torch; and what is left out of what every zygote imports.
        plan: file with what the ranks import, which is imported ahead; "": it is not known.
        behind: import at low priority, behind the ranks that run.
        early: fork the first ranks, and answer the first order of a store, before anything is imported.
    """

    def __init__(
        self,
        program: tuple[str, str, Sequence[str], int],
        environment: Mapping[str, str],
        imports: tuple[Sequence[str], Sequence[str]],
        plan: str = "",
        behind: bool = False,
        early: bool = False,
    ) -> None:
        kind, target, args, ranks = program
        settings = {
            "kind": kind,
            "target": target,
            "preload": list(imports[0]),
            "needless": list(imports[1]),
            "plan": plan,
            "behind": behind,
            "early": early,
            "ranks": ranks,
        }
        super().__init__("zygote.py", settings, environment, (target, *args))
