"""What all ranks hold alike is written once: to memory once a node, to a shared disk once a job."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.save.sharing import Sharing
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers import remote
from outlast.checkpoint.tiers.inventory import verify
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools.convert import export_dcp, export_hugging_face
from outlast.checkpoint.tools.listing import Item, look, tensors
from outlast.checkpoint.tools.replay import differences
from outlast.config import CheckpointOptions
from outlast.errors import CheckpointError
from outlast.recovery.policy.events import Note
from tests.support.jobs import DEADLINE, checkpointer, saver_process, saving, staged, together
from tests.support.launching import until
from tests.support.teams import Team

KIB = 1 << 10


class Replica:
    """State of one rank: tensors that all hold alike, and some that no other rank has."""

    def __init__(self, rank: int, alike: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        self.extra: dict[str, object] = {}
        self.tensors = {**{f"a.{key}": one.clone() for key, one in alike.items()}, **own}

    @property
    def state(self) -> dict[str, object]:
        return {"box": self.tensors, **self.extra}

    def content(self) -> dict[str, bytes]:
        return {key: bytes_of(one) for key, one in self.tensors.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Ranks:
    """Ranks of one node, each a thread, with the node's memory folder and saver."""

    def __init__(self, tmp_path: Path, memory: Path) -> None:
        self.durable = DirectoryTier(tmp_path / "checkpoints")
        self.memory = MemoryFolder(memory)
        self.stage = Stage(self.memory.root)
        self.events = tmp_path / "events.jsonl"
        self.saver = saver_process(self.memory.root, self.events)
        self.generation = 0
        self.savers: list[Any] = []
        self.records: list[Any] = []

    def join(self, jobs: list[Replica], near: bool = True, **settings: Any) -> list[int]:
        """Restore as every rank of a new generation; return the steps."""
        self.generation += 1
        chosen = CheckpointOptions(timeout=DEADLINE, **settings)
        steps = [0] * len(jobs)

        def part(exchange: Any) -> Checkpointer:
            about: dict[str, Any] = {"generation": self.generation, "exchange": exchange}
            about |= {"settings": chosen, "records": self.records}
            folder = self.durable.folder
            made = (
                saving(folder, self.memory, self.saver.ensure, **about)
                if near
                else checkpointer(folder, **about)
            )
            restored = made.restore(jobs[exchange.rank].state)
            steps[exchange.rank] = 0 if restored is None else restored.step
            return made

        self.savers = together(len(jobs), part, generation=self.generation)
        for one in self.savers:
            if isinstance(one, BaseException):
                raise one
        return steps

    def read(self, jobs: list[Replica]) -> list[int]:
        """Load the newest copy on disk as ranks that are no part of the session."""
        steps = [0] * len(jobs)

        def part(exchange: Any) -> None:
            restored = checkpointer(
                self.durable.folder, generation=self.generation + 1, exchange=exchange
            ).restore(jobs[exchange.rank].state)
            steps[exchange.rank] = 0 if restored is None else restored.step

        for answer in together(len(jobs), part, generation=self.generation + 1):
            if isinstance(answer, BaseException):
                raise answer
        return steps

    def save(self, jobs: list[Replica], step: int, durable: bool = False) -> None:
        assert all(staged(self.savers, jobs, Order(step, durable, "a test")))

    def committed(self, step: int) -> Path:
        folder = self.stage.tier.folder / copy_name(step, self.generation)
        until(folder.exists, f"step {step} in memory")
        return folder

    def lost(self) -> str:
        return self.events.read_text() if self.events.exists() else ""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Ranks]]:
    """Return what makes a node, its memory where files are used where they are."""
    made: list[Ranks] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="outlast-test-") as memory:

        def one() -> Ranks:
            folder = tmp_path / str(len(made))
            folder.mkdir()
            made.append(Ranks(folder, Path(memory) / str(len(made))))
            return made[-1]

        yield one


def big(seed: int, kib: int = 3 * KIB, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (kib * KIB,), dtype=torch.uint8, generator=generator)
    return octets.view(dtype) if dtype != torch.bool else octets < 128


def tensor_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def blank(jobs: list[Replica]) -> list[Replica]:
    found = [Replica(job.rank, {}, {}) for job in jobs]
    for one, job in zip(found, jobs, strict=True):
        one.tensors = {key: torch.zeros_like(each) for key, each in job.tensors.items()}
    return found


@pytest.mark.parametrize("near", [True, False])
def test_any_state_comes_back_bit_for_bit(make: Callable[[], Ranks], near: bool) -> None:
    draw = random.Random(7)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
    for case in range(6):
        world = draw.choice([1, 2, 3])
        node = make()
        alike = {
            str(key): big(
                draw.randrange(999), draw.choice([8, 64, 65, 1024, 1500, 2049]), draw.choice(dtypes)
            )
            for key in range(draw.randrange(5))
        }
        jobs = []
        for rank in range(world):
            own = {"rank": torch.tensor([rank]), f"of {rank}": big(rank, draw.choice([4, 700]))}
            own["unlike"] = big(50 + rank, 900)
            own["strided"] = big(5, 512).reshape(256, -1).t()
            jobs.append(Replica(rank, alike, own))
            jobs[-1].tensors |= {f"tied {key}": jobs[-1].tensors[f"a.{key}"] for key in list(alike)[:1]}
        node.join(jobs, staging=draw.choice(["eager", "lazy"]))
        for step in (1, 2):
            for job in jobs:
                for key, one in job.tensors.items():
                    if key.startswith("a.") and one.dtype is not torch.bool:
                        one.add_(step)
            node.save(jobs, step, durable=True)
            assert all(saver.durable(step) for saver in node.savers)
        fresh = blank(jobs)
        assert node.join(fresh, near=near) == [2] * world, case
        assert [one.content() for one in fresh] == [one.content() for one in jobs], case


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_what_changes_behind_the_call_is_saved_as_it_was(make: Callable[[], Ranks], staging: str) -> None:
    """No optimizer steps these tensors, so neither way of staging may read them after the call."""
    node = make()
    jobs = [
        Replica(rank, {str(key): big(key, 16 * KIB, torch.int32) for key in range(4)}, {}) for rank in (0, 1)
    ]
    content = [job.content() for job in jobs]
    node.join(jobs, staging=staging)

    def save(rank: int) -> None:
        assert node.savers[rank].stage(Order(1, True, "a test"), jobs[rank].state)
        for one in jobs[rank].tensors.values():
            one.add_(1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (0, 1)))
    assert all(saver.durable(1) for saver in node.savers)
    fresh = blank(jobs)
    assert node.join(fresh) == [1, 1]
    assert [one.content() for one in fresh] == content


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8)[tensor.view(torch.uint8).numel() // 2] ^= 1


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_a_replica_that_differs_is_saved_by_each_rank_until_it_does_not(
    make: Callable[[], Ranks], staging: str, culprit: int
) -> None:
    node = make()
    alike = {"weight": big(1), "moment": big(2), "small": big(3, 64)}
    jobs = [Replica(rank, alike, {}) for rank in range(2)]
    node.join(jobs, staging=staging)
    sizes = []
    for step in (1, 2, 3, 4):
        if step in (2, 4):
            flip(jobs[culprit].tensors["a.weight"])  # at step 4 it is as it was
        node.save(jobs, step, durable=True)
        assert all(saver.durable(step) for saver in node.savers)
        sizes.append(tensor_bytes(node.durable.folder / copy_name(step, 1)))
        content = [job.content() for job in jobs]
        fresh = blank(jobs)
        assert node.read(fresh) == [step, step]
        assert [one.content() for one in fresh] == content
    assert 6 << 20 < sizes[0] < 7 << 20
    assert sizes == [sizes[0], sizes[1], sizes[1], sizes[0]]
    assert (3 << 20) - 1000 < sizes[1] - sizes[0] < (3 << 20) + 1000, "the weight of each rank"
    told = [record.reason for record in node.records if isinstance(record, Note) and "step " in record.reason]
    assert [("box.a.weight" in reason, "rank 1" in reason) for reason in told] == [
        (True, True),
        (False, False),
    ]
    assert "save_lost" not in node.lost()


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_tensors_that_change_form_are_saved_by_each_rank(
    make: Callable[[], Ranks], ranks: tuple[int, ...]
) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1), "moment": big(2)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)
    node.committed(1)
    for step, kib in ((2, 77), (3, 3 * KIB)):  # at step 3 they are as they were
        for rank in ranks:
            jobs[rank].tensors["a.weight"] = big(step, kib) if step == 2 else big(1)
        node.save(jobs, step, durable=True)
        assert all(saver.durable(step) for saver in node.savers)
        fresh = blank(jobs)
        assert node.read(fresh) == [step, step]
        assert [one.content() for one in fresh] == [one.content() for one in jobs]
    assert "save_lost" not in node.lost()


def test_nothing_is_shared_where_all_of_it_differs(make: Callable[[], Ranks]) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)
    node.committed(1)
    flip(jobs[1].tensors["a.weight"])
    node.save(jobs, 2)
    folder = node.committed(2)
    assert not list(folder.glob("alike-*"))
    jobs[1].tensors["a.weight"].copy_(jobs[0].tensors["a.weight"])
    node.save(jobs, 3)
    assert len(list(node.committed(3).glob("alike-*.safetensors"))) == 1


def test_a_copy_that_lacks_a_shared_file_or_a_bit_of_it_is_not_loaded(make: Callable[[], Ranks]) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1), "moment": big(2)}, {}) for rank in range(2)]
    node.join(jobs)
    content = {}
    for step in (1, 2, 3):
        for job in jobs:
            job.tensors["a.weight"] += 1
        content[step] = [job.content() for job in jobs]
        node.save(jobs, step, durable=True)
        assert all(saver.durable(step) for saver in node.savers)
    next((node.durable.folder / copy_name(3, 1)).glob("alike-00001-*.safetensors")).unlink()
    path = next((node.durable.folder / copy_name(2, 1)).glob("alike-00000-*.safetensors"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    for step in (2, 3):
        assert verify(node.durable, copy_name(step, 1), None).state is CopyState.DAMAGED
    fresh = blank(jobs)
    assert node.join(fresh, near=False) == [1, 1]
    assert [one.content() for one in fresh] == content[1]


def test_switched_off_each_rank_writes_all_of_its_own(make: Callable[[], Ranks]) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1)}, {}) for rank in range(2)]
    node.join(jobs, ckpt_fully_parallel_save=False)
    node.save(jobs, 1)
    folder = node.committed(1)
    assert tensor_bytes(folder) > 2 * (3 << 20)
    assert not list(folder.glob("alike-*"))


class Alike:
    """A job that all ranks of a team hold alike, for :class:`Team`."""

    def __init__(self, seed: int) -> None:
        self.tensors = {"weight": big(1), "moment": big(2)}
        self.own = {"own": torch.full((4,), float(seed))}

    @property
    def state(self) -> dict[str, object]:
        return {"box": self.tensors, "own": self.own}

    def train(self, steps: int = 1) -> None:
        for one in self.tensors.values():
            one[1 :: 1 << 10] += steps

    def content(self) -> bytes:
        return b"".join(map(bytes_of, [*self.tensors.values(), *self.own.values()]))


@pytest.fixture
def team(tmp_path: Path) -> Callable[..., Team]:
    return lambda **how: Team(tmp_path, ["n0", "n1"], job=Alike, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes_write_each_byte_once_to_the_disk_that_they_share(
    team: Callable[..., Team], per_node: int
) -> None:
    job = team(per_node=per_node)
    job.start()
    job.train(1, durable=lambda _: True)
    name = copy_name(1, 1)
    until(lambda: name in job.on_disk(), "step 1 on disk")
    disk = DirectoryTier(job.nodes[0].durable)
    nbytes = 2 * (3 << 20)
    assert nbytes < tensor_bytes(disk.folder / name) < nbytes + (64 << 10)
    for node in job.nodes:
        assert nbytes < tensor_bytes(node.stage.tier.folder / name) < nbytes + (64 << 10)
    assert verify(disk, name, None).state is CopyState.WHOLE
    job.end()
    job.start()
    assert (job.step, job.right()) == (1, True)


def test_nodes_that_differ_write_their_own(team: Callable[..., Team]) -> None:
    job = team(per_node=2)
    job.start()
    job.train(1, durable=lambda _: True)
    until(lambda: copy_name(1, 1) in job.on_disk(), "step 1 on disk")
    for rank in (2, 3):  # all of one node: nobody there finds a difference
        flip(job.jobs[rank].tensors["weight"])  # type: ignore[attr-defined]
    job.train(1, durable=lambda _: True)
    until(lambda: copy_name(2, 1) in job.on_disk(), "step 2 on disk")
    assert "rank 2, 3 not as rank 0" in job.notes()
    assert not job.nodes[0].logged("save_lost")
    job.end()
    job.start()
    assert (job.step, job.right()) == (2, True)


def test_other_tools_find_what_ranks_share(make: Callable[[], Ranks], tmp_path: Path) -> None:
    node = make()
    alike = {"weight": big(1, 3 * KIB, torch.int32), "moment": big(2, 3 * KIB, torch.int32)}
    jobs = [Replica(rank, alike, {"same": torch.arange(9)}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1, durable=True)
    assert all(saver.durable(1) for saver in node.savers)
    name = copy_name(1, 1)
    there = remote.tier_of(str(tmp_path / "global"), {})
    assert remote.put(there, name, node.durable) < 7 << 20
    back = DirectoryTier(tmp_path / "back")
    remote.get(there, name, back)
    assert verify(back, name, None).state is CopyState.WHOLE
    item = Item(back, name)
    manifest = look(item).manifest
    assert manifest is not None
    listed = [(one["rank"], one["tensor"], one["nbytes"]) for one in tensors(item, manifest)]
    assert sorted(one for one in listed if "a." in one[1]) == [
        (rank, f"box.a.{key}", 3 << 20) for rank in range(2) for key in ("moment", "weight")
    ]
    assert differences(item, Item(node.durable, name)) == []
    done = export_hugging_face(back, name, tmp_path / "exported", "box")
    with safe_open(tmp_path / "exported" / done.files[0], framework="pt") as file:
        assert {key: bytes_of(file.get_tensor(key)) for key in file.keys()} == jobs[0].content()  # noqa: SIM118
    export_dcp(back, name, tmp_path / "dcp")
    with safe_open(next((back.folder / name).glob("alike-*.safetensors")), framework="pt") as file:
        assert len(file.keys()) == 1


def test_a_generation_after_one_that_shared_makes_no_buffers_for_whole_states(
    make: Callable[[], Ranks],
) -> None:
    """Making them would take memory and time while the job restarts, and sharing gives them up again."""
    node = make()
    jobs = [Replica(rank, {"w": big(1)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)
    node.committed(1)
    assert node.join(jobs) == [1, 1]
    assert [node.stage.free(str(rank)) for rank in range(2)] == [[], []]
    node.save(jobs, 2)
    assert tensor_bytes(node.committed(2)) < 1.5 * 3 * KIB * KIB


def test_what_is_written_is_what_was_compared(
    make: Callable[[], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1), "moment": big(2)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)
    node.committed(1)
    share = Sharing.share

    def changed(self: Sharing, *given: Any) -> Any:
        """A thread of the script writes to a tensor of rank 0 after ranks have compared."""
        found = share(self, *given)
        if self._around.leads:
            for one in jobs[0].tensors.values():
                flip(one)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Sharing, "share", changed)
        node.save(jobs, 2, durable=True)
    assert not any(saver.durable(2) for saver in node.savers)
    assert "was changed while it was copied" in node.lost()
    node.save(jobs, 3, durable=True)
    assert all(saver.durable(3) for saver in node.savers)


def test_a_difference_that_lasts_is_not_compared_any_more(make: Callable[[], Ranks]) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1), "moment": big(2)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)
    flip(jobs[1].tensors["a.weight"])
    for step in range(2, 7):
        node.save(jobs, step)
    jobs[1].tensors["a.weight"].copy_(jobs[0].tensors["a.weight"])
    node.save(jobs, 7, durable=True)
    assert all(saver.durable(7) for saver in node.savers)
    assert 9 << 20 < tensor_bytes(node.durable.folder / copy_name(7, 1)) < 10 << 20
    fresh = blank(jobs)
    assert node.read(fresh) == [7, 7]
    assert [one.content() for one in fresh] == [one.content() for one in jobs]


def test_a_refusal_of_the_system_on_one_rank_costs_the_save_of_all(make: Callable[[], Ranks]) -> None:
    class Box:
        """An object whose state cannot be read once."""

        refuses = False

        def state_dict(self) -> dict[str, int]:
            if self.refuses:
                raise OSError(5, "a disk of the script")
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    node = make()
    jobs = [Replica(rank, {"weight": big(1)}, {}) for rank in range(2)]
    boxes = [Box(), Box()]
    for job, box in zip(jobs, boxes, strict=True):
        job.extra = {"counts": box}
    node.join(jobs)
    node.save(jobs, 1)
    boxes[1].refuses = True
    assert staged(node.savers, jobs, Order(2, False, "a test")) == [False, False]
    boxes[1].refuses = False
    node.save(jobs, 3, durable=True)
    assert all(saver.durable(3) for saver in node.savers)


def test_ranks_that_save_different_steps_save_nothing(make: Callable[[], Ranks]) -> None:
    node = make()
    jobs = [Replica(rank, {"weight": big(1)}, {}) for rank in range(2)]
    node.join(jobs)
    node.save(jobs, 1)

    def save(rank: int) -> str:
        with pytest.raises(CheckpointError) as raised:
            node.savers[rank].stage(Order(2 + rank, False, "a test"), jobs[rank].state)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(save, (0, 1)))
    assert texts[0] == texts[1]
    assert "2, 3" in texts[0]
    assert not any(name.startswith(copy_name(2, 1)[:14]) for name, _ in node.stage.stagings())
