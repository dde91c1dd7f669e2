"""The table of ``outlast health``: what a node's devices and host show, as plain text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outlast.health.agent.telemetry.kernel_log import catalogue
from outlast.health.policy.preflight import in_bytes
from outlast.health.policy.telemetry import (
    DeviceSample,
    HostSample,
    Notice,
    Port,
    Sample,
    Silence,
    XidEvent,
)

_MOST = 10  # XIDs, silences and notices that are shown
_COLUMNS = ("GPU", "temp", "power", "clock", "load", "memory", "ECC", "rows", "PCIe", "replays", "NVLink", "")
# nvmlClocksEventReasons that are no part of normal work; 0x04 is the limit of power
_SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_RECOVERY = {1: "reset", 2: "reboot", 3: "drain P2P", 4: "drain and reset", 5: "recover IMEX", 6: "bus reset"}


@dataclass
class Shown:
    """What is shown: the newest sample of each device and of the host, and the newest events.

    Args:
        of_file: a file is replayed, which may have samples of one kind only.
    """

    of_file: bool = False
    devices: dict[str, DeviceSample] = field(default_factory=dict)
    host: HostSample | None = None
    silences: dict[str, Silence] = field(default_factory=dict)
    xids: deque[XidEvent] = field(default_factory=lambda: deque(maxlen=_MOST))
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=_MOST))

    def take(self, samples: Iterable[Sample]) -> None:
        """Take what a collector said."""
        for one in samples:
            match one:
                case DeviceSample():
                    self.devices[one.uuid or f"#{one.index}"] = one
                    if not one.error:
                        self._answers(one.index)
                case HostSample():
                    self.host = one
                case Silence():
                    self.silences[one.what] = one
                case XidEvent():
                    self.xids.append(one)
                case Notice():
                    self.notices.append(one)

    def _answers(self, index: int) -> None:
        """Drop silences of a device that was read, and of the calls before those to a device."""
        for what in list(self.silences):
            if what.startswith(f"NVML: device {index},") or not what.startswith("NVML: device "):
                del self.silences[what]

    @property
    def complete(self) -> bool:
        """Whether the host, and the devices or why there are none, are known; of a file, anything."""
        if self.of_file:
            return bool(self.devices or self.host or self.silences or self.xids or self.notices)
        told = self.devices or self.silences or any("no GPU" in one.text for one in self.notices)
        return self.host is not None and bool(told)

    def lines(self, node: str, now: float) -> list[str]:
        """Return the text; ``now`` is wall time."""
        found = [f"{node}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}", *self._table()]
        found += [f"silent for {one.seconds:.0f} s: {one.what}" for one in self.silences.values()]
        if self.host is not None:
            found.append(_host(self.host))
        found += [_xid(one) for one in self.xids]
        found += [one.text for one in self.notices]
        return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in found]

    def _table(self) -> list[str]:
        if not self.devices:
            return []
        devices = sorted(self.devices.values(), key=lambda one: (one.index, one.uuid))
        rows = [_COLUMNS, *(_row(one) for one in devices)]
        widths = [max(len(row[at]) for row in rows if len(row) > 2) for at in range(len(_COLUMNS))]
        found = []
        for row in rows:
            if len(row) == 2:
                found.append(f"{row[0]:<{widths[0]}}  {row[1]}")
            else:
                cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
                found.append("  ".join(cells).rstrip())
        return found


def _row(one: DeviceSample) -> Sequence[str]:
    if one.error:
        return str(one.index), f"not read: {one.error}"
    temperature = _n(one.temperature) + (" C" if one.temperature is not None else "")
    margin = f" ({_n(one.temperature_margin)} left)" if one.temperature_margin is not None else ""
    utilization = "-" if one.utilization is None else f"{one.utilization:.0%}"
    memory = "-"
    if one.memory_used is not None and one.memory_total is not None:
        memory = f"{in_bytes(one.memory_used)} of {in_bytes(one.memory_total)}"
    return (
        str(one.index),
        temperature + margin,
        f"{_n(one.power)}/{_n(one.power_limit)} W",
        f"{_n(one.sm_clock)}/{_n(one.max_sm_clock)} MHz",
        utilization,
        memory,
        f"{_n(one.ecc_corrected)}/{_n(one.ecc_uncorrected)}",
        f"{_n(one.remapped_rows_correctable)}/{_n(one.remapped_rows_uncorrectable)}",
        f"{_n(one.pcie_generation)} x{_n(one.pcie_width)}",
        _n(one.pcie_replays),
        _n(one.nvlink_errors),
        "; ".join(_troubles(one)),
    )


def _troubles(one: DeviceSample) -> Iterable[str]:
    for bit, words in _SLOWED.items():
        if (one.throttle_reasons or 0) & bit:
            yield words
    if one.pcie_width is not None and one.pcie_max_width is not None and one.pcie_width < one.pcie_max_width:
        yield f"PCIe x{one.pcie_width} of x{one.pcie_max_width}"
    if one.remap_pending:
        yield "a row is remapped at the next reset"
    if one.remap_failed:
        yield "a row could not be remapped"
    if one.recovery_action:
        yield f"the driver asks for: {_RECOVERY.get(one.recovery_action, str(one.recovery_action))}"


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _host(one: HostSample) -> str:
    parts = []
    if one.memory_available is not None and one.memory_total is not None:
        parts.append(f"memory {in_bytes(one.memory_available)} of {in_bytes(one.memory_total)} free")
    if one.disk_free is not None and one.disk_total is not None:
        parts.append(f"disk {in_bytes(one.disk_free)} of {in_bytes(one.disk_total)} free")
    if one.load is not None:
        parts.append(f"load {one.load:.1f}")
    if one.cpu_steal is not None:
        parts.append(f"CPU steal {one.cpu_steal:.1%}")
    parts += [_port(port) for port in one.ports]
    return "host: " + ", ".join([*parts, one.error] if one.error else parts)


def _port(one: Port) -> str:
    state = "?" if one.up is None else "up" if one.up else "down"
    return f"{one.name} {state}" + (f" (link went down {one.link_downed} times)" if one.link_downed else "")


def _xid(one: XidEvent) -> str:
    entry = catalogue().get(one.xid, {})
    known = f" {entry['mnemonic']}, NVIDIA: {entry['immediate'] or 'no action'}" if entry else ""
    where = f"GPU {one.index}" if one.index >= 0 else one.pci
    return f"XID {one.xid} of {where}:{known}: {one.text}"
