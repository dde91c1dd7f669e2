"""What all ranks hold alike: found from digests, and divided among files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.save.sharing import divide, held_by_all, mask

KEYS = st.text("abcd", min_size=1, max_size=3)
RANKS = st.lists(st.dictionaries(KEYS, st.sampled_from(["0", "1"])), min_size=1, max_size=4)


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
