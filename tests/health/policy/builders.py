"""Nodes, devices and their samples for the tests of the policies of health."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outlast.health.policy import simulation
from outlast.health.policy.hazard import DEFAULT, HOUR
from outlast.health.policy.monitor import Alert, Health, Risk
from outlast.health.policy.telemetry import DeviceSample, HostSample, Port, Sample, XidEvent

START = 1_800_000_000.0
HORIZON = 1800.0
INTERVAL = 10.0
DAY = 86400.0


def health(booted: float = START - HOUR, horizon: float = HORIZON) -> Health:
    return Health("n1", DEFAULT, horizon, booted)


def device(time: float, index: int = 0, **values: object) -> DeviceSample:
    sample = simulation.samples(simulation.parse("healthy"), "n1", 0.0, -1.0, time)[index]
    assert isinstance(sample, DeviceSample)
    return replace(sample, **values)  # type: ignore[arg-type]


def devices(time: float, count: int = 4, **values: object) -> list[Sample]:
    """Return healthy samples; ``values`` are those of device 0."""
    return [device(time, index, **(values if index == 0 else {})) for index in range(count)]


def xid(after: float, code: int, index: int = 0) -> XidEvent:
    return XidEvent(START + after, "n1", "", index, code)


def host(after: float, **downs: int | None) -> HostSample:
    """Return a sample of a host whose links went down so often."""
    return HostSample(START + after, "n1", tuple(Port(name, True, count) for name, count in downs.items()))


def seen(judge: Health, *samples: Sample) -> list[Risk | Alert]:
    """Show a judge some samples, at the time of the last one."""
    return judge.observe(samples, samples[-1].time)


def node_risk(found: Iterable[Risk | Alert]) -> Risk:
    return next(one for one in found if isinstance(one, Risk) and not one.device)


def alerts(found: Iterable[Risk | Alert]) -> list[Alert]:
    return [one for one in found if isinstance(one, Alert)]


def hard_devices(found: Iterable[Risk | Alert]) -> list[str]:
    """Return the devices, "" for the node, that have failed or are about to."""
    return [one.device for one in found if isinstance(one, Risk) and one.hard]
