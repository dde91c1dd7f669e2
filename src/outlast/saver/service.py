"""The saver's loop: wait for a bell, a new generation or the owner's end, and let the keeper look."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outlast.checkpoint.memory_folder import Members, MemoryFolder, Status, Together
from outlast.core.errors import CheckpointError
from outlast.core.events import Record
from outlast.saver.durable import Tasks
from outlast.saver.keeper import Keeper
from outlast.saver.team import served, shelf
from outlast.saver.team_keeper import TeamKeeper
from outlast.transport.peers import PeerServer

LOOK_EVERY = 0.5  # seconds between two looks when nobody rings


class Service:
    """Serves one memory folder until its owner has gone.

    Args:
        folder: the memory folder; this process holds its lock.
        link: readable when the owner says that the job is over, or has died.
        sink: takes records.
    """

    def __init__(self, folder: MemoryFolder, link: int, sink: Callable[[Record], None]) -> None:
        self._folder = folder
        self._link = link
        self._sink = sink
        with contextlib.suppress(FileNotFoundError):
            folder.bell.unlink()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._bell.bind(os.fspath(folder.bell))
        self._disk = Tasks("disk", folder.ring)
        self._keeper: Keeper | None = None
        before = folder.status()
        self._port = 0 if before is None else before.port
        self._server: PeerServer | None = None
        self._said = Status(os.getpid())
        self._over = False
        folder.publish(self._said)

    def run(self) -> None:
        """Serve; return when the owner has gone and the newest of what was staged is on disk."""
        self._look()  # what a predecessor left is taken on even if the owner has gone already
        while not (self._over and (self._keeper is None or self._keeper.idle)):
            self._wait()
            self._look()
        self._bell.close()
        if self._server is not None:
            self._server.close()
        if self._keeper is not None:
            if self._keeper.keep_for_later():
                return
            shutil.rmtree(self._keeper.stage.root, ignore_errors=True)
        shutil.rmtree(self._folder.root, ignore_errors=True)

    def _wait(self) -> None:
        sources: list[int] = [self._bell.fileno()]
        if not self._over:
            sources.append(self._link)
        ready, _, _ = select.select(sources, [], [], LOOK_EVERY)
        with contextlib.suppress(BlockingIOError):
            while self._bell.fileno() in ready:
                self._bell.recv(64)
        if self._link in ready:
            self._over = True
            if self._keeper is not None:
                self._keeper.finish()

    def _keeper_of(self, members: Members) -> Keeper:
        status = self._said if self._keeper is None else self._keeper.status
        if self._keeper is not None:
            self._keeper.close()
        if members.together is None:
            return Keeper(members, self._disk, status, self._sink)
        status = replace(status, port=self._listen(members.together))
        return TeamKeeper(members, self._disk, status, self._sink, self._folder.ring)

    def _listen(self, together: Together) -> int:
        """See to it that other nodes' savers are heard; return the port, 0: they cannot be."""
        if self._server is None:
            try:
                self._server = self._open(together, self._port)
            except OSError:  # the port of the saver before this one is taken
                with contextlib.suppress(OSError):
                    self._server = self._open(together, 0)
        if self._server is None:
            return 0
        self._server.trust(together.token)
        return self._server.address[1]

    def _open(self, together: Together, port: int) -> PeerServer:
        return PeerServer(
            (together.host, port),
            together.token,
            lambda name: None if self._keeper is None else served(self._keeper.stage, name),
            lambda node: None if self._keeper is None else shelf(self._keeper.stage, node),
            self._answer,
        )

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        keeper = self._keeper
        if not isinstance(keeper, TeamKeeper) or keeper.team is None:
            raise CheckpointError("this node's saver has not met the others yet; it will")
        return keeper.team.hear(message)

    def _look(self) -> None:
        said = None if self._over else self._folder.members()
        if said is not None:
            if self._keeper is None or said.session != self._keeper.members.session:
                self._keeper = self._keeper_of(said)
            self._keeper.members = said
        if self._keeper is None:
            return
        self._keeper.look()
        if self._keeper.status != self._said:
            self._said = self._keeper.status
            self._folder.publish(self._said)
        self._keeper.tidy()
