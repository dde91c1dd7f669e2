"""The risk of a node: what follows from incidents, limits at which a sign counts, and properties."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.health.policy import simulation
from outlast.health.policy.hazard import HOUR, NodeHistory
from outlast.health.policy.monitor import Alert, Risk, signs_in_words
from outlast.health.policy.telemetry import DeviceSample, Notice, Sample, Silence, XidEvent
from tests.health.policy.builders import (
    DAY,
    INTERVAL,
    START,
    alerts,
    device,
    devices,
    hard_devices,
    health,
    host,
    node_risk,
    seen,
    xid,
)


@pytest.mark.parametrize(
    ("scenario", "told", "hard", "probability"),
    [
        ("healthy", [], False, 0.0001),
        ("intense-load", [], False, 0.0001),
        ("xid,device=3", [(60, "3", "missing"), (60, "3", ""), (80, "3", "")], True, 1.0),
        ("lost,device=4", [(60, "4", "missing"), (80, "4", "")], True, 1.0),
        ("xid,device=2,xid=63", [(60, "2", "xid_failing")], False, 0.0032),
        (
            "ecc-burst,device=5",
            [
                (90, "5", sign)
                for sign in ("uncorrected_ecc", "remapped_rows", "remap_pending", "corrected_ecc")
            ],
            False,
            0.0045,
        ),
        (
            "thermal-ramp",
            [(290, "0", "hot"), (440, "0", "slowdown"), (450, "0", "slow_clock")],
            False,
            0.0133,
        ),
    ],
)
def test_an_incident(scenario: str, told: list[tuple[int, str, str]], hard: bool, probability: float) -> None:
    parsed, judge, before, said = simulation.parse(scenario), health(), -1.0, list[tuple[int, str, str]]()
    found: list[Risk | Alert] = []
    last = told[-1][0] if told else 1200
    for second in range(0, last + 1, 10):
        at = float(second)
        found = judge.observe(simulation.samples(parsed, "n1", at, before, START + at), START + at)
        before = at
        said += [(second, one.device.removeprefix("GPU-simulated-"), one.sign) for one in alerts(found)]
    assert said == told
    assert node_risk(found).hard is hard
    assert node_risk(found).probability == pytest.approx(probability, rel=0.5)


@pytest.mark.parametrize("what", ["disk: /shared/run", "host: /proc", "kernel log: /dev/kmsg"])
def test_a_file_server_that_hangs_is_no_sign_of_the_node(what: str) -> None:
    judge = health()
    before = node_risk(judge.observe(devices(START), START)).probability
    late = node_risk(seen(judge, Silence(START + 60, "n1", 60.0, what)))
    assert (late.hard, late.probability <= before) == (False, True)


# Silence of the driver


@pytest.mark.parametrize(("seconds", "hard"), [(20.0, False), (44.9, False), (45.0, True)])
def test_a_driver_that_does_not_answer_for_45_s_is_dead_until_a_device_is_read(
    seconds: float, hard: bool
) -> None:
    judge = health()
    found = seen(judge, Silence(START, "n1", seconds, "NVML: device 3"))
    assert (node_risk(found).hard, len(alerts(found))) == (hard, int(hard))
    assert node_risk(found).probability > 0.01
    assert "NVML: device 3" in node_risk(found).reasons[0]
    assert node_risk(seen(judge, device(START + 10, error="lost"))).hard is hard
    assert not node_risk(seen(judge, device(START + 20))).hard


def test_collectors_that_hang_one_after_another_add_up() -> None:
    judge = health()
    judge.observe(devices(START), START)
    hard = {}
    for begun in range(0, 70, 10):  # each is killed after 7 s, and another one starts
        for seconds in (1, 4, 7):
            told = seen(
                judge, Silence(START + begun + seconds, "n1", float(seconds), "NVML: device 1, handle")
            )
            hard[begun + seconds] = node_risk(told).hard
    assert (hard[44], hard[47], hard[67]) == (False, True, True)


@pytest.mark.parametrize(("after", "counts"), [(30.0, 40), (31.0, 41), (1e6, 41), (-9.0, 10)])
def test_two_silences_add_up_by_30_s_at_most_and_not_backwards(after: float, counts: int) -> None:
    def risk(*silences: tuple[float, float]) -> float:
        judge = health()
        return [node_risk(seen(judge, Silence(START + at, "n1", s, "NVML"))) for at, s in silences][
            -1
        ].probability

    assert risk((0.0, 10.0), (after, 1.0)) == pytest.approx(risk((0.0, min(counts, 40.0))), rel=0.03)


def test_a_silence_counts_by_its_length() -> None:
    usual = node_risk(health().risks(START)).probability
    added = [
        node_risk(seen(health(), Silence(START, "n1", one, "NVML"))).probability - usual
        for one in (0.3, 0.6, 10.0, 20.0)
    ]
    assert added[1] == pytest.approx(2 * added[0], rel=0.02)
    assert added[3] == pytest.approx(2 * added[2], rel=0.02)


# Devices


def test_a_device_that_others_are_read_without_is_gone_after_30_s_and_may_come_back() -> None:
    judge = health()
    seen(judge, *devices(START, 2))
    assert not node_risk(seen(judge, device(START + 30, 1))).hard
    assert hard_devices(seen(judge, device(START + 31, 1))) == ["", "GPU-simulated-0"]
    assert not node_risk(seen(judge, *devices(START + 40, 2))).hard


@pytest.mark.parametrize(
    ("values", "looks"),
    [
        ({"remap_failed": True}, 1),
        ({"recovery_action": 4}, 1),
        ({"pcie_width": 8}, 3),
        ({"error": "temperature: unknown error"}, 3),
        ({"pcie_width": 8, "utilization": 0.0}, 0),  # an idle link may be narrow
    ],
)
def test_a_rule_needs_its_number_of_looks(values: dict[str, object], looks: int) -> None:
    judge = health()
    for look in range(1, (looks or 6) + 1):
        at = START + 10 * look
        found = judge.observe(devices(at, **values), at)
        assert node_risk(found).hard is (look == looks)
    assert hard_devices(found) == (["", "GPU-simulated-0"] if looks else [])
    assert not looks or node_risk(found).probability == 1.0


def test_a_value_that_is_not_read_any_more_is_a_part_of_a_sign() -> None:
    def risk(before: DeviceSample, **values: object) -> Risk:
        judge = health()
        seen(judge, before)
        return node_risk(seen(judge, device(START + 10, **values)))

    calm = risk(device(START))
    two = risk(device(START), temperature=None, sm_clock=None)
    lost = risk(device(START), error="lost")
    assert calm.probability < two.probability < lost.probability
    assert all(name in two.reasons[0] for name in ("sm_clock", "temperature"))
    assert "lost" in lost.reasons[0]
    assert risk(device(START, temperature=None), temperature=None).reasons == ()


def test_nothing_fades_while_a_device_is_not_read_and_a_gap_counts_as_a_minute() -> None:
    def after(*samples: DeviceSample) -> float:
        judge = health()
        first = seen(judge, device(START), xid(0, 63))
        return node_risk(seen(judge, *samples) if samples else first).probability

    minute = after(device(START + 60))
    assert after(device(START + HOUR)) == minute < after(device(START + 59))
    assert after(device(START - HOUR)) == after(device(START)) == after()
    assert after(device(START + 30), device(START + 60)) == pytest.approx(minute)


def test_devices_are_named_by_uuid_or_number_and_come_in_order_behind_the_node() -> None:
    judge = health()
    order = [replace(device(START), uuid=f"GPU-{index}", index=index) for index in (10, 2, 0)]
    found = seen(judge, *order, xid(0, 48, 12), xid(0, 63, 11))
    names = ["", "#11", "#12", "GPU-0", "GPU-2", "GPU-10"]
    assert [one.device for one in found if isinstance(one, Risk)] == names
    assert hard_devices(found) == ["", "#12"]
    assert hard_devices(seen(health(), xid(0, 48, index=-1))) == [""]


def test_a_device_that_is_known_by_its_number_gets_its_name_and_keeps_it() -> None:
    judge = health()
    seen(judge, xid(0, 48, 1))
    assert hard_devices(judge.observe(devices(START + 10), START + 10)) == ["", "GPU-simulated-1"]
    found = seen(judge, device(START + 20, 1, uuid=""))
    assert hard_devices(found) == ["", "GPU-simulated-1"]


# XIDs


def test_a_burst_of_one_xid_counts_once() -> None:
    once, burst = health(), health()
    for judge, count in ((once, 1), (burst, 50)):
        judge.observe(devices(START), START)
        judge.observe([xid(at, 74) for at in range(count)], START + 50)
    assert once.risks(START + 50) == burst.risks(START + 50)


@pytest.mark.parametrize(("after", "hard"), [(180.0, True), (DAY - 1, True), (DAY, False)])
def test_two_failures_of_a_link_within_a_day_are_a_failure_of_the_device(after: float, hard: bool) -> None:
    judge = health()
    assert [one.sign for one in alerts(seen(judge, xid(0, 74)))] == ["xid_link"]
    assert node_risk(seen(judge, xid(after, 121))).hard is hard
    assert not node_risk(seen(health(), xid(0, 74, index=0), xid(9, 74, index=1))).hard, "two devices"


@pytest.mark.parametrize(("after", "counts"), [(599.9, False), (600.0, True)])
def test_links_have_ten_minutes_after_the_start_of_the_node(after: float, counts: bool) -> None:
    assert bool(node_risk(seen(health(booted=START), xid(after, 74))).reasons) is counts
    ports = health(booted=START)
    seen(ports, host(0, ib0=0))
    assert bool(alerts(seen(ports, host(after, ib0=1)))) is counts
    narrow = health(booted=START)
    found = [seen(narrow, device(START + after, 0, pcie_width=8)) for _ in range(3)]
    assert node_risk(found[-1]).hard is counts


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ((xid(0, 31),), 0),
        ((xid(0, 31), xid(DAY - 1, 13)), 1),
        ((xid(0, 31), xid(DAY, 13)), 0),
        ((xid(0, 31, 1), xid(1, 31), xid(DAY - 1, 13)), 1),
        ((xid(0, 63), xid(1, 31)), 0),
        ((xid(0, 31, -1), xid(1, 13, -1)), 0),
    ],
)
def test_errors_of_the_program_are_told_and_no_risk(events: tuple[XidEvent, ...], told: int) -> None:
    found = seen(health(), device(START), device(START, 1), *events)
    assert len([one for one in alerts(found) if not one.sign]) == told
    assert events[0].xid == 63 or node_risk(found).reasons == ()


# The host and its history


def test_a_port_that_goes_down_is_a_sign_and_one_that_counts_anew_is_not() -> None:
    judge = health()
    for second, downs in ((0, 3), (10, None), (20, 3), (30, 0), (40, None)):
        assert node_risk(seen(judge, host(second, ib0=downs, ib1=7))).reasons == ()
    found = seen(judge, host(50, ib0=1, ib1=8))
    assert [(one.device, one.sign, "ib0" in one.text) for one in alerts(found)] == [("", "network", True)]
    assert len(node_risk(found).reasons) == 1


def test_signs_of_the_host_fade_while_it_is_read() -> None:
    def after(*seconds: float) -> float:
        judge = health()
        seen(judge, host(0, ib0=0))
        found = seen(judge, host(0, ib0=1))
        for one in seconds:
            found = seen(judge, host(one))
        return node_risk(found).probability

    assert after() == after(0.0) == after(-5.0) > after(30.0) > after(60.0) == after(HOUR)
    assert after(30.0, 60.0) == pytest.approx(after(60.0))


def test_the_history_of_the_node_counts_and_fades() -> None:
    judge = health()
    judge.ledger_says(NodeHistory(HOUR / 2, "GPU", 1), START)
    first, later = node_risk(judge.risks(START)), node_risk(judge.risks(START + 5 * DAY))
    assert "GPU" in first.reasons[0]
    assert later.probability < first.probability / 10
    judge.ledger_says(NodeHistory(), START)
    assert node_risk(judge.risks(START)).reasons == ()


# Alerts and reasons


@pytest.mark.parametrize(("after", "told"), [(DAY - 1, False), (DAY, True), (-HOUR, True)])
def test_what_was_told_is_not_told_again_for_a_day(after: float, told: bool) -> None:
    judge = health()
    assert len(alerts(seen(judge, xid(0, 63)))) == 1
    assert bool(alerts(seen(judge, xid(after, 92)))) is told, "the same sign"
    assert len(alerts(seen(judge, xid(after, 92, index=1)))) == 1, "another device"


@pytest.mark.parametrize(("code", "dead"), [(79, True), (154, False), (1000, False)])
def test_a_dead_device_is_told_once_and_what_says_nothing_is_not(code: int, dead: bool) -> None:
    judge = health()
    found = seen(judge, xid(0, code))
    assert (len(alerts(found)), node_risk(found).hard) == (int(dead), dead)
    assert alerts(seen(judge, xid(2 * DAY, code))) == []


def test_20_alerts_at_once_and_one_more_every_three_minutes_and_how_many_were_left_out() -> None:
    judge = health()
    first = alerts(judge.observe([xid(0, 48, index) for index in range(23)], START))
    assert [one.device for one in first[:20]] == [f"#{index}" for index in range(20)]
    assert (len(first), first[20].device, "3" in first[20].text) == (21, "", True)
    for _ in range(200):
        judge.observe([], START)
    assert alerts(judge.observe([xid(0, 48, 230)], START + 170)) == []
    later = alerts(judge.observe([xid(0, 48, index) for index in (231, 232)], START + 190))
    assert [one.device for one in later] == ["#231", ""]
    assert (
        len(alerts(judge.observe([xid(0, 48, index) for index in range(240, 270)], START + 10 * DAY))) == 21
    )


def test_an_alert_names_node_device_time_and_xid() -> None:
    (alert,) = alerts(seen(health(), device(START, 3), xid(5, 79, index=3)))
    assert (alert.node, alert.device, alert.time) == ("n1", "GPU-simulated-3", START + 5)
    assert "79" in alert.text


def test_hard_reasons_come_first_then_the_largest_then_by_name_and_eight_of_all() -> None:
    reasons = node_risk(seen(health(), xid(0, 63), xid(1, 79), xid(2, 48), xid(3, 74))).reasons
    assert [code for text in reasons for code in ("48", "79", "74", "63") if code in text] == [
        "48",
        "79",
        "74",
        "63",
    ]
    assert len(node_risk(seen(health(), *(xid(0, 48, index) for index in range(10)))).reasons) == 8
    assert node_risk(seen(health(horizon=0.01), xid(0, 74))).reasons == (), "it adds almost nothing"


def test_a_risk_in_words_names_what_when_and_why() -> None:
    text = signs_in_words(Risk("n1", "GPU-1", 0.25, 1800.0))
    assert all(word in text for word in ("GPU-1", "1800 s", "25.00%"))
    text = signs_in_words(Risk("n1", "", 1.0, 5400.0, ("first", "second"), True))
    assert all(word in text for word in ("n1", "first", "second"))


def test_notices_say_nothing_of_the_risk() -> None:
    judge = health()
    before = judge.risks(START)
    assert seen(judge, Notice(START, "n1", "no GPU")) == before


# Properties


NUMBERS = [spec.name for spec in fields(DeviceSample) if "None" in str(spec.type)]
COUNTED = ("ecc_corrected", "ecc_uncorrected", "remapped_rows_uncorrectable")


def rounds(seed: int, count: int) -> list[list[Sample]]:
    """Return rounds of samples and events of four devices, some of them bad."""
    draw = random.Random(seed)
    counts = {name: [0] * 4 for name in COUNTED}
    found: list[list[Sample]] = []
    for number in range(count):
        at = START + INTERVAL * number
        one: list[Sample] = []
        for index in range(4):
            for name, values in counts.items():
                often = name == "ecc_corrected"
                values[index] += draw.choice((0, 0, 0, 0, 1, 900)) if often else draw.random() < 0.05
            now = {name: values[index] for name, values in counts.items()}
            one.append(device(at, index, temperature=draw.choice((50, 55, 80)), **now))
        if draw.random() < 0.2:
            one.append(XidEvent(at, "n1", "", draw.randrange(4), draw.choice((63, 74, 92, 94, 31))))
        found.append(one)
    return found


def last_risks(given_: Iterable[Sequence[Sample]]) -> dict[str, Risk]:
    judge, found = health(), []
    for number, one in enumerate(given_):
        found = judge.observe(one, START + INTERVAL * number)
    return {one.device: one for one in found if isinstance(one, Risk)}


def more_evidence_never_lowers(seed: int) -> None:
    """The XID is one that the rounds do not have: one that repeats within three minutes counts once."""
    plain, draw = rounds(seed, 12), random.Random(seed)
    event = XidEvent(START, "n1", "", draw.randrange(4), draw.choice((79, 156, 157, 172)))
    more = [list(one) for one in plain]
    more[draw.randrange(12)].append(event)
    before, after = last_risks(plain), last_risks(more)
    assert all(after[name].probability >= before[name].probability - 1e-12 for name in before)


def missing_data_never_lowers(seed: int) -> None:
    plain, draw = rounds(seed, 10), random.Random(seed)
    before = last_risks(plain)
    gap: list[list[Sample]] = []
    for number in range(10, 10 + draw.randrange(1, 12)):
        one: list[Sample] = []
        for index in range(4):
            last = next(each for each in plain[-1] if isinstance(each, DeviceSample) and each.index == index)
            sample = device(
                START + INTERVAL * number, index, **{name: getattr(last, name) for name in COUNTED}
            )
            gone = draw.sample(NUMBERS, draw.randrange(1, len(NUMBERS)))
            lost = draw.random() < 0.3
            nothing = dict.fromkeys(NUMBERS) if lost else dict.fromkeys([*gone, "ecc_uncorrected"])
            one.append(replace(sample, error="lost" if lost else "", **nothing))  # type: ignore[arg-type]
        gap.append(one)
    after = last_risks([*plain, *gap])
    assert all(after[name].probability >= before[name].probability - 1e-12 for name in before)


def what_happened_in_a_gap_counts(seed: int) -> None:
    del seed
    judge = health()
    for at, count in ((0, 0), (10, None), (20, 1)):
        found = judge.observe(devices(START + at, ecc_uncorrected=count), START + at)
    assert "uncorrected_ecc" in [one.sign for one in alerts(found)]


def order_is_nothing(seed: int) -> None:
    plain, draw = rounds(seed, 20), random.Random(seed)
    mixed = [draw.sample(list(one), len(one)) for one in plain]
    events_last = [sorted(one, key=lambda each: isinstance(each, XidEvent)) for one in mixed]
    assert last_risks(plain) == last_risks(events_last)


def signs_decay(seed: int) -> None:
    judge = health()
    judge.observe(devices(START), START)
    seen(judge, xid(1, 94, random.Random(seed).randrange(4)))
    risks = [
        node_risk(judge.observe(devices(START + 60.0 * n), START + 60.0 * n)).probability
        for n in range(1, 40)
    ]
    assert all(later < earlier for earlier, later in itertools.pairwise(risks))


@pytest.mark.parametrize(
    "holds",
    [
        more_evidence_never_lowers,
        missing_data_never_lowers,
        what_happened_in_a_gap_counts,
        order_is_nothing,
        signs_decay,
    ],
    ids=lambda one: one.__name__,
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_property_holds(holds: Callable[[int], None], seed: int) -> None:
    holds(seed)


def test_of_very_many_devices_the_oldest_is_forgotten() -> None:
    judge = health()
    every = [DeviceSample(START, "n1", number, f"GPU-{number}", f"model {number}") for number in range(129)]
    assert len(seen(judge, *every[:128])) == 1 + 128
    known = [one.device for one in seen(judge, every[128]) if isinstance(one, Risk)]
    assert (len(known), "GPU-0" in known, "GPU-1" in known) == (1 + 128, False, True)
