"""Metrics over HTTP: ``GET /metrics`` on one address, answered by one thread, and nothing else.

A stranger on the port costs little: so many connections at once, so many bytes and seconds each, and a pause
after each round of answers. Many connections of one host do not keep others out. The metrics are read again
at most once a second, however many ask.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.errors import UsageError
from outlast.observe.following import RunFollower
from outlast.observe.policy.metrics import exposition
from outlast.strangers import Strangers

PATH = "/metrics"
MOST_CONNECTIONS = 64  # at once; for one more, the oldest of the host that has the most is closed
_ACCEPTS = 16  # a round
MOST_BYTES = 8192  # of a request; Prometheus sends some 300
PATIENCE = 5.0  # seconds from accepting a connection to the end of its answer
_FRESH = 1.0  # seconds for which a text is told again
_PAUSE = 0.01  # seconds after each round, so that a flood of requests leaves the processor to others
_LOOPBACK = "127.0.0.1"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CURES = {
    errno.EADDRINUSE: "choose another port, or end the process that listens there",
    errno.EADDRNOTAVAIL: "name an address of this machine",
    errno.EACCES: "choose a port from 1024 on",
}


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``[HOST:]PORT``; without a host it is the loopback, port 0 is any.

    Raises:
        ValueError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or text.startswith(":"):
        raise ValueError("expected PORT or HOST:PORT, with a port from 0 to 65535")
    return host.strip("[]") or _LOOPBACK, int(port)


def listen(where: tuple[str, int]) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        UsageError: the address cannot be used; with a cure.
    """
    host, port = where
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        listener = socket.create_server(place[:2], family=family, backlog=MOST_CONNECTIONS)
    except UnicodeError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}; name another address") from error
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # a name that is not known has its own
        cure = _CURES.get(number, "name another address")
        raise UsageError(f"cannot listen on {host}:{port}: {why}; {cure}") from error
    listener.setblocking(False)
    return listener


def url(listener: socket.socket) -> str:
    """Return the address of the metrics."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"


@dataclass
class _Connection:
    """A client: what it has sent so far, and what it has not been sent yet."""

    socket: socket.socket
    deadline: float
    request: bytes = b""
    answer: bytes = b""


class Endpoint:
    """Answers requests on a socket that listens.

    Args:
        listener: it belongs to the endpoint from here on.
        text: returns the metrics. What it raises is told to the client (503 or 500).
    """

    def __init__(self, listener: socket.socket, text: Callable[[], str]) -> None:
        self._listener = listener
        self._text = text
        self._told = ("", "")  # status and text
        self._told_at = -math.inf
        self._open: dict[int, _Connection] = {}
        self._strangers: Strangers[int] = Strangers(MOST_CONNECTIONS, PATIENCE)
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve in a thread.

        Raises:
            UsageError: the system allows no more threads.
        """
        self._thread = threading.Thread(target=self._serve_unsignalled, name="metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._listener.close()
            raise UsageError(f"no thread could be started: {error}") from error

    def close(self) -> None:
        """Answer no more; wait a moment for the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None:
            self._thread.join(1.0)

    def _serve_unsignalled(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.serve()

    def serve(self) -> None:
        """Answer until :meth:`close` is called by another thread, or an exception such as Ctrl-C arrives."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                ready = self._selector.select(self._patience())
                for key, _ in ready:
                    self._tend(key.data)
                self._drop(one for one in self._open.values() if one.deadline <= time.monotonic())
                if ready:
                    time.sleep(_PAUSE)
        finally:
            self._drop(self._open.values())
            self._selector.close()
            self._listener.close()

    def _patience(self) -> float | None:
        soonest = min((one.deadline for one in self._open.values()), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _tend(self, one: _Connection | None) -> None:
        if one is None:
            self._accept()
            return
        if one.socket.fileno() not in self._open:  # it had to go in this round
            return
        try:
            done = self._write(one) if one.answer else self._read(one)
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            done = True
        if done:
            self._drop([one])

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                client, address = self._listener.accept()
            except OSError:  # nobody is left, no descriptor is, or the endpoint is closed
                return
            client.setblocking(False)
            now = time.monotonic()
            self._open[client.fileno()] = one = _Connection(client, now + PATIENCE)
            self._selector.register(client, selectors.EVENT_READ, one)
            surplus = self._strangers.add(client.fileno(), str(address[0]), now)
            if surplus is not None:
                self._drop([self._open[surplus]])

    def _read(self, one: _Connection) -> bool:
        """Take what a client has sent; say whether it is done with."""
        data = one.socket.recv(MOST_BYTES + 1)
        one.request += data
        whole = b"\r\n\r\n" in one.request
        if not data and not whole:
            return True
        if whole or len(one.request) > MOST_BYTES:
            one.answer = self._answer(one.request if whole else b"")
            self._selector.modify(one.socket, selectors.EVENT_WRITE, one)
        return False

    def _write(self, one: _Connection) -> bool:
        one.answer = one.answer[one.socket.send(one.answer) :]
        return not one.answer

    def _drop(self, connections: Iterable[_Connection]) -> None:
        for one in list(connections):
            del self._open[one.socket.fileno()]
            self._strangers.remove(one.socket.fileno())
            self._selector.unregister(one.socket)
            one.socket.close()

    def _answer(self, request: bytes) -> bytes:
        """Return the answer to a request; an empty one was too long."""
        words = request.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        if not request:
            return _response("431 Request Header Fields Too Large", f"at most {MOST_BYTES} bytes\n")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response("400 Bad Request", "this is no request of HTTP/1\n")
        if words[0] != "GET":
            return _response("405 Method Not Allowed", "only GET is answered\n", "Allow: GET\r\n")
        if words[1].partition("?")[0] != PATH:
            return _response("404 Not Found", f"only {PATH} is here\n")
        status, text = self._current()
        return _response(status, text)

    def _current(self) -> tuple[str, str]:
        now = time.monotonic()
        if now - self._told_at >= _FRESH:
            self._told_at = now
            try:
                self._told = ("200 OK", self._text())
            except UsageError as error:
                self._told = ("503 Service Unavailable", f"{error}\n")
            except Exception as error:  # noqa: BLE001 - a defect here must not end what is observed
                self._told = ("500 Internal Server Error", f"the metrics cannot be made: {error!r}\n")
        return self._told


def _response(status: str, text: str, more: str = "") -> bytes:
    body = text.encode("utf-8", "replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode("ascii") + body


@contextlib.contextmanager
def serving(where: str, run_dir: Path, node: str, say: Callable[[str], object]) -> Iterator[None]:
    """Serve the metrics of one node of a run while the block runs, in a thread that reads its event log.

    Observing never ends a job: a port that is taken is said, and the job goes on without metrics.

    Args:
        where: ``[HOST:]PORT``; empty: nothing is served.
        run_dir: the run folder.
        node: name of the node; empty: the job has one.
        say: takes where the metrics are, or why there are none.
    """
    if not where:
        yield
        return
    endpoint = None
    try:
        listener = listen(address(where))
        served = url(listener)
        follower = RunFollower(run_dir, node)
        endpoint = Endpoint(listener, lambda: _of_node(follower))
        endpoint.start()
        say(f"metrics: {served}")
    except (UsageError, OSError) as error:
        endpoint = None
        say(f"--metrics-port {where}: {error}; the job goes on without metrics")
    try:
        yield
    finally:
        if endpoint is not None:
            endpoint.close()


def _of_node(follower: RunFollower) -> str:
    now = follower.poll()
    if not now.run_id:
        raise UsageError(f"{follower.run_dir}: no start is in the event log yet")
    return exposition([now])
