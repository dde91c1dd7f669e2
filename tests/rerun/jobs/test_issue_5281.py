"""Megatron-LM issue 5281, end to end: a node is lost, and its shards come back from replicas that may be bad.

There one replica was never written, since its tensors were a subclass whose bytes are not all of it, nobody
compared anything when the shards were put together, and 44 restarts loaded the same wrong state.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.content.digest import chunk_digests, combined, file_digest
from outlast.checkpoint.policy.manifest import COMMIT, copy_name, rank_files
from outlast.config import FaultToleranceOptions
from outlast.recovery.policy.events import Action, Fault, FaultKind, Loaded, RecoveryAction
from outlast.recovery.policy.job import AllStarted, JobDecider, LoadSeen, StepsDone
from tests.support.forging import rewrite
from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.teams import Team


@pytest.fixture
def job(tmp_path: Path) -> Team:
    return Team(tmp_path, ["a", "b", "c"])


def lose(job: Team, owner: str) -> None:
    """Lose a node, and wait until nothing of it is on its way to another one."""
    next(node for node in job.nodes if node.name == owner).lose()
    folders = [node.stage.replica(owner).folder for node in job.nodes]
    until(lambda: not any(list(folder.glob(".tmp-*")) for folder in folders), f"the replicas of {owner}")


def spoil_replicas(job: Team, owner: str, change: Callable[[bytes], bytes]) -> int:
    """Change the shards that other nodes hold of a node; return how many."""
    rank = [node.name for node in job.nodes].index(owner)
    shard = rank_files(rank, job.world)[0]
    changed = 0
    for node in job.nodes:
        for path in node.stage.replica(owner).folder.glob(f"*/{shard}"):
            path.write_bytes(change(path.read_bytes()))
            changed += 1
    return changed


@pytest.mark.parametrize(
    "change",
    [lambda whole: bytes(len(whole)), lambda whole: whole[: len(whole) // 2], lambda whole: whole[::-1]],
    ids=["all zero", "cut off", "other bytes"],
)
def test_a_bad_replica_is_never_put_together_with_the_rest(
    change: Callable[[bytes], bytes], job: Team
) -> None:
    job.start()
    job.train(1, durable=lambda _: True)
    assert job.savers[0].durable(1)
    job.replicated(3)
    lose(job, "b")
    assert spoil_replicas(job, "b", change)
    job.start()
    assert job.step == 1
    assert job.right()
    *_, loaded = (one for one in job.records if isinstance(one, Loaded))
    assert not any(place.startswith("replica/") for place in loaded.places)


def assemble_wrong(job: Team, owner: str, step: int) -> None:
    """Put a shard together wrong wherever there is a replica: its digests are right, its numbers are not."""
    rank = [node.name for node in job.nodes].index(owner)
    tensors, digests, document = rank_files(rank, job.world)
    for node in job.nodes:
        folder = node.stage.replica(owner).folder / copy_name(step, 1)
        if not folder.exists():
            continue
        content = bytearray((folder / tensors).read_bytes())
        rank_file = json.loads((folder / document).read_text())
        begin = rank_file["begin"]
        for key, form in rank_file["tensors"].items():
            end = begin + form["width"] * math.prod(form["shape"])
            if key.endswith("0.weight"):
                content[begin:end] = torch.full(((end - begin) // 4,), 3e38).numpy().tobytes()
            begin = end
        (folder / tensors).write_bytes(content)
        found = chunk_digests(content)
        (folder / digests).write_bytes(found)
        new = [len(content), combined(found), file_digest(found)]
        rewrite(folder, lambda manifest, new=new: manifest["own"][0].__setitem__(slice(3), new))  # type: ignore[misc]


class Supervised:
    """What the launcher does: the decider hears of loads, steps and faults, and says what is loaded next."""

    def __init__(self, job: Team, **settings: Any) -> None:
        self.job = job
        self.settings = settings
        self.decider = JobDecider(FaultToleranceOptions(), job.world)
        self.avoid: tuple[str, ...] = ()
        self.loads: list[str] = []
        self.actions: list[Action] = []

    def start(self) -> None:
        seen = len(self.job.records)
        self.decider.handle(AllStarted(self.decider.generation), float(self.job.generation))
        self.job.start(self.avoid, **self.settings)
        for record in self.job.records[seen:]:
            if isinstance(record, Loaded):
                self.loads += record.places
                heard = LoadSeen(record.step, record.checkpoint, record.places, record.digest)
                self.decider.handle(heard, float(self.job.generation))

    def train(self, until_step: int) -> bool:
        """Train; say whether every number stayed finite, else have the decider answer."""
        loaded = self.job.step
        while self.job.step < until_step:
            self.job.train(1)
            if self.job.step - loaded == 3 and not all(finite(one) for one in self.job.jobs):
                self.fail(FaultKind.NON_FINITE, f"NonFinite: loss is nan in step {self.job.step}")
                return False
            self.decider.handle(StepsDone(self.job.step), float(self.job.generation))
        return True

    def fail(self, kind: FaultKind, signature: str) -> None:
        step, generation = self.job.step, self.decider.generation
        fault = Fault(kind, "b", 1, generation, step, "of this test", signature)
        [action] = self.decider.handle(fault, float(self.job.generation))
        self.actions.append(action)
        self.avoid = action.avoid


def finite(job: Job) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in job.model.parameters())


def test_a_replica_assembled_wrong_is_a_suspect_at_the_first_nan_and_the_global_copy_ends_it(
    job: Team, tmp_path: Path
) -> None:
    run = Supervised(job, global_url=str(tmp_path / "global"))
    run.start()
    job.train(4, durable=lambda step: step == 4)
    uploaded = f"{copy_name(4, 1)}/{COMMIT}"
    until(lambda: list((tmp_path / "global").rglob(uploaded)), "the copy in the global tier")
    job.replicated(6)
    replicated = min(node.status().replicated_step for node in job.nodes)
    lose(job, "b")
    run.fail(FaultKind.CRASH, "the node is gone")
    shutil.rmtree(job.nodes[0].durable)
    for step in range(replicated, job.step + 1):
        assemble_wrong(job, "b", step)
    run.start()
    assert any(place.startswith("replica/b/") for place in run.loads)
    assert not run.train(20)
    assert run.actions[1].kind is RecoveryAction.RESTART_IN_JOB
    assert "suspect" in {one.trust for one in run.decider.trust_changes()}
    before = len(run.loads)
    run.start()
    assert run.loads[before:] == [f"local/{copy_name(4, 1)}"], "it came from the global tier"
    assert "global" in job.notes()
    assert run.train(20)
    assert job.step == 20
    assert len(run.actions) == 2, "not 44"
