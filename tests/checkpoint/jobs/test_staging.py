"""What is staged is the state at that moment, whatever has changed since the save before."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint.content.digest import chunk_digests, row_of
from outlast.checkpoint.content.random_states import capture_random, restore_random
from outlast.checkpoint.content.rank_file import contents_of, parse_rank_file
from outlast.checkpoint.content.state import Capturer, content_of
from outlast.checkpoint.content.typed_json import Decoder, dtype_of
from outlast.checkpoint.policy.manifest import Identity, copy_name, rank_files
from outlast.checkpoint.policy.table import place_in_meshes
from outlast.checkpoint.save import staging as stager
from outlast.checkpoint.save.buffers import Buffers
from outlast.checkpoint.save.sharing import NO_PART
from outlast.checkpoint.save.staging import Order, RankLayout, Stager, Taken
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, staged_file
from outlast.fields import Fields
from tests.support import changes
from tests.support.jobs import DEADLINE, Job

IDENTITY = Identity("run-a", 1, 0, 1)


class Staging:
    """A stager without a saver; what it leaves is read here."""

    def __init__(self, root: Path, identity: Identity = IDENTITY) -> None:
        self.identity = identity
        self.stage = Stage(root)
        self.stage.make()
        (self.stage.pool / "0").mkdir()
        buffers = Buffers(self.stage, "session", rank_files(0, 1)[0], 9)
        self.stager = Stager(MemoryFolder(root), identity, (0,), buffers, lambda: None)
        self.capture, self.layout = Capturer().capture, RankLayout(identity)

    def content(self, step: int, state: dict[str, object], lazily: bool = False) -> dict[str, Any]:
        """Stage a state; return what the files say of it, by name."""
        captured = self.capture(state)
        layout = self.layout.of(captured, (), step)
        order, self.stager.lazy = Order(step, False, "a test"), lazily
        taken = Taken(order, state, captured, layout, NO_PART, time.monotonic())
        assert self.stager.stage(taken, DEADLINE) is not None
        self.stager.fence()
        folder = self.stage.staging(copy_name(step, 1), "session")
        names = rank_files(0, 1)
        file = bytearray((folder / names.tensors).read_bytes())
        content = (folder / names.document).read_bytes()
        fields = Fields.parse(names.document, content)
        row = row_of(len(file), chunk_digests(file), content, *place_in_meshes(fields))
        read = parse_rank_file(content, step, self.identity, row, contents_of("", fields.values))
        found = {}
        for key, entry in read.shard.tensors.items():
            octets = torch.frombuffer(file, dtype=torch.uint8)[entry.begin : entry.end].clone()
            found[key] = octets.view(dtype_of(entry.dtype)).reshape(entry.shape)
        found |= {key: found[target] for key, target in read.shard.table.aliases.items()}
        return {name: Decoder("x", found).decode(value) for name, value in read.values.items()}


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "memory")


def test_a_long_run_id_does_not_shift_what_is_staged_at_a_step_with_more_digits(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "memory", replace(IDENTITY, run_id="r" * 250))
    for step in (9, 10, 1000):
        state = {"box": {"one": torch.arange(10_000) + step}}
        assert same(staging.content(step, state)["box"], state["box"])  # type: ignore[arg-type]


@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
def test_a_state_is_staged_where_no_thread_can_be_started(
    staging: Staging, lazily: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a function of atexit, from Python 3.12 on."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "staging":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(self)

    state = Job(0).state
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for step in (1, 2):
        assert same(staging.content(step, state, lazily), expected(state))


@pytest.mark.parametrize("runs", [True, False], ids=["after the start", "before the start"])
def test_a_signal_while_the_thread_of_a_save_starts_leaves_no_save_unknown(
    staging: Staging, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, leave, over = threading.Thread.start, Stager._leave_record, threading.Event()

    def interrupted(self: threading.Thread) -> None:
        if runs or self.name != "staging":
            start(self)
        if self.name == "staging":
            raise KeyboardInterrupt

    def later(*given: Any) -> None:
        assert over.wait(DEADLINE)
        leave(*given)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        patch.setattr(Stager, "_leave_record", later)
        with pytest.raises(KeyboardInterrupt):
            staging.content(1, {"box": {"one": torch.ones(3)}}, lazily=True)
    monkeypatch.setattr(stager, "_COPY_PATIENCE", DEADLINE if runs else 0.5)
    threading.Timer(0.2, over.set).start()
    staging.stager.close()
    assert (staging.stage.staging(copy_name(1, 1), "session") / staged_file(0, 1)).exists() is runs
    staging.stager.fence()


def same(one: Any, other: Any) -> bool:
    """Return whether two contents are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        plain = [each.detach().resolve_conj().resolve_neg().contiguous() for each in (one, other)]
        form = one.dtype == other.dtype and one.shape == other.shape
        octets = [each.reshape(-1).view(torch.uint8) for each in plain]
        return form and torch.equal(*octets)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def expected(state: dict[str, Any]) -> dict[str, Any]:
    return {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}


def _reshape(state: dict[str, Any]) -> None:
    state["own"]["a"].resize_(2, 6)


def _shrink(state: dict[str, Any]) -> None:
    state["own"]["a"].resize_(3, 3)


def _retype(state: dict[str, Any]) -> None:
    state["own"]["a"].data = state["own"]["a"].view(torch.int32)


def _replace(state: dict[str, Any]) -> None:
    state["model"][0].weight = torch.nn.Parameter(torch.rand(8, 8))


def _rename(state: dict[str, Any]) -> None:
    state["own"]["z"] = state["own"].pop("a")


def _reorder(state: dict[str, Any]) -> None:
    state["own"]["a"] = state["own"].pop("a")


def _deep(state: dict[str, Any]) -> None:
    state["own"]["deep"]["list"][1]["value"] = (1, -0.0)


def _whole_for_true(state: dict[str, Any]) -> None:
    state["own"]["deep"]["flag"] = 1


def _tie(state: dict[str, Any]) -> None:
    state["model"][0].weight = state["model"][2].weight


def _transpose(state: dict[str, Any]) -> None:
    state["own"]["b"].t_()


CHANGES = [_reshape, _shrink, _retype, _replace, _rename, _reorder, _deep, _whole_for_true, _tie, _transpose]


@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_saves_is_in_the_second(
    staging: Staging, change: Callable[[dict[str, Any]], None], lazily: bool
) -> None:
    job = Job(0)
    job.train(2)
    own = {"a": torch.rand(3, 4), "b": torch.rand(4, 4), "deep": {"flag": True, "list": [1, {"value": 2}]}}
    state: dict[str, Any] = {**job.state, "own": own}
    assert same(staging.content(1, state, lazily), expected(state))
    change(state)
    assert same(staging.content(2, state, lazily), expected(state))


def test_a_tied_weight_that_is_untied_is_stored_by_itself(staging: Staging) -> None:
    job = Job(0)
    job.model[0].weight = job.model[2].weight
    assert same(staging.content(1, job.state), expected(job.state))
    job.model[0].weight = torch.nn.Parameter(job.model[2].weight.detach().clone())
    with torch.no_grad():
        job.model[0].weight.add_(1)
    assert same(staging.content(2, job.state), expected(job.state))


def test_views_of_one_memory_that_differ_are_not_taken_for_each_other(staging: Staging) -> None:
    base = torch.arange(12.0)
    own = {"whole": base, "part": base[:6], "square": base[:9].view(3, 3), "turned": base[:9].view(3, 3).t()}
    own |= {"strided": base[::2], "bits": base.view(torch.int32), "empty": base[:0], "again": base}
    own |= {"conjugate": (both := torch.tensor([1 + 2j])).conj(), "complex": both}
    state: dict[str, Any] = {"own": own}
    assert same(staging.content(1, state), expected(state))


@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("part", range(4))
def test_after_any_changes_a_save_has_the_state_of_its_moment(
    tmp_path: Path, seed: int, part: int, lazily: bool
) -> None:
    dice = random.Random(seed + part)
    run, staging = changes.Run(dice), Staging(tmp_path)
    for step in range(1, 60):
        change = dice.choice(changes.CHANGES)
        getattr(run, change)()
        found = staging.content(step, run.state, lazily)
        shutil.rmtree(staging.stage.staged)
        staging.stage.make()
        for name, holder in run.state.items():
            assert same(found[name], content_of(holder)), (change, name)


def test_a_layout_that_could_not_be_made_is_made_by_the_next_save(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = {"x": torch.ones(4)}
    staging.content(1, {"box": box})
    box["x"] = torch.rand(1000)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(stager, "lay_out", fails)
        with pytest.raises(MemoryError):
            staging.content(2, {"box": box})
    assert same(staging.content(3, {"box": box})["box"], box)


def test_random_states_come_back_in_both_forms() -> None:
    random.gauss(0, 1)
    kept = capture_random()
    drawn = [random.gauss(0, 1), random.random()]
    restore_random(kept)
    assert [random.gauss(0, 1), random.random()] == drawn
    restore_random(kept)
    first_form = {**kept, "python": random.getstate()}
    random.seed(1)
    restore_random(first_form)
    assert [random.gauss(0, 1), random.random()] == drawn
