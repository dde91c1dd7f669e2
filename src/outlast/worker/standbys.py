"""Workers that the zygote forks before they are needed; each waits until it is told which rank it is.

Four forks of a process with torch take 30 ms: the kernel copies page tables, and a page when either side
first writes to it. A restart waits for none of that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast import files
from outlast.ipc.processes import die_with_parent

_CALM = 0.5  # seconds without an order, after which the ranks that were just forked need the processors less
_BEGUN_WITHIN = 5.0  # seconds
_PID_BYTES = 16

Pair = tuple[socket.socket, socket.socket]


class Standbys:
    """Standbys of one zygote, which has one thread.

    Args:
        wanted: how many are to wait.
        agent: pid of the process with which they die.
        most: bytes of a message.
    """

    def __init__(self, wanted: int, agent: int, most: int) -> None:
        self._wanted, self._agent, self._most = wanted, agent, most
        self._waiting: list[tuple[int, socket.socket]] = []

    def due(self, channel: socket.socket) -> bool:
        """Return whether standbys are missing, and no order comes for a while."""
        return len(self._waiting) < self._wanted and not files.readable([channel.fileno()], _CALM)

    def fork(self, prepare: Callable[[], None]) -> Mapping[str, Any] | None:
        """Fork what is missing; return None, or in a standby that is needed the entry of its rank.

        Args:
            prepare: called in each standby.
        """
        missing = self._wanted - len(self._waiting)
        try:
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(missing)]
            between = os.fork()
        except OSError:  # no more files or processes; a restart that meets the same says so
            self._wanted = 0
            return None
        if between == 0:
            own = _forked(pairs)
            self.close()
            return self._wait(own, prepare)
        os.waitpid(between, 0)
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(_BEGUN_WITHIN)
            with contextlib.suppress(OSError):
                if pid := ours.recv(_PID_BYTES):
                    self._waiting.append((int(pid), ours))
        return None

    def _wait(self, own: socket.socket, prepare: Callable[[], None]) -> Mapping[str, Any]:
        die_with_parent(self._agent)
        message = b""
        with contextlib.suppress(OSError):
            own.send(str(os.getpid()).encode())  # at once: the zygote waits for it
            prepare()
            message = own.recv(self._most)
        if not message:  # the zygote has ended
            os._exit(0)
        own.close()
        entry: Mapping[str, Any] = json.loads(message)
        return entry

    def begin(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """Let standbys become ranks, as many as there are; return their pids, in the order of the entries."""
        begun: list[int] = []
        while self._waiting and len(begun) < len(entries):
            pid, ours = self._waiting.pop(0)
            with ours, contextlib.suppress(OSError):  # it was killed
                ours.send(json.dumps(entries[len(begun)]).encode())
                begun.append(pid)
        return begun

    def close(self) -> None:
        """Close the connections with them, in another process than the zygote."""
        for _, ours in self._waiting:
            ours.close()
        self._waiting.clear()


def _forked(pairs: Sequence[Pair]) -> socket.socket:
    """In the intermediate process: fork a standby for each pair; only standbys return, each with its end."""
    for _, own in pairs:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                for pair in pairs:
                    pair[0].close()
                    if pair[1] is not own:
                        pair[1].close()
                return own
    os._exit(0)
