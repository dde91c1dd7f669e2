"""The limits of the monitor: at each something counts, and just before it does not; what is said, and how."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from outlast.health.policy.hazard import DEFAULT, HOUR, NodeHistory
from outlast.health.policy.monitor import Alert, Health, Risk, signs_in_words
from outlast.health.policy.telemetry import DeviceSample, HostSample, Notice, Port, Sample, Silence, XidEvent
from tests.health.policy.test_monitor import START, device, devices, health, node_risk

DAY = 86400.0


def xid(after: float, code: int, index: int = 0) -> XidEvent:
    return XidEvent(START + after, "n1", "", index, code)


def texts(found: Iterable[Risk | Alert]) -> list[str]:
    return [one.text for one in found if isinstance(one, Alert)]


def seen(judge: Health, *samples: Sample) -> list[Risk | Alert]:
    """Show a judge some samples, at the time of the last one."""
    return judge.observe(samples, samples[-1].time)


# What the ledger says


@pytest.mark.parametrize(
    ("history", "after", "words"),
    [
        (NodeHistory(23.76 * HOUR, "GPU", 1), 0, "back for 23.8 h after a fault (GPU), 1 in 30 days"),
        (NodeHistory(47.9 * HOUR, "", 2), 0, "back for 47.9 h after a fault (unknown), 2 in 30 days"),
        (NodeHistory(48 * HOUR, "GPU", 1), 0, "back for 2 d after a fault (GPU), 1 in 30 days"),
        (NodeHistory(HOUR, "GPU", 1), 2 * HOUR, "back for 3.0 h after a fault (GPU), 1 in 30 days"),
        (NodeHistory(HOUR, "GPU", 1), -HOUR, "back for 1.0 h after a fault (GPU), 1 in 30 days"),
        (NodeHistory(20 * DAY, "GPU", 1), 2 * DAY, "back for 22 d after a fault (GPU), 1 in 30 days"),
    ],
)
def test_the_history_is_told_with_the_time_since(history: NodeHistory, after: float, words: str) -> None:
    judge = health()
    judge.ledger_says(history, START)
    (reason,) = node_risk(judge.risks(START + after)).reasons
    assert reason.startswith(f"{words} (")


def test_a_node_without_faults_has_no_reason() -> None:
    judge = health()
    judge.ledger_says(NodeHistory(), START)
    assert node_risk(judge.risks(START)).reasons == ()


# What a risk says


def test_the_node_comes_first_then_its_devices_by_number() -> None:
    judge = health()
    order = [replace(device(START), uuid=f"GPU-{index}", index=index) for index in (10, 2, 0, 1)]
    found = seen(judge, *order, xid(0, 63, 12), xid(0, 63, 11))
    assert [one.device for one in found if isinstance(one, Risk)] == [
        *("", "#11", "#12", "GPU-0", "GPU-1", "GPU-2", "GPU-10")
    ]


def test_a_device_without_a_sample_is_named_by_its_number_and_an_unknown_one_not_at_all() -> None:
    judge = health()
    found = [one for one in seen(judge, xid(0, 48, index=1)) if isinstance(one, Risk)]
    assert [(one.device, one.hard) for one in found] == [("", True), ("#1", True)]
    assert found[0].reasons == ("#1: XID 48 (double bit ECC error)",)
    assert found[1].reasons == ("XID 48 (double bit ECC error)",)
    unknown = [one for one in seen(health(), xid(0, 48, index=-1)) if isinstance(one, Risk)]
    assert [(one.device, one.reasons) for one in unknown] == [("", ("XID 48 (double bit ECC error)",))]


def test_a_sample_without_a_name_is_of_the_device_with_its_number() -> None:
    judge = health()
    seen(judge, device(START, 0))
    found = seen(judge, device(START + 10, 0, uuid="", remap_failed=True))
    assert [one.device for one in found if isinstance(one, Risk)] == ["", "GPU-simulated-0"]


def test_hard_reasons_come_first_then_the_largest_then_by_name_and_eight_of_all() -> None:
    judge = health()
    found = seen(judge, xid(0, 63), xid(1, 79), xid(2, 48), xid(3, 74))
    assert [text.partition(" (")[0] for text in node_risk(found).reasons] == [
        *("#0: XID 48", "#0: XID 79", "#0: XID 74", "#0: XID 63")
    ]
    many = seen(health(), *(xid(0, 48, index) for index in range(10)))
    assert len(node_risk(many).reasons) == 8


def test_a_sign_that_adds_almost_nothing_is_no_reason() -> None:
    for horizon, count in ((0.1, 1), (0.01, 0)):
        judge = Health("n1", DEFAULT, horizon, START - HOUR)
        assert len(node_risk(seen(judge, xid(0, 74))).reasons) == count


@pytest.mark.parametrize(
    ("horizon", "words"),
    [(1800.0, "1800 s"), (3599.0, "3599 s"), (3600.0, "1 h"), (5400.0, "1.5 h"), (3618.36, "1.01 h")],
)
def test_a_risk_reads_like_this(horizon: float, words: str) -> None:
    assert signs_in_words(Risk("n1", "GPU-1", 0.25, horizon)) == (
        f"GPU-1: fails within {words} with probability 25.00%"
    )
    hard = Risk("n1", "", 1.0, horizon, ("a", "b"), True)
    assert signs_in_words(hard) == "n1: has failed, or is about to: a; b"


def test_of_very_many_devices_the_oldest_is_forgotten() -> None:
    judge = health()
    every = [DeviceSample(START, "n1", number, f"GPU-{number}", f"model {number}") for number in range(129)]
    assert len(seen(judge, *every[:128])) == 1 + 128
    known = [one.device for one in seen(judge, every[128]) if isinstance(one, Risk)]
    assert len(known) == 1 + 128
    assert ("GPU-0" in known, "GPU-1" in known) == (False, True)


# What is not read


def test_a_value_that_is_not_read_any_more_is_a_part_of_a_sign() -> None:
    judge, other = health(), health()
    for one in (judge, other):
        seen(one, device(START))
    found = seen(judge, device(START + 10, temperature=None, sm_clock=None))
    assert node_risk(found).reasons == ("GPU 0: not read: sm_clock, temperature (0.19%)",)
    lost = seen(other, device(START + 10, error="lost"))
    assert node_risk(lost).reasons == ("GPU 0: not read: lost (1.49%)",)
    never = health()
    for after in (0, 10):
        assert node_risk(seen(never, device(START + after, temperature=None))).reasons == ()


@pytest.mark.parametrize(("count", "more"), [(4, ""), (5, ", ...")])
def test_four_values_that_are_not_read_are_named(count: int, more: str) -> None:
    names = ("ecc_corrected", "nvlink_errors", "pcie_width", "sm_clock", "temperature")[:count]
    judge = health()
    seen(judge, device(START))
    found = seen(judge, device(START + 10, 0, **dict.fromkeys(names)))
    assert f"not read: ecc_corrected, nvlink_errors, pcie_width, sm_clock{more}" in texts(found)


def test_a_long_error_is_cut() -> None:
    found = seen(health(), device(START, error="x" * 300))
    assert texts(found) == [f"not read: {'x' * 150}"]


def test_nothing_fades_while_a_device_is_not_read_and_a_gap_counts_as_a_minute() -> None:
    def after(*samples: DeviceSample) -> float:
        judge = health()
        first = seen(judge, device(START), xid(0, 63))
        return node_risk(seen(judge, *samples) if samples else first).probability

    minute = after(device(START + 60))
    assert after(device(START + HOUR)) == minute
    assert after(device(START + 59)) > minute
    assert after(device(START - HOUR)) == after(device(START)) == after()
    assert after(device(START + 30), device(START + 60)) == pytest.approx(minute)


def test_a_device_that_others_are_read_without_is_gone_after_30_s_and_may_come_back() -> None:
    judge = health()
    seen(judge, *devices(START, 2))
    assert not node_risk(seen(judge, device(START + 30, 1))).hard
    found = seen(judge, device(START + 31, 1))
    assert node_risk(found).reasons[0] == "GPU 0: it is no longer there, for 31 s"
    assert texts(found) == ["it is no longer there, for 31 s"]
    assert [one.device for one in found if isinstance(one, Risk) and one.hard] == ["", "GPU-simulated-0"]
    assert node_risk(seen(judge, device(START + 40, 0, error="lost"))).hard
    back = node_risk(seen(judge, *devices(START + 50, 2)))
    assert not back.hard
    assert back.reasons[0].startswith("GPU 0: not read: lost (")
    briefly = health()
    seen(briefly, *devices(START, 2))
    seen(briefly, device(START + 31, 1))
    back = node_risk(seen(briefly, *devices(START + 40, 2)))
    assert back.reasons == ("GPU 0: it is no longer there, for 31 s (1.48%)",)


# Counters and peers


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ecc_uncorrected", "3 uncorrected ECC error(s)"),
        ("remapped_rows_uncorrectable", "3 row(s) remapped after uncorrectable errors"),
    ],
)
def test_a_counter_tells_what_was_added_and_not_what_it_has(name: str, words: str) -> None:
    judge = health()
    assert texts(seen(judge, device(START, 0, **{name: 5}))) == []
    assert texts(seen(judge, device(START + 10, **{name: 0}))) == []
    assert texts(seen(judge, device(START + 20, **{name: 0}))) == []
    found = seen(judge, device(START + 30, **{name: 3}))
    assert texts(found) == [words]
    again = node_risk(seen(judge, device(START + 40, **{name: 6}))).probability
    assert again > 1.5 * node_risk(found).probability


@pytest.mark.parametrize(
    ("peers", "age", "found"),
    [
        ({}, 0.0, True),
        ({"model": "A100"}, 0.0, False),
        ({"error": "lost"}, 0.0, False),
        ({}, 60.0, True),
        ({}, 60.1, False),
        ({}, -60.1, False),
    ],
)
def test_a_device_is_compared_with_those_of_its_model_that_were_read_within_a_minute(
    peers: dict[str, str], age: float, found: bool
) -> None:
    judge, told = health(), list[Risk | Alert]()
    for number in range(16):
        at = START + 100.0 * number
        others = [replace(device(at - age, index), **peers) for index in (1, 2, 3)]  # type: ignore[arg-type]
        told = seen(judge, *others, device(at, 0, sm_clock=1100.0))
    assert any("of the clock below the other devices" in one for one in node_risk(told).reasons) is found


def test_samples_that_come_together_count_as_those_that_come_one_by_one() -> None:
    readings: list[list[Sample]] = []
    for number in range(6):
        at = START + 10.0 * number
        slow = {"ecc_uncorrected": number, "pcie_width": 8, "sm_clock": 1800.0}
        readings.append([device(at, index, **(slow if index == 0 else {})) for index in range(4)])
    apart, together, noted = health(), health(), health()
    for reading in readings:
        apart.observe(reading, START)
        noted.observe([one for sample in reading for one in (sample, Notice(START, "n1", "hello"))], START)
    together.observe(itertools.chain(*readings), START)
    assert apart.risks(START) == together.risks(START) == noted.risks(START)
    assert [text.rpartition(" (")[0] or text for text in node_risk(apart.risks(START)).reasons] == [
        "GPU 0: PCIe width is 8 of 16 lanes under load",
        "GPU 0: 9.1 % of the clock below the other devices",
        "GPU 0: 1 uncorrected ECC error(s)",
    ]


# XIDs


@pytest.mark.parametrize(("after", "count"), [(179.9, 1), (180.0, 2)])
def test_an_xid_counts_again_after_three_minutes(after: float, count: int) -> None:
    judge = health()
    once = node_risk(seen(judge, xid(0, 63))).probability
    assert round(node_risk(seen(judge, xid(after, 63))).probability / once) == count
    assert node_risk(seen(judge, xid(after, 92))).probability > once * (count + 0.9), "another one"


@pytest.mark.parametrize(("after", "hard"), [(DAY - 1, True), (DAY, False)])
def test_two_link_failures_within_a_day_are_too_many(after: float, hard: bool) -> None:
    judge = health()
    assert texts(seen(judge, xid(0, 74))) == ["XID 74 (NVLink error)"]
    found = seen(judge, xid(after, 121))
    assert node_risk(found).hard is hard
    words = "2 link failures in 24 h: XID 121 (C2C link error)"
    assert (words in texts(found)) is hard
    other = health()
    assert not node_risk(seen(other, xid(0, 74, index=0), xid(9, 74, index=1))).hard


@pytest.mark.parametrize(("after", "counts"), [(599.9, False), (600.0, True)])
def test_links_have_ten_minutes_after_the_start_of_the_node(after: float, counts: bool) -> None:
    judge = health(booted=START)
    assert bool(node_risk(seen(judge, xid(after, 74))).reasons) is counts
    ports = health(booted=START)
    seen(ports, HostSample(START, "n1", (Port("ib0", True, 0),)))
    down = seen(ports, HostSample(START + after, "n1", (Port("ib0", True, 1),)))
    assert bool(texts(down)) is counts
    narrow = health(booted=START)
    found = [seen(narrow, device(START + after, 0, pcie_width=8)) for _ in range(3)]
    assert node_risk(found[-1]).hard is counts


@pytest.mark.parametrize(("after", "told"), [(DAY - 1, False), (DAY, True), (-HOUR, True)])
def test_what_was_told_is_not_told_again_for_a_day(after: float, told: bool) -> None:
    judge = health()
    assert texts(seen(judge, xid(0, 63))) == ["XID 63 (rows are remapped)"]
    assert bool(texts(seen(judge, xid(after, 92)))) is told, "the same sign"
    assert len(texts(seen(judge, xid(after, 92, index=1)))) == 1, "another device"


@pytest.mark.parametrize("code", [79, 154, 1000])
def test_a_dead_device_is_told_once_and_what_says_nothing_is_not(code: int) -> None:
    judge = health()
    found = seen(judge, xid(0, code))
    assert len(texts(found)) == (code == 79)
    assert node_risk(found).hard is (code == 79)
    assert texts(seen(judge, xid(2 * DAY, code))) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((xid(0, 31), xid(DAY - 1, 13)), "2 in 24 h on this device alone; test the device"),
        ((xid(0, 31), xid(DAY, 13)), ""),
        ((xid(0, 31, 1), xid(1, 31), xid(DAY - 1, 13)), "on several devices, so the program is likely"),
        ((xid(0, 31, 1), xid(DAY - 1, 31), xid(DAY, 13)), "2 in 24 h on this device alone"),
        ((xid(0, 31), xid(1, 13), xid(2, 154)), "XID 13 (graphics engine exception): 2 in 24 h"),
        ((xid(0, 63), xid(1, 31)), ""),
        ((xid(0, 31, -1), xid(1, 13, -1)), ""),
    ],
)
def test_errors_of_the_program_count_for_a_day(events: tuple[XidEvent, ...], words: str) -> None:
    said = [one for one in texts(seen(health(), device(START), device(START, 1), *events)) if ": " in one]
    assert len(said) == bool(words)
    assert all(words in one for one in said)


# The host


def test_a_port_that_is_not_counted_or_counts_anew_is_no_sign() -> None:
    judge = health()
    for second, downs in ((0, 3), (10, None), (20, 3), (30, 0), (40, None)):
        found = seen(
            judge, HostSample(START + second, "n1", (Port("ib0", True, downs), Port("ib1", True, 7)))
        )
        assert node_risk(found).reasons == ()
    found = seen(judge, HostSample(START + 50, "n1", (Port("ib0", True, 1), Port("ib1", True, 8))))
    alerts = [one for one in found if isinstance(one, Alert)]
    assert alerts == [Alert("n1", "", START + 50, "the link of ib0 went down", "network")]
    assert node_risk(found).reasons == ("the link of ib1 went down (2.95%)",), "two links"


def test_signs_of_the_host_fade_while_it_is_read() -> None:
    judge = health()
    silent = node_risk(seen(judge, Silence(START, "n1", 20.0, "NVML"))).probability
    assert node_risk(seen(judge, HostSample(START + 9, "n1"))).probability == silent

    def after(*seconds: float) -> float:
        judge = health()
        seen(judge, HostSample(START, "n1", (Port("ib0", True, 0),)))
        found = seen(judge, HostSample(START, "n1", (Port("ib0", True, 1),)))
        for one in seconds:
            found = seen(judge, HostSample(START + one, "n1"))
        return node_risk(found).probability

    assert after() == after(0.0) == after(-5.0) > after(30.0) > after(60.0) == after(HOUR)
    assert after(30.0, 60.0) == pytest.approx(after(60.0))


@pytest.mark.parametrize(("seconds", "hard"), [(44.9, False), (45.0, True)])
def test_a_driver_that_does_not_answer_for_45_s_is_dead(seconds: float, hard: bool) -> None:
    found = seen(health(), Silence(START, "n1", seconds, "NVML: device 3"))
    assert node_risk(found).hard is hard
    assert texts(found) == (["NVML: device 3 has not answered for 45 s"] if hard else [])


def test_a_silence_counts_by_its_length() -> None:
    usual = node_risk(health().risks(START)).probability
    found = {
        one: node_risk(seen(health(), Silence(START, "n1", one, "NVML"))) for one in (0.3, 0.6, 10.0, 20.0)
    }
    added = {length: one.probability - usual for length, one in found.items()}
    assert added[0.6] == pytest.approx(2 * added[0.3], rel=0.02)
    assert added[20.0] == pytest.approx(2 * added[10.0], rel=0.02)
    assert found[10.0].reasons[0].startswith("NVML has not answered for 10 s (")


def test_a_device_that_is_read_ends_a_silence_and_one_that_is_not_does_not() -> None:
    judge = health()
    seen(judge, Silence(START, "n1", 30.0, "NVML"))
    seen(judge, device(START + 1))
    found = node_risk(seen(judge, Silence(START + 20, "n1", 5.0, "NVML")))
    assert found.reasons[0].startswith("NVML has not answered for 5 s (")
    seen(judge, Silence(START + 60, "n1", 45.0, "NVML"))
    assert node_risk(seen(judge, device(START + 70, error="lost"))).hard
    assert not node_risk(seen(judge, device(START + 80))).hard


def test_silences_add_up_by_30_s_at_most_and_not_backwards() -> None:
    def added(after: float) -> str:
        judge = health()
        seen(judge, Silence(START, "n1", 10.0, "NVML"))
        return node_risk(seen(judge, Silence(START + after, "n1", 1.0, "NVML"))).reasons[0].partition(" (")[0]

    lasted = {after: f"NVML has not answered for {seconds} s" for after, seconds in ((30, 40), (-9, 10))}
    assert {after: added(after) for after in lasted} == lasted
    assert added(31) == added(30)


# Alerts


DEAD = "XID 48 (double bit ECC error)"


def left_out(count: int) -> str:
    return f"{count} more alerts were left out: more than one every 180 s"


def test_20_alerts_at_once_and_one_more_every_three_minutes() -> None:
    judge = health()
    first = judge.observe([xid(0, 48, index) for index in range(23)], START)
    assert texts(first) == [*[DEAD] * 20, left_out(3)]
    for _ in range(200):
        judge.observe([], START)
    assert texts(judge.observe([xid(0, 48, 230)], START + 170)) == []
    later = judge.observe([xid(0, 48, index) for index in (231, 232)], START + 190)
    assert texts(later) == [DEAD, left_out(2)]
    assert texts(judge.observe([xid(0, 48, 233)], START + 370)) == [DEAD]
    many = judge.observe([xid(0, 48, index) for index in range(240, 270)], START + 10 * DAY)
    assert texts(many) == [*[DEAD] * 20, left_out(10)]


@pytest.mark.parametrize(("others", "told"), [(4095, False), (4096, True)])
def test_of_very_many_alerts_the_oldest_is_forgotten(others: int, told: bool) -> None:
    judge = health()
    judge.observe([xid(0, 48, index) for index in range(others + 1)], START)
    again = judge.observe([xid(600, 48, 0), xid(600, 48, others)], START + 600)
    assert texts(again) == ([DEAD] if told else [])


def test_an_alert_names_the_node_the_device_and_the_time() -> None:
    alert = seen(health(), device(START, 3), xid(5, 79, index=3))[0]
    assert alert == Alert("n1", "GPU-simulated-3", START + 5, "XID 79 (GPU has fallen off the bus)")
    sign = seen(health(), device(START, 3), xid(5, 63, index=3))[0]
    assert sign == Alert("n1", "GPU-simulated-3", START + 5, "XID 63 (rows are remapped)", "xid_failing")
