"""Faults out of logs: which begin and end an outage, what is skipped, and what is refused."""

from __future__ import annotations

import json
import math

import pytest

from outlast.health.policy.fault_logs import BadLog, Logs
from outlast.health.policy.fitting import Outage, SignSeen
from outlast.health.policy.hazard import DAY
from outlast.health.policy.ledger import Entry, What
from outlast.observe.policy import codec
from outlast.recovery.policy.events import FaultSeen, RunStarted


def told(*lines: str) -> Logs:
    logs = Logs()
    logs.add("\n".join(lines).encode())
    return logs


def run(time: float, node: str = "n1") -> str:
    return codec.encode(RunStarted(time, 0.0, 1, "r", node, 1, "b", (), 1, ""))


def fault(time: float, kind: str, node: str = "n1") -> str:
    return codec.encode(FaultSeen(time, 0.0, 1, kind, node, -1, 3, 0.0, "x", "x"))


def trace(*rows: tuple[float, str, str], node: str = "a") -> Logs:
    """Return the logs of a trace of one node: days, what happened, and the class."""
    return told(
        json.dumps(
            [
                {"node_id": node, "event_time": time, "event_type": what, "fault_type": {"Class": kind}}
                for time, what, kind in rows
            ]
        )
    )


@pytest.mark.parametrize("kind", ["lost", "refused", "corrupt"])
def test_a_fault_of_a_node_lasts_until_a_run_starts_there(kind: str) -> None:
    logs = told(run(1.0), fault(5.0, kind), fault(7.0, "lost"), "", run(8.0, "n2"), run(9.0))
    assert logs.outages == [Outage("n1", 5.0, 9.0, kind)]
    assert (logs.begin, logs.end, logs.nodes, logs.skipped) == (1.0, 9.0, {"n1", "n2"}, 0)


@pytest.mark.parametrize("kind", ["error", "crash", "hang"])
def test_a_fault_of_the_program_says_nothing_of_a_node(kind: str) -> None:
    logs = told(fault(5.0, kind), run(9.0))
    assert logs.outages == []


def test_a_fault_without_a_node_is_nobodys_and_one_without_a_later_run_lasts() -> None:
    logs = told(fault(5.0, "lost", ""), fault(3.0, "lost", "n3"), run(2.0, "n3"))
    assert logs.outages == [Outage("n3", 3.0, math.inf, "lost")]
    assert logs.nodes == {"n3"}


def test_each_fault_of_an_event_log_has_its_own_end() -> None:
    logs = told(fault(1.0, "lost"), run(2.0), fault(3.0, "corrupt"), run(4.0), run(5.0))
    assert logs.outages == [Outage("n1", 1.0, 2.0, "lost"), Outage("n1", 3.0, 4.0, "corrupt")]


def test_lines_that_say_nothing_are_counted() -> None:
    entry = Entry(4.0, "b", What.FAULT, "GPU").to_line()
    logs = told("{torn", entry, "  ", '{"v": 1', '{"v":1', "[]", run(2.0))
    assert logs.outages == [Outage("b", 4.0, 4.0, "GPU")]
    assert (logs.begin, logs.end, logs.nodes, logs.skipped) == (2.0, 4.0, {"b", "n1"}, 4)


def test_several_files_add_up() -> None:
    logs = told(Entry(4.0, "b", What.FAULT, "GPU").to_line())
    logs.add(Entry(9.0, "a", What.SIGN, "hot").to_line().encode())
    logs.add(Entry(1.0, "c", What.FAULT, "NIC").to_line().encode())
    assert [one.node for one in logs.outages] == ["b", "c"]
    assert logs.signs == [SignSeen("a", 9.0, "hot")]
    assert (logs.begin, logs.end, logs.nodes) == (1.0, 9.0, {"a", "b", "c"})


def test_faults_of_one_class_in_a_trace_end_in_the_order_in_which_they_began() -> None:
    logs = trace(
        *(
            (4.0, "fault_end", "x"),
            (1.0, "fault_start", "x"),
            (3.0, "fault_end", "x"),
            (2.0, "fault_start", "x"),
        ),
        *((5.0, "fault_start", "x"), (6.0, "fault_end", "y"), (7.0, "inspection", "x")),
    )
    assert logs.outages == [
        Outage("a", DAY, 3 * DAY, "x"),
        Outage("a", 2 * DAY, 4 * DAY, "x"),
        Outage("a", 5 * DAY, math.inf, "x"),
    ]
    assert (logs.begin, logs.end, logs.skipped) == (0.0, 7 * DAY, 2)


def test_a_record_of_a_newer_version_is_passed_over_and_not_counted() -> None:
    newer = json.dumps({"v": 999, "kind": "MoonPhase", "time": 9.0})
    logs = told(run(1.0), newer.replace('{"v": ', '{"v":'), run(3.0))
    assert (logs.begin, logs.end, logs.nodes, logs.skipped) == (1.0, 3.0, {"n1"}, 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"[1]", b"[", b'[{"node_id": "a"}]', b"[" * 100_000, b" {}"],
    ids=lambda one: one[:9],
)
def test_what_is_no_log_is_refused(content: bytes) -> None:
    with pytest.raises(BadLog) as caught:
        Logs().add(content)
    assert len(str(caught.value)) < 160
