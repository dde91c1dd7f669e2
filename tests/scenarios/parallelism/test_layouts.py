"""The example with tensor, pipeline and data parallelism: bitwise at one layout, close across layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import SCRIPTS

pytestmark = pytest.mark.timeout(600)  # up to eight ranks
BOUND = 1e-5  # relative difference of losses; float32 sums of other order differ by 2e-7 after six steps


def losses(folder: Path, *worlds: str) -> dict[int, str]:
    """Let worlds train one after the other; return the loss of each step, and check who saw which window."""
    folder.mkdir()
    done = warm.run([SCRIPTS / "layouts.py", folder, *worlds], 280)
    assert done.returncode == 0, done.stderr
    found: dict[int, dict[int, Any]] = {}  # by step and dp rank; what is done again replaces
    for path in sorted((folder / "trace").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], {})[int(path.stem.removeprefix("rank-"))] = line
    seen: list[int] = []
    for step, lines in found.items():
        copies = int(lines[0]["layout"].rpartition(" ")[2])
        assert sorted(lines) == list(range(copies)), step
        assert len({line["loss"] for line in lines.values()}) == 1, "the loss is that of all ranks"
        ids = [one for line in lines.values() for one in line["ids"]]
        assert len(ids) == 16
        seen += ids
    assert len(seen) == len(set(seen)), "no window was seen twice"
    return {step: lines[0]["loss"] for step, lines in sorted(found.items())}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "layout", ["2:1:1", pytest.param("1:2:1", marks=LONG), pytest.param("1:1:2", marks=LONG)]
)
def test_a_killed_rank_changes_no_bit(layout: str, tmp_path: Path) -> None:
    expected = losses(tmp_path / "whole", f"{layout}:3")
    assert losses(tmp_path / "killed", f"{layout}:3:2", f"{layout}:3") == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param(["2:2:1:1", "1:1:1:2", "1:1:2:3"], id="fewer ranks and more again"),
        pytest.param(["1:1:3:4"], id="unequal shares of a batch"),
        pytest.param(["2:2:2:1", "2:1:3:2", "2:2:2:3"], id="eight ranks lose 1 or 2"),
        pytest.param(["2:2:2:1", "2:2:1:2", "2:2:2:3"], id="eight ranks lose 4"),
    ],
)
def test_other_layouts_compute_what_one_rank_does_up_to_the_last_bits(
    worlds: list[str], tmp_path: Path
) -> None:
    found = losses(tmp_path / "changed", *worlds)
    expected = losses(tmp_path / "alone", f"1:1:1:{len(found)}")
    assert list(found) == list(expected)
    for step, loss in found.items():
        exact = float.fromhex(expected[step])
        assert abs(float.fromhex(loss) - exact) <= BOUND * exact, step
