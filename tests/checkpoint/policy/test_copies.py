from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.copies import Copies
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks
from outlast.checkpoint.policy.trust import NON_FINITE, Faulted

NAN = Faulted(103, NON_FINITE, "NonFinite: loss is nan", speaks=True)
C80, C100 = copy_name(80, 1), copy_name(100, 1)


def loaded(place: str, digest: str = "", generation: int = 2) -> Copies:
    copies = Copies()
    for name in (C80, C100):
        copies.commit(name)
    copies.begin(generation)
    copies.load(100, (place,), digest, generation)
    return copies


def told(copies: Copies) -> dict[str, CopyStatus]:
    marks = map(Mark.parse, copies.marks())
    return {mark.place: mark.bearing for mark in marks if mark.bearing is not CopyStatus.PROVEN}


def test_what_was_loaded_under_another_name_of_the_tier_counts_as_the_same_bytes() -> None:
    copies = loaded(f"memory/{C100}", "ab")
    copies.fault(NAN)
    copies.load(100, (f"local/{C100}",), "ab", 3)
    copies.fault(NAN)
    assert told(copies)[f"memory/{C100}"] is CopyStatus.QUARANTINED
    mark = Marks(copies.marks()).of("local", C100, "ab")
    assert mark is not None
    assert mark.bearing is CopyStatus.QUARANTINED


def test_other_bytes_of_the_same_name_are_another_copy() -> None:
    copies = loaded(f"memory/{C100}", "ab")
    copies.fault(NAN)
    copies.load(100, (f"local/{C100}",), "cd", 3)
    copies.fault(NAN)
    assert set(told(copies).values()) == {CopyStatus.SUSPECT}
    assert Marks(copies.marks()).of("local", C100, "ef") is not None
    assert Marks(copies.marks()).of("replica", C100, "ef") is None


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([f"local/{C80}"], True),
        ([f"memory/{C80}"], False),
        ([f"local/{C100}"], False),
        ([f"replica/n1/{C100}"], True),
        ([f"local/{copy_name(110, 1)}"], False),
    ],
)
def test_what_may_be_loaded_instead(known: list[str], expected: bool) -> None:
    """Memory comes and goes, and what is on disk was written from it."""
    copies = Copies()
    for place in known:
        copies.commit(place)
    assert not copies.another_exists(), "nothing was loaded"
    copies.load(100, (f"memory/{C100}",), "", 1)
    assert copies.another_exists() is expected


def test_a_generation_that_loaded_nothing_is_never_in_doubt_and_proves_what_it_saved() -> None:
    copies = Copies()
    copies.begin(1)
    copies.commit(copy_name(10, 1))
    copies.clean(30)
    assert [(one.place, one.trust) for one in copies.changes()] == [(f"local/{copy_name(10, 1)}", "proven")]
    copies.fault(NAN)
    assert told(copies) == {}


def test_what_the_saver_wrote_late_belongs_to_the_generation_that_saved_it() -> None:
    copies = loaded(C100)
    copies.fault(NAN)
    copies.begin(3)
    copies.load(80, (C80,), "", 3)
    late = copy_name(102, 2)
    copies.commit(late)
    assert told(copies)[f"local/{late}"] is CopyStatus.SUSPECT
    copies.clean(150)
    assert f"local/{late}" in told(copies), "generation 3 is on another path"


def test_names_of_no_copy_are_passed_over() -> None:
    copies = Copies()
    copies.commit("latest")
    copies.load(1, ("memory/latest", "x"), "", 1)
    copies.remove("quarantine/x")
    copies.set_aside("", "x")
    assert (copies.standing(), copies.changes()) == ({}, ())


WORDS = {one.value for one in CopyStatus}
PLACES = st.builds(
    lambda tier, step, generation: f"{tier}/{copy_name(step, generation)}",
    st.sampled_from(["memory", "local"]),
    st.sampled_from([80, 90]),
    st.integers(1, 2),
)
KINDS = st.sampled_from([NON_FINITE, "error"])
FAULTS = st.builds(
    Faulted, st.sampled_from([83, 105]), KINDS, st.just("x"), st.booleans(), speaks=st.booleans()
)
TURNS = st.tuples(
    st.lists(PLACES, max_size=3),
    st.none() | PLACES,
    st.sampled_from(["", "ab"]),
    st.sampled_from([80, 130]),
    FAULTS,
)


def test_whatever_happens_the_ranks_are_told_what_the_book_says_and_the_next_launcher_knows_it() -> None:
    seen: Counter[str] = Counter()

    bad = f"memory/{copy_name(80, 1)}"
    met = ([bad], bad, "ab", 80, Faulted(83, NON_FINITE, "x", False, speaks=True))

    @settings(max_examples=200)
    @example([met, met])
    @given(st.lists(TURNS, max_size=8))
    def check(history: list[tuple[list[str], str | None, str, int, Faulted]]) -> None:
        copies, words = Copies(), dict[str, str]()
        for generation, (commits, load, digest, reached, fault) in enumerate(history, 1):
            copies.begin(generation)
            if load is not None:
                copies.load(80, (load,), digest, generation)
            for place in commits:
                copies.commit(place)
            copies.clean(reached)
            copies.fault(fault)
            words |= {change.place: change.trust for change in copies.changes()}
            standing = {place: word for place, (word, _) in copies.standing().items()}
            special = {place: word for place, word in standing.items() if word in WORDS}
            assert {place: words[place] for place in special} == special
            marked = told(copies)
            for place, word in standing.items():
                against = Marks(copies.marks()).of(*place.split("/"))
                assert (against is not None) >= (word in ("suspect", "quarantined"))
                assert marked.get(place, "") == (word if word in ("suspect", "quarantined") else "")
                seen[word] += 1
            assert set(copies.held_back()) <= {place for place, word in standing.items() if word == "suspect"}
            heir = Copies()
            heir.restore(json.loads(json.dumps(copies.state())), {})
            assert (heir.marks(), heir.standing()) == (copies.marks(), copies.standing())
            assert heir.changes() == ()

    check()
    assert min(seen[word] for word in ("suspect", "quarantined", "proven", "committed")) > 0, seen
