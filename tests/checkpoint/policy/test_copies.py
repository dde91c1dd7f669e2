from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.copies import Copies
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks, marks_for
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
    kept = (CopyStatus.PROVEN, CopyStatus.DURABLE)
    return {mark.place: mark.bearing for mark in marks if mark.bearing not in kept}


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
        ([f"local/{copy_name(100, 2)}"], False),
        ([f"local/{copy_name(110, 1)}"], False),
    ],
)
def test_what_may_be_loaded_instead(known: list[str], expected: bool) -> None:
    """Memory comes and goes, and what is on disk was written from it."""
    copies = Copies()
    for place in known:
        copies.commit(place)
    assert copies.another_exists() is False, "nothing was loaded"
    copies.load(100, (f"memory/{C100}",), "", 1)
    assert copies.another_exists() is expected


def test_what_is_loaded_is_known_until_the_generation_ends() -> None:
    copies = loaded(C100)
    assert copies.loaded == (f"local/{C100}",)
    copies.begin(3)
    assert copies.loaded == ()
    for end in (lambda: copies.fault(NAN), lambda: copies.clear_suspicion(NAN, "it comes on any state")):
        copies.load(100, (C100,), "", 3)
        end()
        assert copies.loaded == ()


def test_ranks_that_never_agreed_since_a_load_make_what_they_loaded_a_suspect_and_no_more() -> None:
    """The copy was there before the load, whoever was told of it first."""
    copies = Copies()
    copies.begin(2)
    copies.load(100, (C100,), "", 2)
    copies.fault(Faulted(103, "corrupt", "replicas differ", agreed=-1, speaks=True))
    assert told(copies) == {f"local/{C100}": CopyStatus.SUSPECT, "*/*.g2": CopyStatus.SUSPECT} | {
        "*/>-1.g2": CopyStatus.QUARANTINED
    }


def test_a_copy_that_is_gone_is_forgotten_with_all_that_was_known_of_it() -> None:
    copies = loaded(f"memory/{C100}", "ab")
    copies.clean(130)
    assert [(one.place, one.trust) for one in copies.changes()] == [(f"memory/{C100}", "proven")]
    copies.remove(f"memory/{C100}")
    assert f"memory/{C100}" not in copies.standing()
    copies.load(100, (f"local/{C100}",), "ab", 3)
    assert copies.loaded == (f"local/{C100}",), "the other one is gone"
    copies.load(100, (f"memory/{C100}",), "ab", 4)
    copies.clean(130)
    proven = {(one.place, one.trust) for one in copies.changes()}
    assert (f"memory/{C100}", "proven") in proven, "it is another copy under that name"


def test_a_damaged_copy_is_gone_from_its_tier_and_its_name_may_be_used_again() -> None:
    copies = Copies()
    copies.commit(C100)
    copies.commit(f"memory/{C100}")
    copies.set_aside(C100, "the digest of rank 1 differs")
    (change,) = copies.changes()
    assert (change.place, change.step, change.trust) == (f"local/{C100}", 100, "quarantined")
    assert change.reason == "the digest of rank 1 differs"
    assert list(copies.standing()) == [f"memory/{C100}"]
    copies.commit(C100)
    assert copies.standing()[f"local/{C100}"][0] == "committed"


def condemned() -> Copies:
    """Return copies of which the newest is in quarantine: two generations have ended alike after it."""
    copies = loaded(C100)
    copies.fault(NAN)
    copies.load(100, (C100,), "", 3)
    copies.fault(NAN)
    return copies


def test_a_copy_in_quarantine_stays_there_with_its_reason_when_the_ranks_have_set_it_aside() -> None:
    copies = condemned()
    known = copies.standing()[f"local/{C100}"]
    assert known[0] == "quarantined"
    assert copies.reason(f"local/{C100}") == known[1]
    copies.changes()
    copies.set_aside(C100, "marked")
    assert copies.standing()[f"local/{C100}"] == known
    assert copies.changes() == ()


def test_a_fault_that_comes_on_any_state_clears_what_was_loaded_and_what_was_saved_since() -> None:
    copies = loaded(C100)
    saved = copy_name(102, 2)
    copies.commit(saved)
    copies.fault(NAN)
    assert set(told(copies)) == {f"local/{C100}", f"local/{saved}", "*/*.g2"}
    copies.changes()
    copies.clear_suspicion(NAN, "it comes on any state")
    assert set(told(copies).values()) == {CopyStatus.RELEASED}
    changes = {(one.place, one.trust, one.reason) for one in copies.changes()}
    assert changes == {(f"local/{name}", "released", "it comes on any state") for name in (C100, saved)}
    copies.commit(copy_name(104, 2))
    assert set(told(copies).values()) == {CopyStatus.RELEASED}, "nor is what comes later a suspect"


def test_a_person_is_told_each_time_that_a_copy_comes_under_suspicion_and_once() -> None:
    copies = loaded(C100)
    late = copy_name(102, 2)
    copies.commit(late)
    copies.fault(NAN)
    assert {one.trust for one in copies.changes()} == {"suspect"}
    copies.begin(3)
    copies.load(102, (late,), "", 3)
    assert copies.changes() == (), "that it was loaded does not make it another suspect"
    copies.clear_suspicion(NAN, "it comes on any state")
    copies.changes()
    copies.load(100, (C100,), "", 4)
    copies.fault(NAN)
    assert [(one.place, one.trust) for one in copies.changes()] == [(f"local/{C100}", "suspect")]


def test_suspects_that_hold_the_job_back_are_those_that_are_no_older_than_the_newest_to_be_trusted() -> None:
    copies = loaded(C100)
    late = copy_name(102, 2)
    copies.commit(late)
    copies.fault(NAN)
    assert copies.held_back() == (f"local/{late}", f"local/{C100}")
    copies.commit(copy_name(101, 3))
    assert copies.held_back() == (f"local/{late}",)
    copies.commit(copy_name(110, 3))
    assert copies.held_back() == ()


def test_all_suspects_hold_the_job_back_where_there_is_nothing_else() -> None:
    copies = Copies()
    copies.begin(1)
    copies.load(100, (C100,), "", 1)
    assert copies.has_trusted()
    copies.fault(NAN)
    assert not copies.has_trusted()
    assert copies.held_back() == (f"local/{C100}",)


def test_the_next_launcher_goes_on_from_the_newest_durable_copy_that_is_to_be_trusted() -> None:
    copies = Copies()
    copies.commit(f"memory/{C100}")
    assert copies.newest_durable() == -1
    copies.commit(C80)
    copies.commit(copy_name(90, 1))
    assert copies.newest_durable() == 90
    copies.begin(2)
    copies.load(90, (copy_name(90, 1),), "", 2)
    copies.fault(Faulted(93, NON_FINITE, "loss is nan", speaks=True))
    assert copies.newest_durable() == 80
    copies.load(80, (C80,), "", 3)
    copies.fault(Faulted(83, NON_FINITE, "loss is nan", speaks=True))
    assert copies.newest_durable() == 90, "a suspect, where nothing else is left"
    assert condemned().newest_durable() == 80


def test_ranks_are_told_of_the_newest_copies_under_suspicion_and_of_the_newest_proven_one() -> None:
    copies = loaded(C100)
    places = [f"{('local', 'memory')[step % 2]}/{copy_name(step, 2)}" for step in range(101, 141)]
    for place in places:
        copies.commit(place)
    copies.fault(NAN)
    marked = [place for place in told(copies) if not place.startswith("*")]
    assert marked == places[-len(marked) :]
    assert len(marked) == 32, "the environment of a process is not endless"
    copies = Copies()
    copies.begin(1)
    for step in (10, 20, 30):
        copies.commit(copy_name(step, 1))
    copies.commit(f"memory/{copy_name(35, 1)}")
    copies.clean(60)
    proven = [mark for mark in map(Mark.parse, copies.marks()) if mark.bearing is CopyStatus.PROVEN]
    assert proven == [Mark(f"local/{copy_name(30, 1)}", CopyStatus.PROVEN)]


def test_ranks_are_told_of_the_newest_copies_that_must_be_somewhere() -> None:
    copies = Copies()
    copies.begin(1)
    assert Marks(copies.marks()).durable == frozenset()
    copies.commit(f"memory/{copy_name(3, 1)}")
    assert Marks(copies.marks()).durable == frozenset(), "memory is lost with its node"
    for step in range(10, 70, 10):
        copies.commit(copy_name(step, 1))
    copies.commit(f"global/{copy_name(20, 1)}")
    assert Marks(copies.marks()).durable == {copy_name(step, 1) for step in (40, 50, 60)}
    for step in range(10, 70, 10):
        copies.remove(copy_name(step, 1))
    assert Marks(copies.marks()).durable == {copy_name(20, 1)}
    copies.remove(f"global/{copy_name(20, 1)}")
    assert copies.marks() == ()


def test_a_copy_that_was_set_aside_need_not_be_anywhere_and_a_suspect_must() -> None:
    copies = loaded(f"local/{C100}", "ab")
    copies.fault(NAN)
    assert Marks(copies.marks()).durable == {C80, C100}
    copies.load(100, (f"local/{C100}",), "ab", 3)
    copies.fault(NAN)
    assert Marks(copies.marks()).durable == {C80}


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"digests": {f"local/{C100}": "a,b"}},
        {"digests": {f"local/{C100}": ""}},
        *({"copies": {place: None}} for place in (f"a|b/{C100}", f"a,b/{C100}", "local/latest")),
    ],
    ids=str,
)
def test_what_is_not_the_trust_of_a_launcher_is_refused_whole(wrong: dict[str, Any]) -> None:
    state = condemned().state()
    if "copies" in wrong:
        wrong = {"copies": dict.fromkeys(wrong["copies"], state["copies"][f"local/{C100}"])}
    copies = loaded(C80)
    before = copies.state(), copies.loaded
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever part
        copies.restore(state | wrong, {})
    assert (copies.state(), copies.loaded) == before


def test_a_copy_that_a_person_has_released_is_loaded_again_and_others_are_not() -> None:
    copies = condemned()
    copies.fault(NAN)
    copies.load(80, (C80,), "", 4)
    copies.fault(Faulted(83, NON_FINITE, "loss is nan", speaks=True))
    heir = Copies()
    heir.restore(copies.state(), {C100: "checked by hand", "latest": "x"})
    assert told(heir)[f"local/{C80}"] is CopyStatus.SUSPECT
    assert Marks(heir.marks()).of("local", C100) is None
    (change,) = heir.changes()
    assert (change.place, change.trust, change.reason) == (f"local/{C100}", "released", "checked by hand")


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


def test_trainings_of_one_job_know_nothing_of_each_others_copies() -> None:
    """Each is told of its own, as if it were the only one, and what it has on disk is not another's."""
    copies = Copies()
    copies.begin(1)
    for place in (C100, f"a:local/{C80}", f"b:local/{C100}"):
        copies.commit(place)
    copies.load(100, (f"b:memory/{C100}",), "", 2)
    assert not copies.another_exists(), "the older copies are of other trainings"
    copies.fault(NAN)
    for training, durable, suspect in (("", C100, False), ("a", C80, False), ("b", C100, True)):
        marks = Marks(marks_for(copies.marks(), training))
        assert marks.durable == {durable}, training
        assert (marks.of("memory", C100) is not None) is suspect, training
    assert copies.newest_durable() == 100


def test_what_is_said_of_a_generation_is_said_to_all_trainings() -> None:
    general, bare = f'*/*.g{7}|suspect||"why"', C80
    assert marks_for((general, bare), "") == (general, bare)
    assert marks_for((general, bare), "a") == (general,)
