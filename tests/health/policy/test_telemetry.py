"""Samples as lines: what is written is read back; what is no sample is refused with its field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy.telemetry import (
    DeviceSample,
    HostSample,
    Notice,
    Port,
    Sample,
    Silence,
    XidEvent,
    from_line,
    kind_of,
    to_line,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.none() | st.integers(0, 2**64 - 1)
DEVICES = st.builds(
    DeviceSample,
    time=NUMBERS,
    node=st.text(),
    index=st.integers(0, 63),
    uuid=st.text(),
    temperature=st.none() | NUMBERS,
    ecc_corrected=COUNTS,
    remap_pending=st.none() | st.booleans(),
    error=st.text(),
)
PORTS = st.lists(st.builds(Port, st.text(), st.none() | st.booleans(), COUNTS), max_size=4).map(tuple)
SAMPLES = st.one_of(
    DEVICES,
    st.builds(HostSample, time=NUMBERS, node=st.text(), ports=PORTS, cpu_steal=st.none() | NUMBERS),
    st.builds(XidEvent, NUMBERS, st.text(), st.text(), st.integers(-1, 63), st.integers(0, 999), st.text()),
    st.builds(Silence, NUMBERS, st.text(), NUMBERS, st.text()),
    st.builds(Notice, NUMBERS, st.text(), st.text()),
)


@given(SAMPLES)
def test_a_line_is_read_as_it_was_written(sample: Sample) -> None:
    line = to_line(sample)
    assert "\n" not in line
    assert from_line(line) == sample


@given(SAMPLES)
def test_what_is_none_is_not_in_the_line(sample: Sample) -> None:
    assert None not in json.loads(to_line(sample)).values()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("12", "an object whose kind"),
        ("{", "Expecting property name"),
        ('{"kind":"dog"}', "an object whose kind"),
        ('{"kind":"device","time":1,"node":"a"}', "index: a int expected, nothing found"),
        ('{"kind":"device","time":1,"node":"a","index":"0"}', "index: a int expected, '0' found"),
        ('{"kind":"device","time":1,"node":"a","index":true}', "index: a int expected, 'True' found"),
        ('{"kind":"device","time":NaN,"node":"a","index":0}', "time: a float expected, 'nan' found"),
        (
            '{"kind":"device","time":1,"node":"a","index":0,"remap_pending":1}',
            "remap_pending: a bool expected",
        ),
        ('{"kind":"device","time":Infinity,"node":"a","index":0}', "time: a float expected, 'inf' found"),
        ('{"kind":"device","time":true,"node":"a","index":0}', "time: a float expected, 'True' found"),
        ('{"kind":"device","time":1,"node":"a","index":-1}', "index: 0 to 4095 expected, -1 found"),
        (f'{{"kind":"device","time":1,"node":"a","index":{10**30}}}', "index: a number of up to 64 bits"),
        ('{"kind":"device","time":1,"node":"a","index":4096}', "index: 0 to 4095 expected, 4096 found"),
        (
            '{"kind":"xid","time":1,"node":"a","pci":"","index":-2,"xid":79,"text":""}',
            "index: -1 to 4095 expected, -2 found",
        ),
        (
            f'{{"kind":"device","time":1,"node":"a","index":0,"pcie_replays":{2**64}}}',
            "pcie_replays: a number of up to 64 bits expected, '18446744073709551616' found",
        ),
        ('{"kind":"device","time":1,"node":"a","index":1.5}', "index: a int expected, '1.5' found"),
        ('{"kind":"device","time":1,"node":"a","index":0,"error":1}', "error: a str expected, '1' found"),
        (
            json.dumps({"kind": "notice", "time": "x" * 81, "node": "a", "text": ""}),
            f"time: a float expected, '{'x' * 80}' found",
        ),
        (
            json.dumps({"kind": "x" * 90}),
            "kind is one of device, xid, host, silence, notice expected, '.{80}' found",
        ),
        (
            json.dumps({"kind": "host", "time": 1, "node": "a", "ports": [{}] * 65}),
            "a list of up to 64 expected",
        ),
        ('{"kind":"host","time":1,"node":"a","ports":3}', "ports: a list of up to 64 expected"),
        ('{"kind":"host","time":1,"node":"a","ports":[3]}', "ports: objects expected"),
        ('{"kind":"host","time":1,"node":"a","ports":[{"up":true}]}', "name: a str expected, nothing found"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_sample_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        from_line(line)


def test_a_host_may_have_64_ports_and_a_time_may_be_a_whole_number() -> None:
    ports = tuple(Port(f"ib{number}") for number in range(64))
    assert from_line(to_line(HostSample(1, "a", ports))) == HostSample(1.0, "a", ports)


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        (DeviceSample(1.0, "a", 0), "device"),
        (XidEvent(1.0, "a", "", 0, 79), "xid"),
        (HostSample(1.0, "a"), "host"),
        (Silence(1.0, "a", 2.0, "NVML"), "silence"),
        (Notice(1.0, "a", "b"), "notice"),
    ],
)
def test_each_sample_has_the_name_of_its_kind(sample: Sample, kind: str) -> None:
    assert kind_of(sample) == kind
    assert json.loads(to_line(sample))["kind"] == kind


def test_unknown_fields_are_passed_over() -> None:
    assert from_line('{"kind":"notice","time":1,"node":"a","text":"b","more":[1]}') == Notice(1, "a", "b")


def test_a_line_with_only_what_it_must_have_says_nothing_of_the_rest() -> None:
    assert from_line('{"kind":"device","time":1,"node":"a","index":0}').call_seconds == 0.0
