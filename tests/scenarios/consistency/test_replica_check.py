"""The tripwire between real ranks: gloo groups, real stores, bits that flip in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run

FIRST = "model.module.0.weight"


def train(folder: Path, world: int, steps: int, *words: str) -> list[dict[str, Any]]:
    """Return what each rank wrote."""
    run = warm.run([SCRIPTS / "flipping.py", folder, str(world), str(steps), *words], DEADLINE)
    found = [folder / f"rank-{rank}" for rank in range(world)]
    assert all(path.exists() for path in found), run.stdout + run.stderr
    return [json.loads(path.read_text()) for path in found]


def compared(records: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    return [(one["step"], bool(one["digest"])) for one in records]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_step_raise_no_alarm(world: int, tmp_path: Path) -> None:
    ranks = train(tmp_path, world, 20, "optimizer")
    assert [rank["warnings"] for rank in ranks] == [[]] * world
    assert compared(ranks[0]["records"]) == [(step, True) for step in range(0, 21, 2)]
    assert len({one["digest"] for one in ranks[0]["records"]}) == 11, "each step has another state"


@pytest.mark.parametrize(
    ("world", "words", "raised", "differs"),
    [
        (3, "flip=1@4", ([1], 6, 4), ([1], [FIRST])),
        (2, "flip=1@4", ([], 6, 4), ([], [FIRST])),
        (3, "optimizer flip=2@5", ([2], 6, 4), ([2], ["optimizer.state.0.exp_avg"])),
        (4, "mesh flip=3@1", ([], 2, 0), ([], ["model.part"])),
        (2, "apart", ([], 0, -1), ([], None)),
    ],
    ids=["of three", "of two", "a moment", "a shard", "never equal"],
)
def test_a_flipped_bit_raises_at_the_next_comparison(
    world: int,
    words: str,
    raised: tuple[list[int], int, int],
    differs: tuple[list[int], list[str] | None],
    tmp_path: Path,
) -> None:
    ranks = train(tmp_path, world, 12, *words.split(), "action=raise")
    assert [(rank["ranks"], rank["step"], rank["agreed"]) for rank in ranks] == [raised] * world
    last = ranks[0]["records"][-1]
    assert (last["step"], last["digest"], last["ranks"]) == (raised[1], "", differs[0])
    assert differs[1] in (None, last["tensors"])


def test_a_difference_is_warned_of_once(tmp_path: Path) -> None:
    ranks = train(tmp_path, 3, 6, "flip=2@5")
    assert [len(rank["warnings"]) for rank in ranks] == [1, 1, 1]
    assert all(FIRST in rank["warnings"][0] for rank in ranks)


def launched(folder: Path, action: str, flip: int | None = None, *more: str, restarts: int = 0) -> Run:
    """Return a run of 20 steps on three ranks that save every fourth step and compare after every fifth."""
    folder.mkdir()
    if flip is not None:
        (folder / f"flip-{flip}").touch()
    config = folder / "config.toml"
    config.write_text(f'[tripwire]\ntripwire_interval = 5\ntripwire_action = "{action}"\n')
    options = ("--nproc-per-node", "3", "--config", str(config), "--max-restarts", str(restarts), *more)
    script = ("replayed.py", "20", "4", f"{folder / 'flip'}@7")
    return Run(folder / "run", *script, options=options).start()


@pytest.mark.long
def test_of_two_ranks_that_differ_neither_is_blamed(tmp_path: Path) -> None:
    run = launched(tmp_path / "job", "raise", 1, "--nproc-per-node", "2")
    assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("corrupt", -1)
    assert "ReplicasDiffer" in fault["signature"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that ended well, in which nothing flipped."""
    run = launched(tmp_path_factory.mktemp("sound") / "job", "raise")
    assert run.finish() == 0, run.console()
    return run


def end(run: Run) -> dict[str, bytes]:
    """Return the tensors of the copy of step 20."""
    (copy,) = (run.folder / "checkpoints").glob("step-000000020.*")
    found = {}
    for path in sorted(copy.glob("*.safetensors")):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        found |= {
            f"{path.name} {name}": content[begin + one["data_offsets"][0] : begin + one["data_offsets"][1]]
            for name, one in json.loads(content[8:begin]).items()
            if name != "__metadata__"
        }
    return found


@pytest.mark.parametrize("start", ["zygote", pytest.param("cold", marks=pytest.mark.long)])
def test_what_was_saved_after_the_ranks_last_agreed_is_not_loaded_at_the_restart(
    start: str, tmp_path: Path, sound: Run
) -> None:
    more = ("--no-zygote",) if start == "cold" else ()
    run = launched(tmp_path / "flipped", "raise", 1, *more, restarts=3)
    assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("corrupt", 1), "whichever rank is the first to report it"
    assert (fault["step"] >= 10, "ReplicasDiffer" in fault["signature"]) == (True, True)
    assert compared(run.records("compared"))[:3] == [(0, True), (5, True), (10, False)]
    assert [one["step"] for one in run.records("loaded")] == [4]
    aside = {(one["checkpoint"], one["trust"]) for one in run.records("trust_changed")}
    assert ("local/step-000000008.g1", "quarantined") in aside
    assert end(sound)
    assert end(run) == end(sound)


def test_all_ranks_go_back_to_where_they_agreed_and_end_as_if_nothing_had_been(
    tmp_path: Path, sound: Run
) -> None:
    run = launched(tmp_path / "flipped", "rollback", flip=1)
    assert run.finish() == 0, run.console()
    assert run.records("fault_seen") == []
    assert compared(run.records("compared")) == [
        *((0, True), (5, True), (10, False)),
        *((4, True), (5, True), (10, True), (15, True)),
    ]
    assert end(run) == end(sound)
