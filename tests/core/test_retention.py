from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.manifest import copy_name, parse_copy_name
from outlast.core.retention import removals


def removed(
    names: list[str], keep_last_n: int, protected: tuple[str, ...] = (), avoid: tuple[str, ...] = ()
) -> list[str]:
    return [removal.name for removal in removals(names, keep_last_n, protected, avoid)]


def place_of(name: str) -> tuple[int, int]:
    place = parse_copy_name(name)
    assert place is not None
    return place


def test_the_newest_stay_and_the_oldest_goes_first() -> None:
    names = [copy_name(step, 1) for step in (50, 10, 30, 20, 40)]
    assert removed(names, 3) == [copy_name(10, 1), copy_name(20, 1)]


def test_the_loaded_copy_stays_however_old_it_is() -> None:
    names = [copy_name(step, 1) for step in (10, 20, 30, 40)]
    assert removed(names, 2, protected=(copy_name(10, 1),)) == [copy_name(20, 1)]


def test_copies_to_avoid_do_not_crowd_out_the_new_ones() -> None:
    left = [copy_name(step, 1) for step in (120, 140, 160)]
    names = [copy_name(100, 1), *left, copy_name(110, 2)]
    assert removed(names, 2, avoid=tuple(left)) == left
    assert removed([*left, copy_name(110, 2)], 2, avoid=tuple(left)) == left[:2]


def test_other_names_are_left_alone() -> None:
    assert removed(["quarantine", "notes.txt", copy_name(1, 1), copy_name(2, 1)], 1) == [copy_name(1, 1)]


def test_a_removal_says_why() -> None:
    (removal,) = removals([copy_name(step, 1) for step in (10, 20, 30)], 2, ())
    assert removal.reason == "2 newer ones are kept, from step-000000020.g1 on"


def test_what_is_kept_is_what_was_promised() -> None:
    seen: Counter[str] = Counter()
    names = st.tuples(st.integers(1, 8), st.integers(1, 2)).map(lambda place: copy_name(*place))

    @settings(max_examples=300)
    @given(st.lists(names, unique=True, max_size=10), st.integers(2, 4), st.sets(names), st.sets(names))
    def check(present: list[str], keep: int, protected: set[str], avoid: set[str]) -> None:
        gone = removed(present, keep, tuple(protected), tuple(avoid))
        assert len(gone) == len(set(gone))
        assert set(gone) <= set(present) - protected
        good = sorted((n for n in present if n not in avoid), key=place_of, reverse=True)
        assert set(good[:keep]).isdisjoint(gone)
        assert len(present) - len(gone) >= min(keep, len(present))
        assert set(good[keep:]) - protected <= set(gone)
        assert not gone or len(present) > keep
        seen["removed"] += bool(gone)
        seen["protected"] += bool(set(good[keep:]) & protected)
        seen["avoided"] += bool(set(gone) & avoid)

    check()
    assert min(seen["removed"], seen["protected"], seen["avoided"]) > 10, seen
