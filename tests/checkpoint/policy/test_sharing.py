"""What all ranks hold alike: found from digests, divided among files, and looked up by chunks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.sharing import chunks_of, differing, divide, held_by_all, in_chunks, mask
from outlast.checkpoint.policy.table import TensorEntry

KEYS = st.text("abcd", min_size=1, max_size=3)
RANKS = st.lists(st.dictionaries(KEYS, st.sampled_from(["0", "1"])), min_size=1, max_size=4)
CHUNK = 1 << 20


@given(RANKS)
def test_alike_is_what_every_rank_has_with_the_same_digest(ranks: list[dict[str, str]]) -> None:
    digests = sorted(ranks[0].items())
    found = held_by_all(digests, [mask(digests, one) for one in ranks])
    assert found == [key for key, one in digests if all(rank.get(key) == one for rank in ranks)]


def test_a_rank_answers_a_bit_for_each_tensor_of_the_leading_one() -> None:
    digests = [(key, key.upper()) for key in "abcdef"]
    assert mask(digests, dict(digests)) == "3f"
    assert mask(digests, {"a": "A", "f": "F", "e": "another", "g": "G"}) == "21"
    assert mask(digests, {}) == mask([], {"a": "A"}) == "0"


@pytest.mark.parametrize(
    ("masks", "alike"), [(["3f", "3f"], "abcdef"), (["3f", "21"], "af"), (["1e", "31"], "b"), (["0"], "")]
)
def test_a_tensor_is_alike_when_its_bit_is_set_by_all(masks: list[str], alike: str) -> None:
    assert held_by_all([(key, "x") for key in "abcdef"], masks) == list(alike)


@given(st.dictionaries(KEYS, st.integers(1, 100)), st.integers(1, 5))
def test_every_tensor_is_in_one_file_and_the_files_are_about_equal(
    nbytes: dict[str, int], files: int
) -> None:
    found = divide(nbytes, files)
    assert sorted(key for keys in found for key in keys) == sorted(nbytes)
    assert len(found) == min(files, len(nbytes))
    assert found == divide(dict(reversed(nbytes.items())), files), "the order of the keys does not matter"
    sizes = [sum(nbytes[key] for key in keys) for keys in found]
    if sizes:
        assert max(sizes) - min(sizes) <= max(nbytes.values())


def test_the_largest_go_first_each_to_the_file_that_has_least() -> None:
    assert divide({"a": 3, "b": 5, "c": 3, "d": 1}, 2) == (("b", "d"), ("a", "c"))
    assert divide({"a": 3}, 2) == (("a",),)
    assert divide({}, 2) == ()


def entry(begin: int, end: int) -> TensorEntry:
    return TensorEntry("uint8", (end - begin,), (end - begin,), (0,), begin, end)


def test_a_tensor_has_bytes_in_the_chunks_that_it_meets() -> None:
    assert list(chunks_of(entry(5, 2 * CHUNK))) == [0, 1]
    assert list(chunks_of(entry(2 * CHUNK, 2 * CHUNK + 1))) == [2]
    assert list(chunks_of(entry(2 * CHUNK, 2 * CHUNK))) == []
    first, last = CHUNK - 1, 3 * CHUNK + 1
    entries = {"first": entry(2, first), "across": entry(first, last), "last": entry(last, 4 * CHUNK)}
    assert in_chunks(entries, {0}) == {"first", "across"}
    assert in_chunks(entries, {2}) == {"across"}
    assert in_chunks(entries, {3}) == {"across", "last"}
    assert in_chunks(entries, set()) == set()


def digests(letters: Iterable[str]) -> bytes:
    return "".join(8 * letter for letter in letters).encode()


@pytest.mark.parametrize(
    ("expected", "found", "numbers"),
    [("abcd", "abcd", []), ("abcd", "axcx", [1, 3]), ("ab", "abc", [2]), ("abc", "a", [1, 2]), ("", "", [])],
)
def test_which_chunks_differ(expected: str, found: str, numbers: list[int]) -> None:
    assert list(differing(digests(expected), digests(found))) == numbers


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab"), max_size=6))
def test_chunks_that_only_one_has_differ(one: list[str], other: list[str]) -> None:
    found = list(differing(digests(one), digests(other)))
    longest = range(max(len(one), len(other)))
    both = range(min(len(one), len(other)))
    assert found == [place for place in longest if place not in both or one[place] != other[place]]
