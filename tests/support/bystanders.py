"""What a training process has open beside its process groups: connections that must outlive an abort."""

from __future__ import annotations

import selectors
import socket
import threading


class Bystanders:
    """A server that echoes, in a thread that waits in an epoll as gloo's does, and connections to it."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._connections: dict[str, socket.socket] = {}
        threading.Thread(target=self._serve, daemon=True, name="gloo-like").start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._selector.register(self._listening.accept()[0], selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                said = connection.recv(100)
                if said:
                    connection.sendall(said)
                else:
                    self._selector.unregister(connection)

    def connect(self, name: str) -> None:
        """Open a connection, and see that it works."""
        self._connections[name] = socket.create_connection(self._listening.getsockname(), timeout=30)
        assert self._echoes(name)

    def alive(self) -> dict[str, bool]:
        """Say which connections still work; the server takes a new one, too."""
        self.connect("new")
        return {name: self._echoes(name) for name in self._connections}

    def _echoes(self, name: str) -> bool:
        try:
            self._connections[name].sendall(name.encode())
            return self._connections[name].recv(100) == name.encode()
        except OSError:
            return False
