"""A job on three hosts with a network of their own, which is cut, and whose power goes: one part commits."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts as testbed
from tests.support.agents import Agents
from tests.support.hosts import Host, Hosts
from tests.support.launching import DEADLINE
from tests.support.namespaces import Process

PORT = 29400


class Apart(Agents):
    """The agents of a job, each on a host of its own; ``n0`` to ``n2``."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder, "2:3", options=("--ping-timeout", "4", "--max-restarts", "100"))
        self.settings["--rdzv-endpoint"] = f"n0:{PORT}"
        self.hosts = {host.name: host for host in hosts}
        self.processes: dict[str, Process] = {}

    def launch(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        log = self.folder / f"{name}.console"
        self.processes[name] = self.hosts[name].start(command, environment, log, self.folder)

    def consoles(self) -> str:
        return "\n".join(f"--- {name}\n{self.console(name)}" for name in self.processes)

    def leading(self) -> Host:
        """Return the host at the address that the run folder names."""
        named = self.run / "leader.json"
        self.until(named.exists, "a leader that is named")
        where = json.loads(named.read_text())["address"].rpartition(":")[0]
        return next(host for host in self.hosts.values() if where in (host.name, host.address))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Apart]:
    with Hosts(3, tmp_path / "hosts") as hosts:
        yield Apart(tmp_path / "job", hosts)


@pytest.mark.skipif(bool(testbed.why_not()), reason=testbed.why_not() or "hosts can be started")
def test_a_job_goes_on_in_one_part_of_the_network_and_takes_back_what_was_cut_off(job: Apart) -> None:
    job.start("n0", "n1", "n2")
    generation = whole(job, 0)
    leader = job.leading()
    follower = next(host for host in job.hosts.values() if host is not leader)

    follower.cut()
    generation = smaller(job, generation, without=follower)
    follower.heal()
    generation = whole(job, generation)

    leader.cut()
    generation = smaller(job, generation, without=leader)
    job.until(lambda: job.leading() is not leader, "the new leader to be named in the run folder")
    leader.heal()
    generation = whole(job, generation)

    last = next(host for host in job.hosts.values() if host not in (leader, follower))
    last.kill()
    generation = smaller(job, generation, without=last)
    last.boot()
    job.start(last.name)
    whole(job, generation)

    committed = [one["generation"] for one in job.commits()]
    assert committed == sorted(committed), "none commits after a younger generation has"
    job.processes[follower.name].send(signal.SIGTERM)
    codes = {name: process.wait(DEADLINE) for name, process in job.processes.items()}
    assert codes == dict.fromkeys(("n0", "n1", "n2"), 143), job.consoles()
    job.until(lambda: not any(host.processes() for host in job.hosts.values()), "nothing to be left")


def whole(job: Apart, after: int) -> int:
    """Wait until all three nodes run in a generation after another one, and it commits."""
    found = job.until_runs(3, after=after)
    job.until_commit(found)
    return found


def smaller(job: Apart, after: int, without: Host) -> int:
    """Wait until the other two run and commit; the generation is the next one."""
    found = job.until_runs(2, after=after)
    job.until_commit(found)
    mine: list[dict[str, Any]] = [one for one in job.commits() if one["generation"] == found]
    assert found == after + 1, job.consoles()
    assert without.name not in {one["node"] for one in mine}
    return found
