"""A copy is loaded into other worlds than the one that saved it, in every bit, or refused by name."""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from outlast.checkpoint.content.state import tensors_in
from outlast.checkpoint.content.typed_json import Encoder
from outlast.checkpoint.load import reshard
from outlast.checkpoint.policy.manifest import rank_files
from outlast.errors import CheckpointMismatch, UsageError
from outlast.fields import DamagedCopy
from outlast.ipc.exchange import StoreExchange
from outlast.parallelism.policy.degrees import Layout
from outlast.parallelism.policy.slices import Part
from tests.support.jobs import checkpointer, together
from tests.support.worlds import NAME, State, box_of, in_layout, load, save, write_world


@pytest.mark.parametrize(("then", "now"), [(1, 3), (3, 1), (2, 5), (4, 2)])
def test_what_all_ranks_have_alike_any_rank_gets(then: int, now: int, tmp_path: Path) -> None:
    tensor = torch.randn(700_000)  # its chunks are not all the same chunks of the file
    save(tmp_path, then, lambda rank: box_of(t=tensor.clone(), n=[1, (2.5, "x")], empty=torch.zeros(0, 3)))
    for rank in range(now):
        box: dict[str, Any] = {}
        received = load(tmp_path, rank, now, {"box": box})
        assert torch.equal(box["t"], tensor)
        assert (box["n"], box["empty"].shape) == ([1, (2.5, "x")], (0, 3))
        assert (received.cursor, received.left, received.nbytes) == ("here", (), 2_800_000)


def test_what_is_of_a_single_rank_is_refused_by_name(tmp_path: Path) -> None:
    def different(place: int) -> Callable[[int], State]:
        def state(rank: int) -> State:
            tensor = torch.zeros(700_000)
            tensor[place] = float(rank == 2)
            return box_of(first=torch.ones(3), t=tensor)

        return state

    for place in (0, 300_000, 699_999):
        folder = tmp_path / str(place)
        save(folder, 3, different(place))
        errors = []
        for rank in range(2):  # each new rank compares some of the files
            try:
                load(folder, rank, 2, box_of())
            except CheckpointMismatch as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert "box.t" in errors[0]
        assert load(folder, 2, 3, box_of()).note == ""


def test_tensors_at_other_places_of_their_files_are_compared_by_their_bytes(tmp_path: Path) -> None:
    def state(rank: int) -> State:
        own = torch.ones(10 * rank, dtype=torch.float64)
        return {"box": {"t": torch.arange(600_000.0)}, f"own{rank}": {"n": own}}

    save(tmp_path, 2, state)
    box: dict[str, Any] = {}
    received = load(tmp_path, 0, 1, {"box": box, "own0": {}, "own1": {}})
    assert torch.equal(box["t"], torch.arange(600_000.0))
    assert received.left == ()
    assert load(tmp_path, 0, 1, {"box": {}, "own1": {}}).left == ("own0.n",)


def test_tensors_may_lie_in_another_order_in_each_file(tmp_path: Path) -> None:
    """They begin in the chunk in which the one before ends, and are not looked at from first to last."""
    content = {f"t{place}": torch.randn(400_000) for place in range(4)}

    def state(rank: int) -> State:
        names = sorted(content, reverse=rank == 1)
        return {"box": {name: content[name].clone() for name in names}}

    save(tmp_path, 2, state)
    for rank in range(3):
        box: dict[str, Any] = {}
        load(tmp_path, rank, 3, {"box": box})
        assert all(torch.equal(box[name], content[name]) for name in content)


@pytest.mark.parametrize(
    ("state_of", "text"),
    [
        (lambda rank: box_of(who=rank), "box.who"),
        (lambda rank: box_of(log=[1] * rank), "box.log"),
        (lambda rank: box_of(**{f"k{rank}": 1}), "k0, k1"),
        (lambda rank: box_of(t=torch.ones(2 + rank)), "float32[3]"),
        (lambda rank: box_of(t=torch.ones(2, dtype=[torch.int8, torch.bool][rank])), "int8[2]"),
    ],
)
def test_ranks_that_differ_are_named(state_of: Callable[[int], State], text: str, tmp_path: Path) -> None:
    save(tmp_path, 2, state_of)
    for rank in range(3):
        with pytest.raises(CheckpointMismatch) as caught:
            load(tmp_path, rank, 3, box_of())
        assert text in str(caught.value)


class TestLayouts:
    """As many ranks in another layout are another world."""

    SAVED, HERE = Layout(tp=2, pp=2), Layout(tp=2, pp=2, virtual=2)

    @staticmethod
    def stage(rank: int) -> State:
        """Return tensors named by their place in the stage: in another layout they are of other layers."""
        return box_of(**{"blocks.0": torch.full((2,), float(rank // 2))})

    def test_what_would_be_of_other_layers_is_refused_and_it_is_said_what_is_needed(
        self, tmp_path: Path
    ) -> None:
        save(tmp_path, 4, self.stage, self.SAVED)
        lives = [self.stage(0) for _ in range(4)]

        def part(exchange: StoreExchange) -> object:
            return in_layout(tmp_path, exchange, self.HERE).restore(lives[exchange.rank])

        for answer in together(4, part):
            assert isinstance(answer, CheckpointMismatch)
            assert all(word in str(answer) for word in ("pp 2", "virtual", "box.blocks.0"))
        for live in lives:
            assert torch.equal(live["box"]["blocks.0"], torch.zeros(2))  # type: ignore[index]

    @pytest.mark.parametrize("here", [SAVED, None])
    def test_the_layout_that_saved_gets_each_rank_its_own(self, here: Layout | None, tmp_path: Path) -> None:
        save(tmp_path, 4, self.stage, self.SAVED)
        for rank in range(4):
            live = self.stage(0)
            load(tmp_path, rank, 4, live, here)
            assert torch.equal(live["box"]["blocks.0"], torch.full((2,), float(rank // 2)))  # type: ignore[index]

    def test_what_is_alike_on_all_ranks_is_for_every_layout(self, tmp_path: Path) -> None:
        save(tmp_path, 4, lambda rank: box_of(t=torch.ones(2)), self.SAVED)
        live = box_of(t=torch.zeros(2))
        load(tmp_path, 3, 4, live, Layout(dp=4))
        assert torch.equal(live["box"]["t"], torch.ones(2))  # type: ignore[index]


def test_random_states_that_differ_follow_from_the_checkpoint_and_the_rank(tmp_path: Path) -> None:
    save(tmp_path / "alike", 2, lambda rank: box_of())

    def random_of(received: reshard.Received) -> Any:
        return Encoder().encode(received.random, ("random",))

    states = [load(tmp_path / "alike", rank, 3, box_of()) for rank in range(3)]
    assert all(random_of(one) == random_of(states[0]) for one in states)
    assert all("random" not in one.note for one in states)
    write_world(tmp_path / "other", torch.ones(4), [Part.whole((4,))] * 2)
    live: State = {"t": torch.zeros(4)}
    first, again, second = (load(tmp_path / "other", rank, 3, live) for rank in (0, 0, 1))
    assert random_of(first) == random_of(again) != random_of(second)
    assert "random" in first.note
    kept = load(tmp_path / "other", 1, 2, live)
    assert (kept.note, torch.initial_seed()) == ("", 1)


class Stage(torch.nn.Module):
    """Some of four layers, under the names that they have in the whole model."""

    def __init__(self, layers: range, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        every = [torch.nn.Linear(4, 4) for _ in range(4)]
        self.layers = torch.nn.ModuleDict({str(place): every[place] for place in layers})

    def train_on(self, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            for layer in self.layers.values():
                layer(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


class Named:
    """An optimizer whose state has the names of the parameters, as torch's own functions give it."""

    def __init__(self, model: Stage, optimizer: torch.optim.Optimizer, flat: bool) -> None:
        self.parts = (model, optimizer)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> Any:
        return get_optimizer_state_dict(*self.parts, options=self.options)

    def load_state_dict(self, state: Any) -> None:
        set_optimizer_state_dict(*self.parts, state, options=self.options)


def stages(count: int, seed: int, flat: bool) -> list[State]:
    found: list[State] = []
    for stage in range(count):
        model = Stage(range(4 * stage // count, 4 * (stage + 1) // count), seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if seed == 0:
            model.train_on(optimizer)
        found.append({"model": model, "optimizer": Named(model, optimizer, flat)})
    return found


def flattened(states: list[State]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state in states:
        for name, holder in state.items():
            for path, tensor in tensors_in(holder.state_dict()):  # type: ignore[attr-defined]
                found[".".join((name, *path))] = tensor
    return found


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (2, 4), (4, 2), (3, 2)])
def test_layers_move_between_stages(then: int, now: int, flat: bool, tmp_path: Path) -> None:
    saved, live = stages(then, 0, flat), stages(now, 1, flat)
    save(tmp_path, then, lambda rank: saved[rank])
    received = [load(tmp_path, rank, now, live[rank]) for rank in range(now)]
    reshard.require_claimed([each.left for each in received])
    expected, found = flattened(saved), flattened(live)
    assert found.keys() == expected.keys()
    assert len(found) == 4 * 2 * 4
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_an_object_says_once_what_it_holds_while_another_world_loads(tmp_path: Path) -> None:
    saved, [live] = stages(2, 0, True), stages(1, 1, True)
    save(tmp_path, 2, lambda rank: saved[rank])
    asked: list[str] = []

    class Asked(Named):
        def state_dict(self) -> Any:  # a step of a new optimizer, with all its moments
            asked.append("optimizer")
            return super().state_dict()

    model = live["model"]
    assert isinstance(model, Stage)
    optimizer = Asked(model, torch.optim.AdamW(model.parameters(), lr=0.1), True)
    assert checkpointer(tmp_path).restore({"model": model, "optimizer": optimizer}) is not None
    assert asked == ["optimizer"]
    assert optimizer.parts[1].state_dict()["state"][0]["step"] == 2


def calls_of_a_load(folder: Path, tensors: int) -> int:
    """Return how many functions are called while one rank loads what two saved."""

    def state(rank: int) -> State:
        return box_of(**{str(place): torch.tensor([place]) for place in range(tensors)})

    save(folder, 2, state)
    live, profile = state(0), cProfile.Profile()
    profile.runcall(load, folder, 0, 1, live)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_twice_as_many_tensors_are_twice_the_work(tmp_path: Path) -> None:
    few, many = (calls_of_a_load(tmp_path / str(count), count) for count in (400, 800))
    assert many < 2.2 * few


def test_layers_that_no_stage_asks_for_or_none_has_saved_are_refused(tmp_path: Path) -> None:
    saved, live = stages(2, 0, True), stages(1, 1, True)
    save(tmp_path / "more", 1, lambda rank: stages(1, 0, True)[0])
    received = [load(tmp_path / "more", rank, 2, {**saved[0]}) for rank in range(2)]
    with pytest.raises(CheckpointMismatch, match=r"16.*model\.layers"):
        reshard.require_claimed([each.left for each in received])
    save(tmp_path / "less", 2, lambda rank: saved[0])
    with pytest.raises(CheckpointMismatch, match=r"model\.layers\.2\.weight"):
        load(tmp_path / "less", 0, 1, live[0])


def test_moments_without_names_do_not_move_between_stages(tmp_path: Path) -> None:
    def state(stage: Stage) -> State:
        optimizer = torch.optim.AdamW(stage.parameters())
        stage.train_on(optimizer)
        return {"model": stage, "optimizer": optimizer}

    save(tmp_path, 2, lambda rank: state(Stage(range(2 * rank, 2 * rank + 2), rank)))
    model = Stage(range(2), 5)
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.state\.0\.exp_avg"):
        load(tmp_path, 0, 1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_damage_is_found_before_a_byte_of_its_chunk_is_used(tmp_path: Path) -> None:
    """A JSON file that is read; of a rank's tensors the chunk with the damage, others being sound."""
    save(tmp_path, 2, lambda rank: box_of(t=torch.ones(1_000_000)))
    tensors, digests, document = rank_files(1, 2)
    flip(tmp_path / NAME / tensors, 3_000_000)
    load(tmp_path, 0, 3, box_of())
    box: dict[str, Any] = {"t": torch.zeros(1_000_000)}
    with pytest.raises(DamagedCopy, match=f"{tensors}.*2097152.*3145728"):
        load(tmp_path, 1, 3, {"box": box})
    assert box["t"].sum() == 0
    flip(tmp_path / NAME / digests, 3)
    with pytest.raises(DamagedCopy, match=digests):
        load(tmp_path, 1, 3, {"box": box})
    flip(tmp_path / NAME / document, 500)
    with pytest.raises(DamagedCopy, match=document):
        load(tmp_path, 1, 2, box_of())
    flip(tmp_path / NAME / (first := rank_files(0, 2).document), 500)
    with pytest.raises(DamagedCopy, match=first):
        load(tmp_path, 0, 3, box_of())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1))
    finally:
        dist.destroy_process_group()


def test_distributed_tensors_are_filled_where_they_are(mesh: DeviceMesh, tmp_path: Path) -> None:
    content = torch.arange(6.0).view(3, 2)
    saved = distribute_tensor(content, mesh, [Replicate(), Shard(0)])
    assert checkpointer(tmp_path).save(3, box_of(list=[saved, 5], t=saved.clone()), "a test")
    live = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(1), Replicate()])
    place = live.to_local().data_ptr()
    box: dict[str, Any] = {"list": [live, 0], "t": torch.zeros(3, 2)}
    load(tmp_path, 0, 1, {"box": box})
    assert box["list"][0] is live
    assert live.to_local().data_ptr() == place
    assert torch.equal(live.to_local(), content)
    assert (box["list"][1], type(box["t"])) == (5, torch.Tensor)


def test_a_new_optimizer_of_distributed_parameters_goes_on(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Also of one that is a scalar, as the number of its steps is, which is not distributed."""

    def made() -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        wholes = [torch.arange(6.0), torch.tensor(2.0)]
        params = [distribute_tensor(each, mesh, [Replicate()] * 2).requires_grad_() for each in wholes]
        return params, torch.optim.AdamW(params, lr=0.1)

    def step(params: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[Any]:
        sum(each.square().sum() for each in params).backward()  # type: ignore[union-attr]
        optimizer.step()
        return [each.detach().to_local().tolist() for each in params]  # type: ignore[attr-defined]

    (params, optimizer), (others, new) = made(), made()
    step(params, optimizer)
    assert checkpointer(tmp_path).save(3, {"p": [*params], "o": optimizer}, "a test")
    load(tmp_path, 0, 1, {"p": [each.detach() for each in others], "o": new})
    assert [type(each) for each in new.state[others[1]].values()] == [torch.Tensor, DTensor, DTensor]
    for each in (*params, *others):
        each.grad = None
    assert step(params, optimizer) == step(others, new)


@pytest.mark.parametrize("other", ["float64[3, 2]", "float32[4, 2]"])
def test_distributed_tensors_of_another_form_are_refused(
    other: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    def made(form: str) -> torch.Tensor:
        dtype = torch.float64 if "64" in form else torch.float32
        return distribute_tensor(torch.ones(int(form[8]), 2, dtype=dtype), mesh, [Shard(0), Replicate()])

    save(tmp_path, 1, lambda rank: box_of(t=made("float32[3, 2]")))
    text = rf"box\.t.*float32\[3, 2\].*{re.escape(other)}"
    for ranks in (1, 2):
        with pytest.raises(CheckpointMismatch, match=text):
            load(tmp_path, 0, ranks, box_of(t=made(other)))


def test_parts_whose_place_is_not_certain_are_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Sums that are not added up yet, and a division that torch.chunk would not make."""
    save(tmp_path, 1, lambda rank: box_of(t=torch.ones(3)))
    for tensor, text in (
        (DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()]), "Partial"),
        (
            DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], shape=(3,), stride=(1,)),
            r"\[3\].*\[2\]",
        ),
    ):
        with pytest.raises(UsageError, match=rf"box.t.*{text}"):
            checkpointer(tmp_path).save(4, box_of(t=tensor), "a test")
        with pytest.raises(UsageError, match=rf"box.t.*{text}"):
            load(tmp_path, 0, 1, box_of(t=tensor))
