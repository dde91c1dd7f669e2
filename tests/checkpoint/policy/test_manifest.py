from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import (
    FileEntry,
    Manifest,
    Shard,
    TensorEntry,
    copy_name,
    parse_copy_name,
    rank_files,
    some,
)
from outlast.errors import CheckpointMismatch
from outlast.fields import FORMAT_VERSION, DamagedCopy
from outlast.parallelism.policy.degrees import Layout


def files_of(world_size: int) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(name, 100 + rank, f"{rank:032x}")
        for rank in range(world_size)
        for name in rank_files(rank, world_size)
    )


def manifest(world_size: int = 2) -> Manifest:
    return Manifest(
        "run-a", 7, 120, world_size, {"dp": world_size}, {"tuple": [1]}, 1.5, files_of(world_size)
    )


SHARD = Shard(
    "rank-00000-of-00001.safetensors",
    nbytes=200,
    chunk_bytes=128,
    digests=("0" * 16, "f" * 16),
    tensors={
        "a": TensorEntry("float32", (2, 3), (4, 3), (2, 0), 100, 124),
        "b": TensorEntry("bool", (), (), (), 124, 125),
    },
    aliases={"c": "a"},
)

manifests = st.builds(
    Manifest,
    run_id=st.text(max_size=8),
    generation=st.integers(0, 10**6),
    step=st.integers(0, 10**12),
    world_size=st.just(2),
    parallelism=st.sampled_from([{}, {"dp": 2}, vars(Layout(tp=2)), vars(Layout(cp=2, ep=2))]),
    cursor=st.one_of(st.none(), st.integers(), st.lists(st.text(max_size=3))),
    created=st.floats(allow_nan=False, allow_infinity=False),
    files=st.just(files_of(2)),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(manifests)
def test_a_manifest_comes_back_from_its_text(written: Manifest) -> None:
    assert Manifest.from_json(written.to_json()) == written


@pytest.mark.parametrize("wrong", [{"dp": 3}, {"dp": 2, "ep": 3}, {"tp": 0}, {"vp": 2}, {"dp": "2"}])
def test_a_layout_of_other_ranks_is_damage(wrong: dict[str, object]) -> None:
    text = json.dumps({**json.loads(manifest().to_json()), "parallelism": wrong})
    with pytest.raises(DamagedCopy, match="parallelism"):
        Manifest.from_json(text)


def test_a_shard_comes_back_from_its_json() -> None:
    assert Shard.from_json("x.json", json.loads(json.dumps(SHARD.to_json()))) == SHARD


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [spot for key, each in inner for spot in spots(each, (*path, key))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_whatever_replaces_a_value_is_taken_or_named_as_damage() -> None:
    """Nothing but the two named errors may come out, whatever is written where."""
    outcomes: Counter[str] = Counter()

    @settings(max_examples=400)
    @given(st.booleans(), st.integers(0, 10**6), anything)
    def check(of_shard: bool, where: int, new: Any) -> None:
        value = json.loads(json.dumps(SHARD.to_json()) if of_shard else manifest().to_json())
        paths = spots(value)
        put(value, paths[where % len(paths)], new)
        try:
            Shard.from_json("x.json", value) if of_shard else Manifest.from_json(json.dumps(value))
        except (DamagedCopy, CheckpointMismatch):
            outcomes["refused"] += 1
        else:
            outcomes["taken"] += 1

    check()
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.parametrize("field", list(json.loads(manifest().to_json())))
def test_a_missing_field_is_named(field: str) -> None:
    value = json.loads(manifest().to_json())
    del value[field]
    with pytest.raises(DamagedCopy, match=f"MANIFEST.json: {field}: .* expected, nothing found"):
        Manifest.from_json(json.dumps(value))


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "..", ".", "", "/etc/passwd", ".hidden", "a\\b", "a\0b", "a\n", "ä", "-rf"]
)
def test_a_file_name_that_leaves_the_folder_is_refused(name: str) -> None:
    value = json.loads(manifest().to_json())
    value["files"][0]["name"] = name
    with pytest.raises(DamagedCopy, match="name"):
        Manifest.from_json(json.dumps(value))
    shard = json.loads(json.dumps(SHARD.to_json()))
    shard["file"] = name
    with pytest.raises(DamagedCopy, match="file"):
        Shard.from_json("x.json", shard)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (files_of(2)[:-1], r"lacks rank-00001-of-00002\.json"),
        (files_of(3), "lacks rank-00000-of-00002"),
        ((*files_of(2), FileEntry("extra", 1, "0" * 32)), "does not know extra"),
        ((*files_of(2), files_of(2)[0]), r"doubles rank-00000-of-00002\.safetensors"),
    ],
)
def test_a_manifest_lists_two_files_of_each_rank(files: tuple[FileEntry, ...], problem: str) -> None:
    with pytest.raises(DamagedCopy, match=problem):
        Manifest.from_json(replace(manifest(2), files=files).to_json())


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION + 4])
def test_another_format_is_a_mismatch_that_names_both_formats(version: int) -> None:
    value = json.loads(manifest().to_json()) | {"format": version, "files": "unknown to us"}
    with pytest.raises(CheckpointMismatch, match=rf"format {version}, .*reads format {FORMAT_VERSION};"):
        Manifest.from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '"x"', "[" * 100_000, b"\xff\xfe"])
def test_what_is_no_json_object_is_damage(text: str | bytes) -> None:
    with pytest.raises(DamagedCopy):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"range": [100, 300]}, "range"),
        ({"range": [124, 100]}, "range"),
        ({"nbytes": 23}, "range"),
        ({"shape": [2]}, "one length"),
        ({"offsets": [3, 0]}, "part of"),
        ({"shape": [-2, 3]}, "whole numbers"),
    ],
)
def test_a_tensor_lies_within_its_file_and_its_whole(change: dict[str, Any], problem: str) -> None:
    value = json.loads(json.dumps(SHARD.to_json()))
    value["tensors"]["a"].update(change)
    with pytest.raises(DamagedCopy, match=problem):
        Shard.from_json("x.json", value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"digests": ["0" * 16]}, "2 of them"),
        ({"digests": ["0" * 16, "F" * 16]}, "texts like"),
        ({"aliases": {"c": "zzz"}}, "key of a tensor"),
        ({"chunk_bytes": 0}, "at least 1"),
    ],
)
def test_a_shard_is_consistent(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(DamagedCopy, match=problem):
        Shard.from_json("x.json", json.loads(json.dumps(SHARD.to_json())) | change)


def test_tensors_do_not_overlap() -> None:
    value = json.loads(json.dumps(SHARD.to_json()))
    value["tensors"]["b"]["range"] = [123, 124]
    with pytest.raises(DamagedCopy, match="overlap"):
        Shard.from_json("x.json", value)


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_a_copy_name_is_read_back(step: int, generation: int) -> None:
    assert parse_copy_name(copy_name(step, generation)) == (step, generation)


@pytest.mark.parametrize(
    "name",
    [
        *("step-12.g1", "step-000000012.g01", "step-0000000012.g1", "step-000000012", "x-step-000000012.g1"),
        *("step-000000012.g1\n", "step-000000012.g1.bak", ".tmp-step-000000012.g1-ab", "step-00000001٢.g1"),
    ],
)
def test_other_names_are_no_copies(name: str) -> None:
    assert parse_copy_name(name) is None


def test_copy_names_sort_as_their_steps_do() -> None:
    assert copy_name(120, 7) == "step-000000120.g7"
    assert sorted(copy_name(step, 1) for step in (1000, 9, 80)) == [copy_name(s, 1) for s in (9, 80, 1000)]


def test_a_long_list_is_cut_short() -> None:
    assert some(["b", "a"]) == "a, b"
    assert some(range(5)) == "0, 1, 2 and 2 more"
