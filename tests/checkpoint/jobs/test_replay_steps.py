from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import Copy, CopyState
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.checkpoint.tools.listing import Entry, Item, Target
from outlast.checkpoint.tools.replay import Bracket, Left, Plan, _Replay, bisect, plan
from outlast.observe.run_folder import RunFolder

STEPS = st.sets(st.integers(1, 500), min_size=1, max_size=80).map(sorted)


@given(STEPS, st.integers(0, 510), st.data())
def test_the_first_wrong_step_is_bracketed_with_few_looks(
    steps: list[int], wrong: int, data: st.DataObject
) -> None:
    known_at = data.draw(st.sets(st.sampled_from(steps)))
    known = {step: step < wrong for step in known_at}
    looked: list[int] = []

    def equal(step: int) -> bool:
        looked.append(step)
        return step < wrong

    found = bisect(0, steps, known, equal)
    bad = [step for step in steps if step >= wrong]
    assert found.wrong == (bad[0] if bad else None)
    assert found.right == max((step for step in steps if step < wrong), default=0)
    assert tuple(looked) == found.probes
    assert not known_at & set(looked), "what is known is not looked at"
    assert len(looked) <= math.ceil(math.log2(len(steps))) + 2


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_both_ends_were_seen_even_where_a_difference_healed(
    equal_at: list[bool], data: st.DataObject
) -> None:
    steps = list(range(1, len(equal_at) + 1))
    known = {step: equal_at[step - 1] for step in data.draw(st.sets(st.sampled_from(steps)))}
    found = bisect(0, steps, known, lambda step: equal_at[step - 1])
    if found.wrong is None:
        assert equal_at[-1]
        return
    assert not equal_at[found.wrong - 1]
    assert found.right == 0 or equal_at[found.right - 1]
    assert steps.index(found.wrong) == (steps.index(found.right) + 1 if found.right else 0)


@pytest.mark.parametrize(
    ("wrong", "known", "found"),
    [
        (6, {}, Bracket(5, 6, (8, 7, 6))),
        (7, {}, Bracket(6, 7, (8, 7, 6))),
        (8, {6: True}, Bracket(7, 8, (8, 7))),
        (6, {6: False}, Bracket(5, 6, ())),
        (8, {6: True, 7: True, 8: False}, Bracket(7, 8, ())),
        (9, {8: True}, Bracket(8, None, ())),
    ],
)
def test_between_which_of_three_steps_it_went_wrong_and_where_one_had_to_look(
    wrong: int, known: dict[int, bool], found: Bracket
) -> None:
    assert bisect(5, [6, 7, 8], known, lambda step: step < wrong) == found


def test_a_difference_that_healed_is_found_where_it_is_known() -> None:
    found = bisect(0, range(1, 9), {3: False}, lambda step: step != 3)
    assert (found.right, found.wrong) == (2, 3)
    assert 8 not in found.probes, "what comes after it is not looked at"


@pytest.mark.parametrize(
    ("copies", "records", "start", "compared", "digests"),
    [
        (
            {10: "proven", 20: "proven", 30: "suspect", 40: "committed"},
            {5, 15, 25, 35},
            20,
            (30, 40),
            (25, 35),
        ),
        ({10: "proven", 20: "proven"}, set(), 10, (20,), ()),
        ({10: "suspect", 20: "committed"}, {10, 15}, 10, (20,), (15,)),
        ({}, {4, 8}, 0, (), (4, 8)),
    ],
    ids=["the newest proven copy", "with something behind it", "else the oldest", "else the beginning"],
)
def test_where_it_begins_and_what_is_compared(
    copies: dict[int, str], records: set[int], start: int, compared: tuple[int, ...], digests: tuple[int, ...]
) -> None:
    found = plan(copies, records, None, None)
    assert isinstance(found, Plan)
    assert (found.start, found.copies, found.records) == (start, compared, digests)
    assert found.steps == tuple(sorted({*compared, *digests}))


@pytest.mark.parametrize(
    ("copies", "start", "end", "named"),
    [
        ({10: "proven"}, 20, None, ("20", "10")),
        ({10: "proven"}, 10, None, ("10",)),
        ({10: "proven", 30: ""}, 10, 20, ("20",)),
        ({}, None, None, ("0",)),
    ],
)
def test_what_cannot_be_compared_is_named(
    copies: dict[int, str], start: int | None, end: int | None, named: tuple[str, ...]
) -> None:
    found = plan(copies, set(), start, end)
    assert isinstance(found, str)
    assert all(word in found for word in named)


@pytest.mark.parametrize(("worlds", "ranks"), [({4: 8, 12: 4, 8: 8}, 4), ({4: 2}, 2), ({}, 1)], ids=str)
def test_a_run_is_replayed_with_the_ranks_of_its_newest_copy(
    worlds: dict[int, int], ranks: int, tmp_path: Path
) -> None:
    tier = DirectoryTier(tmp_path)
    names = {step: copy_name(step, 1) for step in worlds}
    copies = {
        step: Entry(Item(tier, name), Copy(name, CopyState.WHOLE, world_size=worlds[step]), None)
        for step, name in names.items()
    }
    target = Target(tier, RunFolder(tmp_path), "run")
    replay = _Replay(target, Left(copies, {}), Plan(0, "", (), (), 1, 1), (), tmp_path)
    assert replay._ranks == ranks
