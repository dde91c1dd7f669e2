"""Megatron-LM issue 5281, end to end: a node is lost, and its shards come back from replicas that may be bad.

There one replica was never written, since its tensors were a subclass whose bytes are not all of it, nobody
compared anything when the shards were put together, and 44 restarts loaded the same wrong state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import codecs
from outlast.core.errors import UsageError
from outlast.core.manifest import rank_files
from tests.process.jobs import Job
from tests.process.quantized import Quantized, put_together, take_apart
from tests.process.teams import Team


class Transformer(Job):
    """Trains like any job; one of its weights is quantized anew after every step."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model.register_parameter(
            "quantized", torch.nn.Parameter(Quantized.of(torch.randn(6, 4)), requires_grad=False)
        )

    def train(self, steps: int = 1) -> list[float]:
        losses = super().train(steps)
        self.weight.data8.copy_(torch.randint(-127, 127, (6, 4), dtype=torch.int8))
        self.weight.scale.mul_(1.01)
        return losses

    @property
    def weight(self) -> Any:
        return self.model.quantized

    def content(self) -> bytes:
        plain = [each for name, each in self.model.state_dict().items() if name != "quantized"]
        moments = [each for state in self.optimizer.state_dict()["state"].values() for each in state.values()]
        tensors = [*plain, *moments, self.weight.data8, self.weight.scale]
        return b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in tensors)


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Callable[..., Team]]:
    made: list[Team] = []

    def make(**options: Any) -> Team:
        made.append(Team(tmp_path, ["a", "b", "c"], **options))
        return made[-1]

    before = dict(codecs._CODECS)
    yield make
    codecs._CODECS.clear()
    codecs._CODECS.update(before)
    for each in made:
        for node in each.nodes:
            node.end()


def test_a_tensor_that_no_codec_knows_is_refused_before_the_first_step(team: Callable[..., Team]) -> None:
    job = team(job=Transformer)
    with pytest.raises(UsageError, match=r"quantized.*Quantized.*register_codec"):
        job.start()


def test_shards_of_a_lost_node_come_back_from_replicas_in_every_bit(team: Callable[..., Team]) -> None:
    outlast.register_codec(Quantized, take_apart, put_together)
    job = team(job=Transformer)
    job.start()
    job.replicated(3)
    replicated = min(node.status().replicated_step for node in job.nodes)
    job.nodes[1].lose()
    job.start()
    assert job.step >= replicated
    assert job.right()
    job.train(2)


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
    change: Callable[[bytes], bytes], team: Callable[..., Team]
) -> None:
    job = team()
    job.start()
    job.train(1, durable=lambda _: True)
    assert job.savers[0].durable(1)
    job.replicated(3)
    job.nodes[1].lose()
    assert spoil_replicas(job, "b", change)
    job.start()
    assert job.step == 1
    assert job.right()
    assert "not all of it came from other nodes" in job.notes()
