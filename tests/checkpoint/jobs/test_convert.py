"""What others write comes in, what others read goes out, in every bit; pickles are not believed."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools.convert import (
    Origin,
    export_dcp,
    export_hugging_face,
    import_from,
)
from outlast.errors import CheckpointError, CheckpointMismatch, OutlastError, UsageError
from outlast.ipc.exchange import StoreExchange
from tests.support.bounds import bounded_wait
from tests.support.jobs import Job, checkpointer, together

NAME = copy_name(3, 1)
ORIGIN = Origin("run-a", 3, {"optimizer": "AdamW", "scheduler": "CosineAnnealingLR"})
QUIET = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP warns that it works alone


def saved_job(folder: Path) -> Job:
    job = Job(0)
    job.train(3)
    assert checkpointer(folder).save(3, job.state, "a test", 17)
    return job


def assert_goes_on(folder: Path, job: Job, cursor: object = None) -> None:
    """Restore an imported copy and check that training goes on as that of the job."""
    other = Job(9)
    restored = checkpointer(folder, generation=2).restore(other.state)
    assert restored is not None
    assert (restored.step, restored.cursor) == (3, cursor)
    assert other.content() == job.content()
    for each in (job, other):
        torch.manual_seed(5)
        each.losses = each.train(3)  # type: ignore[attr-defined]
    assert other.losses == job.losses  # type: ignore[attr-defined]
    assert other.content() == job.content()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("limit", [1 << 30, 300, 1])
def test_hugging_face_gets_plain_names_and_files_of_no_more_than_the_limit(
    limit: int, tmp_path: Path
) -> None:
    job = saved_job(tmp_path)
    done = export_hugging_face(DirectoryTier(tmp_path), NAME, tmp_path / "hf", max_shard_bytes=limit)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [path.name for path in files] == list(done.files)
    found: dict[str, torch.Tensor] = {}
    for path in files:
        content = load_file(path)
        size = sum(tensor.nbytes for tensor in content.values())
        assert size <= limit or len(content) == 1
        found |= content
    assert_same(found, job.model.state_dict())
    index = tmp_path / "hf" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (limit < 1 << 30)
    if index.exists():
        said = json.loads(index.read_text())
        assert said["metadata"]["total_size"] == done.nbytes == sum(each.nbytes for each in found.values())
        assert {key: tmp_path / "hf" / file for key, file in said["weight_map"].items()} == {
            key: path for path in files for key in load_file(path)
        }


def test_hugging_face_gets_tied_tensors_under_each_name_and_none_of_ddps_prefix(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    state = {"module.in": weight, "module.out": weight, "module.half": torch.ones(3, dtype=torch.bfloat16)}
    checkpointer(tmp_path).save(3, {"net": state}, "a test")
    done = export_hugging_face(DirectoryTier(tmp_path), NAME, tmp_path / "hf", "net")
    expected = {key.removeprefix("module."): each for key, each in state.items()}
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), expected)
    assert done.left_out == ()


def test_what_hugging_face_has_no_place_for_is_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "_extra_state": {"calls": 3}}
    checkpointer(tmp_path).save(3, {"net": state, "odd": {"c": torch.ones(2) * 1j}}, "a test")
    tier = DirectoryTier(tmp_path)
    assert export_hugging_face(tier, NAME, tmp_path / "hf", "net").left_out == ("_extra_state.calls",)
    with pytest.raises(UsageError, match=r"complex64\[2\]"):
        export_hugging_face(tier, NAME, tmp_path / "odd", "odd")
    with pytest.raises(UsageError, match=r"'model'.*net, odd"):
        export_hugging_face(tier, NAME, tmp_path / "none")
    with pytest.raises(UsageError, match="hf"):
        export_hugging_face(tier, NAME, tmp_path / "hf", "net")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", NAME]


def save_stages(folder: Path, rank_value: float = 0.0) -> None:
    """Let two ranks save a stage each, and something that both should have alike."""

    def part(exchange: StoreExchange) -> bool:
        rank = exchange.rank
        own = {f"layers.{2 * rank + place}": torch.full((3,), float(2 * rank + place)) for place in range(2)}
        shared = torch.full((5,), 7.0 + rank * rank_value)
        state = {"model": {**own, "norm": shared}}
        return checkpointer(folder, exchange=exchange).save(3, state, "a test")

    assert together(2, part) == [True, True]


def test_the_stages_of_a_pipeline_are_put_together(tmp_path: Path) -> None:
    save_stages(tmp_path)
    export_hugging_face(DirectoryTier(tmp_path), NAME, tmp_path / "hf")
    expected = {f"layers.{place}": torch.full((3,), float(place)) for place in range(4)}
    expected["norm"] = torch.full((5,), 7.0)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), expected)


@QUIET
@pytest.mark.parametrize("export", [export_hugging_face, export_dcp])
def test_what_ranks_do_not_have_alike_is_not_exported(export: Any, tmp_path: Path) -> None:
    save_stages(tmp_path, rank_value=1.0)
    with pytest.raises(CheckpointMismatch, match=r"model\.norm.*0.*1"):
        export(DirectoryTier(tmp_path), NAME, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@QUIET
def test_stock_dcp_loads_what_was_exported(tmp_path: Path) -> None:
    job, other = saved_job(tmp_path), Job(1)
    export_dcp(DirectoryTier(tmp_path), NAME, tmp_path / "dcp")
    other.train(1)
    wanted = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    other.model.load_state_dict(wanted["model"])
    other.optimizer.load_state_dict(wanted["optimizer"])
    assert other.content() == job.content()
    assert wanted["optimizer"]["param_groups"] == job.optimizer.state_dict()["param_groups"]


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@QUIET
def test_no_pickle_in_a_dcp_folder_is_believed(tmp_path: Path) -> None:
    trace, tier = tmp_path / "trace", DirectoryTier(tmp_path / "run")
    state = {"model": {"w": torch.ones(3)}, "args": {"evil": Evil(trace), "lr": 0.5}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UsageError, match=r"args\.evil"):
        import_from("dcp", tmp_path / "dcp", tier, Origin("run-a", 3))
    assert not trace.exists()
    assert tier.names() == []
    import_from("dcp", tmp_path / "dcp", tier, Origin("run-a", 3), leave_out=["args.evil"])
    live: dict[str, Any] = {"model": {}, "args": {}}
    assert checkpointer(tier.folder).restore(live) is not None
    assert live["model"]["w"].tolist() == [1.0] * 3
    assert live["args"] == {"lr": 0.5}
    for evil in (Evil(trace), ByName(Path, "touch"), ByName(StorageMeta, "__init__")):
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(CheckpointError):
            import_from("dcp", tmp_path / "dcp", tier, Origin("run-a", 4))
    assert not trace.exists()


def moved(folder: Path, place: str) -> None:
    """Let the metadata of a folder name another place of its tensors."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for each in metadata.storage_data.values():
        each.relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def linked(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a way up": lambda folder: moved(folder, "../secret/__0_0.distcp"),
    "an absolute path": lambda folder: moved(folder, str(folder.parent / "secret" / "__0_0.distcp")),
    "a folder beside": lambda folder: moved(folder, f"../{folder.name}-beside/__0_0.distcp"),
    "a link": lambda folder: linked(folder / "__0_0.distcp", folder.parent / "secret" / "__0_0.distcp"),
    "linked metadata": lambda folder: linked(folder / ".metadata", folder.parent / "secret" / ".metadata"),
    "a linked folder": lambda folder: (
        moved(folder, "way/__0_0.distcp"),
        (folder / "way").symlink_to(folder.parent / "secret"),
    ),
    "a device": lambda folder: linked(folder / ".metadata", Path("/dev/zero")),
    "a FIFO": lambda folder: fifo(folder / "__0_0.distcp"),
    "a FIFO of metadata": lambda folder: fifo(folder / ".metadata"),
}


@QUIET
@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_outside_of_a_dcp_folder_is_read_and_nothing_is_waited_for(
    tmp_path: Path, planted: str
) -> None:
    for name in ("dcp", "secret", "dcp-beside"):
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / name)
    PLANTED[planted](tmp_path / "dcp")
    tier = DirectoryTier(tmp_path / "run")
    with bounded_wait(), pytest.raises(CheckpointError):
        import_from("dcp", tmp_path / "dcp", tier, Origin("run-a", 3))
    assert tier.names() == []


@QUIET
def test_a_dcp_folder_may_be_a_link_and_have_links_that_stay_in_it(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / "blob").mkdir()
    for path in [each for each in (tmp_path / "dcp").iterdir() if each.is_file()]:
        path.rename(tmp_path / "dcp" / "blob" / path.name)
        path.symlink_to(tmp_path / "dcp" / "blob" / path.name)
    (tmp_path / "link").symlink_to(tmp_path / "dcp")
    tier = DirectoryTier(tmp_path / "run")
    assert import_from("dcp", tmp_path / "link", tier, Origin("run-a", 3)) == copy_name(3, 0)


class ByName:
    """Pickled as an attribute of something, as some versions of Python pickle a member of an enumeration."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


@QUIET
def test_a_dcp_folder_of_a_python_that_pickles_enumerations_by_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = ByName.__reduce__
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: by_name(ByName(type(one), one.name))
    )
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    tier = DirectoryTier(tmp_path / "run")
    import_from("dcp", tmp_path / "dcp", tier, Origin("run-a", 3))
    live: dict[str, Any] = {"model": {}}
    assert checkpointer(tier.folder).restore(live) is not None
    assert live["model"]["w"].tolist() == [1.0] * 3


def test_a_job_goes_on_from_a_file_of_torch_save(tmp_path: Path) -> None:
    job = Job(0)
    job.train(3)
    content: dict[str, Any] = {name: each.state_dict() for name, each in job.state.items()}  # type: ignore[attr-defined]
    torch.save(content, tmp_path / "all.pt")
    tier = DirectoryTier(tmp_path / "run")
    import_from("torch", tmp_path / "all.pt", tier, ORIGIN)
    assert_goes_on(tmp_path / "run", job)


def test_plain_entries_come_in_together(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 4, 7: "x"}, tmp_path / "all.pt")
    tier = DirectoryTier(tmp_path / "run")
    import_from("torch", tmp_path / "all.pt", tier, Origin("run-a", 3))
    live: dict[str, Any] = {"model": {}, "rest": {}}
    checkpointer(tier.folder).restore(live)
    assert live["rest"] == {"epoch": 4, 7: "x"}


def test_pickled_objects_are_refused_by_name_unless_their_class_is_allowed(tmp_path: Path) -> None:
    trace, tier = tmp_path / "trace", DirectoryTier(tmp_path / "run")
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1.0)}, tmp_path / "args.pt")
    torch.save({"model": Evil(trace)}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match=r"evil\.pt"):
        import_from("torch", tmp_path / "evil.pt", tier, Origin("run-a", 3))
    assert not trace.exists()
    with pytest.raises(UsageError, match=r"argparse\.Namespace"):
        import_from("torch", tmp_path / "args.pt", tier, Origin("run-a", 3))
    allowed = torch.serialization.safe_globals([argparse.Namespace])
    with allowed, pytest.raises(UsageError, match=r"args.*Namespace"):
        import_from("torch", tmp_path / "args.pt", tier, Origin("run-a", 3))
    assert tier.names() == []
    with allowed:
        import_from("torch", tmp_path / "args.pt", tier, Origin("run-a", 3), leave_out=["args"])
    assert tier.names() == [copy_name(3, 0)]


@pytest.mark.parametrize("origin", [Origin("run-a", 3), Origin("run-a", 4, {"optimiser": "AdamW"})])
def test_an_import_that_cannot_be_is_refused_and_leaves_nothing(origin: Origin, tmp_path: Path) -> None:
    """A copy of the name is there already; a type is given of an object that is not."""
    tier = DirectoryTier(tmp_path / "run")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    import_from("torch", tmp_path / "a.pt", tier, Origin("run-a", 3))
    with pytest.raises(OutlastError, match=r"step-000000003|optimiser"):
        import_from("torch", tmp_path / "a.pt", tier, origin)
    assert [path.name for path in tier.folder.iterdir()] == [copy_name(3, 0)]


@pytest.mark.parametrize("content", [b"junk" * 100, b"", b"\x80\x02]q\x00(K\x01", b"PK\x03\x04 and no more"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(OutlastError, match=r"a\.pt"):
        import_from("torch", tmp_path / "a.pt", DirectoryTier(tmp_path / "run"), Origin("run-a", 3))
