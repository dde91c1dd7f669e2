from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.copies import Copies
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import Mark, Marks, of_later
from outlast.checkpoint.policy.trust import (
    NON_FINITE,
    Change,
    CleanStep,
    Committed,
    Damaged,
    Event,
    Faulted,
    Loaded,
    Released,
    Removed,
    Trust,
    TrustBook,
)
from outlast.recovery.policy.actions import evidence_of
from outlast.recovery.policy.events import Fault, FaultKind

K = 5  # clean steps that prove a copy


def place(tier: str, step: int, generation: int = 1) -> str:
    return f"{tier}/{copy_name(step, generation)}"


L90, L100, R100 = place("local", 90), place("local", 100), place("replica", 100)
L102, M102 = place("local", 102, 2), place("memory", 102, 2)


def bad(step: int, signature: str = "nan", kind: str = NON_FINITE) -> Faulted:
    """Return a fault that speaks against the state."""
    return Faulted(step, kind, signature, speaks=True)


def load(*places: str, generation: int | None = 2) -> Loaded:
    step = int(places[0].partition("-")[2][:9])
    return Loaded(step, places) if generation is None else Loaded(step, places, generation)


def book_of(*events: Event) -> TrustBook:
    book = TrustBook(K)
    for event in events:
        book.handle(event)
    return book


def standing(book: TrustBook) -> dict[str, str]:
    """Return what is said of each copy."""
    suspects = book.suspects()
    words = {one: book.trust(one) for one in book.places()}
    return {one: f"{word and word.value}{', suspect' * (one in suspects)}" for one, word in words.items()}


SUSPECT, GONE = "verified, suspect", None
TWICE = (Committed(L100), load(L100), bad(103), load(L100), bad(103))
ALIKE = "x" * 500
# What happens -> what is said of the copies named.
TURNS: dict[str, tuple[tuple[Event, ...], dict[str, str | None]]] = {
    "loaded": ((load(L100),), {L100: "verified"}),
    "a bad step soon after": ((load(L100), bad(104)), {L100: SUSPECT}),
    "a bad step later": ((load(L100), bad(105)), {L100: "verified"}),
    "a fault that says nothing": ((load(L100), Faulted(102, "error", "x")), {L100: "verified"}),
    "a fault on any state": (
        (load(L100), CleanStep(150), Faulted(150, "lost", "n", lasting=True)),
        {L100: SUSPECT},
    ),
    "twice alike": (TWICE, {L100: "quarantined"}),
    "quarantine lasts": ((*TWICE, Committed(L100), load(L100), CleanStep(200)), {L100: "quarantined"}),
    "a person": ((*TWICE, Released(L100, "x")), {L100: "committed"}),
    "and again": ((*TWICE, Released(L100, "x"), load(L100), bad(103)), {L100: SUSPECT}),
    "in another way": ((load(L100), bad(103), load(L100), bad(103, "x", "corrupt")), {L100: SUSPECT}),
    "in other words": (
        (load(L100), bad(101, "in layer 1"), load(L100), bad(101, "in layer 2")),
        {L100: SUSPECT},
    ),
    "long alike": (
        (load(L100), bad(101, ALIKE + "a"), load(L100), bad(101, ALIKE + "b")),
        {L100: "quarantined"},
    ),
    "clean steps": ((load(L100), CleanStep(105)), {L100: "proven"}),
    "too few": ((load(L100), CleanStep(104)), {L100: "verified"}),
    "a suspect that is fine": ((load(L100), bad(103), load(L100), CleanStep(105)), {L100: "proven"}),
    "proven, then bad": ((load(L100), CleanStep(105), load(L100), bad(104)), {L100: SUSPECT}),
    "proven in between": (
        (load(L100), bad(103), load(L100), CleanStep(105), load(L100), bad(103)),
        {L100: SUSPECT},
    ),
    "a rank that lags": ((load(L100), CleanStep(105), bad(101)), {L100: "proven"}),
    "an unknown step": ((load(L100), CleanStep(104), bad(-1)), {L100: SUSPECT}),
    "its path": (
        (Committed(L90), load(L100), Committed(L102), Committed(M102), bad(103)),
        {L100: SUSPECT, L102: "committed, suspect", M102: "committed, suspect", L90: "committed"},
    ),
    "its path, late": (
        (
            Committed(L90),
            load(L100),
            bad(103),
            load(L90, generation=3),
            Committed(L102),
            Committed(place("local", 92, 3)),
        ),
        {L102: "committed, suspect", place("local", 92, 3): "committed"},
    ),
    "a path that ended well": (
        (load(L100), Committed(L102), Faulted(103, "lost", "n1"), load(L100, generation=3), bad(101)),
        {L100: SUSPECT, L102: "committed"},
    ),
    "one load counts once": (
        (load(L100), bad(103), bad(103), bad(103, "x"), CleanStep(110)),
        {L100: SUSPECT},
    ),
    "parts of two": ((load(R100, L100), bad(100)), {R100: SUSPECT, L100: SUSPECT}),
    "another path": ((Committed(L100), load(L90), CleanStep(200)), {L90: "proven", L100: "committed"}),
    "beside it": (
        (load(L100), Committed(R100), Committed(L90), CleanStep(150)),
        {R100: "committed", L90: "committed"},
    ),
    "saved and trained on": ((Loaded(100, (), 2), Committed(L102), CleanStep(107)), {L102: "proven"}),
    "saved and not enough": ((Loaded(100, (), 2), Committed(L102), CleanStep(106)), {L102: "committed"}),
    "heard of late": ((Loaded(0, (), 2), CleanStep(150), Committed(L102)), {L102: "committed"}),
    "and trained on": ((Loaded(0, (), 2), CleanStep(150), Committed(L102), CleanStep(151)), {L102: "proven"}),
    "the path has ended": (
        (Loaded(0, (), 2), Committed(L102), Faulted(103, "lost", "n1"), CleanStep(150)),
        {L102: "committed"},
    ),
    "damage": ((Committed(L90), Damaged(L90, "digest")), {L90: "quarantined"}),
    "removed": ((Damaged(L90, "digest"), Removed(L90)), {L90: GONE}),
    "removed under way": ((load(L100), Removed(L100), CleanStep(110)), {L100: GONE}),
    "removed, then bad": ((load(L100), Removed(L100), bad(101)), {L100: GONE}),
    "damaged on its path": (
        (load(L100), Committed(L102), Damaged(L102, "x"), Faulted(120, "corrupt", "x", True, agreed=-1)),
        {L102: "quarantined"},
    ),
    "released unheard of": ((Released(L100, "x"),), {L100: "committed"}),
    "nothing to release": ((load(L100), CleanStep(105), Released(L100, "x")), {L100: "proven"}),
}


@pytest.mark.parametrize("turn", TURNS)
def test_what_is_said_of_copies(turn: str) -> None:
    events, expected = TURNS[turn]
    found = standing(book_of(*events))
    assert {one: found.get(one) for one in expected} == expected


def test_a_bad_replica_is_found_out_and_the_job_finishes() -> None:
    book = book_of(Committed(L90), load(L90), CleanStep(95), Committed(R100), Committed(L100))
    newest_first = (R100, L100, L90)
    assert book.order(newest_first) == newest_first
    for bad_one, order in ((R100, (L100, L90, R100)), (L100, (L90, R100, L100))):
        for event in (load(bad_one), CleanStep(102), bad(103)):
            book.handle(event)
        assert book.order(newest_first) == order
    again = place("local", 100, 4)
    for event in (load(L90, generation=4), CleanStep(95), Committed(again), CleanStep(105)):
        book.handle(event)
    assert book.proven() == (again, L90)


def test_a_copy_is_proven_once_and_a_suspect_or_one_that_was_only_saved_is_not() -> None:
    book = book_of(Committed(L90), load(L100), CleanStep(105))
    assert (book.proven(), book.handle(CleanStep(106))) == ((L100,), ())
    assert book_of(Committed(L90), load(L100), bad(103)).proven() == ()


def test_reasons_name_what_they_are_about() -> None:
    book = book_of(Committed(L90), load(L100), Committed(L102), bad(103))
    for one, words in ((L100, (NON_FINITE, "nan", "3")), (L102, (L100,))):
        assert all(word in book.reason(one) for word in words), book.reason(one)
    (change,) = book.handle(Released(L90, "checked")) or book.handle(Released(L100, "checked"))
    assert (change.place, "checked" in change.reason) == (L100, True)
    assert (book.reason("local/unknown"), book.trust("local/unknown")) == ("", None)
    with pytest.raises(ValueError, match="local/latest"):
        book.handle(Committed("local/latest"))


@pytest.mark.parametrize(
    "end", [bad(101), Damaged(L100, "digest"), Removed(L100)], ids=lambda one: type(one).__name__
)
def test_a_released_copy_is_one_until_something_speaks_against_it_again(end: Event) -> None:
    book = book_of(Released(L100, "x"), Committed(L100), load(L100))
    assert book.released() == (L100,)
    book.handle(end)
    assert book.released() == ()


def test_a_release_with_its_path_clears_the_path_that_began_with_that_copy_alone() -> None:
    book = book_of(Committed(L90), load(L100), bad(101), load(L90, generation=3), bad(91))
    assert [generation for generation, _ in book.doubted()] == [2, 3]
    book.handle(Released(L90, "it was the data", with_path=True))
    assert ([generation for generation, _ in book.doubted()], book.suspects()) == ([2], (L100,))
    book.handle(Released(L100, "x"))
    assert [generation for generation, _ in book.doubted()] == [2], "one copy was released"


def test_generation_0_is_known_by_its_number_and_one_that_is_not_known_by_none() -> None:
    assert [one for one, _ in book_of(load(L100, generation=0), bad(101)).doubted()] == [0]
    book = book_of(load(L100, generation=None), bad(101))
    assert (book.doubted(), book.suspects()) == ((), (L100,))


@pytest.mark.parametrize(
    ("events", "asked", "idle"),
    [
        ((), -1, -1),
        ((Loaded(0, ()),), -1, 0),
        ((Loaded(100, ()),), -1, 100),
        ((Loaded(100, ()),), 100, 100),
        ((Loaded(100, ()),), 101, -1),
        ((Loaded(100, ()), CleanStep(100)), -1, 100),
        ((Loaded(100, ()), CleanStep(101)), -1, -1),
        ((Loaded(100, ()), CleanStep(101), Loaded(100, ())), -1, 100),
        ((Loaded(100, ()), Faulted(100, "lost", "n1")), 100, -1),
    ],
)
def test_how_far_a_job_is_that_has_done_no_step_since_its_load(
    events: tuple[Event, ...], asked: int, idle: int
) -> None:
    assert book_of(*events).idle_at(asked) == idle


def test_who_is_accused_of_a_fault() -> None:
    other = place("local", 92, 4)
    book = book_of(Committed(L90), load(L100), Committed(L102), bad(103), load(L90, generation=4))
    for event in (Committed(other), bad(93, "another")):
        book.handle(event)
    assert book.accused(bad(103)) == (L100, L102)
    assert book.accused(bad(500, "another")) == (L90, other)
    assert book.accused(bad(103, "unheard of")) == ()


@pytest.mark.parametrize("how", [Committed, lambda one: Released(one, "x")])
def test_proven_copies_come_newest_first_and_of_one_step_in_the_order_of_their_places(
    how: Callable[[str], Event],
) -> None:
    book = book_of(*(how(one) for one in (R100, L90, L100)))
    for one in (L90, R100, L100):
        book.handle(load(one))
        book.handle(CleanStep(105))
    assert book.proven() == (L100, R100, L90)


def test_a_book_stays_small_however_long_the_job_runs_and_knows_the_latest() -> None:
    book = book_of(Committed(L90))
    for generation in range(2, 1000):
        saved = Committed(place("local", 90 + generation, generation))
        for event in (load(L90, generation=generation), saved, bad(91, f"fault {generation}")):
            book.handle(event)
    assert len(book.places()) < 500
    assert len(book.state()["paths"]) < 200
    assert len(book.state()["copies"][L90]["outcomes"]) < 20
    assert (book.doubted()[-1][0], len(book.doubted()) < 20) == (999, True)
    book.handle(load(L90))
    book.handle(bad(91, "fault 999"))
    assert book.trust(L90) is Trust.QUARANTINED
    saved = [place("local", step) for step in range(1000)]
    known = book_of(*map(Committed, saved)).places()
    assert (len(known) < 500, known) == (True, tuple(saved[-len(known) :]))
    book = book_of(Committed(L90))
    for generation in range(2, 100):
        book.handle(load(L90, generation=generation))
        book.handle(Faulted(95, "corrupt", "x", agreed=92, speaks=True))
    assert (book.diverged()[-1][:2], len(book.diverged()) < 20) == ((99, 92), True)


# Replicas that differ: what was saved since they last held the same is not to be trusted.
SAVED = {step: place("local", step, 3) for step in (12, 14, 16, 40)}
FROM = place("local", 10, 2)


def parted(agreed: int | None, lasting: bool = False, *, step: int = 41) -> TrustBook:
    """Return a book of a path that began with step 10 and ended with replicas that differ."""
    begun = (Committed(FROM), load(FROM, generation=3), *map(Committed, SAVED.values()))
    return book_of(
        *begun, CleanStep(40), Faulted(step, "corrupt", "ranks 0, 1", lasting, agreed, speaks=True)
    )


@given(st.integers(-1, 42))
def test_exactly_what_was_saved_after_the_last_agreement_is_quarantined(agreed: int) -> None:
    book = parted(agreed)
    aside = [one for one in book.places() if book.trust(one) is Trust.QUARANTINED]
    assert aside == [one for step, one in SAVED.items() if step > agreed]
    assert (book.trust(FROM), book.suspects()) == (Trust.PROVEN, ())


def test_it_holds_for_copies_that_are_heard_of_later_and_after_another_launcher() -> None:
    first, heir = parted(14), TrustBook(K)
    heir.restore(json.loads(json.dumps(first.state())))
    for book in (first, heir):
        late, early = place("memory", 15, 3), place("memory", 14, 3)
        for one in (late, early):
            book.handle(Committed(one))
        assert (book.trust(late), book.trust(early)) == (Trust.QUARANTINED, Trust.COMMITTED)
        assert [one[:2] for one in book.diverged()] == [(3, 14)]


@pytest.mark.parametrize(
    ("agreed", "lasting", "suspects"),
    [(-1, False, [FROM]), (9, False, [FROM]), (10, False, []), (11, False, []), (11, True, [FROM])],
)
def test_what_was_loaded_is_a_suspect_only_if_the_ranks_have_not_agreed_since(
    agreed: int, lasting: bool, suspects: list[str]
) -> None:
    fault = Faulted(12, "corrupt", "x", lasting, agreed, speaks=True)
    assert list(book_of(Committed(FROM), load(FROM, generation=3), fault).suspects()) == suspects


def test_releasing_one_of_them_releases_one_copy_and_the_ranks_are_told() -> None:
    book = parted(14)
    book.handle(Released(SAVED[16], "x"))
    assert (book.trust(SAVED[16]), book.trust(SAVED[40])) == (Trust.COMMITTED, Trust.QUARANTINED)
    book.handle(Committed(late := place("local", 17, 3)))
    assert book.trust(late) is Trust.QUARANTINED, "it was not in the book when the other one was released"
    copies = Copies()
    copies.begin(3)
    copies.load(10, (copy_name(10, 2),), "", 3)
    for one in SAVED.values():
        copies.commit(one)
    copies.fault(Faulted(41, "corrupt", "x", False, 14, speaks=True))
    name, other = copy_name(16, 3), copy_name(17, 3)
    assert Marks(copies.marks()).of("local", name) is not None
    heir = Copies()
    heir.restore(json.loads(json.dumps(copies.state())), {name: "looked at"})
    marks = Marks(heir.marks())
    assert marks.of("local", name) is None
    assert marks.against(name) is not None, "there may be one in another tier"
    assert marks.of("local", other) is not None, "nobody has heard of it yet"


def test_digests_do_not_make_the_same_difference_another_fault() -> None:
    words = "ReplicasDiffer: after step 10: weight; rank 0: {}, rank 1: {}"
    first, second = (
        Fault(FaultKind.CORRUPT, "n0", 1, 1, 10, "", words.format(*digests))
        for digests in (("98e1" * 8, "4c07" * 8), ("ab12" * 8, "0000" * 8))
    )
    assert evidence_of(first) == evidence_of(second)


def test_which_copies_the_mark_of_later_ones_is_about() -> None:
    mark = Mark.parse(of_later(7, 14, "they differ").to_text())
    names = (copy_name(15, 7), copy_name(14, 7), copy_name(15, 17), "no copy at all")
    assert [mark.covers("memory", name, "") for name in names] == [True, False, False, False]
    assert Mark.parse(of_later(7, -1, "").to_text()).covers("local", copy_name(0, 7), "")


PLACES = st.builds(place, st.sampled_from(["memory", "local"]), st.sampled_from([10, 20, 30, 40]))
STEPS = st.integers(-1, 60)
KINDS = st.sampled_from([NON_FINITE, "error"])
EVENTS = st.one_of(
    st.builds(Committed, PLACES),
    st.builds(Damaged, PLACES, st.just("digest")),
    st.builds(Released, PLACES, st.just("a person")),
    st.builds(Removed, PLACES),
    st.builds(CleanStep, STEPS),
    st.builds(CleanStep, STEPS),
)
# A load of a copy, what happened before its first steps were over, and a fault or none.
FAULTS = st.builds(Faulted, STEPS, KINDS, st.sampled_from("ab"), speaks=st.booleans())
EPISODES = st.tuples(
    st.lists(PLACES, max_size=2, unique=True), st.lists(EVENTS, max_size=3), st.none() | FAULTS
)
Episode = tuple[list[str], list[Event], Faulted | None]


def played(episodes: list[Episode]) -> list[Event]:
    events: list[Event] = []
    for loaded, between, fault in episodes:
        step = int(loaded[0].partition("-")[2][:9]) if loaded else 0
        events += [Loaded(step, tuple(loaded)), *between]
        events += [fault] if fault is not None else []
    return events


Standing = tuple[Trust | None, bool]


def look_at(change: Change, before: Standing, event: Event, load: Loaded | None) -> None:
    """Assert what holds for every change, whatever happened before."""
    assert (change.trust, change.suspect) != before
    assert change.reason
    if before[0] is Trust.QUARANTINED:
        assert isinstance(event, Released)
    if change.suspect and not before[1]:
        assert isinstance(event, Faulted)
        assert event.speaks
        assert load is not None
        assert event.step - load.step < K
    if change.trust is Trust.QUARANTINED and not isinstance(event, Damaged):
        assert before[1]
        assert load is not None
        assert change.place in load.places
    if change.trust is Trust.PROVEN:
        assert isinstance(event, CleanStep)
        assert before[0] is not None


def test_what_can_never_happen() -> None:
    seen: Counter[str] = Counter()
    saved = [Committed(place("memory", 20)), CleanStep(25)]

    @settings(max_examples=400)
    @example([([place("memory", 10)], saved, Faulted(0, NON_FINITE, "a", speaks=True))])
    @given(st.lists(EPISODES, max_size=12))
    def check(episodes: list[Episode]) -> None:
        book, load = TrustBook(K), None
        standing: dict[str, Standing] = {}
        for event in played(episodes):
            before = dict(standing)
            for change in book.handle(event):
                look_at(change, before.get(change.place, (None, False)), event, load)
                standing[change.place] = (change.trust, change.suspect)
                seen[change.trust.value] += 1
                seen["suspect"] += change.suspect
            if isinstance(event, Removed):
                standing.pop(event.place, None)
            if isinstance(event, (Loaded, Faulted)):
                load = event if isinstance(event, Loaded) else None
            assert {one: (book.trust(one), one in book.suspects()) for one in standing} == standing
            ordered = book.order(standing)
            assert set(ordered) == {one for one in standing if standing[one][0] is not Trust.QUARANTINED}
            doubts = [standing[one][1] for one in ordered]
            assert doubts == sorted(doubts)
            assert set(book.proven()).isdisjoint(book.suspects())

    check()
    assert min(seen[name] for name in (*[one.value for one in Trust], "suspect")) > 0, seen


def test_what_is_known_outlives_the_process() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(st.lists(EPISODES, max_size=8), st.lists(EPISODES, max_size=4))
    def check(earlier: list[Episode], later: list[Episode]) -> None:
        first, second = TrustBook(K), TrustBook(K)
        for event in played(earlier):
            first.handle(event)
        second.restore(json.loads(json.dumps(first.state())))
        for event in played(later):
            assert first.handle(event) == second.handle(event)
        assert first.state()["copies"].keys() == second.state()["copies"].keys()
        assert (first.suspects(), first.proven()) == (second.suspects(), second.proven())
        seen["suspects"] += bool(first.suspects())
        seen["proven"] += bool(first.proven())

    check()
    assert min(seen["suspects"], seen["proven"]) > 0, seen


def test_the_path_of_a_process_ends_with_it() -> None:
    book = book_of(Committed(L90), load(L90), CleanStep(91))
    book.restore(book_of(load(L100), CleanStep(104)).state())
    assert [book.handle(event) for event in (CleanStep(110), bad(111))] == [(), ()]
    assert (book.idle_at(-1), book.suspects()) == (-1, ())


def kept(**more: Any) -> dict[str, Any]:
    entry = {"step": 1, "path": 0, "trust": "verified", "suspicion": "", "reason": "r", "outcomes": {"x": 1}}
    return {"path": 0, "paths": {"2": 0}, "doubted": {}, "parted": {"0": -1}, "copies": {L90: entry | more}}


@pytest.mark.parametrize("more", [{}, {"step": -1}, {"path": -1}, {"trust": "proven"}], ids=str)
def test_a_state_is_taken_over_down_to_the_least_numbers(more: dict[str, Any]) -> None:
    book = TrustBook()
    book.restore(kept(**more))
    assert book.state() == kept(**more) | {"path": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": -1},
        {"path": "x"},
        {"paths": {"2": -1}},
        {"parted": {"0": -2}},
        {"copies": {L90: {}}},
        {"copies": [1]},
        *(kept(**one) for one in ({"trust": "gold"}, {"step": -2}, {"path": -2}, {"outcomes": {"x": 0}})),
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_refused_whole(wrong: dict[str, object]) -> None:
    book = book_of(Committed(L100))
    before = book.state()
    with pytest.raises((KeyError, TypeError, ValueError)):
        book.restore({**kept(), **wrong})
    assert book.state() == before
