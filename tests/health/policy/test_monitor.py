"""The risk of a node: incidents as their log lines, and properties that hold for any telemetry."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.health.policy import monitor, simulation
from outlast.health.policy.hazard import DEFAULT, HOUR, Marks, NodeHistory
from outlast.health.policy.monitor import Alert, Health, Risk, signs_in_words
from outlast.health.policy.signals import Found
from outlast.health.policy.telemetry import DeviceSample, HostSample, Port, Sample, Silence, XidEvent

START = 1_800_000_000.0
HORIZON = 1800.0
INTERVAL = 10.0


def health(booted: float = START - HOUR) -> Health:
    return Health("n1", DEFAULT, HORIZON, booted)


def device(time: float, index: int = 0, **values: object) -> DeviceSample:
    sample = simulation.samples(simulation.parse("healthy"), "n1", 0.0, -1.0, time)[index]
    assert isinstance(sample, DeviceSample)
    return replace(sample, **values)  # type: ignore[arg-type]


def devices(time: float, count: int = 4, **values: object) -> list[Sample]:
    """Return healthy samples; ``values`` are those of device 0."""
    return [device(time, index, **(values if index == 0 else {})) for index in range(count)]


def node_risk(found: Iterable[Risk | Alert]) -> Risk:
    return next(one for one in found if isinstance(one, Risk) and not one.device)


def log(scenario: str, seconds: int) -> list[str]:
    """Return the alerts of a simulated scenario with their seconds, and the risk at the end."""
    parsed, judge, lines, before = simulation.parse(scenario), health(), [], -1.0
    found: list[Risk | Alert] = []
    for second in range(0, seconds + 1, 10):
        at = float(second)
        found = judge.observe(simulation.samples(parsed, "n1", at, before, START + at), START + at)
        before = at
        for one in found:
            if isinstance(one, Alert):
                device = one.device.removeprefix("GPU-simulated-")
                lines.append(f"{second:4} s  GPU {device}: {one.text}")
    return [*lines, signs_in_words(node_risk(found))]


INCIDENTS = {
    ("healthy", 3600): ["n1: fails within 1800 s with probability 0.01%"],
    ("intense-load", 1200): ["n1: fails within 1800 s with probability 0.01%"],
    ("xid,device=3", 100): [
        "  60 s  GPU 3: not read: temperature: GPU is lost",
        "  60 s  GPU 3: XID 79 (GPU has fallen off the bus)",
        "  80 s  GPU 3: it cannot be read: temperature: GPU is lost",
        "n1: has failed, or is about to: GPU 3: XID 79 (GPU has fallen off the bus); GPU 3: it cannot be"
        " read: temperature: GPU is lost; GPU 3: not read: temperature: GPU is lost (1.49%)",
    ],
    ("lost,device=4", 100): [
        "  60 s  GPU 4: not read: temperature: GPU is lost",
        "  80 s  GPU 4: it cannot be read: temperature: GPU is lost",
        "n1: has failed, or is about to: GPU 4: it cannot be read: temperature: GPU is lost; GPU 4: not read:"
        " temperature: GPU is lost (1.49%)",
    ],
    ("xid,device=2,xid=63", 60): [
        "  60 s  GPU 2: XID 63 (rows are remapped)",
        "n1: fails within 1800 s with probability 0.32%: GPU 2: XID 63 (rows are remapped) (0.32%)",
    ],
    ("ecc-burst,device=5", 120): [
        "  90 s  GPU 5: 1 uncorrected ECC error(s)",
        "  90 s  GPU 5: 1 row(s) remapped after uncorrectable errors",
        "  90 s  GPU 5: a row is remapped at the next reset",
        "  90 s  GPU 5: 50 corrected ECC errors a second, others up to 0.01",
        "n1: fails within 1800 s with probability 0.45%: GPU 5: 1 uncorrected ECC error(s) (0.19%); GPU 5: a"
        " row is remapped at the next reset (0.15%); GPU 5: 50 corrected ECC errors a second, others up to"
        " 0.01 (0.07%); GPU 5: 1 row(s) remapped after uncorrectable errors (0.03%)",
    ],
    ("thermal-ramp", 450): [
        " 290 s  GPU 0: 15.3 °C above the other devices",
        " 440 s  GPU 0: the temperature at which clocks are lowered is reached, for 6 samples",
        " 450 s  GPU 0: 24.6 % of the clock below the other devices",
        "n1: fails within 1800 s with probability 1.33%: GPU 0: 24.6 % of the clock below the other devices"
        " (0.59%); GPU 0: the temperature at which clocks are lowered is reached, for 7 samples (0.59%); GPU"
        " 0: 30.2 °C above the other devices (0.15%)",
    ],
}


@pytest.mark.parametrize(("scenario", "expected"), INCIDENTS.items(), ids=[name for name, _ in INCIDENTS])
def test_an_incident_reads_like_this(scenario: tuple[str, int], expected: list[str]) -> None:
    assert log(*scenario) == expected


@pytest.mark.parametrize("what", ["disk: /shared/run", "host: /proc", "kernel log: /dev/kmsg"])
def test_a_file_server_that_hangs_is_no_sign_of_the_node(what: str) -> None:
    judge = health()
    before = node_risk(judge.observe(devices(START), START)).probability
    late = node_risk(judge.observe([Silence(START + 60, "n1", 60.0, what)], START + 60))
    assert not late.hard
    assert late.probability <= before


def test_a_silent_driver_is_the_strongest_sign() -> None:
    judge = health()
    judge.observe(devices(START), START)
    early = judge.observe([Silence(START + 20, "n1", 20.0, "NVML: device 3")], START + 20)
    assert not node_risk(early).hard
    assert node_risk(early).probability > 0.01
    late = judge.observe([Silence(START + 60, "n1", 60.0, "NVML: device 3")], START + 60)
    assert node_risk(late).hard
    assert node_risk(late).reasons[0] == "NVML: device 3 has not answered for 60 s"
    answered = judge.observe(devices(START + 70), START + 70)
    assert not node_risk(answered).hard


def test_collectors_that_hang_one_after_another_add_up() -> None:
    judge = health()
    judge.observe(devices(START), START)
    hard = {}
    for begun in range(0, 70, 10):  # each is killed after 7 s, and another one starts
        for seconds in (1, 4, 7):
            at = START + begun + seconds
            told = judge.observe([Silence(at, "n1", float(seconds), "NVML: device 1, handle")], at)
            hard[begun + seconds] = node_risk(told).hard
    assert (hard[44], hard[47], hard[67]) == (False, True, True)
    jumped = health()
    jumped.observe([Silence(START, "n1", 1.0, "NVML: device 1, handle")], START)
    later = jumped.observe([Silence(START + 1e6, "n1", 1.0, "NVML: device 1, handle")], START + 1e6)
    assert not node_risk(later).hard, "the clock has jumped"


def test_a_device_that_vanishes_is_found_by_those_that_stay() -> None:
    judge = health()
    for second in range(0, 40, 10):
        judge.observe(devices(START + second, 4), START + second)
    for second in range(40, 80, 10):
        found = judge.observe(devices(START + second, 3), START + second)
    assert node_risk(found).hard
    assert "no longer there, for 40 s" in node_risk(found).reasons[0]


@pytest.mark.parametrize(
    ("values", "looks", "reason"),
    [
        ({"remap_failed": True}, 1, "a row could not be remapped"),
        ({"recovery_action": 4}, 1, "the driver asks for drain and reset"),
        ({"pcie_width": 8}, 3, "PCIe width is 8 of 16 lanes under load"),
        ({"error": "temperature: unknown error"}, 3, "it cannot be read: temperature: unknown error"),
    ],
)
def test_a_rule_needs_its_number_of_looks(values: dict[str, object], looks: int, reason: str) -> None:
    judge = health()
    for look in range(1, looks + 1):
        at = START + 10 * look
        found = node_risk(judge.observe(devices(at, **values), at))
        assert found.hard is (look == looks)
    assert found.reasons[0] == f"GPU 0: {reason}"
    assert found.probability == 1.0


def test_a_narrow_idle_link_is_nothing() -> None:
    judge = health()
    for look in range(6):
        at = START + 10 * look
        found = judge.observe(devices(at, pcie_width=8, utilization=0.0), at)
    assert not node_risk(found).hard


def test_links_that_fail_while_a_node_boots_are_nothing() -> None:
    fresh, later = health(booted=START), health()
    for judge in (fresh, later):
        judge.observe(devices(START), START)
    events = [XidEvent(START + at, "n1", "0000:10:00", 0, 74) for at in (10, 300)]
    assert node_risk(fresh.observe(events, START + 300)).reasons == ()
    assert node_risk(later.observe(events, START + 300)).reasons == (
        "GPU 0: 2 link failures in 24 h: XID 74 (NVLink error)",
        "GPU 0: XID 74 (NVLink error) (5.99%)",
    )


def test_a_burst_of_one_xid_counts_once() -> None:
    once, burst = health(), health()
    for judge, count in ((once, 1), (burst, 50)):
        judge.observe(devices(START), START)
        events = [XidEvent(START + at, "n1", "0000:10:00", 0, 74) for at in range(count)]
        judge.observe(events, START + 50)
    assert once.risks(START + 50) == burst.risks(START + 50)


def errors_told(indices: Sequence[int]) -> list[str]:
    judge = health()
    judge.observe(devices(START), START)
    events = [
        XidEvent(START + 600.0 * number, "n1", "0000:10:00", index, 31)
        for number, index in enumerate(indices)
    ]
    found = judge.observe(events, START + 3600)
    assert node_risk(found).reasons == ()
    return [one.text for one in found if isinstance(one, Alert)]


def test_an_error_of_the_program_on_one_device_twice_asks_for_a_test() -> None:
    assert errors_told([2]) == []
    assert errors_told([2, 2]) == [
        "XID 31 (GPU memory page fault): 2 in 24 h on this device alone; test the device"
    ]


def test_an_error_on_several_devices_is_the_programs() -> None:
    assert errors_told([1, 2, 2]) == [
        "XID 31 (GPU memory page fault): on several devices, so the program is likely the cause"
    ]


def test_a_network_port_that_goes_down_is_a_sign() -> None:
    judge = health()
    for second, downs in ((0, 0), (10, 0), (20, 1)):
        at = START + second
        found = judge.observe([HostSample(at, "n1", (Port("mlx5_0/1", True, downs),))], at)
    assert node_risk(found).reasons == ("the link of mlx5_0/1 went down (1.49%)",)


def test_the_history_of_the_node_counts_and_fades() -> None:
    judge = health()
    judge.ledger_says(NodeHistory(HOUR / 2, "GPU", 1), START)
    first, later = node_risk(judge.risks(START)), node_risk(judge.risks(START + 5 * 86400))
    assert first.reasons == ("back for 0.5 h after a fault (GPU), 1 in 30 days (1.67%)",)
    assert later.probability < first.probability / 10


def test_alerts_are_bounded() -> None:
    judge = Health("n1", DEFAULT, HORIZON, START - HOUR)
    told = 0
    for index in range(64):
        events = [XidEvent(START + index, "n1", f"{index}", index, 48)]
        told += sum(isinstance(one, Alert) for one in judge.observe(events, START + index))
    assert told == 20
    later = [one for one in judge.observe([XidEvent(START + 900, "n1", "", 1, 79)], START + 900)]
    assert [one.text for one in later if isinstance(one, Alert)] == [
        "XID 79 (GPU has fallen off the bus)",
        "44 more alerts were left out: more than one every 180 s",
    ]


def test_a_device_that_is_known_by_its_number_gets_its_name() -> None:
    judge = health()
    judge.observe([XidEvent(START, "n1", "0000:11:00", 1, 48)], START)
    found = judge.observe(devices(START + 10), START + 10)
    assert [one.device for one in found if isinstance(one, Risk) and one.hard] == ["", "GPU-simulated-1"]


# Properties. Each is a function of how a monitor is made, so that a planted bug can be shown to be caught.

Make = Callable[[], Health]
NUMBERS = [spec.name for spec in fields(DeviceSample) if "None" in str(spec.type)]


def rounds(seed: int, count: int) -> list[list[Sample]]:
    """Return rounds of samples and events of four devices, some of them bad."""
    draw = random.Random(seed)
    counts = {name: [0] * 4 for name in ("ecc_uncorrected", "remapped_rows_uncorrectable", "ecc_corrected")}
    found: list[list[Sample]] = []
    for number in range(count):
        at = START + INTERVAL * number
        one: list[Sample] = []
        for index in range(4):
            for name, values in counts.items():
                values[index] += (
                    draw.choice((0, 0, 0, 0, 1, 900)) if name == "ecc_corrected" else draw.random() < 0.05
                )
            now = {name: values[index] for name, values in counts.items()}
            one.append(device(at, index, temperature=draw.choice((50, 55, 80)), **now))
        if draw.random() < 0.2:
            one.append(XidEvent(at, "n1", "", draw.randrange(4), draw.choice((63, 74, 92, 94, 31))))
        found.append(one)
    return found


def last_risks(make: Make, given_: Iterable[Sequence[Sample]]) -> dict[str, Risk]:
    judge, found = make(), []
    for number, one in enumerate(given_):
        found = judge.observe(one, START + INTERVAL * number)
    return {one.device: one for one in found if isinstance(one, Risk)}


def more_evidence_never_lowers(make: Make, seed: int) -> None:
    """The XID is one that the rounds do not have: one that repeats within three minutes counts once."""
    plain = rounds(seed, 12)
    draw = random.Random(seed)
    event = XidEvent(START, "n1", "", draw.randrange(4), draw.choice((79, 156, 157, 172)))
    more = [list(one) for one in plain]
    more[draw.randrange(12)].append(event)
    before, after = last_risks(make, plain), last_risks(make, more)
    assert all(after[name].probability >= before[name].probability - 1e-12 for name in before)


def missing_data_never_lowers(make: Make, seed: int) -> None:
    draw = random.Random(seed)
    plain = rounds(seed, 10)
    before = last_risks(make, plain)
    gap: list[list[Sample]] = []
    for number in range(10, 10 + draw.randrange(1, 12)):
        at = START + INTERVAL * number
        one: list[Sample] = []
        for index in range(4):
            sample = device(at, index, **_counts(plain, index))
            gone = draw.sample(NUMBERS, draw.randrange(1, len(NUMBERS)))
            lost = draw.random() < 0.3
            nothing = dict.fromkeys(NUMBERS) if lost else dict.fromkeys([*gone, "ecc_uncorrected"])
            one.append(replace(sample, error="lost" if lost else "", **nothing))  # type: ignore[arg-type]
        gap.append(one)
    after = last_risks(make, [*plain, *gap])
    assert all(after[name].probability >= before[name].probability - 1e-12 for name in before)


def _counts(given_: Sequence[Sequence[Sample]], index: int) -> dict[str, object]:
    last = next(one for one in given_[-1] if isinstance(one, DeviceSample) and one.index == index)
    return {
        name: getattr(last, name)
        for name in ("ecc_corrected", "ecc_uncorrected", "remapped_rows_uncorrectable")
    }


def what_happened_in_a_gap_counts(make: Make, seed: int) -> None:
    del seed
    judge = make()
    judge.observe(devices(START, ecc_uncorrected=0), START)
    judge.observe(devices(START + 10, ecc_uncorrected=None), START + 10)
    found = judge.observe(devices(START + 20, ecc_uncorrected=1), START + 20)
    assert any("1 uncorrected ECC error(s)" in reason for reason in node_risk(found).reasons)


def order_is_nothing(make: Make, seed: int) -> None:
    plain = rounds(seed, 20)
    draw = random.Random(seed)
    mixed = [draw.sample(list(one), len(one)) for one in plain]
    events_last = [sorted(one, key=lambda each: isinstance(each, XidEvent)) for one in mixed]
    assert last_risks(make, plain) == last_risks(make, events_last)


def signs_decay(make: Make, seed: int) -> None:
    judge = make()
    index = random.Random(seed).randrange(4)
    judge.observe(devices(START), START)
    judge.observe([XidEvent(START + 1, "n1", "", index, 94)], START + 1)
    seen = []
    for number in range(1, 40):
        at = START + 60.0 * number
        seen.append(node_risk(judge.observe(devices(at), at)).probability)
    assert all(later < earlier for earlier, later in itertools.pairwise(seen))


PROPERTIES = (
    more_evidence_never_lowers,
    missing_data_never_lowers,
    what_happened_in_a_gap_counts,
    order_is_nothing,
    signs_decay,
)


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda one: one.__name__)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_property_holds(holds: Callable[[Make, int], None], seed: int) -> None:
    holds(health, seed)


class Forgets(Health):
    """A later sign replaces an earlier one."""

    def _sign(self, key: str, device: monitor._Device, found: Found, time: float) -> None:
        if found.sign.startswith("xid"):
            device.marks = Marks(DEFAULT.signs)
        super()._sign(key, device, found, time)


class TakesSilenceForHealth(Health):
    """What is not read counts as observed, and is no sign."""

    def _on_device(self, key: str, device: monitor._Device, sample: DeviceSample) -> None:
        device.observed += INTERVAL
        super()._on_device(key, device, replace(sample, error=""))
        device.known.clear()


class LooksBackOneSample(Health):
    """A counter is compared with the sample before, whatever that has."""

    def _counted(self, device: monitor._Device) -> list[Found]:
        found = super()._counted(device)
        if device.latest is not None and device.latest.ecc_uncorrected is None:
            device.counts.clear()
        return found


class ComparesAsTheyCome(Health):
    """Devices are compared one by one."""

    def _on_devices(self, together: Sequence[Sample]) -> None:
        for one in together:
            super()._on_devices([one])


class NeverForgets(Health):
    """No time passes for the signs."""

    def _on_device(self, key: str, device: monitor._Device, sample: DeviceSample) -> None:
        super()._on_device(key, device, sample)
        device.observed = 0.0


@pytest.mark.parametrize(
    ("holds", "bug"),
    list(
        zip(
            PROPERTIES,
            (Forgets, TakesSilenceForHealth, LooksBackOneSample, ComparesAsTheyCome, NeverForgets),
            strict=True,
        )
    ),
    ids=lambda one: one.__name__,
)
def test_a_planted_bug_breaks_it(holds: Callable[[Make, int], None], bug: type[Health]) -> None:
    broken = 0
    for seed in range(20):
        try:
            holds(lambda: bug("n1", DEFAULT, HORIZON, START - HOUR), seed)
        except AssertionError:
            broken += 1
    assert broken > 0
