"""What is measured of a node's devices and of its host: plain data, which sources make and deciders read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol


@dataclass(frozen=True)
class DeviceSample:
    """One reading of one GPU; None: the device or its driver does not support it, or it was not read.

    Args:
        time: of the reading, wall seconds.
        node: name of the node.
        index: of the device, from 0, as NVML counts; it may change when a device is lost.
        uuid: of the device; empty: not known.
        model: such as "NVIDIA H100 80GB HBM3".
        temperature: of the chip, degrees Celsius.
        temperature_margin: degrees Celsius to the temperature at which the clocks are lowered.
        power, power_limit: watts.
        sm_clock, max_sm_clock: MHz.
        throttle_reasons: bits of nvmlClocksEventReasons.
        utilization: share of the time in which a kernel ran, 0 to 1.
        memory_used, memory_total: bytes.
        ecc_corrected, ecc_uncorrected: errors since the driver was loaded (NVML's volatile counters).
        remapped_rows_correctable, remapped_rows_uncorrectable: rows that were remapped, by the kind of error.
        remap_pending: a row is remapped at the next reset.
        remap_failed: a row could not be remapped.
        recovery_action: nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset, 2 reboot, 3 drain P2P,
            4 drain and reset.
        pcie_width, pcie_max_width: lanes.
        pcie_generation: of the link at present; it is lower while the device is idle.
        pcie_replays: counter.
        nvlink_errors: replays, recoveries and CRC errors of all links, a counter.
        call_seconds: that the reading took.
        error: why it was not read; empty: it was.
    """

    time: float
    node: str
    index: int
    uuid: str = ""
    model: str = ""
    temperature: float | None = None
    temperature_margin: float | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: float | None = None
    max_sm_clock: float | None = None
    throttle_reasons: int | None = None
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    pcie_replays: int | None = None
    nvlink_errors: int | None = None
    call_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class XidEvent:
    """An error that NVIDIA's driver wrote to the kernel log.

    Args:
        time: at which it was read, wall seconds.
        node: name of the node.
        pci: address of the device, such as "0000:3b:00".
        index: of the device; -1: not known.
        xid: number of the error.
        text: the rest of the line.
    """

    time: float
    node: str
    pci: str
    index: int
    xid: int
    text: str = ""


@dataclass(frozen=True)
class Port:
    """One network port.

    Args:
        name: such as "mlx5_0/1" (InfiniBand, RoCE) or "eth0".
        up: whether the link is up; None: not said.
        link_downed: how often the link went down, a counter; None: not counted.
    """

    name: str
    up: bool | None = None
    link_downed: int | None = None


@dataclass(frozen=True)
class HostSample:
    """One reading of the host; None: not read.

    Args:
        time: of the reading, wall seconds.
        node: name of the node.
        ports: network ports other than loopback.
        disk_free, disk_total: bytes of the file system of the run folder.
        memory_available, memory_total: bytes.
        cpu_steal: share of the processors' time that the hypervisor gave to others since the last reading.
        load: of the last minute, as getloadavg counts.
        error: what was not read, and why; empty: all was.
    """

    time: float
    node: str
    ports: tuple[Port, ...] = ()
    disk_free: int | None = None
    disk_total: int | None = None
    memory_available: int | None = None
    memory_total: int | None = None
    cpu_steal: float | None = None
    load: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Silence:
    """A call of the collector that has not come back; it is reported again while it lasts.

    Args:
        time: wall seconds.
        node: name of the node.
        seconds: for which it has not come back.
        what: the call, such as "NVML: device 3, temperature"; "disk: ..." and "host: ..." are no calls of a
            driver; "collector: ..." is the process as a whole.
    """

    time: float
    node: str
    seconds: float
    what: str


@dataclass(frozen=True)
class Notice:
    """Something that a person should read, and that is no sign of a fault: what cannot be read here, and why.

    Args:
        time: wall seconds.
        node: name of the node.
        text: one sentence.
    """

    time: float
    node: str
    text: str


Sample = DeviceSample | XidEvent | HostSample | Silence | Notice


class TelemetrySource(Protocol):
    """Reads samples; runs in the collector process, in a thread of its own, and may block there."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def starting(self) -> bool:
        """Whether the present call is the first one of a driver, which may take longer."""
        ...

    @property
    def doing(self) -> tuple[int, str]:
        """The number of the call that is being made, and what it reads."""
        ...

    def sample(self, now: float) -> Sequence[Sample]:
        """Return what there is to say at ``now`` (wall seconds)."""
        ...


_KINDS: dict[str, type[Sample]] = {
    "device": DeviceSample,
    "xid": XidEvent,
    "host": HostSample,
    "silence": Silence,
    "notice": Notice,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TYPES: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,), "str": (str,)}
_TRUE = {"true": True, "1": True, "false": False, "0": False}
MOST_PORTS = 64  # of a host
_LAST_INDEX = 4095  # of a device; a host has at most as many ranks
_LARGEST = math.nextafter(math.inf, 0.0)
_NUMBERS = range(-(1 << 63), 1 << 64)  # counters have 64 bits


def kind_of(sample: Sample) -> str:
    """Return the name of a sample's kind: "device", "xid", "host", "silence" or "notice"."""
    return _NAMES[type(sample)]


def to_line(sample: Sample) -> str:
    """Return a sample as one line of JSON; fields that are None are left out."""
    values = {name: value for name, value in sample.__dict__.items() if value is not None}
    if isinstance(sample, HostSample):
        values["ports"] = [port.__dict__ for port in sample.ports]
    return json.dumps({"kind": kind_of(sample), **values}, separators=(",", ":"))


COLUMNS = (
    "kind",
    *dict.fromkeys(spec.name for kind in _KINDS.values() for spec in fields(kind)),
)  # of a table of samples


def to_cells(sample: Sample) -> dict[str, str]:
    """Return a sample as the cells of a row by their columns; what is None has none."""
    found = {"kind": kind_of(sample)}
    for name, value in sample.__dict__.items():
        if isinstance(sample, HostSample) and name == "ports":
            found[name] = json.dumps([port.__dict__ for port in sample.ports])
        elif value is not None:
            found[name] = value if isinstance(value, str) else json.dumps(value)
    return found


def from_cells(row: Mapping[str, str | None]) -> Sample:
    """Return the sample of a row of a table; without a kind it is of a device. Empty cells are None.

    Raises:
        ValueError: it is not a sample; says which column has what.
    """
    name = row.get("kind") or "device"
    if name not in _KINDS:
        raise ValueError(f"kind: one of {', '.join(_KINDS)} expected, {name[:80]!r} found")
    values: dict[str, Any] = {}
    for spec in fields(_KINDS[name]):
        text = row.get(spec.name)
        if text and spec.name == "ports":
            try:
                values["ports"] = json.loads(text)
            except RecursionError as error:
                raise ValueError("ports: nested too deeply") from error
        elif text or (text is not None and spec.type == "str"):
            values[spec.name] = _converted(str(spec.type).partition(" | ")[0], text)
    return from_fields(_KINDS[name], values)


def _converted(kind: str, text: str) -> object:
    if kind == "bool":
        return _TRUE.get(text.lower(), text)
    if kind == "str":
        return text
    return int(text) if kind == "int" else float(text)


def from_line(text: str | bytes) -> Sample:
    """Return the sample that a line of JSON describes.

    Raises:
        ValueError: it is not a sample; says which field has what.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"an object whose kind is one of {', '.join(_KINDS)} expected, {text[:80]!r} found")
    return from_fields(_KINDS[kind], values)


def from_fields(kind: type[Sample], values: Mapping[str, Any]) -> Sample:
    """Return a sample of the kind; keys that are no field of it are ignored.

    Raises:
        ValueError: a field is missing, of another type, not finite, or out of range.
    """
    found = _checked(kind, values)
    first = -1 if kind is XidEvent else 0
    if not first <= found.get("index", 0) <= _LAST_INDEX:
        raise ValueError(f"index: {first} to {_LAST_INDEX} expected, {found['index']} found")
    if kind is HostSample:
        ports = values.get("ports", ())
        if not isinstance(ports, (list, tuple)) or len(ports) > MOST_PORTS:
            raise ValueError(f"ports: a list of up to {MOST_PORTS} expected")
        if not all(isinstance(one, Mapping) for one in ports):
            raise ValueError("ports: objects expected")
        found["ports"] = tuple(Port(**_checked(Port, one)) for one in ports)
    return kind(**found)


def _checked(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the simple fields of a class, each of the type that its annotation names."""
    found = {}
    for spec in fields(kind):
        name, type_name = spec.name, str(spec.type).partition(" | ")[0]
        if type_name not in _TYPES:
            continue
        value = values.get(name)
        if value is None:
            if spec.default is MISSING:
                raise ValueError(f"{name}: a {type_name} expected, nothing found")
            continue
        wrong = not isinstance(value, _TYPES[type_name]) or (isinstance(value, bool) and type_name != "bool")
        if wrong or (type_name == "float" and not -_LARGEST <= value <= _LARGEST):
            raise ValueError(f"{name}: a {type_name} expected, {str(value)[:80]!r} found")
        if type_name == "int" and value not in _NUMBERS:
            raise ValueError(f"{name}: a number of up to 64 bits expected, {str(value)[:80]!r} found")
        found[name] = value
    return found
