"""A job that loses nodes goes on in another layout, from what is in memory, and grows back by itself."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT
from tests.support.agents import Agents
from tests.support.processes import command_line
from tests.support.ranks import copies, lines

pytestmark = [pytest.mark.timeout(420)]
IN_MEMORY = "[checkpoints]\nnon_persistent_save_interval = 1\n"
TWO_STAGES = """\
save_interval_seconds = 10.0

[parallelism]
model = "FOLDER/gpt.toml"
global_batch = 16
preferred = { pp = 2 }
"""
MODEL = "layers = 4\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 256\n"  # of the example
FULL, ALONE = "tp 1, pp 2, dp 1", "tp 1, pp 1, dp 1"
WINDOWS = 16  # of a step
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict",
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(nodes: str, config: str, *options: str, script: tuple[str, ...] = ()) -> Agents:
        (tmp_path / "gpt.toml").write_text(MODEL)
        (tmp_path / "job.toml").write_text(IN_MEMORY + config.replace("FOLDER", str(tmp_path)))
        usual = ("--config", str(tmp_path / "job.toml"), "--nproc-per-node", "1")
        made.append(Agents(tmp_path / "job", nodes, script=script, options=(*usual, *options)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def in_memory(agents: Agents, what: str) -> list[dict[str, Any]]:
    """Return what JSON files in the memory folders of a job's nodes have."""
    found = []
    # Path's glob raises for what vanishes, as an older copy does meanwhile
    for path in glob.glob(f"/dev/shm/outlast-memory-*-{agents.job}*/{what}", recursive=True):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(Path(path).read_bytes()))
    return found


def replicated(agents: Agents) -> int:
    """Return the newest step of which every node's part is in the memory of another one; -1: none."""
    return max((one["replicated_step"] for one in in_memory(agents, "status.json")), default=-1)


def begin(agents: Agents, *others: str) -> None:
    """Start the agents, so that n0 coordinates."""
    agents.start("n0")
    agents.until_said("n0", "leader")
    agents.start(*others)


def steps(agents: Agents, world: int) -> list[int]:
    """Return the steps that rank 0 did in a world."""
    return [one["step"] for one in lines(agents.trace / "0.jsonl") if one["world"] == world]


def test_nothing_is_lost_when_the_layout_leaves_a_node_out_that_has_a_part(
    job: Callable[..., Agents],
) -> None:
    endless = ("uneven.py", "1000000", "6", "1", "-1", "0", "0", "0.02")
    layouts = "[parallelism]\nlayouts = [{ dp = 3 }, {}]\n"  # a node that has no ranks is not asked
    agents = job("1:3", f"replication_factor = 3\n{layouts}", script=endless)
    begin(agents, "n1", "n2")
    agents.until(lambda: replicated(agents) > 0, "a step of which every node's part is on another one")
    safe = replicated(agents)
    for pid in agents.tree("n2"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agents.until(lambda: steps(agents, 1), "a step of the rank that is left")
    loaded = agents.records("n0", "loaded")[-1]
    assert ("memory" in loaded["reason"], loaded["step"] >= safe) == (True, True), agents.consoles()
    assert steps(agents, 1)[0] == loaded["step"]


def trace(agents: Agents) -> list[dict[str, Any]]:
    """Return what the ranks with data did, in the order in which they did it."""
    return lines(agents.trace / "rank-00000.jsonl")


def layouts_in_memory(agents: Agents) -> dict[int, Any]:
    """Return the pp of the copies in memory, by the number of their ranks."""
    manifests = in_memory(agents, "**/MANIFEST.json")
    return {one["world_size"]: one["parallelism"].get("pp", 1) for one in manifests}


def standbys(agents: Agents, name: str) -> set[int]:
    """Return the processes of a node that wait to become a rank: those in the group of its zygote."""
    found, groups = set(), dict[int, int]()
    for pid in agents.tree(name)[1:]:
        with contextlib.suppress(ProcessLookupError):
            groups[pid] = os.getpgid(pid)
    for pid, group in groups.items():
        if pid != group in groups and "zygote" in command_line(group):
            found.add(pid)
    return found


def until_layout(agents: Agents, layout: str, after: int, waiting: set[int] | None = None) -> int:
    """Wait until a layout has done a few steps; return how many lines the trace has by then.

    Args:
        waiting: takes the standbys of n0 meanwhile: the zygote forks others, too.
    """

    def reached() -> int:
        if waiting is not None:
            waiting.update(standbys(agents, "n0"))
        found = trace(agents)
        return len(found) if sum(one["layout"] == layout for one in found[after:]) >= 4 else 0

    found: int = agents.until(reached, f"steps of {layout}")
    return found


@pytest.mark.long
def test_a_lost_node_shrinks_the_layout_and_one_that_returns_grows_it(job: Callable[..., Agents]) -> None:
    agents = job("1:2", TWO_STAGES, *(word for one in PRELOADED for word in ("--preload", one)))
    example = str(ROOT / "examples" / "train_gpt_3d.py")
    endless = ("--steps", "100000", "--save-interval", "1000000", "--trace", str(agents.trace))
    agents.command = (example, *endless)
    agents.cold = True  # so that its zygote is known by its command line
    begin(agents, "n1")
    done = until_layout(agents, FULL, 0)
    agents.until(
        lambda: replicated(agents) > max(copies(agents.run), default=0), "replicas newer than the disk's"
    )
    waiting: set[int] = agents.until(lambda: standbys(agents, "n0"), "a standby")
    assert layouts_in_memory(agents).get(2) == 2
    agents.kill("n1")
    done = until_layout(agents, ALONE, done, waiting)
    assert trace(agents)[done - 1]["pid"] in waiting, "a rank of another layout was a standby, too"
    assert "memory" in agents.records("n0", "loaded")[-1]["reason"], agents.consoles()
    assert layouts_in_memory(agents).get(1) == 1
    waiting = agents.until(lambda: standbys(agents, "n0"), "a standby")
    agents.start("n1")
    done = until_layout(agents, FULL, before := done, waiting)
    assert waiting & {one["pid"] for one in trace(agents)[before:done]}, "one of them is n1's"
    seen: dict[int, tuple[str, list[int]]] = {}
    for one in trace(agents):
        loss, ids = seen.setdefault(one["step"], (one["loss"], one["ids"]))
        assert one["ids"] == ids, "a step that is done again has the same windows"
        assert abs(float.fromhex(one["loss"]) - float.fromhex(loss)) <= 1e-4 * float.fromhex(loss)
    assert sorted(seen) == list(range(len(seen))), "no step was left out"
    used = [window for _, ids in seen.values() for window in ids]
    assert len(used) == WINDOWS * len(seen)
