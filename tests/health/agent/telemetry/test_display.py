"""The table of ``outlast health``: a row for each device, words for what is wrong, no control characters."""

from __future__ import annotations

import re
from dataclasses import replace

from outlast.health.agent.telemetry.display import Shown
from outlast.health.policy.telemetry import DeviceSample, HostSample, Notice, Port, Sample, Silence, XidEvent

GIB = 1 << 30
WELL = DeviceSample(
    *(0.0, "n", 0, "GPU-a", "H100"),
    temperature=50,
    temperature_margin=37,
    power=400.0,
    power_limit=700.0,
    sm_clock=1980,
    max_sm_clock=1980,
    throttle_reasons=0,
    utilization=0.97,
    memory_used=70 * GIB,
    memory_total=80 * GIB,
    pcie_width=16,
    pcie_max_width=16,
    pcie_generation=5,
)
SICK = replace(
    *(WELL,),
    index=1,
    uuid="GPU-b",
    throttle_reasons=0x48,
    pcie_width=8,
    remap_pending=True,
    remap_failed=True,
    recovery_action=4,
)


def text(*samples: Sample) -> str:
    shown = Shown()
    shown.take(samples)
    return "\n".join(shown.lines("n", 0.0))


def test_what_is_wrong_with_a_device_is_said_in_words() -> None:
    found = text(WELL, SICK)
    assert "50 C (37 left)  400/700 W  1980/1980 MHz  97%   70 GiB of 80 GiB" in found
    assert all(word in found for word in ("thermal", "x8", "x16", "drain and reset"))


def test_what_is_not_supported_is_a_dash() -> None:
    row = text(DeviceSample(0.0, "n", 0)).splitlines()[2]
    assert row.split() == ["0", "-", "-/-", "W", "-/-", "MHz", "-", "-", "-/-", "-/-", "-", "x-", "-", "-"]


def test_a_device_that_is_not_read_and_comes_back_has_one_row() -> None:
    lost = replace(WELL, error="handle: GPU is lost")
    assert "GPU is lost" in text(WELL, SICK, lost)
    assert "GPU is lost" not in text(WELL, lost, WELL)


def test_a_silence_lasts_until_the_device_is_read() -> None:
    silence = Silence(0.0, "n", 12.0, "NVML: device 1, power")
    assert re.search("12 s.*NVML: device 1, power", text(SICK, silence, WELL))
    assert "NVML" not in text(silence, SICK)


def test_host_xids_and_notices() -> None:
    host = HostSample(
        0.0, "n", (Port("mlx5_0/1", True, 2), Port("eth0", False)), 3 * GIB, 4 * GIB, GIB, 2 * GIB, 0.25, 1.5
    )
    found = text(
        host, XidEvent(0.0, "n", "0000:10:00", -1, 79, "fell \x1b[31m off"), Notice(0.0, "n", "note")
    )
    assert re.search(r"1 GiB.*2 GiB.*3 GiB.*4 GiB.*1\.5.*25\.0%", found)
    assert re.search("mlx5_0/1 up.*2.*eth0 down", found)
    assert re.search("XID 79.*0000:10:00.*ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS.*RESTART_BM", found)
    assert "\x1b" not in found
    assert found.endswith("note")


def test_it_is_complete_with_the_host_and_devices_or_the_reason_for_none() -> None:
    shown = Shown()
    shown.take([HostSample(0.0, "n")])
    assert not shown.complete
    for reason in (WELL, Silence(0.0, "n", 6.0, "NVML: initialisation"), Notice(0.0, "n", "no GPU: NVML")):
        one = Shown()
        one.take([reason])
        assert not one.complete
        one.take([HostSample(0.0, "n")])
        assert one.complete
