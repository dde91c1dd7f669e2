from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast import codec
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import (
    Copy,
    CopyState,
    CopyStatus,
    Mark,
    Marks,
    Resolution,
    left_behind,
    preferred,
    resolve,
)
from outlast.fields import Damage

RUN, WORLD = "run-a", 3
DAMAGE = Damage("COMMIT", "a regular file", "nothing")


def whole(step: int, generation: int = 1, *, world: int = WORLD, run: str = RUN, commit: str = "") -> Copy:
    name = copy_name(step, generation)
    commit = commit or f"digest of {name}"
    return Copy(name, CopyState.WHOLE, run_id=run, world_size=world, commit=commit)


def broken(step: int, state: CopyState, generation: int = 1) -> Copy:
    damage = DAMAGE if state is CopyState.DAMAGED else None
    return Copy(copy_name(step, generation), state, f"it is {state.value}", damage)


def everywhere(*copies: Copy) -> list[list[Copy]]:
    return [list(copies) for _ in range(WORLD)]


def answer(inventories: list[list[Copy]], *avoid: str) -> Resolution:
    return resolve(inventories, avoid, RUN)


def test_the_newest_step_comes_first_and_of_equal_steps_the_highest_generation() -> None:
    found = answer(everywhere(whole(20, 3), whole(40, 9), whole(40, 10), whole(30, 99)))
    assert [(plan.step, plan.generation) for plan in found.plans] == [(40, 10), (40, 9), (30, 99), (20, 3)]
    assert "4" in found.plans[0].reason
    assert "step-000000040.g10" in found.plans[1].reason


def test_what_is_left_where_it_is_has_no_damage_and_no_rank_that_found_some() -> None:
    (out,) = answer([[whole(10)], [], [whole(10)]]).excluded
    assert (out.rank, out.damage, out.step, out.incomplete) == (-1, None, 10, False)
    assert "1" in out.reason


def test_a_job_of_one_rank_resolves_as_others_do() -> None:
    copies = [whole(10), broken(20, CopyState.DAMAGED), whole(30)]
    found = answer([copies], Mark(f"*/{copy_name(30, 1)}").to_text())
    assert [plan.step for plan in found.plans] == [10, 30]
    assert [out.step for out in found.excluded] == [20]
    found = answer([[whole(10), broken(20, CopyState.INCOMPATIBLE)]])
    assert (found.plans, "step-000000020.g1" in found.refusal) == ((), True)


def test_the_digest_of_a_plan_is_that_of_a_manifest_and_of_no_session() -> None:
    digest, session = answer(everywhere(whole(20, commit="12ab"), whole(10, commit="s-1/2"))).plans
    assert (digest.digest, session.digest) == ("12ab", "")


def test_of_the_copies_of_one_name_a_whole_one_that_nothing_speaks_against_is_loaded() -> None:
    memory, local, replica = (replace(whole(10), tier=tier) for tier in ("memory", "local", "replica/n1"))
    nothing = Marks(())
    assert preferred([memory, local], nothing) == memory
    assert preferred([replace(memory, state=CopyState.DAMAGED), local], nothing) == local
    doubtful = Marks([Mark(f"memory/{local.name}").to_text()])
    assert preferred([memory, local, replica], doubtful) == local
    assert preferred([replace(local, state=CopyState.UNREADABLE), memory], doubtful) == memory
    proven = Marks([Mark(f"memory/{local.name}", CopyStatus.PROVEN).to_text()])
    assert preferred([local, memory], proven) == local, "trust of one of them is no reason to read it"


def test_what_other_nodes_have_given_up_for_a_newer_copy_is_not_worth_a_word() -> None:
    """Nodes keep parts of the newest copies in memory, and not all let go of one at the same time."""
    old, new = (replace(whole(step), part=(0,), tier="memory") for step in (10, 20))
    found = answer([[old, new], [new], [new]])
    assert ([plan.step for plan in found.plans], found.excluded) == ([20], ())
    found = answer([[old, new], [old], [old]])
    assert [out.step for out in found.excluded] == [20], "it is newer than what is loaded"
    assert found.excluded[0].incomplete
    for left_over in (replace(old, part=()), replace(old, state=CopyState.UNREADABLE)):
        found = answer([[left_over, new], [new], [new]])
        assert [out.step for out in found.excluded] == [10]
    found = answer([[replace(old, commit="a"), new], *([replace(old, commit=b), new] for b in "bc")])
    assert [out.step for out in found.excluded] == [10], "all nodes have it, and it is not the same"


def test_nothing_saved_is_neither_a_plan_nor_a_refusal() -> None:
    assert answer(everywhere()) == Resolution((), (), "")


def test_a_copy_that_one_rank_finds_damaged_goes_to_quarantine_with_its_place() -> None:
    inventories = everywhere(whole(10), whole(20))
    inventories[1][1] = broken(20, CopyState.DAMAGED)
    found = answer(inventories)
    assert [plan.step for plan in found.plans] == [10]
    (out,) = found.excluded
    assert (out.aside, out.rank, out.damage) == (True, 1, DAMAGE)
    assert not out.incomplete


def test_a_copy_that_one_rank_does_not_see_is_left_where_it_is() -> None:
    inventories = everywhere(whole(10), whole(20))
    del inventories[2][1]
    (out,) = answer(inventories).excluded
    assert (out.step, out.aside, "2" in out.reason) == (20, False, True)


def test_suspects_are_tried_when_nothing_else_is_left() -> None:
    mark = Mark(f"local/{copy_name(20, 1)}", reason="non-finite 3 steps after it was loaded")
    found = answer(everywhere(whole(10), whole(20), whole(30, 2)), mark.to_text(), '*/>20.g2|suspect||""')
    assert [(plan.step, plan.suspect) for plan in found.plans] == [(10, False), (30, True), (20, True)]
    assert all(one in found.plans[0].reason for one in ("step-000000020.g1", "step-000000030.g2"))
    assert mark.reason in found.plans[2].reason
    assert found.excluded == ()


def test_what_is_beside_the_path_of_the_run_comes_after_all_that_is_on_it() -> None:
    first = [replace(whole(step), began="") for step in (20, 30, 36)]
    second = replace(whole(34, 2), began=copy_name(30, 1))
    found = answer(everywhere(*first, second))
    assert [(plan.step, plan.generation) for plan in found.plans] == [(34, 2), (30, 1), (20, 1), (36, 1)]
    assert copy_name(36, 1) in found.plans[0].reason
    released = Mark(f"local/{copy_name(36, 1)}", CopyStatus.RELEASED).to_text()
    assert answer(everywhere(*first, second), released).plans[0].step == 36, "a person wants it"
    assert answer(everywhere(*first, second), f"*/{second.name}").plans[0].step == 36, "it is a suspect"
    inventories = everywhere(*first, second)
    del inventories[1][-1]
    assert answer(inventories).plans[0].step == 36, "it cannot be loaded, and nothing shows that it ever was"


def test_what_is_marked_as_quarantined_is_set_aside_whoever_sees_it() -> None:
    inventories = everywhere(whole(10), whole(20))
    inventories[1][1] = replace(whole(20), tier="memory")
    mark = Mark(f"memory/{copy_name(20, 1)}", CopyStatus.QUARANTINED, reason="twice, a nan")
    found = answer(inventories, mark.to_text())
    assert [plan.step for plan in found.plans] == [10]
    (out,) = found.excluded
    assert (out.step, out.aside) == (20, True)
    assert all(words in out.reason for words in (mark.reason, "outlast ckpt release"))


def test_a_suspect_in_one_tier_says_nothing_of_other_bytes_in_another_one() -> None:
    name = copy_name(20, 1)
    local, memory = whole(20), replace(whole(20), tier="memory", commit="other bytes")
    assert preferred([memory, local], Marks(())) is memory
    assert preferred([memory, local], Marks([Mark(f"memory/{name}").to_text()])) is local
    same = replace(memory, commit=local.commit)
    marks = [Mark(f"memory/{name}", digest=local.commit).to_text()]
    assert preferred([same, local], Marks(marks)) is same
    assert [plan.suspect for plan in answer(everywhere(local), *marks).plans] == [True]
    assert [plan.suspect for plan in answer(everywhere(replace(local, commit="c")), *marks).plans] == [False]


def test_a_copy_of_another_run_is_refused_by_name_wherever_it_stands() -> None:
    found = answer(everywhere(whole(10, run="run-b"), whole(20)))
    assert found.plans == ()
    assert all(one in found.refusal for one in ("step-000000010.g1", "run-b", "run-a"))


def test_a_copy_in_a_newer_format_is_not_passed_over_either() -> None:
    found = answer(everywhere(whole(10), broken(20, CopyState.INCOMPATIBLE)))
    assert found.plans == ()
    assert "step-000000020.g1" in found.refusal


def test_an_inventory_survives_the_exchange() -> None:
    copies = (whole(10), broken(20, CopyState.DAMAGED), broken(30, CopyState.INCOMPATIBLE))
    assert codec.convert(json.loads(json.dumps(codec.values_of(copies))), tuple[Copy, ...]) == copies


@st.composite
def mostly_whole(draw: st.DrawFn) -> list[list[Copy]]:
    """Return inventories of copies that all ranks share, with a few of them spoilt for a rank or for all."""
    places = draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=6, unique=True)
    )
    inventories: list[list[Copy | None]] = [
        [whole(step * 10, generation) for step, generation in places] for _ in range(WORLD)
    ]
    for place in draw(st.lists(st.integers(0, len(places) - 1), max_size=2, unique=True)):
        step, generation = places[place][0] * 10, places[place][1]
        spoilt = draw(
            st.sampled_from(
                [
                    None,
                    broken(step, CopyState.DAMAGED, generation),
                    broken(step, CopyState.UNREADABLE, generation),
                    broken(step, CopyState.INCOMPATIBLE, generation),
                    whole(step, generation, commit="another"),
                    whole(step, generation, world=2, commit="of two ranks"),
                ]
            )
        )
        for rank in draw(st.sampled_from([(0, 1, 2), (0, 1, 2), (0,), (1,), (2,)])):
            inventories[rank][place] = spoilt
    return [[copy for copy in inventory if copy is not None] for inventory in inventories]


def loadable(name: str, inventories: list[list[Copy]]) -> bool:
    found = [copy for inventory in inventories for copy in inventory if copy.name == name]
    return (
        len(found) == WORLD
        and all(copy.state is CopyState.WHOLE and copy.run_id == RUN for copy in found)
        and len({copy.commit for copy in found}) == 1
    )


def test_every_loadable_copy_is_planned_in_order_and_nothing_else_is() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(mostly_whole(), st.sets(st.sampled_from([copy_name(10, 1), copy_name(20, 1)]), max_size=1))
    def check(inventories: list[list[Copy]], avoid: set[str]) -> None:
        found = answer(inventories, *avoid)
        places = {copy.name: (copy.step, copy.generation) for each in inventories for copy in each}
        planned = [plan.name for plan in found.plans]
        usable = {name for name in places if loadable(name, inventories)}
        assert set(planned) <= usable
        assert [plan.suspect for plan in found.plans] == [name in avoid for name in planned]
        assert planned == sorted(planned, key=lambda name: (name not in avoid, places[name]), reverse=True)
        left = set(places) - set(planned) - {out.name for out in found.excluded}
        if found.refusal:
            last = max(left, key=lambda name: places[name])
            assert found.refusal.startswith(last)
            assert last not in usable
            assert {name for name in usable if places[name] > places[last]} == set(planned)
        else:
            assert left == set()
            assert usable == set(planned)
        for out in found.excluded:
            damaged = any(
                c.state is CopyState.DAMAGED for each in inventories for c in each if c.name == out.name
            )
            assert out.aside == damaged
            assert out.reason
        seen["planned"] += bool(planned)
        seen["excluded"] += bool(found.excluded)
        seen["refused"] += bool(found.refusal)

    check()
    assert min(seen["planned"], seen["excluded"], seen["refused"]) > 0, seen


@given(mostly_whole(), st.integers(0, 2**32))
def test_the_order_in_which_a_rank_lists_its_folders_does_not_matter(
    inventories: list[list[Copy]], seed: int
) -> None:
    shuffled = [random.Random(seed + rank).sample(each, len(each)) for rank, each in enumerate(inventories)]
    assert answer(shuffled) == answer(inventories)


# What one generation after the other did: the place in the list of copies of the one that it began from (from
# nothing if there is none), and how many steps after that it saved.
HISTORIES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 9), max_size=4, unique=True)), max_size=7
)


def test_what_a_generation_saved_after_the_copy_that_a_later_one_began_from_is_left_behind() -> None:
    first = {copy_name(step, 1): "" for step in (10, 20, 30, 36)}
    assert left_behind(first) == frozenset()
    second = {copy_name(34, 2): copy_name(30, 1)}
    assert left_behind({**first, **second}) == {copy_name(36, 1)}
    third = {copy_name(25, 3): copy_name(20, 1), copy_name(40, 3): copy_name(20, 1)}
    assert left_behind({**first, **second, **third}) == {copy_name(30, 1), copy_name(36, 1), copy_name(34, 2)}
    assert left_behind({**second, **third}) == {copy_name(34, 2)}, "retention has removed the copy between"
    anew = {copy_name(3, 4): ""}
    assert left_behind({**first, **anew}) == first.keys()


def test_where_nobody_knows_what_a_generation_began_from_the_step_counts_alone() -> None:
    unknown = {copy_name(40, 1): None, copy_name(20, 2): None, copy_name(30, 3): None}
    assert left_behind(unknown) == frozenset()
    known = {copy_name(34, 4): copy_name(30, 3)}
    assert left_behind({**unknown, **known}) == {copy_name(40, 1)}
    assert left_behind({copy_name(7, 1): "step-7", "notes.txt": None}) == frozenset()


def test_a_run_that_goes_on_in_another_folder_may_count_its_generations_anew() -> None:
    copies = {
        copy_name(30, 7): copy_name(20, 6),
        copy_name(50, 7): copy_name(20, 6),
        copy_name(34, 1): copy_name(30, 7),
    }
    assert left_behind(copies) == {copy_name(50, 7)}


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
                mine = copy_name(step + more, generation)
                behind = last = behind | {mine}
                began[mine], paths[mine] = origin, behind
        assert began.keys() - left_behind(began) == last

    check()
