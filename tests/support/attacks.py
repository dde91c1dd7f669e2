"""A job of two nodes that trains and saves, and what an attacker on the network has to attack it with."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from outlast.checkpoint.tiers.memory_folder import Members, MemoryFolder
from tests.support.agents import Agents, agents
from tests.support.launching import until
from tests.support.processes import command_line

EVERY_STEP = "[checkpoints]\nnon_persistent_save_interval = 1\n"
LISTENS = "0A"  # a state in /proc/net/tcp


def listeners(pids: Iterable[int]) -> dict[int, set[tuple[str, int]]]:
    """Return the addresses and ports at which processes of this host listen for TCP, by pid."""
    found: dict[int, set[tuple[str, int]]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes = _listening(pid)
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    inode = link.removeprefix("socket:[").rstrip("]")
                    if inode in inodes:
                        found.setdefault(pid, set()).add(inodes[inode])
    return found


def _listening(pid: int) -> dict[str, tuple[str, int]]:
    """Return what is listened at in the network namespace of a process, by inode."""
    inodes: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS:
                address, _, port = words[1].partition(":")
                raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                inodes[words[9]] = (socket.inet_ntop(family, raw), int(port, 16))
    return inodes


class Victim:
    """A job of two nodes on this host that trains, saves every step, and keeps replicas.

    Args:
        folder: of the test.
        options: more options of all agents.
    """

    def __init__(self, found: Agents) -> None:
        self.agents = found

    def pids(self) -> list[int]:
        """Return all processes of the job."""
        return [pid for name in list(self.agents.agents) for pid in self.agents.tree(name)]

    def savers(self) -> dict[str, int]:
        """Return the pid of each node's saver."""
        found = {}
        for name in self.agents.agents:
            for pid in self.agents.tree(name):
                if "outlast.checkpoint.writer" in command_line(pid):
                    found[name] = pid
        return found

    def ports(self) -> set[tuple[str, int]]:
        """Return where the job listens."""
        return {one for each in listeners(self.pids()).values() for one in each}

    def memory(self, node: str) -> MemoryFolder:
        """Return the memory folder of a node."""
        path = self.agents.run / "nodes" / node / "memory.json"
        return MemoryFolder(json.loads(path.read_text())["memory"])

    def members(self, node: str) -> Members:
        """Return what the ranks of a node told its saver, with the table of nodes."""

        def whole() -> Members | None:
            said = self.memory(node).members()
            return said if said and said.together and said.together.nodes else None

        found: Members = until(whole, "the table of nodes")
        return found

    def step(self) -> int:
        """Return the newest step that both nodes have in memory."""
        said = [self.memory(node).status() for node in self.agents.agents]
        return min((one.memory_step for one in said if one is not None), default=-1)

    def trains(self, steps: int = 5) -> None:
        """Wait until so many steps more are in memory on both nodes."""
        begun = self.step()
        self.agents.until(lambda: self.step() >= begun + steps, f"{steps} steps after {begun}")

    def replicates(self) -> None:
        """Wait until a step newer than all so far is on the other node, too."""
        begun = self.step()
        self.agents.until(
            lambda: all(
                (one := self.memory(node).status()) is not None and one.replicated_step > begun
                for node in self.agents.agents
            ),
            f"replicas of a step after {begun}",
        )

    def faults(self) -> list[dict[str, Any]]:
        """Return the faults that any agent has recorded."""
        return [one for name in self.agents.agents for one in self.agents.records(name, "fault")]

    def stores(self) -> set[tuple[str, int]]:
        """Return where the hosts of torch's stores listen."""
        started = [
            one for name in self.agents.agents for one in self.agents.records(name, "generation_started")
        ]
        ranks = {pid for one in started for pid in one["pids"]}
        hosts = [pid for pid in self.pids() if "zygote.py" in command_line(pid) and pid not in ranks]
        return {one for each in listeners(hosts).values() for one in each}

    def store(self) -> dist.TCPStore:
        """Return the store of the job's generation, as anybody reaches it who reaches its port."""
        for place in self.stores():
            found = dist.TCPStore(
                *_reached(place), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
            )
            if any(key.startswith("default_pg/0//outlast/1/") for key in found.list_keys()):
                return found
        raise AssertionError(f"no store of the generation among {self.stores()}")


def _reached(place: tuple[str, int]) -> tuple[str, int]:
    return ("127.0.0.1", place[1]) if place[0] in ("0.0.0.0", "::") else place


@contextlib.contextmanager
def victim(folder: Path, *options: str, save_interval: int = 1000) -> Iterator[Victim]:
    """Give a job that has trained and replicated; nothing of it lives afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "outlast.toml"
    config.write_text(EVERY_STEP)
    script = ("counting.py", "1000000", str(save_interval))
    words = ("--config", str(config), *options)
    with agents(folder / "job", "2:2", script=script, options=words, cold=True) as found:
        job = Victim(found)
        found.start("a", "b")
        found.until(lambda: all((found.run / "nodes" / n / "memory.json").exists() for n in "ab"), "savers")
        found.until(lambda: job.step() >= 2, "the first steps")
        yield job


class Strangers:
    """Many connections to ports, which say a byte now and then; those that are closed are made again."""

    def __init__(self, ports: Iterable[tuple[str, int]], each: int, every: float = 0.5) -> None:
        self._places = [place for place in ports for _ in range(each)]
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.bytes = 0

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)

    def _work(self) -> None:
        lines: dict[int, socket.socket] = {}
        while not self._ended.wait(self._every):
            for number, place in enumerate(self._places):
                try:
                    line = lines.get(number)
                    if line is None:
                        line = lines[number] = socket.create_connection(place, 2.0)
                        line.settimeout(0)
                    line.send(b"O")
                    self.bytes += 1
                    with contextlib.suppress(BlockingIOError):
                        if not line.recv(1000):
                            lines.pop(number).close()
                except OSError:
                    with contextlib.suppress(KeyError):
                        lines.pop(number).close()
        for line in lines.values():
            line.close()

    def last(self, seconds: float) -> None:
        """Let them be there for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._thread.is_alive()
            time.sleep(0.1)
