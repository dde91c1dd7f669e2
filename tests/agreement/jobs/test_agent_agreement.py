"""Ranks that agree on a step through their agent: threads over real pages, and the agent's look at them."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from outlast.agreement.agent import StepAgreements
from outlast.agreement.policy.steps import NodeCoordinator, Stage, TellRanks, Want
from outlast.agreement.policy.votes import Flag
from outlast.agreement.worker.agent_agreement import AgentAgreement
from outlast.ipc.control import Inbox
from outlast.ipc.heartbeat_page import HeartbeatPage, HeartbeatReader
from outlast.launcher.workers.processes import Worker
from tests.agreement.jobs.training import PATIENCE, Trainee, all_at_gate, open_gate, started, until

SHORT = [0.0] * 20


class Rank(Trainee):
    """A rank that notes after which steps it acts."""

    def __init__(
        self, page: HeartbeatPage, control: Path, seconds: Sequence[float], saved: float, gate: int
    ) -> None:
        super().__init__(seconds, gate)
        self.page = page
        self.agreement = AgentAgreement(page, str(control), lambda: (math.inf, math.inf, {"local": saved}))
        self.patience = PATIENCE
        self.met: list[tuple[int, Want]] = []
        self.seen: list[float] = []
        self.held: list[bool] = []  # whether it was told to go on, at each hold

    def begin(self) -> None:
        self.agreement.begin(0)

    def after(self, step: int) -> None:
        self.page.heartbeat(step)
        found = self.agreement.decided(step)
        if found is not None:
            self.met.append((step, found.wants))
            self.seen.append(found.seconds["local"])
            self.agreement.begin(step)
            if Want.HOLD in found.wants:
                self.held.append(self.agreement.hold(self.patience))

    def end(self) -> None:
        self.agreement.end()

    def has_met(self, want: Want) -> bool:
        return any(want in wants for _, wants in self.met)


class Node:
    """An agent's inbox and pages, and the ranks that share them."""

    def __init__(self, folder: Path, *seconds: Sequence[float], gate: int = -1) -> None:
        self.inbox = Inbox(folder / "control")
        now = time.monotonic()
        self.pages = {
            rank: HeartbeatReader(folder / f"page-{rank}", rank=rank, generation=1, spawned=now)
            for rank in range(len(seconds))
        }
        for page in self.pages.values():
            page.agreement.serve()
        self.ranks = [
            Rank(HeartbeatPage.open(page.path), folder / "control", each, 1.0 + rank, gate)
            for (rank, page), each in zip(self.pages.items(), seconds, strict=True)
        ]
        self.workers: list[Worker] = []
        self.number = 1
        self.coordinator = NodeCoordinator()
        self.agreements = StepAgreements()
        self.agreements.begin(self)
        self.over = threading.Event()
        self.woken = 0

    def look(self) -> None:
        """Read the pages, and write what follows."""
        seen = self.agreements.look()
        for order in () if seen is None else self.coordinator.look(seen):
            self.agreements.tell(order)

    def serve(self) -> None:
        """Look whenever a rank asks for it, and now and then, as an agent does."""
        self.inbox._socket.setblocking(True)
        self.inbox._socket.settimeout(0.01)
        while not self.over.is_set():
            with contextlib.suppress(socket.timeout):
                self.inbox._socket.recv(64)
                self.woken += 1
            self.look()

    def close(self) -> None:
        self.inbox.close()
        self.agreements.over()
        for page in self.pages.values():
            page.close()


@contextlib.contextmanager
def training(folder: Path, *seconds: Sequence[float], gate: int = -1) -> Iterator[Node]:
    node = Node(folder, *seconds, gate=gate)
    agent = threading.Thread(target=node.serve)
    agent.start()
    try:
        with started(*node.ranks):
            yield node
    finally:
        node.over.set()
        agent.join(PATIENCE)
        node.close()


def ask(rank: Rank, want: Want, last: Rank) -> None:
    """Ask for something, and wait for a proposal in the page that is written last."""
    rank.agreement.ask(want)
    until(lambda: last.page.agreement.ticket)


def test_ranks_that_hold_wait_until_they_are_released(tmp_path: Path) -> None:
    with training(tmp_path, [0.01] * 40, [0.01] * 40, gate=2) as node:
        all_at_gate(node.ranks)
        ask(node.ranks[0], Want.SAVE | Want.HOLD, node.ranks[1])
        open_gate(*node.ranks)
        until(lambda: all(rank.met for rank in node.ranks))
        (step,) = {rank.completed for rank in node.ranks}
        assert not any(rank.held for rank in node.ranks)
        for said in node.coordinator._coordinator.release():
            node.agreements.tell(TellRanks(1, said))
    assert [rank.met for rank in node.ranks] == [[(step, Want.SAVE | Want.HOLD)]] * 2
    assert [rank.held for rank in node.ranks] == [[True], [True]]
    assert [rank.completed for rank in node.ranks] == [40, 40]


def test_ranks_that_nobody_releases_go_on_by_themselves(tmp_path: Path) -> None:
    with training(tmp_path, [0.01] * 20, [0.01] * 20, gate=2) as node:
        all_at_gate(node.ranks)
        for rank in node.ranks:
            rank.patience = 0.1
        ask(node.ranks[0], Want.SAVE | Want.HOLD, node.ranks[1])
        open_gate(*node.ranks)
    assert [rank.held for rank in node.ranks] == [[False], [False]]


def test_ranks_of_different_speeds_act_after_the_same_steps(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [[draw.choice((0.0, 0.001, 0.01)) for _ in range(400)] for _ in range(4)]
    with training(tmp_path, *lengths) as node:
        for want in (Want.SAVE, Want.DUE, Want.STOP):
            asking = draw.choice(node.ranks)
            asking.agreement.ask(want)
            until(lambda rank=asking, want=want: rank.has_met(want) or not rank.thread.is_alive())
    assert node.ranks[0].met, "somebody was heard"
    assert [rank.met for rank in node.ranks] == [node.ranks[0].met] * 4
    assert {taken for rank in node.ranks for taken in rank.seen} == {4.0}, "the longest save counts"


def test_all_ranks_save_once_although_only_the_agent_has_asked(tmp_path: Path) -> None:
    with training(tmp_path, [0.01] * 100, [0.01] * 100, gate=2) as node:
        all_at_gate(node.ranks)
        node.agreements.ask_save()
        open_gate(*node.ranks)
        until(lambda: all(rank.met for rank in node.ranks))
    (met,) = node.ranks[0].met
    assert met[1] is Want.SAVE
    assert node.ranks[1].met == [met]


def test_a_request_within_a_long_step_is_met_after_that_step_where_time_is_short(tmp_path: Path) -> None:
    with training(tmp_path, SHORT, SHORT, gate=5) as node:
        asking, other = node.ranks
        all_at_gate(node.ranks)
        ask(asking, Want.PREEMPTED, other)
        open_gate(asking, other)
    assert asking.met == other.met == [(5, Want.PREEMPTED)]


def test_a_rank_at_the_end_of_its_loop_holds_nobody_up(tmp_path: Path) -> None:
    with training(tmp_path, SHORT, SHORT) as node:
        slow, quick = node.ranks
        quick.thread.join(PATIENCE)
        slow.agreement.ask(Want.SAVE)
    assert slow.completed == quick.completed == 20
    assert slow.met == quick.met


def test_in_a_healthy_step_nothing_is_sent_and_nobody_is_told(tmp_path: Path) -> None:
    with training(tmp_path, [0.0] * 50, [0.0] * 50) as node:
        for rank in node.ranks:
            rank.thread.join(PATIENCE)
        assert all(rank.completed == 50 and not rank.met for rank in node.ranks)
        assert all(rank.page.agreement.ticket == 0 for rank in node.ranks)
        assert node.woken == 0


def test_a_dead_rank_ends_the_agreement(tmp_path: Path) -> None:
    ended = Worker(1, os.getpid())
    ended.exit_code = 1
    ended.close()
    with training(tmp_path, SHORT, SHORT, gate=5) as node:
        asking, dead = node.ranks
        all_at_gate(node.ranks)
        ask(asking, Want.PREEMPTED, dead)
        open_gate(asking)

        def withdrawn() -> bool:
            if asking.page.beats > 6:  # it waits after step 5 for the other one's answer, and is alive
                node.workers = [ended]
            said = asking.page.agreement.read()
            return said is not None and said.stage is Stage.WITHDRAWN

        until(withdrawn)
        asking.thread.join(PATIENCE)
        assert asking.met == []
        open_gate(dead)


def test_what_the_agent_writes_is_read_whole(tmp_path: Path) -> None:
    node = Node(tmp_path, [])
    words = node.ranks[0].page.agreement
    assert words.served
    assert words.read() is None
    words.begin(1, 6)
    words.terms(50.0, 60.0, {"memory": 0.5})
    words.want(Want.SAVE | Want.PREEMPTED)
    words.answer(0, passed=False)
    node.look()
    said = words.read()
    assert said is not None
    assert (said.stage, said.step, said.ticket) == (Stage.PROPOSED, 7, words.ticket)
    words.answer(said.number, passed=False)
    node.look()
    said = words.read()
    assert said is not None
    assert said.stage is Stage.COMMITTED
    vote = said.vote(40.0)
    assert vote.flags == {Flag.SAVE, Flag.PREEMPTED}
    assert (vote.left, vote.limit, vote.seconds) == (10.0, 20.0, {"memory": 0.5})
    node.ranks[0].agreement.end()
    node.close()
