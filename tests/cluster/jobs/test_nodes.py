"""Jobs of several nodes: real agents on this host, real signals; each ends everywhere and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agents import Agents
from tests.support.jobs import frozen, mounted, needs_root
from tests.support.launching import until
from tests.support.processes import main_thread_stopped

_END = "exit:0 * *"
_FAKETIME = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    """Return what makes a job; its agents are gone afterwards."""
    made: list[Agents] = []

    def make(*args: Any, **more: Any) -> Agents:
        made.append(Agents(tmp_path / f"job-{len(made)}", *args, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def _begun(found: Agents, *names: str, ranks: int) -> int:
    """Start agents, the first of which coordinates; return the generation that all ranks are in."""
    found.start(names[0])
    found.until_said(names[0], "this node is the leader")
    found.start(*names[1:])
    generation = found.until_runs(ranks)
    found.until_commit(generation)
    return generation


def _ends(found: Agents, *lost: str) -> None:
    """Let all ranks finish: every agent that lives ends with 0, and nothing is left."""
    found.order(_END)
    codes = found.finish()
    assert codes == {name: -signal.SIGKILL if name in lost else 0 for name in codes}, found.consoles()
    found.nothing_left()


def test_workers_killed_on_two_nodes_at_once_cost_one_generation(job: Callable[..., Agents]) -> None:
    found = job("3:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    pids = found.ranks(first, 3)
    for rank in (1, 2):
        os.kill(pids[rank], signal.SIGKILL)
    found.until_commit(found.until_runs(3, after=first))
    assert found.generations() == [first, first + 1], found.consoles()
    _ends(found)
    assert json.loads((found.run / "job_state.json").read_text())["complete"] >= 0, "the next launch knows it"


def test_a_killed_agent_costs_one_generation_and_the_job_grows_when_it_is_back(
    job: Callable[..., Agents],
) -> None:
    found = job("2:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    found.kill("n2")
    smaller = found.until_runs(2, after=first)
    found.until_commit(smaller)
    found.start("n2")
    found.until_commit(found.until_runs(3, after=smaller))
    assert found.generations() == [first, first + 1, first + 2], found.consoles()
    _ends(found)


def test_a_spare_takes_the_place_of_a_killed_leader(job: Callable[..., Agents]) -> None:
    found = job("2:2", spares=1)
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.start("n1")
    first = found.until_runs(2)
    found.start("n2")
    found.until_said("n2", "this node is a spare")  # it votes from then on
    found.kill("n0")
    found.until_commit(found.until_runs(2, after=first))
    assert found.generations() == [first, first + 1], found.consoles()
    _ends(found, "n0")


def test_a_leader_killed_while_a_generation_forms_is_succeeded(job: Callable[..., Agents]) -> None:
    found = job("2:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    os.kill(found.ranks(first, 3)[2], signal.SIGKILL)
    until(lambda: found.records("n0", "action_taken"), "the order to restart")
    found.kill("n0")
    found.until_commit(found.until_runs(2, after=first))
    _ends(found, "n0")


def test_a_founder_killed_before_anybody_joined_founds_the_job_again(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.send("n0", signal.SIGSTOP)  # it has the port, and takes nobody in
    found.start("n1")
    found.until_said("n1", "agents meet at")
    found.kill("n0")
    found.start("n0")
    found.until_commit(found.until_runs(2))
    _ends(found)


def test_a_stopped_leaders_node_commits_nothing_when_it_wakes_up(job: Callable[..., Agents]) -> None:
    found = job("2:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    tree = found.tree("n0")
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    second = found.until_runs(2, after=first)
    found.until_commit(second)
    assert found.commits()[-1]["node"] != "n0"
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    found.until_commit(found.until_runs(3, after=second))
    committed = [one["generation"] for one in found.commits()]
    assert committed == sorted(committed), found.consoles()
    _ends(found)


def test_an_agent_stopped_for_longer_than_its_timeout_joins_again(job: Callable[..., Agents]) -> None:
    found = job("2:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    found.send("n1", signal.SIGSTOP)
    second = found.until_runs(2, after=first)
    found.send("n1", signal.SIGCONT)
    found.until_commit(found.until_runs(3, after=second))
    assert found.generations() == [first, first + 1, first + 2], found.consoles()
    _ends(found)


def test_a_job_that_needs_all_of_its_nodes_takes_back_each_that_was_lost_and_lives(
    job: Callable[..., Agents],
) -> None:
    """A node whose agent is only busy is not lost; one that is stopped is, the leader too, and comes back."""
    found = job("3:3")
    first = _begun(found, "n0", "n1", "n2", ranks=3)
    with main_thread_stopped(found.agents["n1"].pid):
        found.until_said("n0", "n1 is connected, and its agent is busy")
    assert found.generations() == [first]
    for at, name in enumerate(("n2", "n0"), 1):
        others = [other for other in ("n0", "n1", "n2") if other != name]
        found.send(name, signal.SIGSTOP)
        found.until(lambda: any(found.said(one, f"{name} is lost") for one in others), f"{name} lost")  # noqa: B023
        found.send(name, signal.SIGCONT)
        found.until_commit(found.until_runs(3, after=first + at - 1))
    assert found.generations() == [first, first + 1, first + 2], found.consoles()
    _ends(found)


@pytest.mark.parametrize(("what", "ranks", "spares"), [("raise", 2, 1), ("exit:3", 1, 0)])
def test_a_fault_that_comes_back_ends_every_agent_with_93(
    job: Callable[..., Agents], what: str, ranks: int, spares: int
) -> None:
    found = job("2:2", spares, options=("--nproc-per-node", f"{ranks}", "--max-restarts", "1"))
    found.start(*(f"n{at}" for at in range(2 + spares)))
    # Of a script that has said nothing yet no step is known, so no fault of it comes back.
    # The next generation must not get further before its rank 1 has begun.
    until(lambda: len(found.commits()) >= 30, "commits")
    found.order(f"{what} 1 *")
    assert set(found.finish().values()) == {93}, found.consoles()
    # A spare that has joined in time is tried, too; a save that is committed late refills the budget.
    assert 2 <= len(found.generations()) <= 3 + spares
    found.nothing_left()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_agent_ends_the_job_everywhere(
    job: Callable[..., Agents], signum: int, code: int
) -> None:
    found = job("2:2", spares=1)
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.start("n1", "n2")
    found.until_commit(found.until_runs(2))
    found.until(lambda: any(found.said(name, "this node is a spare") for name in ("n1", "n2")), "a spare")
    found.send("n1", signum)
    assert found.finish() == {"n0": code, "n1": code, "n2": code}, found.consoles()
    found.nothing_left()


def test_a_signal_during_start_up_ends_the_job_everywhere(job: Callable[..., Agents]) -> None:
    found = job("3:3")
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.start("n1")
    found.until_said("n0", "n1 has joined")
    found.send("n1", signal.SIGTERM)
    assert found.finish() == {"n0": 143, "n1": 143}, found.consoles()
    found.nothing_left()


def test_a_signal_reaches_a_leader_that_has_not_answered_yet(job: Callable[..., Agents]) -> None:
    found = job("3:3")
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.send("n0", signal.SIGSTOP)
    found.start("n1")
    found.until_said("n1", "agents meet at")
    for times in (1, 2):  # as schedulers repeat it
        found.send("n1", signal.SIGTERM)
        found.until(lambda times=times: found.said("n1", "s to answer") == times, f"note {times} of a signal")
    found.send("n0", signal.SIGCONT)
    assert found.finish() == {"n0": 143, "n1": 143}, found.consoles()
    found.nothing_left()


def test_an_agent_that_hears_nobody_ends_at_once_by_a_second_signal(job: Callable[..., Agents]) -> None:
    found = job("3:3")
    with socket.create_server(("127.0.0.1", found.port)):  # somebody is there, and never answers
        found.start("n1")
        found.until_said("n1", "agents meet at")
        found.send("n1", signal.SIGTERM)
        found.until_said("n1", "a leader has 5 s to answer")
        found.send("n1", signal.SIGINT)
        assert found.finish() == {"n1": 130}, found.consoles()
    found.nothing_left()


def test_a_signal_ends_an_agent_whose_leader_is_gone_for_good(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    _begun(found, "n0", "n1", ranks=2)
    found.kill("n0")
    found.send("n1", signal.SIGTERM)
    assert found.finish("n1") == {"n1": 143}, found.consoles()
    found.nothing_left()


def test_the_same_command_goes_on_with_a_younger_generation_when_all_agents_were_killed(
    job: Callable[..., Agents],
) -> None:
    found = job("2:2")
    first = _begun(found, "n0", "n1", ranks=2)
    for name in ("n0", "n1"):
        found.kill(name)
    found.start("n1", "n0")
    second = found.until_runs(2, after=first)
    _ends(found)
    found.start("n0", "n1")
    assert found.finish() == {"n0": 0, "n1": 0}
    assert found.generations() == [first, second, second + 1], found.consoles()
    found.nothing_left()


@pytest.mark.skipif(not _FAKETIME, reason="libfaketime is not installed")
def test_wrong_clocks_and_one_that_is_set_back_by_an_hour_change_nothing(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    faked = {"LD_PRELOAD": str(_FAKETIME[0]), "DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}
    found = job("2:2")
    # Only the agents: with this library a rank's time.sleep fails.
    real = ("/usr/bin/env", "-u", "LD_PRELOAD")
    found.command = (found.command[0], *real, *found.command[1:])
    found.start("n0", environment={**faked, "FAKETIME_TIMESTAMP_FILE": str(clock)})
    found.until_said("n0", "this node is the leader")
    found.start("n1", environment={**faked, "FAKETIME": "-400d"})
    assert found.finish("n1") == {"n1": 69}  # the preflight finds it
    assert "behind the newest file of the run folder" in found.console("n1")
    found.start("n1", options=("--preflight", "off"), environment={**faked, "FAKETIME": "-400d"})
    first = found.until_runs(2)
    found.until_commit(first)
    times = {name: found.records(name, "run_started")[-1]["time"] for name in ("n0", "n1")}
    assert times["n0"] - times["n1"] > 399 * 86400
    assert found.generations() == [first], found.consoles()
    clock.write_text("-3600")
    os.kill(found.ranks(first, 2)[1], signal.SIGKILL)
    found.until_commit(found.until_runs(2, after=first))
    assert found.generations() == [first, first + 1], found.consoles()
    _ends(found)


@pytest.fixture
def freezing(job: Callable[..., Agents], tmp_path: Path) -> Iterator[tuple[Agents, Callable[..., None]]]:
    """Give a job of two nodes and what freezes the file system of its run folder, or thaws it."""
    found = job("2:2", options=("--ping-timeout", "2", "--preflight", "off"))
    found.run.mkdir()
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(found.run, "-o", "loop", str(image)), frozen(found.run) as freeze:
        yield found, freeze


@needs_root
def test_a_run_folder_whose_file_system_hangs_stops_no_agent(
    freezing: tuple[Agents, Callable[..., None]],
) -> None:
    found, freeze = freezing
    first = _begun(found, "n0", "n1", ranks=2)
    freeze()
    found.until(lambda: "has not answered for" in found.console("n0"), "word of it")
    before = len(found.commits())  # each has asked for a lease, which pings renew every few seconds
    found.until(lambda: len(found.commits()) > before + 100, "commits while nothing can be written")
    freeze(thaw=True)
    found.until_said("n0", "answers again after")
    assert found.generations() == [first], found.consoles()
    _ends(found)


@needs_root
def test_a_rank_that_fails_while_the_run_folder_is_frozen_costs_one_generation_and_no_node(
    freezing: tuple[Agents, Callable[..., None]],
) -> None:
    found, freeze = freezing
    first = _begun(found, "n0", "n1", ranks=2)
    freeze()
    found.order(f"exit:3 1 {first}")  # what it left to read is looked for in its log
    found.until(lambda: "restart-in-job" in found.console("n0"), "the order to restart")
    found.until(lambda: "has not answered for" in found.console("n1"), "word of it")
    time.sleep(6.0)  # three times as long as an agent may be silent
    assert "is lost" not in found.console("n0"), found.consoles()
    freeze(thaw=True)
    found.until_commit(found.until_runs(2, after=first))
    assert found.generations() == [first, first + 1], found.consoles()
    assert "is lost" not in found.console("n0"), found.consoles()
    assert (found.run / "nodes" / "n1" / "logs" / f"gen-{first + 1:04d}" / "rank-00001").is_dir()
    _ends(found)


def _undisturbed(steps: int) -> str:
    """Return the digest of what the script trains, computed here for both ranks."""
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        gradients = []
        for rank in (0, 1):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            loss = model(torch.randn(4, 16, generator=generator)).square().mean()
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.step()
    bits = b"".join(bytes(one.detach().view(torch.uint8).flatten().tolist()) for one in model.parameters())
    return hashlib.sha256(bits).hexdigest()


@pytest.mark.parametrize("lost", ["n1", "n0"])
def test_training_is_bit_for_bit_the_same_when_a_spare_takes_the_place_of_a_killed_agent(
    job: Callable[..., Agents], lost: str
) -> None:
    steps = 200
    found = job("2:2", spares=1, script=("agreeing.py", str(steps)))
    hold = found.trace / "hold"
    hold.touch()  # training waits for the spare
    found.start("n0")
    found.until_said("n0", "this node is the leader")
    found.start("n1")
    found.until_said("n0", "generation 1")
    found.start("n2")
    found.until_said("n2", "this node is a spare")
    hold.unlink()
    first = found.until_runs(2)
    found.until(lambda: any(found.records(name, "saved") for name in ("n0", "n1")), "a checkpoint")
    found.kill(lost)
    found.until_runs(2, after=first)
    codes = found.finish()
    assert codes == {name: -signal.SIGKILL if name == lost else 0 for name in codes}, found.consoles()
    found.nothing_left()
    loaded = [one["step"] for name in codes for one in found.records(name, "loaded")]
    assert loaded, found.consoles()
    assert loaded[0] > 0
    assert (found.trace / "digest").read_text() == _undisturbed(steps)
