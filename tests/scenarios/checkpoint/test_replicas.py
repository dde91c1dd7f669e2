"""Several nodes write once what all hold alike; a lost node comes back from the memory of the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents, agents
from tests.support.launching import is_gone, until
from tests.support.processes import child_running

ONCE = 3 * 4 * (2 * 16 * 20_000 + 3 * 20_000 + 16)  # the parameters and their moments
OWN = 2 * (2 * 4 * 20_000)  # the statistics of each rank


@contextlib.contextmanager
def trained(folder: Path, nodes: int, *words: str, options: tuple[str, ...] = ()) -> Iterator[Agents]:
    script, each = ("replicated.py", "12", *words), ("--nproc-per-node", str(2 // nodes), *options)
    with agents(folder, f"{nodes}:{nodes}", script=script, options=each) as job:
        job.start(*[f"n{number}" for number in range(nodes)])
        yield job


def tensor_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def memory_of(job: Agents) -> list[Path]:
    return [path for path in Path("/dev/shm").glob("outlast-memory-*") if job.job in path.name]


def sizes_in_memory(job: Agents) -> list[int]:
    """Return how large the copies in memory are; nothing if one was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return [tensor_bytes(copy) for one in memory_of(job) for copy in (one / "memory").glob("step-*")]
    return []


def step_of(file: Path) -> int:
    return int(file.parent.name.split(".")[0].removeprefix("step-"))


def finals(job: Agents) -> list[str]:
    return [(job.trace / f"final-{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what each rank ends with when nothing happens."""
    with trained(tmp_path_factory.mktemp("whole") / "job", 1) as job:
        assert set(job.finish().values()) == {0}, job.consoles()
        found = finals(job)
    assert found[0] != found[1], "each rank has statistics of its own"
    return found


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_rank_of_ddp_goes_on_bit_for_bit(tmp_path: Path, nodes: int, expected: list[str]) -> None:
    with trained(tmp_path / "killed", nodes, "kill=1@6", "hold=7") as job:
        job.until(lambda: len(list(job.trace.glob("held-*.g2"))) == 2, "step 8 of the second generation")
        bytes_in_memory = job.until(lambda: sizes_in_memory(job), "copies that stay while one looks at them")
        (job.trace / "go").touch()
        assert set(job.finish().values()) == {0}, job.consoles()
        assert finals(job) == expected
        newest = max((job.run / "checkpoints").glob("step-*"))
    assert ONCE + OWN <= tensor_bytes(newest) < 1.02 * (ONCE + OWN)
    assert all(nbytes < 1.02 * (ONCE + OWN) for nbytes in bytes_in_memory)


def test_a_node_that_is_lost_with_its_memory_comes_back_from_the_other(
    tmp_path: Path, expected: list[str]
) -> None:
    """The second step on disk comes later than the loss: what is loaded is a replica."""
    with trained(tmp_path / "lost", 2, "hold=6") as job:
        job.until(lambda: len(list(job.trace.glob("held-*.g1"))) == 2, "step 7 of the first generation")
        parts = [path for path in memory_of(job) if path.name.endswith("-n1")]
        held = [one / "replica" / "n1" for one in memory_of(job) if one.name.endswith("-n0")]
        job.until(
            lambda: any(step_of(copy) >= 5 for one in held for copy in one.glob("step-*/COMMIT")),
            "a replica that is younger than what is on disk",
        )
        everything = job.tree("n1")
        for pid in everything:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.agents["n1"].wait(60)
        until(lambda: all(map(is_gone, everything)), "the end of the node")
        for path in parts:
            shutil.rmtree(path)
        (job.trace / "go").touch()
        job.start("n1")
        assert job.finish("n0", "n1") == {"n0": 0, "n1": 0}, job.consoles()
        loaded = job.records("n0", "loaded") + job.records("n1", "loaded")
        assert finals(job) == expected
    assert max(one["step"] for one in loaded) >= 5, loaded


@pytest.mark.long
def test_what_a_lost_node_was_to_complete_on_disk_is_not_there_after_the_end(tmp_path: Path) -> None:
    """Its checkpoint writer stands still, so that the other node's part of step 4 is all that is written."""
    with trained(tmp_path / "begun", 2, "hold=2", options=("--max-restarts", "0")) as job:
        job.until(lambda: len(list(job.trace.glob("held-*.g1"))) == 2, "step 4 of the first generation")
        agent = job.agents["n1"].pid
        writer = job.until(lambda: child_running(agent, "outlast.checkpoint.writer"), "the writer of n1")
        os.kill(writer, signal.SIGSTOP)
        (job.trace / "go").touch()
        copies = job.run / "checkpoints"
        job.until(lambda: list(copies.glob(".tmp-step-000000004.g1*/*.safetensors")), "a part of step 4")
        for pid in job.tree("n1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert job.finish("n0") != {"n0": 0}, job.consoles()
        job.until(lambda: not list(copies.glob(".tmp-*")), "the removal of what was begun", 30)
