from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import (
    MOST_RANKS,
    FileEntry,
    Identity,
    Manifest,
    Row,
    alike_files,
    copy_name,
    is_label,
    parse_copy_name,
    rank_files,
    runs_of,
)
from outlast.errors import CheckpointError, CheckpointMismatch
from outlast.fields import FORMAT_VERSION, DamagedCopy
from outlast.parallelism.policy.degrees import Layout
from tests.support.forging import SAID, text_of
from tests.support.json_values import ANYTHING, replace_one


def row(number: int) -> Row:
    digests = [f"{number + more:032x}" for more in range(3)]
    return Row((1 << 20) + number, digests[0], digests[1], 10 + number, digests[2], 64, ((number, 0), (1,)))


def rows_of(ranks: Iterable[int]) -> tuple[Row, ...]:
    return tuple(map(row, ranks))


def manifest(world_size: int = 2) -> Manifest:
    rows = rows_of(range(world_size))
    same = runs_of([SAID] * world_size)
    return Manifest("run-a", 7, 120, world_size, {"dp": world_size}, {"tuple": [1]}, 1.5, rows, same)


SAME = runs_of([SAID] * 2)
manifests = st.builds(
    Manifest,
    run_id=st.text(max_size=8),
    generation=st.integers(0, 10**6),
    step=st.integers(0, 10**12),
    world_size=st.just(2),
    parallelism=st.sampled_from([{}, {"dp": 2}, vars(Layout(tp=2)), vars(Layout(cp=2, ep=2))]),
    cursor=st.one_of(st.none(), st.integers(), st.lists(st.text(max_size=3))),
    created=st.floats(allow_nan=False, allow_infinity=False),
    own=st.just(rows_of((0, 1))),
    contents=st.just(SAME),
)


@given(manifests)
def test_a_manifest_comes_back_from_its_text(written: Manifest) -> None:
    assert Manifest.from_json(written.to_json()) == written


@pytest.mark.parametrize("wrong", [{"dp": 3}, {"dp": 2, "ep": 3}, {"tp": 0}, {"vp": 2}, {"dp": "2"}])
def test_a_layout_of_other_ranks_is_damage(wrong: dict[str, object]) -> None:
    text = text_of({**json.loads(manifest().to_json()), "parallelism": wrong})
    with pytest.raises(DamagedCopy, match="parallelism"):
        Manifest.from_json(text)


def test_whatever_replaces_a_value_is_taken_or_named_as_damage() -> None:
    """Nothing but the two named errors may come out, whatever is written where."""
    outcomes: Counter[str] = Counter()

    @settings(max_examples=400)
    @given(st.integers(0, 10**6), ANYTHING)
    def check(where: int, new: Any) -> None:
        value = json.loads(manifest().to_json())
        replace_one(value, where, new)
        try:
            Manifest.from_json(text_of(value))
        except (DamagedCopy, CheckpointMismatch):
            outcomes["refused"] += 1
        else:
            outcomes["taken"] += 1

    check()
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.parametrize("began", [None, "", "step-000000100.g6"])
def test_what_a_generation_began_from_is_known_or_not(began: str | None) -> None:
    value = {**json.loads(manifest().to_json()), "began": began}
    assert Manifest.from_json(text_of(value)).began == began
    with pytest.raises(DamagedCopy, match="began"):
        Manifest.from_json(text_of({**value, "began": "step-1"}))


WHOLE = manifest().to_json()
OTHER_TEXTS = {
    "unknown": WHOLE.replace('{"format"', '{"also":1,"format"'),
    "doubled": WHOLE.replace('{"format"', '{"step":120,"format"'),
    "spaced": WHOLE.replace(",", ", ", 1),
    "cut off": WHOLE[:-1],
    "a whole number as another one": WHOLE.replace(":120,", ":120.0,"),
    "a number as a text": WHOLE.replace(":120,", ':"120",'),
    "short rows": WHOLE.replace(",10,", ",", 1),
    "large digits": WHOLE.replace('01"', '0A"', 1),
    **{
        f"without {name}": text_of({k: v for k, v in json.loads(WHOLE).items() if k != name})
        for name in json.loads(WHOLE)
    },
}


@pytest.mark.parametrize("how", OTHER_TEXTS)
def test_no_other_text_is_a_manifest(how: str) -> None:
    assert OTHER_TEXTS[how] != WHOLE
    with pytest.raises(DamagedCopy):
        Manifest.from_json(OTHER_TEXTS[how])


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1, FORMAT_VERSION + 4])
def test_another_format_is_a_mismatch_that_names_both_formats(version: int) -> None:
    value = json.loads(manifest().to_json()) | {"format": version, "own": "unknown to us"}
    with pytest.raises(CheckpointMismatch, match=rf"{version}.*{FORMAT_VERSION}"):
        Manifest.from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '"x"', "[" * 100_000, b"\xff\xfe"])
def test_what_is_no_json_object_is_damage(text: str | bytes) -> None:
    with pytest.raises(DamagedCopy):
        Manifest.from_json(text)


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


def test_a_manifest_says_the_layout_that_is_known() -> None:
    assert Identity("run-a", 1, 0, 4).parallelism == {}
    known = Identity("run-a", 1, 0, 4, Layout(tp=2, dp=2)).parallelism
    assert Layout(**known) == Layout(tp=2, dp=2)


def test_a_cursor_that_no_json_holds_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(manifest(), cursor=float("nan")).to_json()


def part_of(ranks: tuple[int, ...], session: str) -> str:
    return Manifest(
        "run-a", 1, 5, 4, {}, None, 1.5, rows_of(ranks), runs_of([SAID] * len(ranks)), session, ranks
    ).to_json()


def test_the_part_of_a_node_lists_the_files_of_its_ranks() -> None:
    found = Manifest.from_json(part_of((1, 3), "s1"))
    assert tuple(found.ranks) == (1, 3)
    assert list(found.needed()) == [*found.of_rank(1), *found.of_rank(3)]
    assert found.of_rank(3) == row(3).entries(rank_files(3, 4))
    for rank in (0, 2, 4):
        with pytest.raises(DamagedCopy, match=f"rank {rank}"):
            found.of_rank(rank)


def test_the_parts_of_all_nodes_make_a_copy() -> None:
    part = Manifest.from_json(part_of((1, 3), "s1"))
    assert part.parts() == {1: (row(1), SAID), 3: (row(3), SAID)}
    rows = {
        rank: (row(rank), {**SAID, "state.x": f"{rank // 2:016x}"} if rank else SAID) for rank in range(4)
    }
    whole = part.joined(rows, (row(9),))
    assert whole.contents["table"] == ((4, SAID["table"]),)
    assert whole.contents["state.x"] == ((1, ""), (1, f"{0:016x}"), (2, f"{1:016x}"))
    assert whole.alike("state.x") == {f"{0:016x}": [1], f"{1:016x}": [2, 3]}
    assert whole.alike("state.y") == {}
    assert [whole.contents_of(rank) for rank in range(4)] == [said for _, said in rows.values()]
    assert (whole.own, whole.part, whole.shared, whole.session) == (rows_of(range(4)), (), (row(9),), "s1")
    assert Manifest.from_json(whole.to_json()) == whole
    del rows[2]
    with pytest.raises(CheckpointError, match="rank 2"):
        part.joined(rows, ())


@pytest.mark.parametrize(
    ("ranks", "session"), [((3, 4), "s1"), ((7,), "s1"), ((0, 1), ""), ((2, 1), "s1"), ((1, 1), "s1")]
)
def test_a_part_is_of_ranks_that_there_are_and_of_a_session(ranks: tuple[int, ...], session: str) -> None:
    with pytest.raises(DamagedCopy, match="part"):
        Manifest.from_json(part_of(ranks, session))


def with_shared(count: int) -> Manifest:
    return replace(manifest(), shared=rows_of(range(5, 5 + count)))


def test_files_that_all_ranks_share_are_listed_and_every_rank_needs_them() -> None:
    found = Manifest.from_json(with_shared(2).to_json())
    shared = [*alike_files(0, 2), *alike_files(1, 2)]
    assert [one.name for one in found.needed()] == [*rank_files(0, 2), *rank_files(1, 2), *shared]
    assert [one.name for one in found.needed([1])] == [*rank_files(1, 2), *shared]
    assert found.of_shared(1) == row(6).entries(alike_files(1, 2))
    assert found.nbytes == sum(one.nbytes for one in found.needed())
    with pytest.raises(DamagedCopy, match="number 2"):
        found.of_shared(2)


def test_there_are_no_more_shared_files_than_ranks() -> None:
    with pytest.raises(DamagedCopy, match="shared"):
        Manifest.from_json(with_shared(3).to_json())


def test_ranks_that_did_not_write_a_copy_need_nothing_of_it() -> None:
    """A job that has grown has ranks without a file; one without any rank there reads no shared file."""
    found = [one.name for one in with_shared(1).needed([1, 2, 5])]
    assert found == [*rank_files(1, 2), *alike_files(0, 1)]
    assert list(with_shared(1).needed([2])) == []


def test_three_files_belong_together() -> None:
    tensors, digests, document = manifest().of_rank(1)
    assert tensors == FileEntry("rank-00001-of-00002.safetensors", (1 << 20) + 1, f"{1:032x}")
    assert digests == FileEntry("rank-00001-of-00002.digests", 16, f"{2:032x}")
    assert document == FileEntry("rank-00001-of-00002.json", 11, f"{3:032x}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("node-1", True),
        ("9", True),
        ("a" * 100, True),
        ("a" * 101, False),
        ("", False),
        ("-x", False),
        ("a/b", False),
    ],
)
def test_a_label_is_a_short_name_without_a_path(name: str, expected: bool) -> None:
    assert is_label(name) is expected


@pytest.mark.parametrize(
    "change",
    [
        {"own": rows_of(range(1))},
        {"own": rows_of(range(3))},
        {"own": ()},
        {"own": (row(0), row(1)._replace(nbytes=-1))},
        {"own": (row(0), row(1)._replace(document_nbytes=1 << 70))},
        {"own": (row(0), row(1)._replace(digest="0" * 31))},
        {"own": (row(0), row(1)._replace(digests="0" * 32 + "\n"))},
        {"own": (row(0), row(1)._replace(document="g" * 32))},
        {"own": (row(0), row(1)._replace(begin=-1))},
        {"own": (row(0), row(1)._replace(coordinates=((-1,),)))},
        {"contents": {}},
        {"contents": runs_of([SAID])},
        {"contents": {**SAME, "state.x": ((1, "0" * 16),)}},
        {"contents": {**SAME, "state.x": ((3, "0" * 16),)}},
        {"contents": {**SAME, "state.x": ((2, ""),)}},
        {"contents": {**SAME, "state.x": ((1, "0" * 16), (1, "0" * 16))}},
        {"contents": {**SAME, "state.x": ((2, "0" * 15),)}},
        {"contents": {**SAME, "state.x": ((0, ""), (2, "0" * 16))}},
        {"world_size": 0},
        {"world_size": MOST_RANKS},
        {"world_size": MOST_RANKS + 1},
        {"created": float("inf")},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_manifest_has_a_row_for_each_rank_and_says_when(change: dict[str, Any]) -> None:
    assert Manifest.from_json(manifest(1).to_json()) == manifest(1)
    wrong = replace(manifest(2), **{"parallelism": {}, **change})
    with pytest.raises((DamagedCopy, ValueError)):
        Manifest.from_json(wrong.to_json())
