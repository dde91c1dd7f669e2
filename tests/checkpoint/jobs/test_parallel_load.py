"""Shared files of a copy on disk are read once for all ranks that load it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.load import parallel, reading, reshard
from outlast.checkpoint.load.parallel import ParallelLoad, part_of
from outlast.checkpoint.policy.manifest import CHUNK_BYTES, copy_name, is_shared
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.replica.client import PeerClient
from outlast.checkpoint.replica.frames import PeerLost
from outlast.checkpoint.tiers.inventory import verify
from outlast.checkpoint.tiers.tier import DirectoryTier
from tests.support.launching import until
from tests.support.teams import Team

MIB = 1 << 20
NBYTES = 3 * MIB + 5


class Alike:
    """A job that all ranks hold alike, but for a small tensor."""

    def __init__(self, seed: int) -> None:
        self.tensors = {"a": torch.zeros(NBYTES, dtype=torch.uint8), "b": torch.zeros(MIB)}
        self.own = {"own": torch.full((4,), float(seed))}

    @property
    def state(self) -> dict[str, object]:
        return {"box": self.tensors, "own": self.own}

    def train(self, steps: int = 1) -> None:
        generator = torch.Generator().manual_seed(int(self.tensors["b"][0]) + steps)
        self.tensors["a"].random_(0, 256, generator=generator)
        self.tensors["b"] += steps

    def content(self) -> bytes:
        tensors = [*self.tensors.values(), *self.own.values()]
        return b"".join(one.view(torch.uint8).numpy().tobytes() for one in tensors)


class AllAlike(Alike):
    """A job that ranks of another world can load."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.own = {}


@pytest.fixture
def team_of() -> Iterator[Callable[..., Team]]:
    """Return what makes a team in memory, where files are used where they are."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="outlast-test-"))
    yield lambda nodes, **how: Team(  # type: ignore[misc]
        root, [f"n{number}" for number in range(nodes)], **{"job": Alike, **how}
    )

    def removed() -> bool:  # writers that end may still write
        shutil.rmtree(root, ignore_errors=True)
        return not root.exists()

    until(removed, f"the end of {root}")


class Reads:
    """How many bytes of shared files are read from the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        self.whole: list[int] = []
        read = reading.read_verified

        def read_part(folder: Any, entry: Any, digests: Any, loan: Any, threads: int, part: Any) -> None:
            self.parts.append(part[1] - part[0])
            read(folder, entry, digests, loan, threads, part)

        def read_whole(folder: Any, entry: Any, digests: Any, loan: Any, threads: int) -> None:
            is_read = is_shared(entry.name) and not loan.is_filled
            self.whole += [entry.nbytes] if is_read else []
            read(folder, entry, digests, loan, threads)

        monkeypatch.setattr(parallel, "_LEAST_BYTES", 1)
        monkeypatch.setattr(parallel, "read_verified", read_part)
        monkeypatch.setattr(reshard, "read_verified", read_whole)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def saved(team: Team, steps: int = 1) -> str:
    """Save steps on disk, and end; return the name of the newest copy."""
    team.start()
    for _ in range(steps):
        team.train(1, durable=lambda _: True)
        name = copy_name(team.step, 1)
        until(lambda: all(one.status().durable_step == team.step for one in team.nodes), name)
    team.end()
    return name


def shared_bytes(team: Team, name: str) -> int:
    return sum(path.stat().st_size for path in (team.nodes[0].durable / name).glob("alike-*.safetensors"))


@pytest.mark.parametrize(("nbytes", "count"), [(0, 3), (1, 1), (5 * MIB + 7, 2), (3 * MIB, 7), (64 * MIB, 3)])
def test_the_parts_of_the_readers_are_the_file(nbytes: int, count: int) -> None:
    parts = [part_of(nbytes, range(one, one + 1), count) for one in range(count)]
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == nbytes
    assert all(begin % CHUNK_BYTES == 0 or begin == nbytes for begin, _ in parts)
    sizes = [end - begin for begin, end in parts if begin < end]
    assert not sizes or max(sizes) - min(sizes) < 2 * CHUNK_BYTES
    assert len(sizes) == min(count, max(1, nbytes // (4 * MIB)), nbytes)
    assert part_of(nbytes, range(count), count) == (0, nbytes)


@pytest.mark.parametrize(
    ("nodes", "per_node", "shared"), [(1, 3, True), (4, 1, True), (3, 2, True), (2, 2, False)]
)
def test_what_all_ranks_need_is_read_from_the_disk_once(
    team_of: Callable[..., Team], reads: Reads, nodes: int, per_node: int, shared: bool
) -> None:
    team = team_of(nodes, per_node=per_node, shared=shared)
    name = saved(team)
    nbytes = shared_bytes(team, name)
    assert nbytes > NBYTES + 4 * MIB
    team.start()
    assert (team.step, team.right(), team.loaded().reason.split("from ")[-1]) == (1, True, "local")
    assert sum(reads.parts) == nbytes * (1 if shared else nodes)
    assert reads.whole == []
    for node in team.nodes:
        landed = [len(node.stage.free(f"alike-{number}")) for number in range(min(per_node, 2))]
        assert set(landed) == {1}, "what has landed is a buffer"
    assert not any(node.stage.landing.names() for node in team.nodes)
    team.train(1, durable=lambda _: True)
    until(lambda: copy_name(2, 2) in team.on_disk(), "step 2")


def test_other_ranks_read_it_once_too(team_of: Callable[..., Team], reads: Reads) -> None:
    team = team_of(2, job=AllAlike)
    nbytes = shared_bytes(team, saved(team))
    team.have("n0", "n1", "n2")
    team.start()
    assert [job.content() for job in team.jobs] == [team.content[1][0]] * 3
    assert sum(reads.parts) == nbytes


def test_ranks_that_have_it_in_memory_read_nothing(team_of: Callable[..., Team], reads: Reads) -> None:
    team = team_of(2, per_node=2)
    team.start()
    team.train(2)
    team.start()
    assert (team.step, team.right()) == (2, True)
    assert (reads.parts, reads.whole) == ([], [])


@pytest.mark.parametrize("file", [0, 1])
def test_a_damaged_part_is_found_by_its_reader(team_of: Callable[..., Team], reads: Reads, file: int) -> None:
    team = team_of(2, per_node=2)
    name = saved(team, 2)
    path = sorted((team.nodes[0].durable / name).glob("alike-*.safetensors"))[file]
    octets = bytearray(path.read_bytes())
    octets[-1] ^= 1
    path.write_bytes(octets)
    team.start()
    assert (team.step, team.right()) == (1, True)
    assert name not in team.on_disk()
    assert name in "".join(DirectoryTier(team.nodes[0].durable).quarantined())


class Hours:
    """A clock by which everything takes an hour."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 3600.0
        return self.now


@pytest.mark.parametrize("fault", ["refuses", "slow"])
def test_what_does_not_come_from_another_node_is_read_from_the_disk(
    team_of: Callable[..., Team], reads: Reads, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    team = team_of(2, per_node=2)
    name = saved(team)

    def lost(*_: Any) -> Iterator[memoryview]:
        raise PeerLost("n1", "fetching", 0, "a test")

    if fault == "refuses":
        monkeypatch.setattr(PeerClient, "fetch", lost)
    else:
        monkeypatch.setattr(parallel, "time", Hours())
    team.start()
    assert (team.step, team.right()) == (1, True)
    assert (sum(reads.parts), reads.whole) == (2 * shared_bytes(team, name), [])
    assert "not all that was asked for" in team.notes()
    assert verify(DirectoryTier(team.nodes[0].durable), name, None).state is CopyState.WHOLE


def test_memory_that_is_cleaned_in_between_damages_no_copy_on_disk(
    team_of: Callable[..., Team], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = team_of(2, per_node=2)
    name = saved(team)
    prepare = ParallelLoad._prepare

    def cleaned(self: ParallelLoad, *given: Any) -> str:
        found = prepare(self, *given)
        for path in (self._stage.landing.folder / name).glob("*.digests"):
            path.unlink()
        return found

    monkeypatch.setattr(ParallelLoad, "_prepare", cleaned)
    team.start()
    assert (team.step, team.right(), name in team.on_disk()) == (1, True, True)
    assert sum(reads.whole) == 4 * shared_bytes(team, name)
    assert "each rank reads the shared files itself" in team.notes()
    assert not any(node.stage.landing.names() for node in team.nodes)


@pytest.mark.parametrize("shares", [True, False])
def test_what_has_landed_and_is_no_buffer_of_the_session_is_removed(
    team_of: Callable[..., Team], reads: Reads, shares: bool
) -> None:
    team = team_of(1, per_node=2, job=AllAlike)
    saved(team)
    team.per_node = 1
    team.have("n0", "n1")
    team.start(ckpt_fully_parallel_save=shares)
    if shares:
        team.train(1)
    (left,) = {tuple(sorted(one.name for one in node.stage.pool.glob("alike-*"))) for node in team.nodes}
    assert left == (("alike-0",) if shares else ())


def test_where_there_is_no_room_each_rank_reads_for_itself(
    team_of: Callable[..., Team], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = team_of(2, per_node=2)
    name = saved(team)
    monkeypatch.setattr(parallel, "room_beside", lambda _: NBYTES)
    team.start()
    assert (team.step, team.right(), reads.parts) == (1, True, [])
    assert sum(reads.whole) == 4 * shared_bytes(team, name)
    assert "there is no room" in team.notes()


def test_a_bit_that_flips_in_memory_damages_no_copy_on_disk(
    team_of: Callable[..., Team], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = team_of(2)
    name = saved(team)
    land = ParallelLoad.land

    def flips(self: ParallelLoad, *given: Any) -> Any:
        found = land(self, *given)
        (path,) = (self._stage.landing.folder / name).glob("*.safetensors")
        with open(path, "r+b") as file:
            file.seek(2 * MIB)
            octet = file.read(1)[0]
            file.seek(2 * MIB)
            file.write(bytes([octet ^ 4]))
        return found

    monkeypatch.setattr(ParallelLoad, "land", flips)
    team.start()
    assert (team.step, team.right()) == (1, True)
    assert sum(reads.whole) == 2 * shared_bytes(team, name)
    assert name in team.on_disk()
    assert "what has landed in memory is not used" in team.notes()
