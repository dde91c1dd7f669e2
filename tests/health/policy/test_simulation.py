"""Scenarios of telemetry: what happens, to which device, from when on; the same at every reading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.health.policy import simulation
from outlast.health.policy.options import source_problem
from outlast.health.policy.simulation import Kind, Scenario, parse, samples
from outlast.health.policy.telemetry import DeviceSample, HostSample, Port, Sample, XidEvent

ELAPSED = st.floats(0, 1e6)


def devices(found: list[Sample]) -> list[DeviceSample]:
    return [one for one in found if isinstance(one, DeviceSample)]


def test_a_text_is_parsed() -> None:
    assert parse("xid,device=3,after=2.5,xid=48,devices=4,seed=7") == Scenario(Kind.XID, 3, 4, 2.5, 48, 7)
    assert parse("healthy") == Scenario(Kind.HEALTHY)
    assert parse("lost,devices=64,device=63,after=0") == Scenario(Kind.LOST, 63, 64, 0.0)
    assert parse("lost,devices=1") == Scenario(Kind.LOST, 0, 1)
    assert parse("intense-load,xid,device=3,xid=48") == Scenario(Kind.XID, 3, xid=48, loaded=True)
    assert parse("intense-load,device=3") == Scenario(Kind.INTENSE_LOAD, 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fire", "'fire'.*healthy.*thermal-ramp"),
        ("", "''"),
        *((f"intense-load,{one}", f"'{one}'") for one in ("fire", "healthy", "intense-load")),
        ("intense-load,xid,lost", "'lost'"),
        ("xid,intense-load", "'intense-load'"),
        ("intense-load,loaded=1", "'loaded'"),
        ("xid,gpu=1", "'gpu'.*device, devices"),
        ("xid,device=one", "device='one'"),
        ("xid,device=8", "device=8.*0.*7"),
        *((f"xid,devices={one}", f"devices={one}.*1.*64") for one in (0, 65)),
        *((f"xid,xid={one}", f"xid={one}.*1.*999") for one in (-1, 1000)),
        ("xid,seed=9223372036854775808", "seed=9223372036854775808"),
        *((f"xid,after={one}", f"after={one}") for one in ("-1", "nan", "inf")),
    ],
)
def test_what_is_wrong_in_a_text_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        parse(text)
    assert str(caught.value) in source_problem(f"simulate:{text}")


@pytest.mark.parametrize("kind", [Kind.XID, Kind.LOST, Kind.ECC_BURST, Kind.THERMAL_RAMP, Kind.SILENCE])
def test_a_failure_under_intense_load_has_both(kind: Kind) -> None:
    under = Scenario(kind, device=2, after=100, loaded=True)
    load = devices(samples(Scenario(Kind.INTENSE_LOAD, after=0), "n", 99.0, 0.0, 5.0))
    assert devices(samples(under, "n", 99.0, 0.0, 5.0)) == load
    load = devices(samples(Scenario(Kind.INTENSE_LOAD, after=0), "n", 200.0, 99.0, 5.0))
    found = samples(under, "n", 200.0, 99.0, 5.0)
    pairs = list(zip(devices(found), load, strict=True))
    assert [one.index for one, other in pairs if one != other] == [2] * (kind is not Kind.SILENCE)
    assert sum(isinstance(one, XidEvent) for one in found) == (kind is Kind.XID)
    assert simulation.silent(under, 200.0) == (kind is Kind.SILENCE)


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


CALM = DeviceSample(
    *(5.0, "n", 0, "GPU-simulated-0", "simulated H100"),
    temperature=55,
    temperature_margin=32,
    power=605.1,
    power_limit=700.0,
    sm_clock=1980.0,
    max_sm_clock=1980.0,
    throttle_reasons=0,
    utilization=0.98,
    memory_used=75011399449,
    memory_total=80 << 30,
    ecc_corrected=0,
    ecc_uncorrected=0,
    remapped_rows_correctable=0,
    remapped_rows_uncorrectable=0,
    remap_pending=False,
    remap_failed=False,
    recovery_action=0,
    pcie_width=16,
    pcie_max_width=16,
    pcie_generation=5,
    pcie_replays=0,
    nvlink_errors=0,
    call_seconds=0.004,
)


@pytest.mark.parametrize(
    ("text", "elapsed", "changed"),
    [
        ("healthy", 9.9, {}),
        ("healthy", 10.0, {"power": 639.3, "utilization": 0.96, "memory_used": 75351838449}),
        ("thermal-ramp,after=4", 4.0, {}),
        ("ecc-burst,after=5", 5.0, {}),
        ("ecc-burst,after=5", 9.0, {"ecc_corrected": 200}),
        ("intense-load,after=5", 4.9, {}),
        (
            "intense-load,after=5",
            5.0,
            {
                **{"temperature": 73, "temperature_margin": 14, "power": 695.0, "sm_clock": 1755.0},
                **{"throttle_reasons": 0x04, "utilization": 1.0, "memory_used": 76 << 30},
            },
        ),
        ("xid,xid=48,after=5", 5.0, {}),
    ],
)
def test_what_a_device_shows(text: str, elapsed: float, changed: dict[str, Any]) -> None:
    shown = devices(samples(parse(f"{text},seed=3"), "n", elapsed, -1, 5.0))[0]
    assert shown == replace(CALM, **changed)


@pytest.mark.parametrize("text", ["lost,after=5", "xid,after=5"])
def test_a_lost_device_shows_only_that_it_is_lost(text: str) -> None:
    scenario = parse(f"{text},device=1,devices=2")
    lost = DeviceSample(5.0, "n", 1, "GPU-simulated-1", "simulated H100")
    before, after = (devices(samples(scenario, "n", at, -1, 5.0))[1] for at in (4.9, 5.0))
    assert (before.error, bool(after.error)) == ("", True)
    assert replace(after, error="") == lost != before


def test_what_the_host_and_the_kernel_log_show() -> None:
    found = samples(parse("xid,device=12,devices=13,xid=48,after=5"), "n", 5.0, -1, 7.0)
    assert found[13:] == [
        XidEvent(7.0, "n", "0000:1c:00", 12, 48, "simulated"),
        HostSample(
            *(7.0, "n", (Port("mlx5_0/1", True, 0), Port("mlx5_1/1", True, 0))),
            disk_free=900 << 30,
            disk_total=1000 << 30,
            memory_available=1400 << 30,
            memory_total=2000 << 30,
            cpu_steal=0.0,
            load=20.0,
        ),
    ]


def test_an_xid_is_told_once_and_79_loses_the_device() -> None:
    scenario = Scenario(Kind.XID, device=1, after=25, devices=2)
    readings = [samples(scenario, "n", at, at - 10, 0.0) for at in range(0, 100, 10)]
    events = [one for found in readings for one in found if isinstance(one, XidEvent)]
    assert [(one.xid, one.index, one.pci) for one in events] == [(79, 1, simulation.pci_of(1))]
    assert [devices(found)[1].error for found in readings[:3]] == ["", "", ""]
    assert devices(readings[3])[1].error
