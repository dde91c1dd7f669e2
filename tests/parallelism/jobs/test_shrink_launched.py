"""A job of two nodes goes on with one in another layout, from what is in memory, and grows back by itself."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint.policy.manifest import Manifest, place_of
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.parallelism.policy.degrees import Layout
from tests.source_tree import ROOT
from tests.support.agents import Agents
from tests.support.processes import command_line

CONFIG = """\
[checkpoints]
non_persistent_save_interval = 1
save_interval_seconds = 10.0

[parallelism]
model = "FOLDER/gpt.toml"
global_batch = 16
preferred = { pp = 2 }
"""
FULL, ALONE = "tp 1, pp 2, dp 1", "tp 1, pp 1, dp 1"
MODEL = "layers = 4\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 256\n"  # of the example
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict",
)
WINDOWS = 16  # of a step


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    (tmp_path / "gpt.toml").write_text(MODEL)
    (tmp_path / "job.toml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    options = ("--config", str(tmp_path / "job.toml"), "--nproc-per-node", "1")
    for module in PRELOADED:
        options += ("--preload", module)
    found = Agents(tmp_path / "job", "1:2", options=options)
    example = ROOT / "examples" / "train_gpt_3d.py"
    found.command = (
        str(example),
        *("--steps", "100000", "--save-interval", "1000000"),
        "--trace",
        str(found.trace),
    )
    yield found
    found.stop()


def trace(agents: Agents) -> list[dict[str, Any]]:
    """Return what the ranks with data did, in the order in which they did it."""
    path = agents.trace / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def replicated(agents: Agents) -> int:
    """Return the newest step of which every node's part is in the memory of another one; -1: none."""
    found = [-1]
    for path in Path("/dev/shm").glob(f"outlast-memory-*-{agents.job}*/status.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text())["replicated_step"])
    return max(found)


def on_disk(agents: Agents) -> int:
    """Return the newest step on disk; 0: none."""
    names = DirectoryTier(agents.run / "checkpoints").names()
    return max((place_of(name)[0] for name in names), default=0)


def saved_by(agents: Agents) -> dict[int, Layout | None]:
    """Return the layout that the copies on disk and in memory say, by the number of their ranks."""
    found: dict[int, Layout | None] = {}
    memory = Path("/dev/shm").glob(f"outlast-memory-*-{agents.job}*")
    for folder in (agents.run / "checkpoints", *memory):
        for path in glob.glob(
            f"{folder}/**/MANIFEST.json", recursive=True
        ):  # Path's raises for what vanishes
            with contextlib.suppress(FileNotFoundError):  # an older copy is removed meanwhile
                manifest = Manifest.from_json(Path(path).read_bytes())
                found[manifest.world_size] = manifest.layout
    return found


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
        lines = trace(agents)
        steps = [one["step"] for one in lines[after:] if one["layout"] == layout]
        return len(lines) if len(steps) >= 4 else 0

    found: int = agents.until(reached, f"steps of {layout}")
    return found


def test_a_lost_node_shrinks_the_layout_and_one_that_returns_grows_it(agents: Agents) -> None:
    agents.start("n0")
    agents.until_said("n0", "this node is the leader")
    agents.start("n1")
    done = until_layout(agents, FULL, 0)
    agents.until(lambda: replicated(agents) > on_disk(agents), "replicas that are newer than the disk's copy")
    waiting: set[int] = agents.until(lambda: standbys(agents, "n0"), "a standby")
    agents.kill("n1")
    done = until_layout(agents, ALONE, done, waiting)
    assert trace(agents)[done - 1]["pid"] in waiting, "a rank of another layout was a standby, too"
    loads = agents.records("n0", "loaded")
    assert loads[-1]["reason"].endswith("from memory"), agents.consoles()
    waiting = agents.until(lambda: standbys(agents, "n0"), "a standby")
    agents.start("n1")
    done = until_layout(agents, FULL, before := done, waiting)
    assert waiting & {one["pid"] for one in trace(agents)[before:done]}, "one of them is n1's"
    assert saved_by(agents) == {1: Layout(), 2: Layout(pp=2)}
    seen: dict[int, tuple[str, list[int]]] = {}
    for one in trace(agents):
        loss, ids = seen.setdefault(one["step"], (one["loss"], one["ids"]))
        assert one["ids"] == ids, "a step that is done again has the same windows"
        assert abs(float.fromhex(one["loss"]) - float.fromhex(loss)) <= 1e-4 * float.fromhex(loss)
    assert sorted(seen) == list(range(len(seen))), "no step was left out"
    used = [window for _, ids in seen.values() for window in ids]
    assert len(used) == WINDOWS * len(seen)
