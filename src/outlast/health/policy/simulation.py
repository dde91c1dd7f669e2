"""Simulated telemetry: what the devices of a node would show in a scenario, as a function of time.

The values of a healthy device are those of an H100 under load (700 W, 80 GiB): 55 °C, 620 W, with noise of a
few percent. A scenario changes one device from a given second on. Nothing is drawn from a generator: noise is
a function of seed, device and second, so two readings of one moment are equal.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from enum import Enum
from hashlib import blake2b

from outlast.health.policy.telemetry import DeviceSample, HostSample, Port, Sample, XidEvent

GIB = 1 << 30
MODEL = "simulated H100"
MOST_DEVICES = 64
_MOST_XID = 999  # NVIDIA's catalogue has 172
_SEEDS = 1 << 63
_POWER = 620.0  # watts
_STEP = 10.0  # seconds for which noise keeps its value
_SLOWDOWN = 87  # degrees Celsius at which the clocks are lowered
_RAMP = 0.1  # degrees Celsius a second
_HOTTEST = 95.0
_BURST = 50.0  # corrected errors a second
_PER_UNCORRECTED = 30.0  # seconds
_HW_THERMAL = 0x40
_SW_POWER_CAP = 0x04


class Kind(str, Enum):
    """What happens to the device."""

    HEALTHY = "healthy"
    THERMAL_RAMP = "thermal-ramp"  # the temperature rises by 6 degrees a minute until the clocks are lowered
    ECC_BURST = "ecc-burst"  # 50 corrected errors a second, an uncorrected one every 30 s, a row to remap
    XID = "xid"  # the driver logs an XID; after 79 the device is lost
    SILENCE = "silence"  # a call of the driver does not come back
    LOST = "lost"  # the device is lost without an XID
    INTENSE_LOAD = "intense-load"  # all devices at their power limit


_FAILURES = [kind.value for kind in Kind if kind not in (Kind.HEALTHY, Kind.INTENSE_LOAD)]


@dataclass(frozen=True)
class Scenario:
    """A scenario and its parameters.

    Args:
        kind: what happens.
        device: to which.
        devices: of the node.
        after: seconds from the start until it happens.
        xid: number of the error.
        seed: of the noise.
        loaded: all devices are at their power limit from the start, whatever happens to one.
    """

    kind: Kind
    device: int = 0
    devices: int = 8
    after: float = 60.0
    xid: int = 79
    seed: int = 0
    loaded: bool = False


def parse(text: str) -> Scenario:
    """Return the scenario that a text like ``xid,device=3,after=20,xid=79`` describes.

    ``intense-load,xid`` is a failure under intense load, which lasts from the start.

    Raises:
        ValueError: says what is unknown, or out of range.
    """
    name, *settings = text.split(",")
    known = [kind.value for kind in Kind]
    if name not in known:
        raise ValueError(f"scenario {name!r} is unknown; known are {', '.join(known)}")
    loaded = name == Kind.INTENSE_LOAD.value and bool(settings) and "=" not in settings[0]
    if loaded:
        name, *settings = settings
        if name not in _FAILURES:
            raise ValueError(f"{name!r} is no failure; those under intense load are {', '.join(_FAILURES)}")
    names = [spec.name for spec in fields(Scenario) if spec.name not in ("kind", "loaded")]
    values: dict[str, float] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in names:
            raise ValueError(f"setting {key!r} is unknown; known are {', '.join(names)}")
        try:
            values[key] = float(value) if key == "after" else int(value)
        except ValueError:
            raise ValueError(f"{key}={value!r} is no number") from None
    scenario = Scenario(Kind(name), loaded=loaded, **values)  # type: ignore[arg-type]  # as the fields say
    if not 0 < scenario.devices <= MOST_DEVICES:
        raise ValueError(f"devices={scenario.devices}: 1 to {MOST_DEVICES} expected")
    if not 0 <= scenario.device < scenario.devices:
        raise ValueError(f"device={scenario.device}: 0 to {scenario.devices - 1} expected")
    if not 0 < scenario.xid <= _MOST_XID:
        raise ValueError(f"xid={scenario.xid}: 1 to {_MOST_XID} expected")
    if not -_SEEDS <= scenario.seed < _SEEDS:
        raise ValueError(f"seed={scenario.seed}: a number of up to 63 bits expected")
    if not 0 <= scenario.after < math.inf:
        raise ValueError(f"after={scenario.after}: a number of seconds from 0 expected")
    return scenario


def silent(scenario: Scenario, elapsed: float) -> bool:
    """Say whether a call of the driver does not come back at this second."""
    return scenario.kind is Kind.SILENCE and elapsed >= scenario.after


def samples(scenario: Scenario, node: str, elapsed: float, before: float, now: float) -> list[Sample]:
    """Return what a node shows.

    Args:
        scenario: what happens.
        node: its name.
        elapsed: seconds since the start of the scenario.
        before: those at the reading before, for events in between; negative: there was none.
        now: wall seconds.
    """
    found: list[Sample] = [_device(scenario, node, index, elapsed, now) for index in range(scenario.devices)]
    if scenario.kind is Kind.XID and before < scenario.after <= elapsed:
        found.append(XidEvent(now, node, pci_of(scenario.device), scenario.device, scenario.xid, "simulated"))
    ports = tuple(Port(f"mlx5_{number}/1", True, 0) for number in range(2))
    disk, memory = (900 * GIB, 1000 * GIB), (1400 * GIB, 2000 * GIB)
    found.append(HostSample(now, node, ports, *disk, *memory, cpu_steal=0.0, load=20.0))
    return found


def pci_of(index: int) -> str:
    """Return the PCI address of a simulated device, as the kernel log writes it."""
    return f"0000:{0x10 + index:02x}:00"


def _device(scenario: Scenario, node: str, index: int, elapsed: float, now: float) -> DeviceSample:
    uuid = f"GPU-simulated-{index}"
    since = elapsed - scenario.after
    struck = since >= 0 and index == scenario.device
    kind = scenario.kind if struck else Kind.HEALTHY
    if kind is Kind.LOST or (kind is Kind.XID and scenario.xid == 79):
        return DeviceSample(now, node, index, uuid, MODEL, error="temperature: GPU is lost")
    more_power, more_heat, more_use, more_memory = (
        _noise(scenario.seed, index, elapsed, what) for what in range(4)
    )
    intense = scenario.loaded or (scenario.kind is Kind.INTENSE_LOAD and since >= 0)
    power = 695.0 if intense else _POWER * (1 + 0.04 * more_power)
    temperature = (71.0 if intense else 55.0) + 0.02 * (power - _POWER) + more_heat
    if kind is Kind.THERMAL_RAMP:
        temperature = min(_HOTTEST, temperature + _RAMP * since)
    degrees = round(temperature)
    throttled = degrees >= _SLOWDOWN
    reasons = (_HW_THERMAL if throttled else 0) | (_SW_POWER_CAP if intense else 0)
    burst = kind is Kind.ECC_BURST
    return DeviceSample(
        *(now, node, index, uuid, MODEL),
        temperature=degrees,
        temperature_margin=_SLOWDOWN - degrees,
        power=round(power * (0.6 if throttled else 1.0), 1),
        power_limit=700.0,
        sm_clock=1100.0 if throttled else 1755.0 if intense else 1980.0,
        max_sm_clock=1980.0,
        throttle_reasons=reasons,
        utilization=1.0 if intense else round(0.97 + 0.02 * more_use, 2),
        memory_used=round((76 if intense else 70 + more_memory) * GIB),
        memory_total=80 * GIB,
        ecc_corrected=int(_BURST * since) if burst else 0,
        ecc_uncorrected=int(since / _PER_UNCORRECTED) if burst else 0,
        remapped_rows_correctable=0,
        remapped_rows_uncorrectable=int(since / _PER_UNCORRECTED) if burst else 0,
        remap_pending=burst and since >= _PER_UNCORRECTED,
        remap_failed=False,
        recovery_action=0,
        pcie_width=16,
        pcie_max_width=16,
        pcie_generation=5,
        pcie_replays=0,
        nvlink_errors=0,
        call_seconds=0.004,
    )


def _noise(seed: int, index: int, elapsed: float, what: int) -> float:
    """Return a number from -1 to 1 that is the same for the same arguments."""
    key = struct.pack("<qqqq", seed, index, int(elapsed // _STEP), what)
    drawn: int = struct.unpack("<Q", blake2b(key, digest_size=8).digest())[0]
    return drawn / 2**63 - 1
