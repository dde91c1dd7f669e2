"""What a book of trust says of copies that nobody told it of, next to its limits, and after a long time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.trust import (
    NON_FINITE,
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

L90, L100, R100 = (f"{tier}/{copy_name(step, 1)}" for tier, step in (("a", 90), ("a", 100), ("b", 100)))
L102 = f"a/{copy_name(102, 2)}"


def book_of(*events: Event) -> TrustBook:
    """Return a book of which five clean steps prove a copy, after some events."""
    book = TrustBook(clean_steps=5)
    for event in events:
        book.handle(event)
    return book


def bad(step: int, signature: str = "nan") -> Faulted:
    return Faulted(step, NON_FINITE, signature, speaks=True)


def loaded(place: str, generation: int = 2) -> Loaded:
    return Loaded(int(place.partition("-")[2][:9]), (place,), generation)


def test_a_copy_is_released_before_the_book_has_heard_of_it() -> None:
    book = book_of(Committed(L90), Released(L100, "looked at"))
    assert book.released() == (L100,)
    assert (book.trust(L100), book.reason(L100)) == (Trust.COMMITTED, "released: looked at")


def test_what_nothing_speaks_against_is_not_released() -> None:
    book = book_of(Committed(L100), loaded(L100), CleanStep(105))
    assert book.handle(Released(L100, "looked at")) == ()
    assert (book.trust(L100), book.released()) == (Trust.PROVEN, ())


@pytest.mark.parametrize("end", [bad(101), Damaged(L100, "digest"), Removed(L100)])
def test_a_released_copy_is_one_until_something_speaks_against_it_again(end: Event) -> None:
    book = book_of(Released(L100, "looked at"))
    book.handle(Committed(L100))
    assert book.reason(L100) == "released: looked at", "that it exists is no news"
    book.handle(loaded(L100))
    assert book.released() == (L100,)
    book.handle(end)
    assert book.released() == ()


def test_a_release_with_its_path_clears_the_path_that_began_with_that_copy_alone() -> None:
    book = book_of(Committed(L90), Committed(L100), loaded(L100), bad(101), loaded(L90, 3), bad(91))
    assert [generation for generation, _ in book.doubted()] == [2, 3]
    book.handle(Released(L90, "it was the data", with_path=True))
    assert [generation for generation, _ in book.doubted()] == [2]
    assert book.suspects() == (L100,)


def test_generation_0_is_known_by_its_number_and_one_that_is_not_known_by_none() -> None:
    book = book_of(Committed(L100), loaded(L100, 0), bad(101))
    assert [generation for generation, _ in book.doubted()] == [0]
    book = book_of(Committed(L100), Loaded(100, (L100,)), bad(101))
    assert (book.doubted(), book.suspects()) == ((), (L100,))


def test_a_path_proves_neither_what_it_began_beside_nor_what_is_older() -> None:
    """Copies whose generation is not known count to the path on which the book hears of them."""
    book = book_of(Committed(L100), loaded(L100), Committed(R100), Committed(L90), CleanStep(150))
    assert book.proven() == (L100,)


@pytest.mark.parametrize(("step", "proven"), [(106, ()), (107, (L102,))])
def test_a_copy_is_proven_when_enough_clean_steps_were_done_after_it(
    step: int, proven: tuple[str, ...]
) -> None:
    book = book_of(Loaded(100, (), 2), Committed(L102), CleanStep(step))
    assert book.proven() == proven


def test_what_is_heard_of_while_a_path_goes_on_is_proven_by_its_next_steps_and_not_after_its_end() -> None:
    book = book_of(Loaded(0, (), 2), CleanStep(150), Committed(L102))
    assert book.proven() == ()
    book.handle(CleanStep(151))
    assert book.proven() == (L102,)
    book = book_of(Loaded(0, (), 2), Committed(L102), Faulted(103, "lost", "n1"), CleanStep(150))
    assert book.proven() == ()


def test_a_proven_copy_that_becomes_a_suspect_has_to_prove_itself_anew() -> None:
    book = book_of(Committed(L100), loaded(L100), CleanStep(105), loaded(L100, 3), bad(104))
    assert (book.trust(L100), book.suspects(), book.proven()) == (Trust.VERIFIED, (L100,), ())
    book.handle(loaded(L100, 4))
    book.handle(CleanStep(105))
    assert (book.suspects(), book.proven()) == ((), (L100,))


def test_a_copy_that_is_gone_when_its_path_ends_is_not_brought_back_by_that() -> None:
    for end in (CleanStep(110), bad(101)):
        book = book_of(Committed(L100), loaded(L100), Removed(L100))
        assert book.handle(end) == ()
        assert book.places() == ()


def test_a_copy_in_quarantine_keeps_its_reason_whatever_happens_on_its_path() -> None:
    book = book_of(Committed(L100), loaded(L100), Committed(L102), Damaged(L100, "one"), Damaged(L102, "two"))
    for event in (CleanStep(120), Faulted(120, "corrupt", "x", True, agreed=-1), loaded(L100, 3), bad(101)):
        assert book.handle(event) == ()
    assert (book.reason(L100), book.reason(L102), book.suspects()) == ("one", "two", ())


def test_a_copy_that_the_book_heard_of_by_its_load_is_a_suspect_for_itself() -> None:
    book = book_of(loaded(L100), Committed(L102), bad(101))
    assert book.reason(L100) == "non-finite (nan) 1 steps after it was loaded"
    assert book.reason(L102) == f"saved on the path that began with {L100}, which is not to be trusted"


def test_copies_of_a_path_that_ended_well_are_not_doubted_for_the_next_one() -> None:
    book = book_of(Committed(L100), loaded(L100), Committed(L102), Faulted(103, "lost", "n1"))
    book.handle(loaded(L100, 3))
    book.handle(bad(101))
    assert book.suspects() == (L100,)
    assert [generation for generation, _ in book.doubted()] == [3]


def test_faults_that_begin_alike_are_two_and_what_is_far_behind_in_a_signature_does_not_count() -> None:
    for other, trust in (("nan in layer 2", Trust.VERIFIED), ("nan in layer 1", Trust.QUARANTINED)):
        book = book_of(Committed(L100), loaded(L100), bad(101, "nan in layer 1"))
        book.handle(loaded(L100, 3))
        book.handle(bad(101, other))
        assert book.trust(L100) is trust
    first, second = (f"{'x' * 500}{end}" for end in "ab")
    book = book_of(Committed(L100), loaded(L100), bad(101, first), loaded(L100, 3), bad(101, second))
    assert book.trust(L100) is Trust.QUARANTINED


@pytest.mark.parametrize(
    ("events", "asked", "idle"),
    [
        ((), -1, -1),
        ((Loaded(100, ()),), -1, 100),
        ((Loaded(100, ()),), 100, 100),
        ((Loaded(100, ()),), 101, -1),
        ((Loaded(100, ()), CleanStep(100)), -1, 100),
        ((Loaded(100, ()), CleanStep(101)), -1, -1),
        ((Loaded(100, ()), CleanStep(101), Loaded(100, ())), -1, 100),
        ((Loaded(100, ()), Faulted(100, "lost", "n1")), 100, -1),
        ((Loaded(0, ()),), -1, 0),
    ],
)
def test_how_far_a_job_is_that_has_done_no_step_since_its_load(
    events: tuple[Event, ...], asked: int, idle: int
) -> None:
    assert book_of(*events).idle_at(asked) == idle


def test_who_is_accused_of_a_fault() -> None:
    other = f"a/{copy_name(92, 4)}"
    book = book_of(Committed(L90), Committed(L100), loaded(L100), Committed(L102), bad(103))
    book.handle(loaded(L90, 4))
    book.handle(Committed(other))
    book.handle(bad(93, "another"))
    assert book.accused(bad(103)) == (L100, L102)
    assert book.accused(bad(500, "another")) == (L90, other)
    assert book.accused(bad(103, "unheard of")) == ()


@pytest.mark.parametrize("how", [Committed, lambda place: Released(place, "looked at")])
def test_proven_copies_come_newest_first_and_of_one_step_in_the_order_of_their_places(
    how: Callable[[str], Event],
) -> None:
    book = book_of(*(how(one) for one in (R100, L90, L100)))
    for place in (L90, R100, L100):
        book.handle(loaded(place))
        book.handle(CleanStep(105))
    assert book.proven() == (L100, R100, L90)


def test_a_book_stays_small_however_long_the_job_runs_and_knows_the_latest() -> None:
    book = book_of(Committed(L90))
    for generation in range(2, 1000):
        saved = Committed(f"a/{copy_name(90 + generation, generation)}")
        for event in (loaded(L90, generation), saved, bad(91, f"fault {generation}")):
            book.handle(event)
    assert f"a/{copy_name(90 + 999, 999)}" in book.suspects()
    assert book.doubted()[-1][0] == 999
    assert len(book.doubted()) < 20
    assert len(book.places()) < 500
    assert len(book.state()["paths"]) < 200


def test_what_ended_a_load_is_remembered_for_a_few_other_ends() -> None:
    book = book_of(Committed(L90))
    for number in range(100):
        book.handle(loaded(L90))
        book.handle(bad(91, f"fault {number}"))
    assert len(book.state()["copies"][L90]["outcomes"]) < 20
    book.handle(loaded(L90))
    book.handle(bad(91, "fault 98"))
    assert book.trust(L90) is Trust.QUARANTINED


def test_it_knows_of_the_latest_generations_only_that_they_came_apart() -> None:
    book = book_of(Committed(L90))
    for generation in range(2, 100):
        book.handle(loaded(L90, generation))
        book.handle(Faulted(95, "corrupt", "x", agreed=92, speaks=True))
    assert book.diverged()[-1][:2] == (99, 92)
    assert len(book.diverged()) < 20


def test_the_latest_of_many_copies_are_known_and_those_released_are_among_them() -> None:
    book = TrustBook()
    places = [f"a/{copy_name(step, 1)}" for step in range(1000)]
    for place in places:
        book.handle(Released(place, "looked at"))
    assert 100 < len(book.released()) < 500
    assert book.places() == tuple(places[-len(book.places()) :])


@pytest.mark.parametrize(
    ("agreed", "reason"),
    [
        (-1, "saved by ranks that should hold the same and do not"),
        (0, "saved after step 0, when ranks last held what they should hold alike"),
    ],
)
def test_a_copy_says_since_when_ranks_have_differed(agreed: int, reason: str) -> None:
    book = book_of(Loaded(0, (), 2), Committed(L102), Faulted(103, "corrupt", "x", agreed=agreed))
    assert (book.trust(L102), book.reason(L102)) == (Trust.QUARANTINED, reason)
    assert book.diverged() == ((2, agreed, reason),)


def kept(**more: Any) -> dict[str, Any]:
    entry = {"step": 1, "path": 0, "trust": "verified", "suspicion": "", "reason": "r", "outcomes": {"x": 1}}
    return {"path": 0, "paths": {"2": 0}, "doubted": {}, "parted": {"0": -1}, "copies": {L90: entry | more}}


@pytest.mark.parametrize("more", [{}, {"step": -1}, {"path": -1}, {"trust": "proven"}])
def test_a_state_is_taken_over_down_to_the_least_numbers(more: dict[str, Any]) -> None:
    book = TrustBook()
    book.restore(kept(**more))
    assert book.state() == kept(**more) | {"path": 1}


@pytest.mark.parametrize(
    "state",
    [
        kept(step=-2),
        kept(path=-2),
        kept(outcomes={"x": 0}),
        kept() | {"parted": {"0": -2}},
        kept() | {"paths": {"2": -1}},
        kept() | {"path": -1},
    ],
    ids=str,
)
def test_numbers_that_are_too_small_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is less than"):
        TrustBook().restore(state)


def test_a_book_that_is_taken_over_forgets_what_was_under_way() -> None:
    book = book_of(Committed(L90), loaded(L90), CleanStep(91))
    book.restore(book_of(Committed(L100), Committed(L102)).state())
    assert book.handle(CleanStep(200)) == ()
    assert book.handle(bad(201)) == ()
    assert (book.idle_at(-1), book.suspects(), book.proven()) == (-1, (), ())
