from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.manifest import copy_name
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

K = 5
NAN = "the loss is nan"


def place(tier: str, step: int, generation: int = 1) -> str:
    return f"{tier}/{copy_name(step, generation)}"


def bad(step: int, kind: str = NON_FINITE, signature: str = NAN) -> Faulted:
    """Return a fault that speaks against the state."""
    return Faulted(step, kind, signature, speaks=True)


def told(book: TrustBook, *events: Event) -> list[str]:
    """Return what a person would read of these events."""
    return [
        f"{change.place} {change.trust.value}{', suspect' * change.suspect}: {change.reason}"
        for event in events
        for change in book.handle(event)
    ]


def started(*places: str, clean_steps: int = K) -> TrustBook:
    """Return a book of copies that an earlier process has committed."""
    book = TrustBook(clean_steps)
    for one in places:
        book.handle(Committed(one))
    return book


R100, L100, L90 = place("replica", 100), place("local", 100), place("local", 90)


def test_a_bad_replica_is_found_out_and_the_job_finishes() -> None:
    book = started(L90)
    assert told(book, Loaded(90, (L90,)), CleanStep(94), CleanStep(95)) == [
        "local/step-000000090.g1 verified: verified when it was loaded",
        "local/step-000000090.g1 proven: 5 clean steps after it was loaded",
    ]
    assert told(book, Committed(R100), Committed(L100)) == [
        "replica/step-000000100.g1 committed: committed",
        "local/step-000000100.g1 committed: committed",
    ]
    # Node n3 is lost at step 102, and its shards are taken from the other nodes' memory.
    assert told(book, Faulted(102, "lost", "n3")) == []
    newest_first = (R100, L100, L90)
    assert book.order(newest_first) == newest_first
    assert told(book, Loaded(100, (R100,)), CleanStep(101), CleanStep(102), bad(103)) == [
        "replica/step-000000100.g1 verified: verified when it was loaded",
        "replica/step-000000100.g1 verified, suspect: non-finite (the loss is nan) 3 steps after it was"
        " loaded",
    ]
    assert book.suspects() == (R100,)
    assert book.order(newest_first) == (L100, L90, R100)
    # The same step from disk has the same numbers: it was saved like that, so the older one is next.
    assert told(book, Loaded(100, (L100,)), CleanStep(102), bad(103)) == [
        "local/step-000000100.g1 verified: verified when it was loaded",
        "local/step-000000100.g1 verified, suspect: non-finite (the loss is nan) 3 steps after it was loaded",
    ]
    assert book.order(newest_first) == (L90, R100, L100)
    again = place("local", 100, 4)
    assert told(
        book, Loaded(90, (L90,)), CleanStep(95), Committed(again), CleanStep(104), CleanStep(105)
    ) == [
        "local/step-000000100.g4 committed: committed",
        "local/step-000000100.g4 proven: training went on from it for 5 clean steps",
    ]
    assert book.proven() == (again, L90)


def test_a_suspect_that_ends_the_same_way_again_is_quarantined_until_a_person_releases_it() -> None:
    book = started(L100)
    told(book, Loaded(100, (L100,)), bad(103), Loaded(100, (L100,)))
    assert told(book, bad(103)) == [
        "local/step-000000100.g1 quarantined: non-finite (the loss is nan) 3 steps after it was loaded,"
        " as after the load before"
    ]
    assert (book.order((L100,)), book.suspects(), book.proven()) == ((), (), ())
    assert told(book, Committed(L100), Loaded(100, (L100,)), CleanStep(200)) == []
    assert told(book, Released(L100, "the power supply was bad")) == [
        "local/step-000000100.g1 committed: released: the power supply was bad"
    ]
    assert book.order((L100,)) == (L100,)
    book.handle(Loaded(100, (L100,)))
    assert "suspect" in told(book, bad(103))[0]


def test_a_suspect_that_ends_in_another_way_stays_a_suspect() -> None:
    book = started(L100)
    for kind in (NON_FINITE, "corrupt"):
        book.handle(Loaded(100, (L100,)))
        book.handle(bad(103, kind, "x"))
    assert (book.trust(L100), book.suspects()) == (Trust.VERIFIED, (L100,))
    assert book.reason(L100) == "corrupt (x) 3 steps after it was loaded"


def test_a_suspect_that_proves_itself_is_none_any_more() -> None:
    book = started(L100)
    told(
        book,
        Loaded(100, (L100,)),
        bad(103),
        Loaded(100, (L100,)),
        CleanStep(105),
    )
    assert (book.trust(L100), book.suspects()) == (Trust.PROVEN, ())
    told(
        book,
        bad(120),
        Loaded(100, (L100,)),
        bad(103),
    )
    assert (book.trust(L100), book.suspects()) == (Trust.VERIFIED, (L100,))


def test_a_fault_that_does_not_speak_against_the_state_makes_no_suspect() -> None:
    book = started(L100)
    for _ in range(4):
        book.handle(Loaded(100, (L100,)))
        book.handle(Faulted(102, "error", "x"))
    assert book.suspects() == ()


def test_a_fault_that_comes_too_late_after_the_load_proves_nothing() -> None:
    book = started(L100)
    book.handle(Loaded(100, (L100,)))
    book.handle(bad(105))
    assert book.suspects() == ()
    book.handle(Loaded(100, (L100,)))
    book.handle(bad(104))
    assert book.suspects() == (L100,)


def test_clean_steps_count_for_more_than_the_step_of_a_rank_that_lags_behind() -> None:
    book = started(L100)
    told(book, Loaded(100, (L100,)), CleanStep(105), bad(101))
    assert (book.trust(L100), book.suspects()) == (Trust.PROVEN, ())
    assert told(book, Loaded(100, (L100,)), CleanStep(104), bad(-1)) == [
        "local/step-000000100.g1 verified, suspect: non-finite (the loss is nan) 4 steps after it was loaded"
    ]


def test_what_was_saved_on_the_path_from_a_suspect_is_suspect_too() -> None:
    book = started(L90, L100)
    later, other = place("local", 102, 2), place("memory", 102, 2)
    told(
        book,
        Loaded(100, (L100,)),
        Committed(later),
        Committed(other),
        bad(103),
    )
    assert book.suspects() == (L100, later, other)
    assert book.reason(later) == f"saved on the path that began with {L100}, which is not to be trusted"
    assert book.order((later, L100, L90)) == (L90, later, L100)


def test_one_load_counts_once_however_many_ranks_report() -> None:
    book = started(L100)
    told(book, Loaded(100, (L100,)), bad(103))
    assert (
        told(
            book,
            bad(103),
            bad(103, "corrupt", "x"),
            CleanStep(110),
        )
        == []
    )
    assert (book.trust(L100), book.suspects()) == (Trust.VERIFIED, (L100,))


def test_every_copy_that_shards_were_read_from_is_in_it() -> None:
    book = started(R100, L100, L90)
    told(book, Loaded(100, (R100, L100)), bad(100))
    assert book.suspects() == (L100, R100)


def test_a_copy_is_not_proven_by_a_path_that_it_was_not_saved_on() -> None:
    book = started(L100, L90)
    told(book, Loaded(90, (L90,)), CleanStep(200))
    assert book.proven() == (L90,)
    book = started()
    saved = place("local", 10)
    told(
        book, Loaded(0, ()), Committed(saved), CleanStep(14), Faulted(14, "lost", "n1"), Loaded(10, (saved,))
    )
    assert told(book, CleanStep(14)) == []
    assert "proven" in told(book, CleanStep(15))[0]


def test_damage_quarantines_and_a_removed_copy_is_forgotten() -> None:
    book = started(L90)
    assert told(book, Damaged(L90, "rank 3: digest")) == [
        "local/step-000000090.g1 quarantined: rank 3: digest"
    ]
    assert told(book, Damaged(L90, "rank 3: digest"), Removed(L90)) == []
    assert book.trust(L90) is None
    assert book.order((L90,)) == (L90,)
    assert book.reason(L90) == ""


def test_a_place_must_name_a_copy() -> None:
    with pytest.raises(ValueError, match=r"'local/latest' is no place of a copy; expected tier/step-0"):
        TrustBook().handle(Committed("local/latest"))


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
EPISODES = st.tuples(
    st.lists(PLACES, max_size=2, unique=True),
    st.lists(EVENTS, max_size=3),
    st.one_of(
        st.none(),
        st.builds(
            Faulted,
            STEPS,
            st.sampled_from([NON_FINITE, "error"]),
            st.sampled_from("ab"),
            speaks=st.booleans(),
        ),
    ),
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

    @settings(max_examples=400)
    @example(
        [
            (
                [place("memory", 10)],
                [Committed(place("memory", 20)), CleanStep(25)],
                Faulted(0, NON_FINITE, "a", speaks=True),
            )
        ]
    )
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
    def check(
        earlier: list[Episode],
        later: list[Episode],
    ) -> None:
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
    book, other = started(L100), TrustBook(K)
    told(book, Loaded(100, (L100,)), CleanStep(104))
    other.restore(book.state())
    assert told(other, CleanStep(110), bad(111)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": -1},
        {"path": "x"},
        {"paths": {"3": -1}},
        {"copies": {L90: {}}},
        {
            "copies": {
                L90: {"step": 1, "path": 1, "trust": "gold", "suspicion": "", "reason": "", "outcomes": {}}
            }
        },
        {"copies": []},
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_refused_whole(wrong: dict[str, object]) -> None:
    book = started(L100)
    before = book.state()
    state = {**before, "path": 7} | wrong
    if wrong == {"copies": []}:
        state["copies"] = [1]
    with pytest.raises((KeyError, TypeError, ValueError)):
        book.restore(state)
    assert book.state() == before


def test_a_path_is_told_by_its_generation_however_late_its_copies_come() -> None:
    book = started(L90, L100)
    told(book, Loaded(100, (L100,), 2), bad(103), Loaded(90, (L90,), 3))
    late, own = place("local", 102, 2), place("local", 92, 3)
    assert told(book, Committed(late), Committed(own)) == [
        f"{late} committed, suspect: saved on the path that began with {L100}, which is not to be trusted",
        f"{own} committed: committed",
    ]
    assert [generation for generation, _ in book.doubted()] == [2]
    told(book, Released(L100, "a person"))
    assert [generation for generation, _ in book.doubted()] == [2], "one copy was released"
    told(book, Released(L100, "it was not the state", with_path=True))
    assert book.doubted() == ()


def test_when_nothing_else_is_left_to_be_tried_a_copy_is_a_suspect_however_long_ago_it_was_loaded() -> None:
    book = started(L100)
    told(book, Loaded(100, (L100,)), CleanStep(150))
    assert "suspect: lost (n1) 50 steps" in told(book, Faulted(150, "lost", "n1", lasting=True))[0]
