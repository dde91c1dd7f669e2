"""Scenarios of telemetry: what happens, to which device, from when on; the same at every reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy import simulation
from outlast.health.policy.options import source_problem
from outlast.health.policy.simulation import Kind, Scenario, parse, samples
from outlast.health.policy.telemetry import DeviceSample, HostSample, Sample, XidEvent

ELAPSED = st.floats(0, 1e6)


def devices(found: list[Sample]) -> list[DeviceSample]:
    return [one for one in found if isinstance(one, DeviceSample)]


def test_a_text_is_parsed() -> None:
    assert parse("xid,device=3,after=2.5,xid=48,devices=4,seed=7") == Scenario(Kind.XID, 3, 4, 2.5, 48, 7)
    assert parse("healthy") == Scenario(Kind.HEALTHY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fire", "scenario 'fire' is unknown; known are healthy, thermal-ramp"),
        ("", "scenario '' is unknown"),
        ("xid,gpu=1", "setting 'gpu' is unknown; known are device, devices"),
        ("xid,device=one", "device='one' is no number"),
        ("xid,device=8", "device=8: 0 to 7 expected"),
        ("xid,devices=0", "devices=0: 1 to 64 expected"),
        ("xid,after=-1", "after=-1.0"),
        ("xid,after=nan", "after=nan"),
    ],
)
def test_what_is_wrong_in_it_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(text)
    assert problem in source_problem(f"simulate:{text}")


@given(st.sampled_from(Kind), ELAPSED, st.integers(0, 9))
def test_only_the_named_device_is_changed_and_only_from_then_on(
    kind: Kind, elapsed: float, seed: int
) -> None:
    calm = devices(samples(Scenario(Kind.HEALTHY, seed=seed), "n", elapsed, -1, 5.0))
    found = samples(Scenario(kind, device=2, after=100, seed=seed), "n", elapsed, -1, 5.0)
    changed = {one.index for one, other in zip(devices(found), calm, strict=True) if one != other}
    if elapsed < 100 or kind in (Kind.HEALTHY, Kind.SILENCE):
        assert changed == set()
    else:
        assert changed <= (set(range(8)) if kind is Kind.INTENSE_LOAD else {2})
    assert sum(isinstance(one, HostSample) for one in found) == 1


@given(ELAPSED, st.integers(0, 9))
def test_a_healthy_device_stays_in_its_range(elapsed: float, seed: int) -> None:
    for one in devices(samples(Scenario(Kind.HEALTHY, seed=seed), "n", elapsed, -1, 0.0)):
        assert one.temperature is not None
        assert 52 <= one.temperature <= 58
        assert one.power is not None
        assert one.power_limit is not None
        assert one.power < one.power_limit
        assert (one.throttle_reasons, one.ecc_corrected, one.ecc_uncorrected, one.error) == (0, 0, 0, "")


def test_the_ramp_ends_in_lower_clocks() -> None:
    ramp = Scenario(Kind.THERMAL_RAMP, after=0, devices=1)
    shown = [devices(samples(ramp, "n", at, -1, 0.0))[0] for at in range(0, 600, 10)]
    temperatures = [one.temperature or 0 for one in shown]
    assert temperatures[0] < 60
    assert max(temperatures) <= 95
    assert shown[-1].throttle_reasons == 0x40
    assert (shown[-1].sm_clock or 0) < (shown[0].sm_clock or 0)


def test_an_ecc_burst_only_counts_upwards() -> None:
    burst = Scenario(Kind.ECC_BURST, after=10, devices=1)
    shown = [devices(samples(burst, "n", at, -1, 0.0))[0] for at in range(0, 200, 7)]
    for name in ("ecc_corrected", "ecc_uncorrected", "remapped_rows_uncorrectable"):
        counts = [getattr(one, name) for one in shown]
        assert counts == sorted(counts)
        assert counts[-1] > 0
    assert shown[-1].remap_pending is True


def test_an_xid_is_told_once_and_79_loses_the_device() -> None:
    scenario = Scenario(Kind.XID, device=1, after=25, devices=2)
    readings = [samples(scenario, "n", at, at - 10, 0.0) for at in range(0, 100, 10)]
    events = [one for found in readings for one in found if isinstance(one, XidEvent)]
    assert [(one.xid, one.index, one.pci) for one in events] == [(79, 1, simulation.pci_of(1))]
    assert [devices(found)[1].error for found in readings[:3]] == ["", "", ""]
    assert devices(readings[3])[1].error == "temperature: GPU is lost"


def test_a_silence_begins_at_its_second() -> None:
    scenario = Scenario(Kind.SILENCE, after=25)
    assert not simulation.silent(scenario, 24.9)
    assert simulation.silent(scenario, 25)
    assert not simulation.silent(Scenario(Kind.LOST, after=25), 30)
