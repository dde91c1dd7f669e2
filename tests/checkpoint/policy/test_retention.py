from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name, parse_copy_name
from outlast.checkpoint.policy.resolve import removals


def removed(
    names: list[str], keep_last_n: int, protected: tuple[str, ...] = (), avoid: tuple[str, ...] = ()
) -> list[str]:
    return [removal.name for removal in removals(dict.fromkeys(names), keep_last_n, protected, avoid)]


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


def test_copies_of_a_path_that_the_run_has_left_do_not_crowd_out_the_new_ones() -> None:
    left = {copy_name(step, 1): "" for step in (180, 190, 200)}
    began = {copy_name(170, 1): "", **left, copy_name(175, 2): copy_name(170, 1)}
    (first, *_) = gone = removals(began, 3, ())
    assert [one.name for one in gone] == [copy_name(180, 1), copy_name(190, 1)]
    assert first.reason
    assert [one.name for one in removals(began, 1, ())] == [copy_name(170, 1), *left]


def test_where_all_copies_are_to_be_avoided_the_newest_of_them_stay() -> None:
    names = [copy_name(step, 1) for step in (10, 20, 30)]
    (gone,) = removals(dict.fromkeys(names), 2, (), names, 4)
    assert (gone.name, "2" in gone.reason) == (names[0], True)


def test_other_names_are_left_alone() -> None:
    assert removed(["quarantine", "notes.txt", copy_name(1, 1), copy_name(2, 1)], 1) == [copy_name(1, 1)]


def test_of_one_copy_that_stays_the_next_older_one_is_the_first_ancestor() -> None:
    names = [copy_name(step, 1) for step in range(1, 9)]
    left = set(names) - {one.name for one in removals(dict.fromkeys(names), 1, (), (), 1)}
    assert left == {copy_name(8, 1), copy_name(7, 1)}


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
    assert min(seen["removed"], seen["protected"], seen["avoided"]) > 0, seen


def steps_kept(
    intervals: list[int], keep_last_n: int, keep_ancestors: int, avoid: tuple[str, ...] = ()
) -> list[tuple[int, ...]]:
    """Return the steps that are on disk after each save of a job that removes after each, newest first."""
    present: list[str] = []
    history = []
    for step in itertools.accumulate(intervals):
        present.append(copy_name(step, 1))
        gone = {one.name for one in removals(dict.fromkeys(present), keep_last_n, (), avoid, keep_ancestors)}
        present = [name for name in present if name not in gone]
        history.append(tuple(sorted((place_of(name)[0] for name in present), reverse=True)))
    return history


def test_ancestors_reach_back_at_doubling_distances() -> None:
    history = steps_kept([10] * 100, 3, 4)
    assert history[-1] == (1000, 990, 980, 960, 900, 770)
    assert history[49] == (500, 490, 480, 450, 390, 260)
    assert history[3] == (40, 30, 20, 10)


def test_an_ancestor_is_never_one_to_avoid() -> None:
    names = [copy_name(step, 1) for step in range(10, 1010, 10)]
    kept = set(names) - {one.name for one in removals(dict.fromkeys(names), 3, (), (), 4)}
    bad = min(kept, key=place_of)
    again = set(names) - {one.name for one in removals(dict.fromkeys(names), 3, (), (bad,), 4)}
    assert bad not in again
    assert len(again) == len(kept)


def test_of_two_ancestors_of_one_step_the_newer_generation_stays() -> None:
    names = [*[copy_name(step, 2) for step in (64, 110, 120)], copy_name(64, 1), copy_name(64, 3)]
    assert removed(names, 2) == [copy_name(64, generation) for generation in (1, 2, 3)]
    left = set(names) - {one.name for one in removals(dict.fromkeys(names), 2, (), (), 4)}
    assert left == {copy_name(120, 2), copy_name(110, 2), copy_name(64, 3)}


def test_a_job_always_has_ancestors_at_every_distance() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=50)
    @given(
        st.one_of(
            st.tuples(st.integers(1, 40), st.integers(30, 250)).map(lambda one: [one[0]] * one[1]),
            st.lists(st.integers(8, 12), min_size=30, max_size=200),
        ),
        st.integers(2, 4),
        st.integers(1, 6),
    )
    def check(intervals: list[int], keep: int, ancestors: int) -> None:
        longest = max(intervals)
        for done, steps in enumerate(steps_kept(intervals, keep, ancestors), 1):
            newest, first = steps[0], intervals[0]
            assert len(steps) <= keep + ancestors
            assert len(steps) >= min(done, keep)
            reach = newest - steps[min(keep, len(steps)) - 1]
            back = [newest - step for step in steps[min(keep, len(steps)) - 1 :]]
            # The next older one is at most four times as far back, and an interval at either end.
            for near, far in itertools.pairwise(back):
                assert far <= 4 * (near + longest) + longest
            # All of it reaches as far back as was asked for, as long as the job has run.
            if done > keep:
                wanted = min(newest - first, max(reach // 2, 1) * 2 ** (ancestors - 1) - longest)
                assert back[-1] >= wanted - longest
                seen["far"] += back[-1] > 4 * reach
            seen["full"] += len(steps) == keep + ancestors

    check()
    assert min(seen["far"], seen["full"]) > 0, seen


def test_removing_again_removes_nothing() -> None:
    seen: Counter[str] = Counter()
    names = st.tuples(st.integers(1, 400), st.integers(1, 2)).map(lambda place: copy_name(*place))

    @settings(max_examples=300)
    @given(st.lists(names, unique=True, max_size=40), st.integers(2, 4), st.integers(0, 5), st.data())
    def check(present: list[str], keep: int, ancestors: int, data: st.DataObject) -> None:
        some = st.sets(st.sampled_from(present), max_size=4) if present else st.just(set[str]())
        protected, avoid = data.draw(some), data.draw(some)
        gone = {one.name for one in removals(dict.fromkeys(present), keep, protected, avoid, ancestors)}
        left = [name for name in present if name not in gone]
        assert gone.isdisjoint(protected)
        good = sorted((n for n in present if n not in avoid), key=place_of, reverse=True)
        assert gone.isdisjoint(good[:keep])
        assert len(set(left) - protected) <= keep + ancestors
        assert removals(dict.fromkeys(left), keep, protected, avoid, ancestors) == ()
        assert gone <= {one.name for one in removals(dict.fromkeys(present), keep, protected, avoid)}
        seen["ancestors"] += len(left) > keep + len(protected)
        seen["removed"] += bool(gone)

    check()
    assert min(seen["ancestors"], seen["removed"]) > 0, seen
