"""What of the telemetry is recorded: few records, and none of the changes lost."""

from __future__ import annotations

from dataclasses import replace

from outlast.health.agent.telemetry.recording import Recording, values_of, words_of
from outlast.health.policy.telemetry import DeviceSample, HostSample, Port, Silence, XidEvent

DEVICE = DeviceSample(0.0, "n", 0, "GPU-a", "H100", temperature=40.0, remap_pending=True)
XID = XidEvent(0.0, "n", "0000:10:00", 0, 79, "lost")


def test_one_sample_of_each_device_and_the_host_in_an_interval() -> None:
    recording = Recording(60.0)
    kept = [
        (now, one.__class__)
        for now in range(0, 130, 10)
        for one in (DEVICE, replace(DEVICE, index=1, uuid="GPU-b"), HostSample(0.0, "n"))
        if recording.admits(one, float(now))
    ]
    assert [now for now, _ in kept] == [0, 0, 0, 60, 60, 60, 120, 120, 120]


def test_an_error_is_recorded_at_once_and_so_is_its_end() -> None:
    recording = Recording(60.0)
    lost = replace(DEVICE, error="GPU is lost")
    assert [recording.admits(one, at) for at, one in enumerate((DEVICE, lost, lost, DEVICE))] == [
        *(True, True, False, True)
    ]


def test_a_flood_is_bounded_and_counted() -> None:
    recording = Recording(60.0)
    flood = sum(recording.admits(XID, at * 0.01) for at in range(10_000))
    assert flood <= 20 + 100 / 10 + 1
    assert recording.dropped == 10_000 - flood
    flapping = Recording(60.0)
    kept = sum(
        flapping.admits(replace(DEVICE, error="lost" if at % 2 else ""), at * 0.01) for at in range(10_000)
    )
    assert kept <= 20 + 100 / 10 + 3


def test_the_numbers_of_a_sample() -> None:
    assert values_of(DEVICE) == {"temperature": 40.0, "remap_pending": 1.0, "call_seconds": 0.0}
    ports = (Port("a", True, 2), Port("b", False, 3), Port("c"))
    assert values_of(HostSample(0.0, "n", ports, load=1.5)) == {
        "load": 1.5,
        "ports_down": 1.0,
        "link_downed": 5.0,
    }
    assert values_of(XID) == {"xid": 79.0}
    silence = Silence(0.0, "n", 5.0, "NVML: device 1, power")
    assert (values_of(silence), words_of(silence)) == ({"seconds": 5.0}, "NVML: device 1, power")
    assert words_of(XID) == "0000:10:00: lost"
