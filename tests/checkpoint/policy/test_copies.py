"""How far copies are trusted, through what happens to them: each turn is a call of :class:`Copies`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.copies import CLEAN_STEPS, NON_FINITE, Copies, Faulted, Trust, TrustChange
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.policy.resolve import CopyStatus, Mark, Marks, marks_for, of_later, removals
from outlast.recovery.policy.actions import evidence_of
from outlast.recovery.policy.events import Fault, FaultKind

Turn = Callable[[Copies], Any]
begin, commit, clean, remove = (
    partial(methodcaller, name) for name in ("begin", "commit", "clean", "remove")
)
set_aside, fault, clear = (partial(methodcaller, name) for name in ("set_aside", "fault", "clear_suspicion"))


def place(tier: str, step: int, generation: int = 1) -> str:
    return f"{tier}/{copy_name(step, generation)}"


def load(*places: str, generation: int = 2, digest: str = "") -> Turn:
    return methodcaller("load", int(places[0].partition("-")[2][:9]), places, digest, generation)


def bad(step: int, signature: str = "nan", kind: str = NON_FINITE) -> Turn:
    """Return a fault that speaks against the state."""
    return fault(Faulted(step, kind, signature, speaks=True))


def after(*turns: Turn, copies: Copies | None = None) -> Copies:
    """Return copies to which this has happened."""
    copies = copies or Copies()
    for turn in turns:
        turn(copies)
    return copies


def heir_of(copies: Copies, **released: str) -> Copies:
    """Return the copies as the next launcher knows them."""
    return Copies.restored(json.loads(json.dumps(copies.state())), released)


def words(copies: Copies) -> dict[str, str]:
    return {one: word for one, (word, _) in copies.standing().items()}


def marked(copies: Copies) -> dict[str, CopyStatus]:
    """Return what the ranks get of copies that are not to be kept."""
    marks = map(Mark.parse, copies.marks())
    kept = (CopyStatus.PROVEN, CopyStatus.DURABLE)
    return {mark.place: mark.bearing for mark in marks if mark.bearing not in kept}


def changes(copies: Copies) -> list[tuple[str, str]]:
    return [(one.place, one.trust) for one in copies.changes()]


C80, C100 = copy_name(80, 1), copy_name(100, 1)
L80, L90, L100, M100 = place("local", 80), place("local", 90), place("local", 100), place("memory", 100)
R100, L102, M102 = place("replica", 100), place("local", 102, 2), place("memory", 102, 2)
L92, L107 = place("local", 92, 3), place("local", 107, 0)
M10 = place("memory", 10)
NAN = Faulted(103, NON_FINITE, "NonFinite: loss is nan", speaks=True)
ANY = "it comes on any state"
SUSPECT, GONE = "suspect", None
TWICE = (commit(L100), load(L100), bad(103), load(L100, generation=3), bad(103))
CLEARED = (load(L100), fault(NAN), clear(NAN, ANY))
ALIKE = "x" * 500
LOST = Faulted(103, "lost", "n1")
# A generation that goes back to a copy of its own, and another one that loads a second training.
L200, L300, L304, L400 = (place("local", step) for step in (200, 300, 304, 400))
PATH = (
    *(begin(1), commit(L100), clean(150), commit(L200), clean(220)),
    commit(L300),
    clean(320),
    commit(L400),
)
BACK = (*PATH, load(L300, generation=1), commit(L304))
G200, G304 = place("global", 200), place("global", 304)
A100, A200, B300 = f"a:{place('local', 100, 0)}", f"a:{L200}", f"b:{place('local', 300, 0)}"
PAIR = (load(A100, generation=1), commit(A200), clean(220), load(B300, generation=1))
DIFFER = Faulted(305, "corrupt", "x", agreed=-1, speaks=True)
BEFORE = {L100: "proven", L200: "proven", L300: SUSPECT, L400: "committed"}
# What happens -> how far the copies named are trusted.
TURNS: dict[str, tuple[tuple[Turn, ...], dict[str, str | None]]] = {
    "loaded": ((load(L100),), {L100: "verified"}),
    "a bad step soon after": ((load(L100), bad(119)), {L100: SUSPECT}),
    "a bad step later": ((load(L100), bad(120)), {L100: "verified"}),
    "a fault that says nothing": ((load(L100), fault(Faulted(102, "error", "x"))), {L100: "verified"}),
    "a fault on any state": (
        (load(L100), clean(150), fault(Faulted(150, "lost", "n", lasting=True))),
        {L100: SUSPECT},
    ),
    "twice alike": (TWICE, {L100: "quarantined"}),
    "quarantine lasts": ((*TWICE, commit(L100), load(L100), clean(200), bad(201)), {L100: "quarantined"}),
    "in another way": ((load(L100), bad(103), load(L100), bad(103, "x", "corrupt")), {L100: SUSPECT}),
    "in other words": (
        (load(L100), bad(101, "in layer 1"), load(L100), bad(101, "in layer 2")),
        {L100: SUSPECT},
    ),
    "long alike": (
        (load(L100), bad(101, ALIKE + "a"), load(L100), bad(101, ALIKE + "b")),
        {L100: "quarantined"},
    ),
    "clean steps": ((load(L100), clean(120)), {L100: "proven"}),
    "too few": ((load(L100), clean(119)), {L100: "verified"}),
    "a suspect that is fine": ((load(L100), bad(103), load(L100), clean(120)), {L100: "proven"}),
    "proven, then bad": ((load(L100), clean(120), load(L100), bad(119)), {L100: SUSPECT}),
    "proven in between": (
        (load(L100), bad(103), load(L100), clean(120), load(L100), bad(103)),
        {L100: SUSPECT},
    ),
    "a rank that lags": ((load(L100), clean(120), bad(101)), {L100: "proven"}),
    "an unknown step": ((load(L100), clean(119), bad(-1)), {L100: SUSPECT}),
    "its generation": (
        (commit(L90), load(L100), commit(L102), commit(M102), bad(103)),
        {L100: SUSPECT, L102: SUSPECT, M102: SUSPECT, L90: "committed"},
    ),
    "its generation, late": (
        (commit(L90), load(L100), bad(103), load(L90, generation=3), commit(L102), commit(L92)),
        {L102: SUSPECT, L92: "committed"},
    ),
    "its generation, proven": ((load(L80), commit(L102), clean(130), bad(99)), {L102: "proven"}),
    "generation 0": ((load(L100, generation=0), bad(101), commit(L107)), {L107: SUSPECT}),
    "a generation that ended well": (
        (load(L100), commit(L102), fault(LOST), load(L100, generation=3), bad(101)),
        {L100: SUSPECT, L102: "committed"},
    ),
    "one load counts once": (
        (load(L100), bad(103), bad(103), bad(103, "x"), clean(150)),
        {L100: SUSPECT},
    ),
    "parts of two": ((load(R100, L100), bad(100)), {R100: SUSPECT, L100: SUSPECT}),
    "another one": ((commit(L100), load(L90), clean(200)), {L90: "proven", L100: "committed"}),
    "beside it": ((load(L100), commit(R100), commit(L90), clean(150)), {R100: "committed", L90: "committed"}),
    "saved and trained on": ((begin(2), commit(L102), clean(122)), {L102: "proven"}),
    "saved and not enough": ((begin(2), commit(L102), clean(121)), {L102: "committed"}),
    "heard of late": ((begin(2), clean(150), commit(L102)), {L102: "committed"}),
    "and trained on": ((begin(2), clean(150), commit(L102), clean(151)), {L102: "proven"}),
    "the generation has ended": ((begin(2), commit(L102), fault(LOST), clean(150)), {L102: "committed"}),
    "damage": ((commit(L90), set_aside(L90, "digest")), {L90: GONE}),
    "damaged and written anew": ((load(L90), set_aside(L90, "x"), commit(L90)), {L90: "committed"}),
    "in quarantine, and set aside": ((*TWICE, set_aside(L100, "marked")), {L100: "quarantined"}),
    "removed under way": ((load(L100), remove(L100), clean(150)), {L100: GONE}),
    "removed, then bad": ((load(L100), remove(L100), bad(101)), {L100: GONE}),
    "never agreed, on its own disk": (
        (load(L100), fault(Faulted(103, "corrupt", "x", agreed=-1, speaks=True)), commit(L102)),
        {L100: SUSPECT, L102: "quarantined"},
    ),
    "a rollback that fails": ((*BACK, bad(305)), {**BEFORE, L304: SUSPECT}),
    "replicas that differ after a rollback": ((*BACK, fault(DIFFER)), {**BEFORE, L304: "quarantined"}),
    "heard of after it": ((*BACK, bad(305), commit(G200), commit(G304)), {G200: "committed", G304: SUSPECT}),
    "of the path before a rollback": (
        (*BACK, clean(450)),
        {L300: "proven", L304: "proven", L400: "committed"},
    ),
    "saved again after a rollback": ((*BACK, commit(L400), clean(420)), {L400: "proven"}),
    "another training that is bad": ((*PAIR, bad(305)), {A100: "proven", A200: "proven", B300: SUSPECT}),
    "loaded and saved again": (
        (load(L100), commit(place("local", 100, 2)), clean(150), fault(DIFFER)),
        {L100: "proven", place("local", 100, 2): "quarantined"},
    ),
    "cleared": (CLEARED, {L100: "committed"}),
    "cleared, and again": ((*CLEARED, load(L100), bad(103)), {L100: SUSPECT}),
    "other faults are not cleared": ((load(L100), bad(103, "x"), clear(NAN, ANY)), {L100: SUSPECT}),
    "no copy's name": (
        (
            *(commit("latest"), load("memory/x-000000001", "x"), remove("quarantine/x"), set_aside("", "x")),
            *(commit(f"a,b/{C100}"), commit(f"a|b/{C100}")),
        ),
        {},
    ),
}


@pytest.mark.parametrize("turn", TURNS)
def test_how_far_copies_are_trusted(turn: str) -> None:
    turns, expected = TURNS[turn]
    found = words(after(*turns))
    assert {one: found.get(one) for one in expected or found} == expected


@pytest.mark.parametrize("end", [bad(305), fault(DIFFER)])
def test_a_rollback_that_fails_speaks_against_nothing_that_was_saved_before_it(end: Turn) -> None:
    copies = after(*BACK, remove(L400), end)
    assert (copies.has_trusted(), copies.newest_durable()) == (True, 200)
    for known in (copies, heir_of(copies)):
        marks, names = Marks(known.marks()), [copy_name(step, 1) for step in (100, 200, 300, 304)]
        assert list(filter(marks.doubted, names)) == names[2:]
        assert marks.proven == {names[1]}
        gone = removals(dict.fromkeys(names), 1, (), known.marks())
        assert [one.name for one in gone] == [names[0], *names[2:]]


def test_reasons_name_what_they_are_about() -> None:
    copies = after(commit(L90), load(L100), commit(L102), bad(103))
    for one, about in ((L100, (NON_FINITE, "nan", "3")), (L102, (L100,))):
        assert all(word in copies.reason(one) for word in about), copies.reason(one)
    (change,) = heir_of(copies, **{C100: "checked", copy_name(90, 1): "nothing to release"}).changes()
    assert change == TrustChange(L100, 100, "released", "checked")


@pytest.mark.parametrize("end", [bad(101), set_aside(L100, "digest"), remove(L100)])
def test_a_released_copy_is_one_until_something_speaks_against_it_again(end: Turn) -> None:
    released = CopyStatus.RELEASED
    copies = after(*CLEARED, commit(L100), load(L100))
    assert [place for place, one in marked(copies).items() if one is released] == [L100]
    assert marked(heir_of(copies)) == marked(copies)
    assert released not in marked(after(end, copies=copies)).values()


def test_a_cleared_load_clears_the_generation_that_began_with_it_alone() -> None:
    copies = after(commit(L90), load(L100), bad(101, "x"), load(L90, generation=3), commit(L92), bad(91))
    assert {"*/>99.g2", "*/>89.g3", L90, L92, L100} == marked(copies).keys()
    copies.clear_suspicion(NAN, ANY)
    assert marked(copies).keys() == {"*/>99.g2", "*/>89.g3", L90, L92, L100}, "another fault"
    copies.clear_suspicion(Faulted(500, NON_FINITE, "nan"), ANY)
    suspect, released = CopyStatus.SUSPECT, CopyStatus.RELEASED
    assert marked(copies) == {L100: suspect, "*/>99.g2": suspect, L90: released, L92: released}
    assert changes(copies)[-2:] == [(L90, "released"), (L92, "released")]
    copies.commit(place("local", 94, 3))
    assert words(copies)[place("local", 94, 3)] == "committed", "nor is what comes later a suspect"
    heir = heir_of(copies, **{C100: "x"})
    assert "*/>99.g2" in marked(heir), "one copy was released"


@pytest.mark.parametrize(
    ("turns", "asked", "idle"),
    [
        ((), -1, -1),
        ((begin(2),), -1, 0),
        ((load(L100),), -1, 100),
        ((load(L100),), 100, 100),
        ((load(L100),), 101, -1),
        ((load(L100), clean(100)), -1, 100),
        ((load(L100), clean(101)), -1, -1),
        ((load(L100), clean(101), load(L100)), -1, 100),
        ((load(L100), fault(LOST)), 100, -1),
    ],
)
def test_how_far_a_job_is_that_has_done_no_step_since_its_load(
    turns: tuple[Turn, ...], asked: int, idle: int
) -> None:
    assert after(*turns).idle_at(asked) == idle


def test_what_is_kept_stays_small_however_long_the_job_runs_and_knows_the_latest() -> None:
    copies = after(commit(L90))
    for generation in range(2, 1000):
        saved = place("local", 90 + generation, generation)
        turns = (load(L90, generation=generation), commit(saved), bad(91, f"fault {generation}"))
        after(*turns, copies=copies)
    state = copies.state()
    assert (len(state["copies"]), len(state["copies"][L90]["outcomes"])) == (256, 8)
    general = [one for one in marked(copies) if ">" in one]
    assert (general[-1], len(general)) == ("*/>89.g999", 8)
    assert len(copies.marks()) < 64, "the environment of a process is not endless"
    assert words(after(load(L90), bad(91, "fault 999"), copies=copies))[L90] == "quarantined"
    for generation in range(1000, 1100):
        end = fault(Faulted(95, "corrupt", "x", agreed=92, speaks=True))
        after(load(L80, generation=generation), end, copies=copies)
    later = [one for one in marked(copies) if one.startswith("*/>92")]
    assert (later[-1], len(later)) == ("*/>92.g1099", 8)


# Replicas that differ: what was saved since they last held the same is not to be trusted.
SAVED = {step: place("local", step, 3) for step in (12, 14, 16, 40)}
FROM = place("local", 10, 2)


def diverged(agreed: int) -> Copies:
    """Return copies of a job that began with step 10 and ended with replicas that differ."""
    end = Faulted(41, "corrupt", "ranks 0, 1", False, agreed, speaks=True)
    return after(load(FROM, generation=3), *map(commit, SAVED.values()), clean(40), fault(end))


@given(st.integers(-1, 42))
def test_exactly_what_was_saved_after_the_last_agreement_is_quarantined(agreed: int) -> None:
    found = words(diverged(agreed))
    assert [one for one in found if found[one] == "quarantined"] == [
        one for step, one in SAVED.items() if step > agreed
    ]
    assert found[FROM] == "proven"


def test_it_holds_for_copies_that_are_heard_of_later_and_after_another_launcher() -> None:
    first = diverged(14)
    for copies in (first, heir_of(first)):
        late, early = place("memory", 15, 3), place("memory", 14, 3)
        after(commit(late), commit(early), copies=copies)
        assert (words(copies)[late], words(copies)[early]) == ("quarantined", "committed")
        assert "*/>14.g3" in marked(copies)


@pytest.mark.parametrize(
    ("agreed", "lasting", "word"),
    [
        (-1, False, SUSPECT),
        (9, False, SUSPECT),
        (10, False, "verified"),
        (11, False, "verified"),
        (11, True, SUSPECT),
    ],
)
def test_what_was_loaded_is_a_suspect_only_if_the_ranks_have_not_agreed_since(
    agreed: int, lasting: bool, word: str
) -> None:
    end = Faulted(12, "corrupt", "x", lasting, agreed, speaks=True)
    assert words(after(load(FROM, generation=3), fault(end))) == {FROM: word}


def test_releasing_one_of_them_releases_one_copy_and_the_ranks_get_that() -> None:
    name, other = copy_name(16, 3), copy_name(17, 3)
    copies = diverged(14)
    assert Marks(copies.marks()).of("local", name) is not None
    heir = heir_of(copies, **{name: "looked at"})
    assert (words(heir)[SAVED[16]], words(heir)[SAVED[40]]) == ("committed", "quarantined")
    marks = Marks(heir.marks())
    assert marks.of("local", name) is None
    assert marks.against(name) is not None, "there may be one in another tier"
    assert marks.of("local", other) is not None, "nobody has heard of it yet"
    heir.commit(other)
    assert words(heir)[f"local/{other}"] == "quarantined"


def test_digests_do_not_make_the_same_difference_another_fault() -> None:
    text = "ReplicasDiffer: after step 10: weight; rank 0: {}, rank 1: {}"
    first, second = (
        Fault(FaultKind.CORRUPT, "n0", 1, 1, 10, "", text.format(*digests))
        for digests in (("98e1" * 8, "4c07" * 8), ("ab12" * 8, "0000" * 8))
    )
    assert evidence_of(first) == evidence_of(second)


def test_which_copies_the_mark_of_later_ones_is_about() -> None:
    mark = Mark.parse(of_later(7, 14, CopyStatus.QUARANTINED, "they differ").to_text())
    names = (copy_name(15, 7), copy_name(14, 7), copy_name(15, 17), "no copy at all")
    assert [mark.covers("memory", name, "") for name in names] == [True, False, False, False]
    assert Mark.parse(of_later(7, -1, CopyStatus.QUARANTINED, "").to_text()).covers(
        "local", copy_name(0, 7), ""
    )


@pytest.mark.parametrize(("digest", "expected"), [("ab", CopyStatus.QUARANTINED), ("cd", CopyStatus.SUSPECT)])
def test_what_was_loaded_under_another_name_of_the_tier_counts_as_the_same_bytes(
    digest: str, expected: CopyStatus
) -> None:
    copies = after(load(M100, digest="ab"), fault(NAN), load(L100, digest=digest), fault(NAN))
    assert marked(copies)[M100] is expected
    mark = Marks(copies.marks()).of("local", C100, "ab")
    assert mark is not None
    assert mark.bearing is expected
    assert Marks(copies.marks()).of("replica", C100, "ef") is None


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (L80, True),
        (f"memory/{C80}", False),
        (L100, False),
        (f"replica/n1/{C100}", True),
        (place("local", 100, 2), False),
        (place("local", 110), False),
    ],
)
def test_what_may_be_loaded_instead(known: str, expected: bool) -> None:
    """Memory comes and goes, and what is on disk was written from it."""
    copies = after(commit(known))
    assert copies.another_exists() is False, "nothing was loaded"
    assert after(load(M100), copies=copies).another_exists() is expected


@pytest.mark.parametrize("end", [begin(3), fault(NAN), clear(NAN, ANY)])
def test_what_is_loaded_is_known_until_the_generation_ends(end: Turn) -> None:
    copies = after(methodcaller("load", 100, (C100,), "", 2))
    assert copies.loaded == (L100,)
    assert after(end, copies=copies).loaded == ()


def test_a_copy_that_is_gone_is_forgotten_with_all_that_was_known_of_it() -> None:
    copies = after(load(M100, digest="ab"), clean(130))
    assert changes(copies) == [(M100, "proven")]
    after(remove(M100), load(L100, digest="ab", generation=3), copies=copies)
    assert copies.loaded == (L100,), "the other one is gone"
    after(load(M100, digest="ab", generation=4), clean(130), copies=copies)
    assert (M100, "proven") in changes(copies), "it is another copy under that name"


def test_a_person_hears_of_damage_and_of_each_suspicion_once() -> None:
    copies = after(commit(L100), commit(M100), set_aside(C100, "the digest of rank 1 differs"))
    assert copies.changes() == (TrustChange(L100, 100, "quarantined", "the digest of rank 1 differs"),)
    assert words(copies) == {M100: "committed"}
    after(load(L100), commit(L102), fault(NAN), copies=copies)
    assert changes(copies) == [(L100, SUSPECT), (L102, SUSPECT)]
    after(begin(3), load(L102, generation=3), bad(103, "x"), copies=copies)
    assert changes(copies) == [], "a suspect that was loaded, or has failed otherwise, is no other suspect"
    after(clear(NAN, ANY), load(L100, generation=4), fault(NAN), copies=copies)
    assert changes(copies)[-1] == (L100, SUSPECT)
    copies = after(*TWICE)
    copies.changes()
    assert changes(after(set_aside(C100, "marked"), copies=copies)) == []


def test_suspects_that_hold_the_job_back_are_those_that_are_no_older_than_the_newest_to_be_trusted() -> None:
    copies = after(commit(L80), load(L100), commit(L102), fault(NAN))
    assert copies.held_back() == (L102, L100)
    for name, held_back in ((copy_name(101, 3), (L102,)), (copy_name(110, 3), ())):
        assert after(commit(name), copies=copies).held_back() == held_back
    copies = after(load(L100))
    assert copies.has_trusted()
    copies.fault(NAN)
    assert (copies.has_trusted(), copies.held_back()) == (False, (L100,)), "there is nothing else"


@pytest.mark.parametrize(
    ("turn", "word"),
    [(clean(122), "proven"), (fault(Faulted(103, "corrupt", "x", agreed=101, speaks=True)), "quarantined")],
    ids=["clean steps", "replicas differ"],
)
def test_a_launcher_that_takes_over_a_generation_judges_what_that_had_saved_before(
    turn: Turn, word: str
) -> None:
    copies = heir_of(after(begin(2), commit(L102)))
    assert words(after(begin(2), turn, copies=copies)) == {L102: word}


def test_the_next_launcher_goes_on_from_the_newest_durable_copy_that_is_to_be_trusted() -> None:
    copies, found = Copies(), []
    for turns in (
        (commit(M100),),
        (commit(C80), commit(L90)),
        (load(L90), bad(93)),
        (load(L80, generation=3), bad(83)),
        (load(L90, generation=4), bad(93)),
    ):
        found.append(after(*turns, copies=copies).newest_durable())
    assert found == [-1, 90, 80, 90, 80], "a suspect, where nothing else is left"


def test_ranks_get_the_newest_copies_under_suspicion_and_the_newest_proven_one() -> None:
    places = [place(("local", "memory")[step % 2], step, 2) for step in range(101, 141)]
    copies = after(load(L100), *map(commit, places), fault(NAN))
    assert [one for one in marked(copies) if not one.startswith("*")] == places[-32:]
    saved = [place("local", step) for step in (10, 20, 30)]
    copies = after(begin(1), *map(commit, saved), commit(place("memory", 35)), clean(60))
    marks = [mark for mark in map(Mark.parse, copies.marks()) if mark.bearing is CopyStatus.PROVEN]
    assert marks == [Mark(saved[-1], CopyStatus.PROVEN)]


def test_ranks_get_the_newest_copies_that_must_be_somewhere() -> None:
    disk = [copy_name(step, 1) for step in range(10, 70, 10)]
    elsewhere = place("global", 20)
    copies, found = Copies(), []
    for turns in (
        (commit(place("memory", 3)),),
        (*map(commit, disk), commit(elsewhere)),
        tuple(map(remove, disk)),
        (remove(elsewhere),),
    ):
        found.append(Marks(after(*turns, copies=copies).marks()).durable)
    assert found == [set(), set(disk[-3:]), {disk[1]}, set()], "memory is lost with its node"
    copies = after(commit(L80), load(L100), fault(NAN))
    assert Marks(copies.marks()).durable == {C80, C100}
    assert Marks(after(load(L100), fault(NAN), copies=copies).marks()).durable == {C80}


KEPT = {"trust": "verified", "reason": "r", "digest": "ab", "released": False, "outcomes": ["x"]}


def kept(**more: Any) -> dict[str, Any]:
    found = {"version": 2, "doubted": [[2, L80]], "diverged": [[2, -1]], "copies": {L90: KEPT}}
    return found | {key: value for key, value in more.items() if key in found}


@pytest.mark.parametrize(
    "state",
    [
        {"version": 1},
        {"copies": [1]},
        {"diverged": [[0, -2]]},
        {"doubted": {"2": 1}},
        *({"copies": {L90: KEPT | one}} for one in ({"trust": "gold"}, {"digest": "a,b"}, {"outcomes": 1})),
        *({"copies": {place: KEPT}} for place in (f"a|b/{C100}", f"a,b/{C100}", "local/latest", C100)),
    ],
    ids=str,
)
def test_what_is_not_the_trust_of_a_launcher_is_refused(state: dict[str, Any]) -> None:
    assert Copies.restored(kept(), {}).state() == kept()
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever part
        Copies.restored(kept(**state), {})


PLACES = st.builds(
    place, st.sampled_from(["memory", "local"]), st.sampled_from([10, 20, 40]), st.integers(1, 4)
)
STEPS = st.integers(-1, 90)
BETWEEN = st.one_of(
    st.tuples(st.just("commit"), PLACES),
    st.tuples(st.just("remove"), PLACES),
    st.tuples(st.just("set_aside"), PLACES, st.just("digest")),
    st.tuples(st.just("clean"), STEPS),
    st.tuples(st.just("clean"), STEPS),
)
FAULTS = st.builds(
    Faulted,
    STEPS,
    st.sampled_from([NON_FINITE, "error"]),
    st.sampled_from("ab"),
    st.booleans(),
    st.none() | STEPS,
    speaks=st.booleans(),
)
# Of a generation: what it loads, the digest, what happens then, its fault, and whether the launcher ends.
Generation = tuple[list[str], str, list[tuple[Any, ...]], Faulted, bool]
GENERATIONS = st.tuples(
    st.lists(PLACES, max_size=2, unique=True),
    st.sampled_from(["", "ab"]),
    st.lists(BETWEEN, max_size=4),
    FAULTS,
    st.booleans(),
)


def turns_of(history: list[Generation]) -> list[tuple[Any, ...]]:
    """Return the calls of a history."""
    found: list[tuple[Any, ...]] = []
    for generation, (loaded, digest, between, end, restart) in enumerate(history, 1):
        found.append(("begin", generation))
        if loaded:
            found.append(("load", int(loaded[0].partition("-")[2][:9]), loaded, digest, generation))
        found += [*between, ("fault", end)] + [("restart",)] * restart
    return found


def allowed(change: TrustChange, before: str | None, call: tuple[Any, ...], began: int) -> bool:
    """Say whether a change may happen, whatever happened before."""
    if before in (change.trust, Trust.QUARANTINED.value) or not change.reason:
        return False
    soon = call[0] == "fault" and max(call[1].step, began) - began < CLEAN_STEPS
    match change.trust:
        case "proven":
            return call[0] == "clean" and before is not None and call[1] - began >= CLEAN_STEPS
        case "suspect":
            late = before is None and "the path that began" in change.reason
            return late or (call[0] == "fault" and (call[1].lasting or (call[1].speaks and soon)))
        case "quarantined":
            again = before == SUSPECT and change.reason.endswith("as after the load before")
            return call[0] == "set_aside" or again or "held" in change.reason or "hold" in change.reason
    return False


def test_whatever_happens_changes_and_marks_fit_the_trust_and_the_next_launcher_knows_it() -> None:
    seen: Counter[str] = Counter()
    met: Generation = ([M10], "ab", [], Faulted(13, NON_FINITE, "x", speaks=True), False)

    @settings(max_examples=400)
    @example([met, met])
    @example([([M10], "", [("clean", 35)], Faulted(0, NON_FINITE, "a", speaks=True), False)])
    @given(st.lists(GENERATIONS, max_size=8))
    def check(history: list[Generation]) -> None:
        copies, began = Copies(), 0
        for name, *arguments in turns_of(history):
            before, heir = words(copies), heir_of(copies)
            assert (heir.marks(), heir.standing()) == (copies.marks(), copies.standing())
            if name == "restart":
                copies = heir
                continue
            getattr(copies, name)(*arguments)
            began = arguments[0] if name == "load" else 0 if name == "begin" else began
            found, last = words(copies), dict(before)
            for change in copies.changes():
                call = (name, *arguments)
                assert allowed(change, last.get(change.place), call, began), (change, call)
                last[change.place] = change.trust
            special = {"suspect", "quarantined", "proven"}
            assert {one: word for one, word in found.items() if word in special} == {
                one: word for one, word in last.items() if word in special and one in found
            }
            against = {one: word for one, word in found.items() if word in ("suspect", "quarantined")}
            marks = {one: str(word.value) for one, word in marked(copies).items() if one in found}
            assert marks == against
            for one in against:
                assert Marks(copies.marks()).of(*one.split("/")) is not None
            assert set(copies.held_back()) <= against.keys()
            seen.update(found.values())

    check()
    assert min(seen[one.value] for one in Trust) > 0, seen


@settings(max_examples=200)
@given(st.lists(GENERATIONS, max_size=6), st.lists(GENERATIONS, max_size=3))
def test_the_next_launcher_decides_as_the_one_before_would_have(
    earlier: list[Generation], later: list[Generation]
) -> None:
    first = Copies()
    for name, *arguments in turns_of(earlier):
        if name != "restart":
            getattr(first, name)(*arguments)
    first.changes()
    second = heir_of(first)
    for name, *arguments in turns_of([*earlier, *later])[len(turns_of(earlier)) :]:
        for copies in (first, second):
            if name != "restart":
                getattr(copies, name)(*arguments)
        assert first.changes() == second.changes()
        assert first.state() == second.state()


def test_the_generation_of_a_launcher_ends_with_it() -> None:
    heir = after(clean(130), bad(131), copies=heir_of(after(load(L100), clean(119))))
    assert (heir.idle_at(-1), words(heir)) == (-1, {L100: "verified"})


def test_trainings_of_one_job_know_nothing_of_each_others_copies() -> None:
    """Each gets what is known of its own, as if it were the only one; what it has on disk is no other's."""
    copies = after(begin(1), commit(C100), commit(f"a:local/{C80}"), commit(f"b:local/{C100}"))
    copies.load(100, (f"b:memory/{C100}",), "", 2)
    assert not copies.another_exists(), "the older copies are of other trainings"
    copies.fault(NAN)
    for training, durable, suspect in (("", C100, False), ("a", C80, False), ("b", C100, True)):
        marks = Marks(marks_for(copies.marks(), training))
        assert marks.durable == {durable}, training
        assert (marks.of("memory", C100) is not None) is suspect, training
    assert copies.newest_durable() == 100


def test_a_mark_of_a_generation_is_for_all_trainings() -> None:
    general, bare = f'*/>89.g{7}|suspect||"why"', C80
    assert marks_for((general, bare), "") == (general, bare)
    assert marks_for((general, bare), "a") == (general,)
