"""Starts workers: forked from the zygote, or as plain subprocesses where that is impossible (a cold start).

The store host of the next generation is ordered while the present one runs, so that a restart waits for the
forks alone. With a fixed port it is ordered when the one before has ended. A zygote that dies is replaced. If
it cannot fork safely, does not answer, or dies twice in a row, this launcher starts workers cold and says
why.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from outlast.cluster.agent import network
from outlast.cluster.policy.messages import Assignment
from outlast.ipc.processes import Child, cannot_start
from outlast.launcher.command.options import ScriptKind, StartKind
from outlast.launcher.workers.cold_store import ColdStore, unserved
from outlast.launcher.workers.generation import Generation, LaunchContext, LogFiles, Rendezvous
from outlast.launcher.workers.head_start import program_of
from outlast.launcher.workers.own_source import needless, starts_early
from outlast.launcher.workers.processes import Worker
from outlast.launcher.workers.script_sets import ScriptSets
from outlast.launcher.workers.warming import Imported, Warming
from outlast.launcher.workers.zygote import Zygote
from outlast.recovery.policy.events import ImportsSeen, StartedAgain

IMPORT_PATIENCE = 600.0  # a cold import of torch and of preloaded modules from a slow file system
FORK_PATIENCE = 30.0
_SILENT_FOR = 5.0  # seconds of imports, after which the console says what the ranks wait for
_CONNECTED_WITHIN = 0.3  # seconds, for a rank that has begun to connect to a store
_CONNECTS_WITHIN = 2.0  # seconds of a generation in which its ranks connect to its store
_LOOK_EVERY = 0.05  # seconds, for log files that are on their way
_ZYGOTES = 2  # tries without a successful fork in between


class Mode(Enum):
    """What the spawner is waiting for."""

    IMPORTING = "the zygote imports torch"
    IDLE = "ready to fork"
    FORKING = "the zygote forks a generation"
    COLD = "workers are started as plain subprocesses"


@dataclass(frozen=True)
class _Wanted:
    """A requested generation, and the workers that are kept for it, by local rank.

    Args:
        mine: what the generation means for this node.
        kept: workers that go on in it.
        logs: its log files.
        at: monotonic time before which nothing is started.
    """

    mine: Assignment
    kept: Mapping[int, Worker]
    logs: LogFiles
    at: float = 0.0

    def may_start(self) -> bool:
        """Say whether its wait is over and its log files exist.

        Raises:
            RunFolderUnusable: there is no room for them.
        """
        return self.logs.there() and time.monotonic() >= self.at


@dataclass(frozen=True)
class _Forking:
    """What the zygote has been ordered to fork; without ``wanted`` the generation runs already."""

    generation: Generation
    ranks: tuple[int, ...]
    wanted: _Wanted | None = None


class WorkerSpawner:
    """Starts generations of workers.

    Args:
        around: the launcher's options and folders.
        selector: the zygote's socket is registered here, with this object as its data.
        say: told why something is started cold or again.
        imported: told what was imported ahead.
    """

    def __init__(
        self,
        around: LaunchContext,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        imported: Callable[[Imported], None],
    ) -> None:
        self._around = around
        self._selector = selector
        self._say = say
        self._imported = imported
        self._zygote: Zygote | None = None
        self._tries = 0
        self._wanted: _Wanted | None = None
        self._forking: _Forking | None = None
        self._unwanted: _Forking | None = None
        self._retiring: deque[tuple[float, Rendezvous]] = deque()  # stores that are over, and when they end
        self._short: Generation | None = None
        self._store: Rendezvous | None = None
        self._preparing = False  # a store host is on its way, and its pid is not known yet
        self._cold_port = 0
        self._fixed_port = network.master_port(around.options)
        self.store_serial = 0
        self._waits_until = 0.0
        self._speaks_at = math.inf
        self.cold_reason = ""
        self.mode = Mode.COLD
        self._hosts: dict[int, Child] = {}
        self._script_sets = ScriptSets(around.base)
        self._outdated = False  # the zygote was started before it was known what the script sets
        self._warm = False  # the zygote has imported what the ranks import
        self._early = starts_early(around.options)  # the first ranks do not wait for torch
        self._needless = needless(around.options)
        self._unserved: Generation | None = None  # nobody serves its store until torch has been imported
        self._cold_store: ColdStore | None = None  # serves it where no zygote can
        self._over = 0  # the newest generation that has ended
        self._warming = Warming(around, self._start, selector, self)
        self._open()

    def _start(self, plan: str, behind: bool) -> Zygote:
        options, early = self._around.options, self._early and not plan
        given = program_of(options), self._script_sets.environment, (options.preload, self._needless)
        zygote = self._around.head_start.zygote(*given, plan, behind, early)
        self._around.family.hold(zygote.process)
        return zygote

    def _open(self) -> None:
        """Start a zygote; if that is impossible, workers start cold."""
        options = self._around.options
        if options.start is StartKind.COLD:
            self._go_cold("--no-zygote was given")
        elif options.script.kind is ScriptKind.COMMAND:
            self._go_cold("--no-python: the program is not a Python script")
        elif self._tries >= _ZYGOTES:
            self._go_cold(f"the zygote ended {self._tries} times before it had forked a worker")
        else:
            self._tries += 1
            plan = self._warming.first_plan()
            self._warm, self._early = bool(plan), self._early and not plan
            try:
                self._zygote = self._start(plan, behind=False)
            except OSError as error:
                self._go_cold(cannot_start("the zygote", error))
                return
            self._selector.register(self._zygote, selectors.EVENT_READ, self)
            self._await_imports()

    def _await_imports(self) -> None:
        now = time.monotonic()
        self.mode, self._waits_until = Mode.IMPORTING, now + IMPORT_PATIENCE
        self._speaks_at = now + _SILENT_FOR

    @property
    def owes(self) -> bool:
        """Whether the zygote has been asked for processes whose pids are not known yet."""
        return self._preparing or self.mode is Mode.FORKING

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the zygote, and of the one that is to follow it."""
        return (*(() if self._zygote is None else (self._zygote.pid,)), *self._warming.pids)

    def deadline(self) -> float | None:
        """Return when :meth:`tick` has work: at the latest when the zygote's time is over."""
        limits = (self._limit(), self._warming.deadline(), self._speaks(), self._starts_at())
        return min((limit for limit in limits if limit is not None), default=None)

    def _starts_at(self) -> float | None:
        """Return when the wait of a requested generation is over."""
        at = 0.0 if self._wanted is None else self._wanted.at
        return max(at, time.monotonic() + _LOOK_EVERY) if at else None

    def _limit(self) -> float | None:
        waits = self._preparing or self.mode in (Mode.IMPORTING, Mode.FORKING)
        limits = [self._waits_until] if waits else []
        if self._wanted is not None and not self._wanted.logs.there():
            limits.append(time.monotonic() + _LOOK_EVERY)
        if self._retiring:
            limits.append(self._retiring[0][0])
        return min(limits, default=None)

    def _speaks(self) -> float | None:
        """Return when to say that the ranks wait for imports."""
        return self._speaks_at if self.mode is Mode.IMPORTING and self._wanted is not None else None

    @property
    def store_port(self) -> int:
        """The port of the store for the next generation; 0: none is ready.

        Where workers start cold nobody but rank 0 can serve one: then it is the negative of a free port.
        """
        if self.mode is Mode.COLD:
            if not self._cold_port:
                self._cold_port = self._fixed_port or _free_port()
                self.store_serial += 1
            return -self._cold_port
        return 0 if self._store is None else self._store.port

    def request(self, mine: Assignment, kept: Mapping[int, Worker]) -> Generation | None:
        """Request a generation; it is returned here or by a later :meth:`answers` or :meth:`tick`.

        Args:
            mine: what the generation means for this node.
            kept: workers that go on in it, by local rank; the others are started.
        """
        at = time.monotonic() + mine.wait if mine.wait else 0.0
        self._wanted = _Wanted(mine, kept, LogFiles(mine, self._around), at)
        return self._proceed()

    def refill(self, generation: Generation) -> Generation | None:
        """Start workers for the ranks of a generation that lost theirs; returned like :meth:`request`."""
        self._short = generation
        return self._proceed()

    def prepare_for(self, again: StartedAgain) -> None:
        """Fork later generations from a zygote that imports with the variables that the script sets."""
        if self.mode is Mode.COLD:
            return
        if again.package:
            if self._warming.leave_out(again.package, again.reason):
                self._say(
                    f"{again.reason}: ranks began again, and import {again.package} themselves from now on"
                )
                self._outdated = True
                self._renew()
            return
        folder = self._around.runtime
        problem, news = self._script_sets.take(
            again, folder / f"environment-{again.generation}-{again.rank}.json"
        )
        if problem:
            self._go_cold(problem)
        elif news:
            self._say(
                f"{again.reason}: ranks began again, as cold interpreters; after a restart they are forked"
                " from a zygote that has imported under these variables"
            )
            self._outdated = True
            self._warming.originals = self._script_sets.originals
            self._warming.again()
            self._renew()

    def learn(self, seen: ImportsSeen, generation: Generation) -> None:
        """Fork later generations from a zygote that imports what the ranks import."""
        if self.mode is not Mode.COLD:
            self._warming.learn(seen, generation.ranks)

    def _renew(self) -> None:
        """Replace an outdated zygote when it owes nothing; the store that is ready stays."""
        if self._preparing or self.mode not in (Mode.IMPORTING, Mode.IDLE):
            return
        if self._outdated:
            self._outdated, self._tries = False, 0
            self._end_zygote()
            self._open()
        elif self.mode is Mode.IDLE and (ready := self._warming.take()) is not None:
            self._end_zygote()
            self._zygote, self._warm = ready, True
        self._tell()

    def _tell(self) -> None:
        """Report what was imported ahead, and what could not be."""
        while self._warming.problems:
            self._say(self._warming.problems.pop(0))
        while self._warming.news:
            self._imported(self._warming.news.pop(0))

    def give_up(self) -> None:
        """Withdraw all requests; a generation that comes later is discarded.

        Its store ends soon: ranks of other nodes may wait there for those that never come, and what they
        have written must not be read by the ranks of the next generation. One that is just connecting has to
        get through first, since torch would try again and again where nothing wakes it.
        """
        wanted, forking = self._wanted, self._forking
        self._wanted = self._short = None
        self._unwanted = forking
        if forking is not None and forking.wanted is not None:
            self._retire_soon(forking.generation.meeting)
        if wanted is not None and self._store is not None and self._elsewhere(wanted.mine) is None:
            self._retire_soon(self._store)
            self._store = None
            self._order_store()

    def answers(self) -> Generation | None:
        """Read the zygotes' answers; return a generation whose workers have been forked."""
        self._warming.answers()
        self._renew()
        self._hear_cold_store()
        if self._zygote is None:
            return None
        found = self._zygote.answers()
        if found is None:
            return self._lost("ended")
        started = None
        for answer in found:
            started = self._take(answer) or started
        return started

    def tick(self, now: float) -> Generation | None:
        """Replace a zygote that does not answer; end stores of past generations."""
        while self._retiring and self._retiring[0][0] <= now:
            self.retire_host(self._retiring.popleft()[1])
        if self._fixed_port and not self._hosts:
            self._order_store()
        if self._wanted is not None and self._wanted.may_start():
            started = self._proceed()
            if started is not None:
                return started
        self._warming.tick(now)
        self._renew()
        self._tell()
        if (at := self._speaks()) is not None and at <= now:
            self._speaks_at = math.inf
            preloaded = "".join(f", {name}" for name in self._around.options.preload)
            self._say(
                f"the ranks start when torch{preloaded} has been imported; that takes longer than usual"
            )
        if self.mode is Mode.IMPORTING and self._warming.first_is_stuck(now):
            return self._lost("makes no progress")
        limit = self._limit()
        if limit is None or now < limit:
            return None
        what = "a store was to be served" if self.mode is Mode.IDLE else self.mode.value
        return self._lost(f"did not answer while {what}")

    def _take(self, answer: dict[str, Any]) -> Generation | None:
        if "early" in answer:
            self.mode = Mode.IDLE
            self._order_store()
        elif "ready" in answer:
            if answer["obstacle"]:
                self._go_cold(answer["obstacle"])
            elif not self._warming.first_done(answer["left_out"]):
                self._tries, self._outdated = 0, True
            else:
                self.mode = Mode.IDLE
                self._order_store()
        elif "refused" in answer:
            self._take_back()
            self._go_cold(f"the zygote cannot fork: {answer['refused']}")
        elif "storeless" in answer:
            self._go_cold(f"no store can be served: {answer['storeless']}")
        elif "store" in answer:
            self._take_store(answer)
        elif "workers" in answer and self._forking is not None:
            started = self._take_workers(self._forking, answer["workers"])
            if started is not None:
                return started
        self._renew()
        return self._proceed()

    def _take_workers(self, forked: _Forking, workers: Iterable[int]) -> Generation | None:
        self._forking = None
        pids = dict(zip(forked.ranks, workers, strict=True))
        self.mode, self._tries = Mode.IDLE, 0
        if self._early:
            self._import_behind(forked.generation)
        self._order_store()
        if forked is not self._unwanted:
            forked.generation.adopt(pids)
            return forked.generation
        self._unwanted = None
        self._discard(forked, pids.values())
        return None

    def _take_store(self, answer: Mapping[str, Any]) -> None:
        port, pid, generation = answer["port"], answer["store"], self._unserved
        self._preparing, self._unserved = False, None
        if pid:
            self._host(Child(pid))
        if generation is None:
            self._store = Rendezvous(port, pid, served=True)
            self.store_serial += 1
            if answer["busy"]:
                self._say(f"--master-port={self._fixed_port} cannot be taken: {answer['busy']}")
        else:
            self._served(generation, pid, port, answer["busy"])
            self._order_store()

    def _host(self, host: Child) -> None:
        self._hosts[host.pid] = host
        self._around.family.hold(host)

    def _served(self, generation: Generation, pid: int, port: int, busy: str) -> None:
        """Take the host of a store that was promised to a generation."""
        wanted = generation.meeting.port
        generation.meeting = replace(generation.meeting, host_pid=pid)
        if generation.number <= self._over or port != wanted:
            self.retire_host(generation.meeting)
        if generation.number > self._over and port != wanted:
            self._say(f"generation {generation.number}: nobody serves its store, port {wanted}: {busy}")

    def _import_behind(self, generation: Generation) -> None:
        """Have the zygote import torch, which the ranks that it has forked did not wait for."""
        self._early, self._unserved = False, generation
        self._await_imports()
        with contextlib.suppress(OSError):  # it has ended, which the next answer says
            if self._zygote is not None:
                self._zygote.order({"order": "import"})

    def _proceed(self) -> Generation | None:
        """Start the requested generation if all that it needs is there."""
        if self._wanted is None:
            return self._fill()
        if not self._wanted.may_start() or not self._around.may_start():
            return None
        mine, kept = self._wanted.mine, self._wanted.kept
        if self.mode is Mode.COLD:
            self._wanted = None
            meeting = self._elsewhere(mine) or self._rank_0_serves(mine)
            self._cold_port = 0
            generation = Generation(mine, self._around, meeting, kept)
            generation.start_cold(self.cold_reason)
            return generation
        found = self._elsewhere(mine) or self._store
        if found is None:
            self._order_store()
        if self.mode is Mode.IDLE and found is not None and self._zygote is not None:
            wanted, self._wanted = self._wanted, None
            if found is self._store:
                self._store = None
                found = replace(found, host=mine.host or found.host)
            self._say_where(mine.generation, found)
            return self._fork(Generation(mine, self._around, found, kept), wanted)
        return None

    def _fill(self) -> Generation | None:
        """Start the workers that a generation has lost, as soon as something can start them."""
        short = self._short
        if short is None or self.mode not in (Mode.COLD, Mode.IDLE) or not self._around.may_start():
            return None
        self._short = None
        if not short.vacant:
            return None
        if self.mode is Mode.COLD:
            short.start_cold(self.cold_reason)
            return short
        return self._fork(short)

    def _fork(self, generation: Generation, wanted: _Wanted | None = None) -> Generation | None:
        """Order workers for the vacant ranks; return the generation if there are none."""
        ranks = generation.vacant
        if not ranks:
            generation.adopt({})
            self._order_store()
            return generation
        self._forking = _Forking(generation, ranks, wanted)
        self.mode, self._waits_until = Mode.FORKING, time.monotonic() + FORK_PATIENCE
        assert self._zygote is not None, "it is ready"
        try:
            common = self._script_sets.originals
            seats = [{**generation.seat(rank), "common": common} for rank in ranks]
            self._warming.own = generation.own_variables
            self._zygote.order({"order": "spawn", "ranks": seats})
        except OSError:
            return self._lost("ended")
        return None

    def _elsewhere(self, mine: Assignment) -> Rendezvous | None:
        """Return the store of a generation that another node serves, or rank 0 itself."""
        if mine.host and (not mine.master or mine.port < 0):
            return Rendezvous(abs(mine.port), 0, mine.host, mine.port > 0)
        return None

    def _rank_0_serves(self, mine: Assignment) -> Rendezvous:
        return Rendezvous(abs(self.store_port), 0, mine.host or "127.0.0.1")

    def _say_where(self, generation: int, meeting: Rendezvous) -> None:
        """Report that the ranks' store is not at the address that the user gave."""
        world = self._around.options.world
        if world.master_port not in (0, meeting.port):
            self._say(
                f"generation {generation}: ranks meet at {meeting.host}:{meeting.port} (MASTER_ADDR,"
                f" MASTER_PORT), not at {world.master_addr}:{world.master_port}; a script that names that"
                " place itself will not connect"
            )

    def _order_store(self) -> None:
        if self.mode is not Mode.IDLE or (self._fixed_port and self._hosts):
            return  # it cannot answer yet, or the store of the generation that runs has the port
        if self._zygote is not None and self._store is None and not self._preparing:
            options = self._around.options
            host = network.store_host(options, self._around.address)
            port = self._fixed_port if self._unserved is None else self._unserved.meeting.port
            given = {"port": port, "avoid": 0 if self._unserved else options.world.master_port}
            with contextlib.suppress(OSError):
                self._zygote.order({"order": "store", "host": host, **given})
                self._preparing, self._waits_until = True, time.monotonic() + FORK_PATIENCE

    def _discard(self, forked: _Forking, pids: Iterable[int]) -> None:
        """End workers that were forked for a past generation."""
        self._over = forked.generation.number
        for pid in pids:
            self._around.family.drop(Child(pid))
        if forked.wanted is not None:  # nobody else has taken charge of it
            forked.generation.discard()

    def _lost(self, how: str) -> Generation | None:
        """Replace the zygote; a generation that it owed is requested again."""
        self._take_back()
        self._say(f"the zygote {how}; running workers are not touched")
        self._drop()
        self._warming.first_lost()
        if self._warm:
            self._warming.again()
        self._open()
        return self._proceed()

    def _take_back(self) -> None:
        """Request the generation that the zygote owes again."""
        forking, self._forking = self._forking, None
        if forking is not None:
            if forking is not self._unwanted and forking.wanted is None:
                self._short = forking.generation
            elif forking is not self._unwanted:
                self._wanted = forking.wanted
            self._unwanted = None
            if forking.wanted is not None:
                forking.generation.discard()

    def _go_cold(self, why: str) -> None:
        self._drop()
        self._warming.close()
        self.mode, self.cold_reason = Mode.COLD, why
        self._say(f"workers start cold: {why}")
        self._serve_cold()

    def _serve_cold(self) -> None:
        """Have a cold process serve the store that was promised to a generation, if there is one."""
        generation, self._unserved = self._unserved, None
        if generation is None or generation.number <= self._over:
            return
        host = network.store_host(self._around.options, self._around.address)
        try:
            self._cold_store = ColdStore(generation, host, self._script_sets.environment)
        except OSError as error:
            self._say(unserved(generation, cannot_start("the store host", error)))
            return
        self._host(self._cold_store.process)
        self._selector.register(self._cold_store, selectors.EVENT_READ, self)

    def _hear_cold_store(self) -> None:
        cold = self._cold_store
        problem = None if cold is None else cold.problem()
        if cold is None or problem is None:
            return
        self._close_cold_store()
        if problem and cold.generation.number > self._over:
            self.retire_host(cold.generation.meeting)
            self._say(unserved(cold.generation, problem))

    def _close_cold_store(self) -> None:
        if self._cold_store is not None:
            self._selector.unregister(self._cold_store)
            self._cold_store.close()
            self._cold_store = None

    def _drop(self) -> None:
        self._end_zygote()
        if self._store is not None:
            self.retire_host(self._store)
        self._store, self._preparing = None, False

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._selector.unregister(self._zygote)
            self._zygote.end()
            self._around.family.drop(self._zygote.process)
            self._zygote = None

    def retire(self, generation: Generation) -> None:
        """End the store host of a generation that is over: soon, if ranks of other nodes may be connecting.

        torch tries again and again to connect to a store that ended, and nothing wakes such a rank.
        """
        self._over = generation.number
        if time.monotonic() - generation.spawned < _CONNECTS_WITHIN:
            self._retire_soon(generation.meeting)
        else:
            self.retire_host(generation.meeting)

    def _retire_soon(self, meeting: Rendezvous) -> None:
        if meeting.host_pid in self._hosts:
            self._retiring.append((time.monotonic() + _CONNECTED_WITHIN, meeting))

    def retire_host(self, meeting: Rendezvous) -> None:
        """End the store host of a generation that is over."""
        host = self._hosts.pop(meeting.host_pid, None)
        if host is not None:
            self._around.family.drop(host)

    def store_ended(self, meeting: Rendezvous) -> bool:
        """Return whether the store host of a generation that is not over has ended."""
        host = self._hosts.get(meeting.host_pid)
        return host is not None and host.poll() is not None

    def close(self) -> None:
        """End the zygote and every store host."""
        self._drop()
        self._close_cold_store()
        self._warming.close()
        for host in self._hosts.values():
            self._around.family.drop(host)
        self._hosts.clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
