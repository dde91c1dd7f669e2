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
    raw = json.loads(line)
    assert raw["kind"] == kind_of(sample)
    assert None not in raw.values()


DEVICE = '{{"kind":"device","time":1,"node":"a","index":{}}}'
FIELD = '{{"kind":"device","time":{},"node":"a","index":0}}'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *((line, ".") for line in ("12", "{", "[" * 100_000)),
        *(
            (json.dumps({"kind": kind}), "kind.*device, xid, host, silence, notice")
            for kind in ("dog", "x" * 90)
        ),
        ('{"kind":"device","time":1,"node":"a"}', "index"),
        *((DEVICE.format(value), "index") for value in ('"0"', "true", "-1", 10**30, 4096, "1.5")),
        *((FIELD.format(value), "time") for value in ("NaN", "Infinity", "true", f'"{"x" * 81}"')),
        ('{"kind":"device","time":1,"node":"a","index":0,"remap_pending":1}', "remap_pending"),
        (
            '{"kind":"xid","time":1,"node":"a","pci":"","index":-2,"xid":79,"text":""}',
            "index.*-1.*4095.*-2",
        ),
        (f'{{"kind":"device","time":1,"node":"a","index":0,"pcie_replays":{2**64}}}', "pcie_replays"),
        ('{"kind":"device","time":1,"node":"a","index":0,"error":1}', "error"),
        (json.dumps({"kind": "host", "time": 1, "node": "a", "ports": [{}] * 65}), "ports|64"),
        ('{"kind":"host","time":1,"node":"a","ports":3}', "ports"),
        ('{"kind":"host","time":1,"node":"a","ports":[3]}', "ports"),
        ('{"kind":"host","time":1,"node":"a","ports":[{"up":true}]}', "name"),
    ],
    ids=range(24),
)
def test_what_is_no_sample_is_refused_with_the_field(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        from_line(line)
    assert len(str(caught.value)) < 300


def test_a_host_may_have_64_ports_and_a_time_may_be_a_whole_number() -> None:
    ports = tuple(Port(f"ib{number}") for number in range(64))
    assert from_line(to_line(HostSample(1, "a", ports))) == HostSample(1.0, "a", ports)


def test_unknown_fields_are_passed_over() -> None:
    assert from_line('{"kind":"notice","time":1,"node":"a","text":"b","more":[1]}') == Notice(1, "a", "b")
