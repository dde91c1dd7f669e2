"""The node ledger: who is in burn-in, who is in quarantine, and what gets a node out of it."""

from __future__ import annotations

import json
import random

import pytest

from outlast.health.policy.fitting import Outage
from outlast.health.policy.hazard import DAY, HOUR, NodeHistory
from outlast.health.policy.ledger import (
    BadEntry,
    Entry,
    Ledger,
    Standing,
    State,
    What,
    entry_of,
    in_quarantine,
)

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
    for hours, expected in ((5, State.BURN_IN), (23.999, State.BURN_IN), (24, State.GOOD)):
        found, reason = state(fault(3), Entry(NOW - hours * HOUR, "a", What.REPAIR))
        assert (found, "GPU" in reason) == (expected, expected is State.BURN_IN)


def test_a_loss_of_a_node_that_lived_counts_no_more_and_other_faults_do() -> None:
    def loss(days_ago: float, what: What = What.FAULT) -> Entry:
        return Entry(NOW - days_ago * DAY, "a", what, "lost")

    lived = [loss(6), loss(5.9999, What.LIVED), loss(0.2), loss(0.1999, What.LIVED)]
    assert state(*lived) == (State.GOOD, "")
    assert Ledger(lived, 3).outages("a") == []
    assert not Ledger(lived, 3).needs_repair_entry("a")
    assert state(*lived, fault(2), fault(1))[0] is State.QUARANTINE
    assert state(*lived, loss(3), loss(4))[0] is State.QUARANTINE, "nobody came back from those"
    assert state(loss(2.0001, What.LIVED), fault(1), loss(2))[0] is State.QUARANTINE


@pytest.mark.parametrize(
    ("days", "quarantine"),
    [
        ((2, 5), True),
        ((2, 6.999), True),
        ((2, 7), False),
        ((2, 10), False),
        ((2, 10, 29.999), True),
        ((2, 10, 30), False),
        ((10, 20, 40), False),
    ],
)
def test_a_node_that_fails_often_is_in_quarantine(days: tuple[float, ...], quarantine: bool) -> None:
    found, reason = state(*map(fault, days))
    assert (found is State.QUARANTINE, "GPU" in reason) == (quarantine, quarantine)


def test_a_fault_without_a_repair_begins_the_burn_in() -> None:
    assert state(fault(0.5, kind=""))[0] is State.BURN_IN
    repaired = Entry(NOW - HOUR, "a", What.REPAIR)
    found, reason = state(fault(20, kind="NIC"), fault(10), repaired)
    assert (found, "GPU" in reason, "NIC" in reason) == (State.BURN_IN, True, False)


def test_a_clock_may_be_ahead_by_the_length_of_a_burst_and_no_more() -> None:
    near, far = (Entry(NOW + ahead, "a", What.FAULT, "GPU") for ahead in (180, 180.1))
    assert state(near)[0] is State.BURN_IN
    assert state(far) == (State.GOOD, "")


def test_what_the_launcher_hears_of_a_node() -> None:
    assert Standing(State.GOOD).last_choice == ""
    assert "why" in Standing(State.BURN_IN, "why").last_choice
    assert [in_quarantine(Standing(one, "quarantine: no").last_choice) for one in State] == [
        *(False, False, True)
    ]


def test_zero_leaves_quarantine_to_people() -> None:
    assert state(fault(2), fault(3), fault(4), after=0)[0] is State.GOOD
    by_hand = Entry(NOW - DAY, "a", What.QUARANTINE, reason="cable")
    assert state(by_hand, after=0) == (State.QUARANTINE, "cable")
    assert state(Entry(0.0, "a", What.QUARANTINE), fault(1)) == (
        State.QUARANTINE,
        state(Entry(0.0, "a", What.QUARANTINE))[1],
    )


def test_a_release_ends_it_and_later_faults_count() -> None:
    release = Entry(NOW - 1.5 * DAY, "a", What.RELEASE)
    assert state(fault(2), fault(3), fault(4), release)[0] is State.GOOD
    assert state(fault(2), release, fault(1.2), fault(1.1))[0] is State.QUARANTINE
    assert state(Entry(NOW - 3 * DAY, "a", What.QUARANTINE), release)[0] is State.GOOD
    assert state(release, Entry(NOW - DAY, "a", What.QUARANTINE))[0] is State.QUARANTINE
    assert state(fault(0.5), Entry(NOW - 0.5 * DAY, "a", What.RELEASE), after=1)[0] is State.GOOD


def test_a_burst_of_several_writers_is_one_fault() -> None:
    burst = [Entry(NOW - DAY * 2 + second, "a", What.FAULT, "lost") for second in (0, 1, 60, 179)]
    assert state(*burst)[0] is State.GOOD
    assert len(Ledger(burst, 3).entries("a")) == 1
    signs = [Entry(burst[0].time + 5 * number, "a", What.SIGN, "hot") for number in range(20)]
    assert len(Ledger([*burst, *signs], 3).entries("a")) == 1 + len(signs)
    assert len(Ledger([burst[0], fault(2, "b")], 3).nodes) == 2
    assert len(Ledger([burst[0], Entry(burst[0].time + 180, "a", What.FAULT)], 3).entries("a")) == 2


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
    assert Ledger([fault(3), Entry(NOW, "a", What.SIGN, "hot")], 3).needs_repair_entry("a")
    assert ledger.history("a", NOW) == NodeHistory(0.5 * DAY, "NIC", 2)
    assert not Ledger([fault(3), Entry(NOW, "a", What.REPAIR)], 3).needs_repair_entry("a")


def test_a_node_whose_next_fault_is_in_the_future_has_the_history_of_now() -> None:
    ledger = Ledger([fault(3), Entry(NOW - DAY, "a", What.REPAIR), fault(-1, kind="NIC")], 3)
    assert ledger.history("a", NOW) == NodeHistory(DAY, "GPU", 1)
    assert Ledger([fault(0)], 3).history("a", NOW) == NodeHistory(0.0, "GPU", 1)


def test_a_node_that_runs_before_its_repair_is_written_came_back_just_now() -> None:
    repair, later = Entry(NOW + HOUR, "a", What.REPAIR), fault(-1, kind="NIC")
    assert Ledger([fault(1), repair, later], 3).history("a", NOW) == NodeHistory(0.0, "GPU", 1)


def test_a_line_gives_the_same_entry() -> None:
    entry = Entry(NOW, "a", What.SIGN, "hot", "GPU-1", "it is hot")
    assert entry_of(entry.to_line()) == entry
    assert entry_of(Entry(NOW, "a", What.REPAIR).to_line()) == Entry(NOW, "a", What.REPAIR)


def test_a_line_leaves_out_what_is_not_known_and_is_short() -> None:
    line = Entry(1.0, "a", What.REPAIR, reason="x" * 501).to_line()
    assert json.loads(line) == {"time": 1.0, "node": "a", "what": "repair", "reason": "x" * 500}
    long = {"time": 0, "node": "n" * 501, "what": "fault", "kind": "k" * 501, "device": "d" * 501}
    found = entry_of(json.dumps(long))
    assert found == Entry(0.0, "n" * 500, What.FAULT, "k" * 500, "d" * 500)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *((line, "JSON") for line in ("", "{", "[" * 100_000)),
        ("[]", "object"),
        ("{}", "time"),
        *((f'{{"time": {value}, "node": "a", "what": "fault"}}', "time") for value in ("-1", "1e15", "true")),
        ('{"time": 1}', "node"),
        ('{"time": 1, "node": "", "what": "fault"}', "node"),
        ('{"time": 1, "node": "a", "what": "rumour"}', "what.*rumour"),
        *(
            (json.dumps({"time": 1, "node": "a", "what": "fault", n: 3}), n)
            for n in ("kind", "device", "reason")
        ),
    ],
)
def test_what_is_no_entry_is_refused_with_the_field(line: str, named: str) -> None:
    with pytest.raises(BadEntry, match=named):
        entry_of(line)
