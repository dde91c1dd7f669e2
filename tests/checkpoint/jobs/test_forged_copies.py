"""Copies whose digests are right and whose content is not: whoever may write the folder can make them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.load.reshard import open_part
from outlast.checkpoint.policy.manifest import Identity, copy_name
from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tiers.inventory import read_manifest, verify
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import CheckpointMismatch, OutlastError
from outlast.fields import DamagedCopy
from outlast.recovery.policy.events import Quarantined, Record
from tests.checkpoint.content.test_decoders import changed
from tests.support.forging import forge
from tests.support.jobs import Job, checkpointer, save_steps

OLD, NEW = copy_name(1, 1), copy_name(2, 1)


def entry(document: Any) -> Any:
    return document["tensors"]["model.0.weight"]


FORGED: dict[str, Callable[[Any, Any], object]] = {
    "tensors beyond all memory": lambda d, m: m["own"][0].__setitem__(0, (1 << 62) - 1),
    "a shape beyond torch's": lambda d, m: entry(d).update(shape=[2**70, 8]),
    "a shape whose product is": lambda d, m: entry(d).update(shape=[2**60, 2**60], part=[[0, 0], [8, 8]]),
    "a quantized type": lambda d, m: entry(d).update(dtype="quint8", shape=[256], width=1),
    "groups without parameters": lambda d, m: d["state"]["optimizer"]["dict"].update(
        param_groups=[{"dict": {}}]
    ),
    "no state of an optimizer": lambda d, m: d["state"]["optimizer"]["dict"].pop("state"),
    "a list for an optimizer": lambda d, m: d["state"].update(optimizer=[]),
    "a number for its entries": lambda d, m: d["state"]["optimizer"]["dict"].update(
        state={"map": [[0, 1.5]]}
    ),
    "a list that says dict": lambda d, m: d["state"].update(scheduler={"dict": [1]}),
    "bytes that are no base64": lambda d, m: d.update(state={"Counter": {"bytearray": "w"}}),
    "parameters that are no texts": lambda d, m: d["parameters"].update(optimizer=[[1, 2, None]] * 4),
    "an address for an object": lambda d, m: d["state"].update(
        scheduler={"dict": {"a": {"numpy.ndarray": ["O", [1], "QUFBQUFBQUE="]}}}
    ),
    "an address in the cursor": lambda d, m: m.update(cursor={"numpy.generic": ["O", "QUFBQUFBQUE="]}),
    "no random states": lambda d, m: d.update(random={"dict": {}}),
    "random words that are too few": lambda d, m: d["random"]["dict"].update(torch={"bytes": "QUFB"}),
    "a kind that is no text": lambda d, m: d["kinds"].update(optimizer=["AdamW"]),
}


KNOWN_AT_THE_LOAD = {  # what only the live objects, or torch, can tell
    "groups without parameters",
    "no state of an optimizer",
    "a list for an optimizer",
    "a number for its entries",
    "random words that are too few",
}


@pytest.mark.parametrize("wrong", FORGED)
def test_a_forged_copy_is_found_without_torch_as_far_as_it_can_be(
    wrong: str, saved: tuple[Path, dict[int, bytes]], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "here")
    assert verify(DirectoryTier(folder), NEW, None).state is CopyState.WHOLE
    forge(folder / NEW, FORGED[wrong])
    found = verify(DirectoryTier(folder), NEW, None)
    assert found.state is (CopyState.WHOLE if wrong in KNOWN_AT_THE_LOAD else CopyState.DAMAGED), found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, save_steps(folder, 1, 2)


@pytest.mark.parametrize("wrong", FORGED)
def test_a_forged_copy_is_damaged_and_the_older_one_is_loaded(
    wrong: str, saved: tuple[Path, dict[int, bytes]], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "here")
    forge(folder / NEW, FORGED[wrong])
    records: list[Record] = []
    job = Job(77)
    restored = checkpointer(folder, generation=2, records=records).restore(job.state)
    assert restored is not None
    assert (restored.name, job.content()) == (OLD, saved[1][1])
    assert [record.checkpoint for record in records if isinstance(record, Quarantined)] == [NEW]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_ends_in_a_copy_or_in_a_refusal(
    saved: tuple[Path, dict[int, bytes]], tmp_path_factory: pytest.TempPathFactory, dice: st.DataObject
) -> None:
    folder = shutil.copytree(saved[0], tmp_path_factory.mktemp("any") / "here")

    def change(document: Any, manifest: Any) -> None:
        part = dice.draw(
            st.sampled_from(
                ["state", "kinds", "parameters", "random", "tensors", "aliases", "meshes", "begin"]
            )
        )
        document[part] = changed(document[part], dice)

    forge(folder / NEW, change)
    before = torch.get_rng_state()
    try:
        restored = checkpointer(folder, generation=2).restore(Job(77).state)
        assert restored is not None
        assert restored.name in (OLD, NEW)
    except OutlastError:
        pass
    finally:
        torch.set_rng_state(before)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_change_ends_so_for_ranks_of_another_world(
    saved: tuple[Path, dict[int, bytes]], tmp_path_factory: pytest.TempPathFactory, dice: st.DataObject
) -> None:
    """For two ranks the values of the one that saved are put together anew."""
    folder = shutil.copytree(saved[0], tmp_path_factory.mktemp("other") / "here")

    def change(document: Any, manifest: Any) -> None:
        part = dice.draw(st.sampled_from(["state", "tensors", "aliases"]))
        document[part] = changed(document[part], dice)

    forge(folder / NEW, change)
    with DirectoryTier(folder).open(NEW) as copy:
        try:
            _, commit = read_manifest(copy, NEW)
            open_part(copy, NEW, commit, Identity("run-a", 2, 0, 2), Job(77).state).fill()
        except (DamagedCopy, CheckpointMismatch):
            pass
