"""Replicas that differ: what was saved since they last held the same is not to be trusted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.policy.copies import Copies
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import Mark, Marks, of_later
from outlast.checkpoint.policy.trust import CleanStep, Committed, Faulted, Loaded, Released, Trust, TrustBook
from outlast.recovery.policy.actions import evidence_of
from outlast.recovery.policy.events import Fault, FaultKind

PLACES = [f"local/{copy_name(step, 3)}" for step in (12, 14, 16, 40)]
FROM = f"local/{copy_name(10, 2)}"
NAMED = "ReplicasDiffer: ranks 0, 1"


def trained(agreed: int | None, step: int = 41, lasting: bool = False) -> TrustBook:
    """Return a book of a path that began with step 10 and ended with replicas that differ."""
    book = TrustBook(clean_steps=5)
    book.handle(Committed(FROM))
    book.handle(Loaded(10, (FROM,), 3))
    for place in PLACES:
        book.handle(Committed(place))
    book.handle(CleanStep(40))
    book.handle(Faulted(step, "corrupt", NAMED, lasting, agreed, speaks=True))
    return book


@given(st.integers(-1, 42))
def test_exactly_what_was_saved_after_the_last_agreement_is_quarantined(agreed: int) -> None:
    book = trained(agreed)
    aside = [place for place in book.places() if book.trust(place) is Trust.QUARANTINED]
    assert aside == [place for place, step in zip(PLACES, (12, 14, 16, 40), strict=True) if step > agreed]
    assert book.trust(FROM) is Trust.PROVEN
    assert not book.suspects()


def test_it_holds_for_copies_that_are_heard_of_later_and_after_another_launcher() -> None:
    first = trained(14)
    book = TrustBook(clean_steps=5)
    book.restore(json.loads(json.dumps(first.state())))
    for one in (first, book):
        late, early = f"memory/{copy_name(15, 3)}", f"memory/{copy_name(14, 3)}"
        one.handle(Committed(late))
        one.handle(Committed(early))
        assert one.trust(late) is Trust.QUARANTINED
        assert one.trust(early) is Trust.COMMITTED
        assert [(generation, agreed) for generation, agreed, _ in one.diverged()] == [(3, 14)]


@pytest.mark.parametrize(
    ("agreed", "lasting", "suspects"),
    [(-1, False, [FROM]), (9, False, [FROM]), (10, False, []), (11, False, []), (11, True, [FROM])],
)
def test_what_was_loaded_is_a_suspect_only_if_the_ranks_have_not_agreed_since(
    agreed: int, lasting: bool, suspects: list[str]
) -> None:
    book = TrustBook(clean_steps=5)
    book.handle(Committed(FROM))
    book.handle(Loaded(10, (FROM,), 3))
    book.handle(Faulted(12, "corrupt", NAMED, lasting, agreed, speaks=True))
    assert list(book.suspects()) == suspects


def test_releasing_one_copy_releases_one_copy() -> None:
    book = trained(14)
    book.handle(Released(PLACES[2], "looked at"))
    assert book.trust(PLACES[2]) is Trust.COMMITTED
    assert book.trust(PLACES[3]) is Trust.QUARANTINED
    assert len(book.diverged()) == 1
    late = f"local/{copy_name(17, 3)}"
    book.handle(Committed(late))
    assert book.trust(late) is Trust.QUARANTINED, "it was not in the book when the other one was released"


def test_the_ranks_are_told_that_one_copy_of_such_a_generation_is_released() -> None:
    copies = Copies()
    copies.begin(3)
    copies.load(10, (copy_name(10, 2),), "", 3)
    for place in PLACES:
        copies.commit(place)
    copies.fault(Faulted(41, "corrupt", NAMED, False, 14, speaks=True))
    name, other = copy_name(16, 3), copy_name(17, 3)
    assert Marks(copies.marks()).of("local", name) is not None
    heir = Copies()
    heir.restore(json.loads(json.dumps(copies.state())), {name: "looked at"})
    marks = Marks(heir.marks())
    assert marks.of("local", name) is None
    assert marks.against(name) is not None, "there may be one in another tier"
    assert marks.of("local", other) is not None, "nobody has heard of it yet"
    assert marks.of("local", copy_name(40, 3)) is not None


def test_digests_do_not_make_the_same_difference_another_fault() -> None:
    words = "ReplicasDiffer: after step 10: weight; rank 0: {}, rank 1: {}"
    faults = [
        Fault(FaultKind.CORRUPT, "n0", 1, 1, 10, "", words.format(*digests))
        for digests in (("98e1" * 8, "4c07" * 8), ("ab12" * 8, "0000" * 8))
    ]
    assert evidence_of(faults[0]) == evidence_of(faults[1])


def test_which_copies_the_mark_of_later_ones_is_about() -> None:
    mark = Mark.parse(of_later(7, 14, "they differ").to_text())
    assert mark.covers("memory", copy_name(15, 7), "")
    assert not mark.covers("memory", copy_name(14, 7), "")
    assert not mark.covers("memory", copy_name(15, 17), "")
    assert not mark.covers("memory", "no copy at all", "")
    assert Mark.parse(of_later(7, -1, "").to_text()).covers("local", copy_name(0, 7), "")
