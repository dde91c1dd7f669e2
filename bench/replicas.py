"""replicas: GB/s of replicas between two checkpoint writers over 1, 4 and 8 connections, and of sockets.

A process sends to another one on loopback; each connection has a thread at both ends, as in the writers.
Systems and numbers of connections take turns (ABBA); each sends the same number of bytes.

socket   MiB after MiB from memory, received into one buffer
frames   the same in frames with their digests, computed by the sender and compared by the receiver
replica  a copy from a file in memory to the folder of another node, as the writers do it: greeting, frames,
         the digest of the file, commit

    python bench/replicas.py --mib 1024 --rounds 10 --out replicas.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from peers import figures

from outlast.checkpoint.content.digest import commit_line, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, MANIFEST, copy_name, rank_files
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import CHUNK_BYTES, Channel, Kind
from outlast.checkpoint.replica.handshake import Party
from outlast.checkpoint.replica.server import PeerServer
from outlast.checkpoint.tiers.tier import DirectoryTier

SYSTEMS = ("socket", "frames", "replica")
CONNECTIONS = (1, 4, 8)
PATIENCE = 600.0
LOOPBACK = "127.0.0.1"
COPY, FILE = copy_name(1, 1), rank_files(0, 1)[0]
Address = tuple[str, int]


@dataclass(frozen=True)
class Part:
    """What one connection sends, in memory and in a file there."""

    file: Path
    content: memoryview

    def chunks(self) -> Iterator[memoryview]:
        for begin in range(0, len(self.content), CHUNK_BYTES):
            yield self.content[begin : begin + CHUNK_BYTES]


def party(node: str) -> Party:
    return Party(node, "a key of this benchmark", "replicas", 1)


def accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def serve_socket(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with connection:
        left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        while left and (got := connection.recv_into(buffer[:left])):
            left -= got
        connection.sendall(b"!")


def serve_frames(connection: socket.socket) -> None:
    with connection:
        channel = Channel(connection, "sender", PATIENCE)
        for _ in channel.receive_file(FILE, channel.receive_json(Kind.REQUEST)["bytes"]):
            pass
        channel.send_json(Kind.ANSWER, {})


def receive(folder: Path) -> None:
    """Serve all systems until standard input ends; print their ports."""
    ports = {}
    for system, serve in (("socket", serve_socket), ("frames", serve_frames)):
        listener = socket.create_server((LOOPBACK, 0), backlog=64)
        threading.Thread(target=accept, args=(listener, serve), daemon=True).start()
        ports[system] = listener.getsockname()[1]
    server = PeerServer(
        (LOOPBACK, 0), party("receiver"), lambda _: None, lambda node, _: DirectoryTier(folder / node)
    )
    with server:
        ports["replica"] = server.address[1]
        figures.say(json.dumps(ports))
        sys.stdin.read()


def send_socket(address: Address, part: Part) -> Callable[[], None]:
    connection = socket.create_connection(address)

    def send() -> None:
        with connection:
            connection.sendall(len(part.content).to_bytes(8, "big"))
            for chunk in part.chunks():
                connection.sendall(chunk)
            assert connection.recv(1) == b"!"

    return send


def send_frames(address: Address, part: Part) -> Callable[[], None]:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, "receiver", PATIENCE)

    def send() -> None:
        with connection:
            channel.send_json(Kind.REQUEST, {"bytes": len(part.content)})
            for chunk in part.chunks():
                channel.send_chunk(chunk)
            channel.receive_json(Kind.ANSWER)

    return send


def send_replica(address: Address, part: Part) -> Callable[[], None]:
    node, ends = part.file.name, {MANIFEST: b"{}", COMMIT: commit_line(1, "0" * 32)}
    files: dict[str, tuple[Path | bytes, str]] = {FILE: (part.file, file_digest(part.content))}
    files |= {name: (text, file_digest(text)) for name, text in ends.items()}
    client = PeerClient(address, party(node), PATIENCE, expected="receiver")

    def send() -> None:
        client.send(node, COPY, files)

    return send


def measured(
    make: Callable[[Address, Part], Callable[[], None]], address: Address, parts: list[Part]
) -> float:
    """Return the seconds in which all connections send their part and hear that it has arrived."""
    sends = [make(address, part) for part in parts]
    failed: list[BaseException] = []

    def run(send: Callable[[], None]) -> None:
        try:
            send()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(send,)) for send in sends]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="sent at a time, over all connections")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS), help="at most 8")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for what is sent and received")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(options.receive)
        return 0
    lines, senders = figures.Lines(options.out), (send_socket, send_frames, send_replica)
    lines.write(surroundings := figures.surroundings(0))
    figures.say(json.dumps(surroundings))
    with tempfile.TemporaryDirectory(dir=options.folder) as name, ExitStack() as stack:
        root = Path(name)
        receiver = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, "--receive", str(root / "received")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        stack.callback(receiver.stdin.close)
        ports = json.loads(receiver.stdout.readline())
        parts: dict[int, list[Part]] = {}
        for count in options.connections:
            content = memoryview(os.urandom((options.mib << 20) // count))
            parts[count] = [Part(root / f"n{count}-{number}", content) for number in range(count)]
            for part in parts[count]:
                part.file.write_bytes(content)
        cases = {
            f"{system} {count}": (system, make, count)
            for count in options.connections
            for system, make in zip(SYSTEMS, senders, strict=True)
        }
        rates: dict[str, list[float]] = {case: [] for case in cases}
        for number, case in enumerate([*cases, *figures.abba(list(cases), options.rounds)]):
            system, make, count = cases[case]
            (root / "received").mkdir()
            seconds = measured(make, (LOOPBACK, ports[system]), parts[count])
            shutil.rmtree(root / "received")
            if number >= len(cases):  # each case is tried once before
                rates[case].append(sum(len(part.content) for part in parts[count]) / seconds / 1e9)
        for case, (system, _, count) in cases.items():
            plain = figures.summary(rates[f"socket {count}"])["median"]
            found = figures.summary(rates[case])
            line = {"record": "replicas", "system": system, "connections": count, "mib": options.mib}
            line |= {"gb_s": found, "of_socket": found["median"] / plain}
            lines.write(line)
            figures.say(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
