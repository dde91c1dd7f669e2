"""The node ledger: who is in burn-in, who is in quarantine, and what gets a node out of it."""

from __future__ import annotations

import random

import pytest

from outlast.health.policy.fitting import Outage
from outlast.health.policy.hazard import DAY, HOUR, NodeHistory
from outlast.health.policy.ledger import BadEntry, Entry, Ledger, State, What, entry_of

NOW = 1_000 * DAY


def fault(days_ago: float, node: str = "a", kind: str = "GPU") -> Entry:
    return Entry(NOW - days_ago * DAY, node, What.FAULT, kind)


def state(*entries: Entry, after: int = 3) -> tuple[State, str]:
    found = Ledger(entries, after).standing("a", NOW)
    return found.state, found.reason


def test_an_unknown_node_is_good() -> None:
    assert state() == (State.GOOD, "")
    assert Ledger((), 3).history("a", NOW) == NodeHistory()


def test_a_node_that_came_back_is_in_burn_in_for_a_day() -> None:
    back = Entry(NOW - 5 * HOUR, "a", What.REPAIR)
    assert state(fault(3), back) == (State.BURN_IN, "it came back 5.0 h ago from a fault (GPU)")
    assert state(fault(3), Entry(NOW - 25 * HOUR, "a", What.REPAIR)) == (State.GOOD, "")


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ((2, 5), "2 faults in 7 days (GPU)"),
        ((2, 10, 20), "3 faults in 30 days (GPU)"),
        ((2, 10), ""),
        ((10, 20, 40), ""),
    ],
)
def test_a_node_that_fails_often_is_in_quarantine(days: tuple[float, ...], expected: str) -> None:
    found = state(*map(fault, days))
    assert found == ((State.QUARANTINE, expected) if expected else (State.GOOD, ""))


def test_zero_leaves_quarantine_to_people() -> None:
    assert state(fault(2), fault(3), fault(4), after=0)[0] is State.GOOD
    by_hand = Entry(NOW - DAY, "a", What.QUARANTINE, reason="cable")
    assert state(by_hand, after=0) == (State.QUARANTINE, "cable")


def test_a_release_ends_it_and_later_faults_count() -> None:
    release = Entry(NOW - 1.5 * DAY, "a", What.RELEASE)
    assert state(fault(2), fault(3), fault(4), release)[0] is State.GOOD
    assert state(fault(2), release, fault(1.2), fault(1.1))[0] is State.QUARANTINE
    assert state(Entry(NOW - 3 * DAY, "a", What.QUARANTINE), release)[0] is State.GOOD


def test_a_burst_of_several_writers_is_one_fault() -> None:
    burst = [Entry(NOW - DAY * 2 + second, "a", What.FAULT, "lost") for second in (0, 1, 60, 179)]
    assert state(*burst)[0] is State.GOOD
    assert len(Ledger(burst, 3).entries("a")) == 1


def test_the_order_of_the_files_is_nothing(seed: int) -> None:
    draw = random.Random(seed)
    entries = [fault(draw.uniform(0, 40), draw.choice("abc"), draw.choice(("GPU", "NIC"))) for _ in range(30)]
    mixed = draw.sample(entries, len(entries))
    one, other = Ledger(entries, 3), Ledger(mixed, 3)
    assert [one.standing(node, NOW) for node in "abc"] == [other.standing(node, NOW) for node in "abc"]


def test_outages_end_with_the_repair() -> None:
    ledger = Ledger([fault(3), Entry(NOW - DAY, "a", What.REPAIR), fault(0.5, kind="NIC")], 3)
    assert ledger.outages("a") == [
        Outage("a", NOW - 3 * DAY, NOW - DAY, "GPU"),
        Outage("a", NOW - 0.5 * DAY, NOW - 0.5 * DAY, "NIC"),
    ]
    assert ledger.needs_repair_entry("a")
    assert ledger.history("a", NOW) == NodeHistory(0.5 * DAY, "NIC", 2)
    assert not Ledger([fault(3), Entry(NOW, "a", What.REPAIR)], 3).needs_repair_entry("a")


def test_a_line_gives_the_same_entry() -> None:
    entry = Entry(NOW, "a", What.SIGN, "hot", "GPU-1", "it is hot")
    assert entry_of(entry.to_line()) == entry
    assert entry_of(Entry(NOW, "a", What.REPAIR).to_line()) == Entry(NOW, "a", What.REPAIR)


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "{", '{"time": 1}', '{"time": -1, "node": "a", "what": "fault"}'),
        *('{"time": 1, "node": "", "what": "fault"}', '{"time": 1, "node": "a", "what": "rumour"}'),
        '{"time": 1, "node": "a", "what": "fault", "kind": 3}',
        '{"time": true, "node": "a", "what": "fault"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises(BadEntry, match="expected"):
        entry_of(line)
