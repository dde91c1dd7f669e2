"""The example with tensor, pipeline and data parallelism: bitwise at one layout, close across layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import warm

pytestmark = pytest.mark.timeout(600)  # up to eight ranks
SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "layouts.py"
BOUND = 1e-5  # relative difference of losses; float32 sums of other order differ by 2e-7 after six steps


def losses(folder: Path, *worlds: str) -> dict[int, str]:
    """Let worlds train one after the other; return the loss of each step, and check who saw which window."""
    folder.mkdir()
    done = warm.run([SCRIPT, folder, *worlds], 280)
    assert done.returncode == 0, done.stderr
    found: dict[
        int, dict[int, tuple[str, list[int]]]
    ] = {}  # by step and dp rank; what is done again replaces
    ranks_of: dict[int, int] = {}
    for path in sorted((folder / "trace").glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], {})[rank] = (line["loss"], line["ids"])
            ranks_of[line["step"]] = int(line["layout"].rpartition(" ")[2])
    seen: list[int] = []
    for step, said in found.items():
        assert sorted(said) == list(range(ranks_of[step])), step
        assert len({loss for loss, _ in said.values()}) == 1, "the loss is that of all ranks"
        ids = [one for _, given in said.values() for one in given]
        assert len(ids) == 16
        seen += ids
    assert len(seen) == len(set(seen)), "no window was seen twice"
    return {step: said[0][0] for step, said in sorted(found.items())}


@pytest.mark.parametrize("layout", ["2:1:1", "1:2:1", "1:1:2"])
def test_a_killed_rank_changes_no_bit(layout: str, tmp_path: Path) -> None:
    expected = losses(tmp_path / "whole", f"{layout}:3")
    assert losses(tmp_path / "killed", f"{layout}:3:2", f"{layout}:3") == expected


def require_close(found: dict[int, str], folder: Path) -> None:
    """Compare losses with those of one rank that does all steps."""
    expected = losses(folder, f"1:1:1:{len(found)}")
    assert list(found) == list(expected)
    for step, loss in found.items():
        exact = float.fromhex(expected[step])
        assert abs(float.fromhex(loss) - exact) <= BOUND * exact, step


def test_fewer_ranks_and_more_again_change_no_more_than_the_last_bits(tmp_path: Path) -> None:
    found = losses(tmp_path / "changed", "2:2:1:1", "1:1:1:2", "1:1:2:3")
    require_close(found, tmp_path / "alone")


def test_ranks_with_unequal_shares_of_a_batch_compute_what_one_does(tmp_path: Path) -> None:
    require_close(losses(tmp_path / "three", "1:1:3:4"), tmp_path / "alone")


@pytest.mark.parametrize("left", [pytest.param("2:1:3", id="1 or 2"), pytest.param("2:2:1", id="4")])
def test_eight_ranks_that_lose_some_and_grow_back_compute_what_one_does(left: str, tmp_path: Path) -> None:
    require_close(losses(tmp_path / "eight", "2:2:2:1", f"{left}:2", "2:2:2:3"), tmp_path / "alone")
