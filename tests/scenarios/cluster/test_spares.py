"""Jobs with a spare node: it takes the place of what is lost, and every agent learns how the job ends."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable

import pytest
import torch

from tests.support.agents import Agents


def _with_spare(found: Agents) -> None:
    """Start the agents of two nodes, and of a third one when they run."""
    found.start_founder()
    found.start("n1")
    found.until(lambda: all(found.records(one, "generation_started") for one in ("n0", "n1")), "ranks")
    found.start("n2")
    found.until_spare("n2")


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


@pytest.mark.long
def test_training_is_bit_for_bit_the_same_after_spares_took_the_places_of_a_node_and_of_the_leader(
    job: Callable[..., Agents],
) -> None:
    steps = 200
    found = job("2:2", spares=1, script=("agreeing.py", str(steps)))
    hold = found.trace / "hold"
    hold.touch()  # training waits for the spare
    _with_spare(found)
    generation = 0
    for lost in ("n1", "n0"):
        assert found.leader() == "n0"
        hold.unlink()
        generation = found.until_runs(2, after=generation)
        found.until(lambda: _saved(found, generation), "a checkpoint")  # noqa: B023
        hold.touch()
        found.kill(lost)
        if lost == "n1":
            found.start(lost)
            found.until_spare(lost)
    hold.unlink()
    codes = found.finish()
    assert codes == {"n0": -signal.SIGKILL, "n1": 0, "n2": 0}, found.consoles()
    found.nothing_left()
    assert found.generations() == [1, 2, 3], found.consoles()
    assert found.lost("n1")
    loaded = [one for name in codes for one in found.records(name, "loaded") if one["generation"] > 1]
    assert {one["generation"] for one in loaded} == {2, 3}
    assert min(one["step"] for one in loaded) > 0
    assert (found.trace / "digest").read_text() == _undisturbed(steps)


def _saved(found: Agents, generation: int) -> bool:
    return any(
        one["generation"] == generation for name in found.agents for one in found.records(name, "saved")
    )


@pytest.mark.parametrize(
    ("what", "ranks", "spares"),
    [("raise", 2, 1), pytest.param("exit:3", 1, 0, marks=pytest.mark.long)],
)
def test_a_fault_that_comes_back_ends_every_agent_with_93(
    job: Callable[..., Agents], what: str, ranks: int, spares: int
) -> None:
    found = job("2:2", spares, options=("--nproc-per-node", f"{ranks}", "--max-restarts", "1"))
    found.start(*(f"n{at}" for at in range(2 + spares)))
    # Of a script that has said nothing yet no step is known, so no fault of it comes back.
    # The next generation must not get further before its rank 1 has begun.
    found.until(lambda: len(found.commits()) >= 30, "commits")
    found.order(f"{what} 1 *")
    assert set(found.finish().values()) == {93}, found.consoles()
    # A spare that has joined in time is tried, too; a save that is committed late refills the budget.
    assert 2 <= len(found.generations()) <= 3 + spares
    found.nothing_left()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_a_signal_to_one_agent_ends_the_job_everywhere(
    job: Callable[..., Agents], signum: int, code: int
) -> None:
    found = job("2:2", spares=1)
    _with_spare(found)
    found.until_commit(found.until_runs(2))
    found.send("n1", signum)
    assert found.finish() == {"n0": code, "n1": code, "n2": code}, found.consoles()
    found.nothing_left()


def test_a_node_that_is_asked_to_stop_while_its_leader_is_gone_ends(job: Callable[..., Agents]) -> None:
    found = job("2:2")
    found.start_founder()
    found.start("n1")
    found.until_commit(found.until_runs(2))
    found.kill("n0")
    found.send("n1", signal.SIGTERM)
    assert found.finish("n1") == {"n1": 143}, found.consoles()
    found.nothing_left()
