"""What a loop says of itself, to an agent and to nobody, and frameworks that are missing or too old."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast import settings
from outlast.agreement.agent import StepAgreements
from outlast.agreement.policy.steps import StepCoordinator, TellRanks, Want
from outlast.errors import UsageError
from outlast.integrations.announcing import AnnouncedLoop, require
from outlast.integrations.frameworks import follow
from outlast.ipc.control import Inbox
from outlast.ipc.heartbeat_page import HeartbeatReader
from outlast.launcher.workers.processes import Worker
from outlast.observe.policy import codec
from outlast.recovery.policy.events import CannotSave, Record, ScriptSaved
from outlast.settings import WorkerContext
from outlast.stragglers.policy.rows import BENCHMARK
from tests.support import warm
from tests.support.launching import SCRIPTS, until


class Agent:
    """The agent of two ranks, each of which does to its loop what it is told."""

    number = 1
    workers: tuple[Worker, ...] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inbox = Inbox(folder / "control")
        self.pages = {
            rank: HeartbeatReader(folder / f"page-{rank}", rank=rank, generation=1, spawned=time.monotonic())
            for rank in (0, 1)
        }
        self._agreements = StepAgreements()
        self._agreements.begin(self)
        self.coordinator = StepCoordinator(self.pages)
        self._saved: list[tuple[int, int]] = []
        self._told: dict[int, int] = dict.fromkeys(self.pages, 0)
        self._open = contextlib.ExitStack()
        self._orders = {rank: self._start(rank) for rank in self.pages}

    def _start(self, rank: int) -> int:
        self.pages[rank].agreement.serve()
        pipe, answers = self._folder / f"orders-{rank}", self._folder / f"answers-{rank}"
        os.mkfifo(pipe)
        answers.touch()
        context = WorkerContext(
            generation=1, heartbeat_path=str(self.pages[rank].path), control_path=str(self._inbox.path)
        )
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [SCRIPTS / "announced_loop.py", pipe, answers]
        with open(self._folder / "out", "ab") as out:
            process = warm.start(command, out, out, {**settings.worker_variables(context), **ranks})
        self._open.callback(process.wait, 60)
        self._open.callback(process.kill)
        order = os.open(pipe, os.O_RDWR)
        self._open.callback(os.close, order)
        return order

    def tell(self, rank: int, order: str) -> None:
        os.write(self._orders[rank], f"{order}\n".encode())
        self._told[rank] += 1

    def answers(self, rank: int) -> list[str]:
        return (self._folder / f"answers-{rank}").read_text().splitlines()

    def all_answered(self) -> bool:
        """Take part in the agreement; return whether every rank has done what it was told."""
        seen = self._agreements.look()
        for status in () if seen is None else seen.statuses:
            for said in self.coordinator.handle(status):
                self._agreements.tell(TellRanks(1, said))
        return all(len(self.answers(rank)) == count for rank, count in self._told.items())

    def do(self, *orders: str) -> None:
        for order in orders:
            for rank in self.pages:
                self.tell(rank, order)
            self.wait()

    def wait(self) -> None:
        until(self.all_answered, lambda: f"{self._told}: {(self._folder / 'out').read_text()}")

    def saved(self) -> list[tuple[int, int]]:
        """Return what was reported as saved: step, and its number in the agreement."""
        for line in self._inbox.lines():
            record = codec.decode(line)
            if isinstance(record, ScriptSaved):
                self._saved.append((record.step, record.agreed))
        return self._saved

    def reported(self, kind: type[Record]) -> list[Record]:
        """Return what was reported of one kind since the last call of this and of :meth:`saved`."""
        return [one for one in map(codec.decode, self._inbox.lines()) if isinstance(one, kind)]

    def close(self) -> None:
        self._open.close()
        self._agreements.over()
        self._inbox.close()
        for page in self.pages.values():
            page.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with contextlib.closing(Agent(tmp_path)) as found:
        yield found


def test_a_save_is_reported_by_the_rank_that_wrote_it(agent: Agent) -> None:
    agent.do("begin 0", "step_done 1", "saved 1", "step_done 2")
    assert agent.saved() == [(1, 1)], "when the step after it is completed"
    agent.tell(1, "saved 2")
    agent.tell(1, "end")
    agent.wait()
    assert agent.saved() == [(1, 1)], "rank 0 still writes"
    agent.tell(0, "saved 2")
    agent.tell(0, "end")
    agent.wait()
    assert agent.saved() == [(1, 1), (2, 2)]


def test_a_save_in_the_background_is_reported_when_it_is_complete(agent: Agent, tmp_path: Path) -> None:
    written = tmp_path / "written"
    agent.do("begin 0", "step_done 1", f"saved 1 when:{written}", "step_done 2", "step_done 3")
    assert agent.saved() == []
    written.touch()
    agent.do("step_done 4", "step_done 5")
    assert agent.saved() == [(1, 1)]
    agent.do("end")


def test_that_no_checkpoint_will_come_is_reported_once(agent: Agent) -> None:
    agent.do("begin 0", "step_done 1", "cannot_save 1 no-place")
    (found,) = agent.reported(CannotSave)
    assert isinstance(found, CannotSave)
    assert (found.step, found.reason) == (1, "no-place")


def test_a_save_before_a_planned_stop_is_reported_with_the_step_that_was_agreed_on(agent: Agent) -> None:
    """A framework with two optimizers counts two steps for each; the ranks count calls since the start."""
    agent.do("begin 100", "step_done 102", "saved 102")
    agent.coordinator.ask(Want.SAVE | Want.HOLD)
    step = 102
    while "step_done True False" not in agent.answers(0):
        step += 2
        assert step < 120, "the ranks were never told to save"
        agent.do(f"step_done {step}")
    assert agent.answers(1)[-1] == "step_done True False"
    assert agent.saved() == [(102, 1)]
    agent.do(f"saved {step}", f"step_done {step + 2}")
    assert agent.coordinator.held == (step - 100) // 2
    assert agent.saved() == [(102, 1), (step, agent.coordinator.held)]
    agent.do("end")


def test_a_product_that_ranks_compare_costs_no_checkpoint(agent: Agent) -> None:
    agent.do("begin 0", "step_done 1")
    agent.coordinator.ask(Want.BENCHMARK)
    for step in range(2, 8):
        agent.do(f"step_done {step}")
    for rank, page in agent.pages.items():
        assert set(agent.answers(rank)) == {"begin False False", "step_done False False"}
        assert BENCHMARK in page.names(), "the product was computed"
    agent.do("end")


def test_garbage_that_is_due_is_collected_before_the_first_step(agent: Agent) -> None:
    """Else the first step that makes many objects does it, such as the first one that saves."""
    agent.do("imports", "begin 0", "due")
    for rank in (0, 1):
        assert agent.answers(rank) == ["imports True", "begin False False", "due False"]


def test_a_save_that_failed_is_not_reported_by_the_next_loop(agent: Agent) -> None:
    agent.do("begin 0", "step_done 1", "saved 1", "forget", "begin 1", "step_done 2")
    assert agent.saved() == []
    agent.do("end")


def test_outside_of_the_launcher_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with AnnouncedLoop() as loop:
        loop.begin(3)
        assert loop.step_done(4) == 4
        loop.saved(4)
        loop.enter_section("evaluation")
        loop.leave_section()
    assert (loop.active, loop.should_save, loop.should_stop, caplog.text) == (False, False, False, "")


def test_a_framework_that_is_missing_or_too_old_is_named_with_what_is_needed() -> None:
    require("pytest", (8, 0), "a test")
    with pytest.raises(UsageError, match=r"a test.*nobody-has-this.*1\.2"):
        require("nobody-has-this", (1, 2), "a test")
    with pytest.raises(UsageError, match=r"pytest \d.*pytest 999\.1"):
        require("pytest", (999, 1), "a test")
    with pytest.raises(UsageError, match=r"builtins\.dict"), follow({}):
        pass
