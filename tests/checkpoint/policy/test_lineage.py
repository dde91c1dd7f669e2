from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.lineage import left_behind
from outlast.checkpoint.policy.manifest import copy_name

# What one generation after the other did: the place in the list of copies of the one that it began from (from
# nothing if there is none), and how many steps after that it saved.
HISTORIES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 9), max_size=4, unique=True)), max_size=7
)


def name(step: int, generation: int) -> str:
    return copy_name(step, generation)


def test_what_a_generation_saved_after_the_copy_that_a_later_one_began_from_is_left_behind() -> None:
    first = {name(step, 1): "" for step in (10, 20, 30, 36)}
    assert left_behind(first) == frozenset()
    second = {name(34, 2): name(30, 1)}
    assert left_behind({**first, **second}) == {name(36, 1)}
    third = {name(25, 3): name(20, 1), name(40, 3): name(20, 1)}
    assert left_behind({**first, **second, **third}) == {name(30, 1), name(36, 1), name(34, 2)}
    assert left_behind({**second, **third}) == {name(34, 2)}, "retention has removed the copy between"
    anew = {name(3, 4): ""}
    assert left_behind({**first, **anew}) == first.keys()


def test_where_nobody_knows_what_a_generation_began_from_the_step_counts_alone() -> None:
    unknown = {name(40, 1): None, name(20, 2): None, name(30, 3): None}
    assert left_behind(unknown) == frozenset()
    known = {name(34, 4): name(30, 3)}
    assert left_behind({**unknown, **known}) == {name(40, 1)}
    assert left_behind({name(7, 1): "step-7", "notes.txt": None}) == frozenset()


def test_a_run_that_goes_on_in_another_folder_may_count_its_generations_anew() -> None:
    copies = {name(30, 7): name(20, 6), name(50, 7): name(20, 6), name(34, 1): name(30, 7)}
    assert left_behind(copies) == {name(50, 7)}


def test_every_copy_is_on_the_path_of_the_newest_generation_or_left_behind() -> None:
    @settings(max_examples=300)
    @given(HISTORIES, st.randoms(use_true_random=False))
    def check(history: list[tuple[int, list[int]]], draw: object) -> None:
        began: dict[str, str | None] = {}
        paths: dict[str, frozenset[str]] = {}  # of a copy: all that led to it, itself included
        last: frozenset[str] = frozenset()
        for generation, (where, saved) in enumerate(history, start=1):
            names = list(began)
            origin = names[where % len(names)] if names else ""
            step = int(origin[5:14]) if origin else 0
            behind = paths.get(origin, frozenset())
            for more in sorted(saved):
                mine = name(step + more, generation)
                behind = last = behind | {mine}
                began[mine], paths[mine] = origin, behind
        assert began.keys() - left_behind(began) == last

    check()
