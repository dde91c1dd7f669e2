"""The processes of a campaign: the ranks, the owner of the checkpoint writer, and the run without faults."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers.disk_loads import load

from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.errors import NoUsableCheckpoint, SaveFailed
from outlast.ipc.exchange import SoloExchange, SystemClock
from outlast.ipc.processes import die_with_parent
from outlast.ports import ExchangeFailed
from outlast.recovery.policy.events import Loaded, Record

PATIENCE = 20.0  # seconds of the ranks for each other and the saver; nothing here needs one
LAST = 40  # the step after which a job trains no further
Say = Callable[..., None]


@dataclass(frozen=True)
class Setup:
    """The constants of a campaign.

    Args:
        seed: of the campaign.
        world: ranks.
        width: of the model's layers.
        every: steps between two saves that also go to disk.
        staging: eager or lazy.
        buffers: copies of the state in memory.
        owner: of the saver: "agent", a process of its own, or "rank 0".
        pause: seconds that a step waits after training.
        folder: holds the copies on disk and the event log.
        memory: the memory folder.
    """

    seed: int
    world: int
    width: int
    every: int
    staging: str
    buffers: int
    owner: str
    pause: float
    folder: Path
    memory: Path

    @classmethod
    def drawn(cls, seed: int, dice: random.Random, folder: Path, memory: Path) -> Setup:
        world, width, every = dice.choice((1, 2)), dice.choice((8, 64, 200)), dice.choice((2, 3, 5))
        staging, buffers = dice.choice(("eager", "eager", "lazy")), dice.choice((2, 3, 3))
        owner, pause = dice.choice(("agent", "agent", "rank 0")), dice.choice((0.0, 0.003, 0.01))
        return cls(seed, world, width, every, staging, buffers, owner, pause, folder, memory)

    @property
    def disk(self) -> Path:
        return self.folder / "checkpoints"


class Training:
    """One rank's objects; two ranks with the same steps are bitwise equal."""

    def __init__(self, setup: Setup, rank: int) -> None:
        torch.manual_seed(setup.seed * 2 + rank)
        random.seed(setup.seed * 2 + rank)
        self.width = setup.width
        layers = torch.nn.Linear(self.width, self.width), torch.nn.Dropout(0.2)
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(self.width, self.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self) -> None:
        loss = self.model(torch.randn(4, self.width)).square().mean() * random.random()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def digest(self) -> str:
        """Return a digest of every bit of the model, the moments, the schedule and the random states."""
        found = hashlib.blake2b(digest_size=12)
        moments = self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.state_dict().values(), *(one for each in moments for one in each.values())]
        for one in tensors:
            found.update(ctypes.string_at(one.contiguous().data_ptr(), one.numel() * one.element_size()))
        rates = [group["lr"] for group in self.optimizer.param_groups]
        found.update(repr((rates, sorted(self.scheduler.state_dict().items()), random.getstate())).encode())
        found.update(bytes(torch.get_rng_state().tolist()))
        return found.hexdigest()


class PairExchange:
    """The exchange of two ranks over a socket between them: it fails at once when the other rank ends."""

    world_size = 2

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank = rank
        self._link = link

    def gather(self, topic: str, value: str, timeout: float) -> list[str]:
        """Return both values; see :class:`outlast.ports.Exchange`."""
        self._link.settimeout(timeout)
        try:
            self._link.send(json.dumps([topic, value]).encode())
            got = self._link.recv(1 << 20)
        except OSError as error:
            raise ExchangeFailed(f"exchange {topic!r}: {error}") from error
        if not got:
            raise ExchangeFailed(f"exchange {topic!r}: the other rank has ended")
        other, theirs = json.loads(got)
        assert other == topic, (other, topic)
        return [value, theirs] if self.rank == 0 else [theirs, value]


# What runs in the forked processes.


def reference(setup: Setup, say: Say) -> None:
    """Train without faults, and report the content of every step of every rank."""
    for rank in range(setup.world):
        training = Training(setup, rank)
        contents = [training.digest()]
        for _ in range(LAST):
            training.train()
            contents.append(training.digest())
        say(contents=contents)


def own(setup: Setup, say: Say) -> None:
    """Start the checkpoint writer, and start it again when it ends, as an agent does."""
    saver, told = SaverProcess(setup.memory, "", setup.folder / "events.jsonl"), 0
    while True:
        saver.ensure()
        if saver.pid != told:
            told = saver.pid
            say(saver=told)
        time.sleep(0.003)


@dataclass(frozen=True)
class Shift:
    """The task of the workers of a generation.

    Args:
        generation: its number.
        steps: to train at most.
        durable: at the end, wait until the last step that is due on disk is there.
        memory: save through memory; without it, only restore from disk.
    """

    generation: int
    steps: int
    durable: bool = False
    memory: bool = True


def work(setup: Setup, rank: int, shift: Shift, link: socket.socket | None, say: Say) -> None:
    """Be one rank: restore, train, save every step."""
    training, records = Training(setup, rank), list[Record]()
    exchange = SoloExchange() if link is None else PairExchange(rank, link)
    settings = CheckpointOptions(timeout=PATIENCE, staging=setup.staging, buffers=setup.buffers)
    identity = Identity(f"campaign-{setup.seed}", shift.generation, rank, setup.world)
    saver = SaverProcess(setup.memory, "", setup.folder / "events.jsonl")

    def call_saver() -> None:
        before = saver.pid
        if setup.owner == "rank 0" and rank == 0:
            saver.ensure()
        if saver.pid != before:
            say(saver=saver.pid)

    found = Checkpointer(
        *(setup.disk, identity, exchange, settings, SystemClock(), records.append),
        *(MemoryFolder(setup.memory), call_saver),
    )
    if shift.memory:
        restored = found.restore(training.state)
    else:
        restored = load(setup.disk, identity, exchange, settings, training.state, records.append)
    start = 0 if restored is None else restored.step
    why = "".join(record.reason for record in records if isinstance(record, Loaded))
    name, cursor = ("", None) if restored is None else (restored.name, restored.cursor)
    say(restored=start, name=name, content=training.digest(), cursor=cursor, why=why)
    owed = 0
    for step in range(start + 1, min(start + shift.steps, LAST) + 1):
        exchange.gather("step", str(step), PATIENCE)
        time.sleep(setup.pause)
        training.train()
        say(begins=step, content=training.digest())
        order = Order(step, step % setup.every == 0, "a campaign", {"next": step})
        if found.stage(order, training.state):
            owed = step if order.durable else owed
            say(staged=step)
    if shift.durable and owed and not found.durable(owed):
        say(not_durable=owed)
    if shift.memory:
        found.settle()
    say(settled=True)


@dataclass
class Child:
    """A forked process, and its reports."""

    name: str
    pid: int
    reader: int
    rest: bytes = b""
    said: list[dict[str, Any]] = field(default_factory=list)

    def hear(self) -> bool:
        """Read the reports; return whether there may be more."""
        got = os.read(self.reader, 1 << 16)
        *lines, self.rest = (self.rest + got).split(b"\n")
        self.said += map(json.loads, lines)
        return bool(got)

    def newest(self, key: str) -> int:
        """Return the highest step that it reported under a key, 0 if none."""
        return max((one[key] for one in self.said if key in one), default=0)


def fork(name: str, body: Callable[[Say], None], *keep: int) -> Child:
    """Run a body in a forked process that keeps no other descriptors of this one."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(name, pid, reader)

    def say(**what: Any) -> None:
        os.write(writer, json.dumps(what).encode() + b"\n")

    try:
        die_with_parent(parent)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in (writer, *keep):
                with contextlib.suppress(OSError):
                    os.close(number)
        body(say)
    except (NoUsableCheckpoint, SaveFailed, ExchangeFailed) as error:
        say(ended=type(error).__name__, text=str(error)[:1500])
    except BaseException:  # noqa: BLE001 - the last frame of this process; the oracle judges it
        say(error=traceback.format_exc()[-2500:])
    finally:
        os._exit(0)
