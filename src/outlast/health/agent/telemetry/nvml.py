"""The devices as NVIDIA's driver describes them, through the library ``nvidia-ml-py`` (module ``pynvml``).

Every call may take for ever when the driver hangs; :class:`Nvml` says before each one what it is about to
read. What a device or a driver does not support is None in the sample. Any other error ends the reading of
the device, and is the ``error`` of its sample.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from outlast.health.policy.telemetry import DeviceSample, Notice, Sample

LIBRARY = "libnvidia-ml.so.1"
_MODULE = "pynvml"
_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/lib",
)
_MOST_DEVICES = 64
_CACHE = Path("/etc/ld.so.cache")
_CACHE_BYTES = 16 << 20
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, from driver r570 on
# NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL: CRC of flits and of data, replays, recoveries
_NVLINK_TOTALS = (38, 45, 52, 59)
# From Blackwell on there are no totals: RCV_ERRORS and LINK_RECOVERY_EVENTS of each link (scope)
_NVLINK_EACH = (208, 215)
_LINKS = 18
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_ABSENT_ERRORS = (
    *("INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "NOT_FOUND", "FUNCTION_NOT_FOUND", "NO_DATA"),
    *("FREQ_NOT_SUPPORTED", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED", "NOT_READY"),
)
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """What stays the same of a device; its PCI address is as the kernel log writes it."""

    uuid: str = ""
    model: str = ""
    pci: str = ""


def missing(library_path: str) -> str:
    """Return why NVML cannot be used here, without loading it; empty: it is installed.

    Args:
        library_path: LD_LIBRARY_PATH of the collector.
    """
    folders = [*filter(None, library_path.split(":")), *_FOLDERS]
    if not any(os.path.exists(os.path.join(folder, LIBRARY)) for folder in folders):
        try:
            with open(_CACHE, "rb") as file:
                known = f"{LIBRARY}\0".encode() in file.read(_CACHE_BYTES)
        except OSError:
            known = False
        if not known:
            return f"{LIBRARY} is not installed (it comes with NVIDIA's driver)"
    if find_spec(_MODULE) is None:
        return "the package nvidia-ml-py is not installed; pip install 'outlast[gpu]'"
    return ""


class Nvml:
    """The GPUs of this node.

    Args:
        node: name of the node.
        known: devices that an earlier collector has read: uuid and index; one that is not there any more is
            reported as an error.
        addresses: takes the index of each device by its PCI address.
    """

    name = "NVML"

    def __init__(self, node: str, known: Mapping[str, int], addresses: dict[str, int]) -> None:
        self._node = node
        self._addresses = addresses
        self._known = dict(known)
        self._count = 0
        self.library: ModuleType | None = None  # once it is initialised
        self._identities: dict[int, Identity] = {}
        self._said = ""
        self.doing = (0, "")

    @property
    def starting(self) -> bool:
        """Whether the driver is being initialised, which takes seconds without persistence mode."""
        return self.library is None

    def sample(self, now: float) -> Sequence[Sample]:
        """Return a sample of each device; where there is no NVML, a notice that says why."""
        try:
            library = self.library or self._begin()
        except ImportError:
            return self._without(now, "the package nvidia-ml-py is not installed; pip install 'outlast[gpu]'")
        except Exception as error:  # noqa: BLE001 - pynvml makes its error classes at import
            return self._without(now, str(error))
        try:
            self._do("number of devices")
            count = int(library.nvmlDeviceGetCount())
        except library.NVMLError as error:
            return [self._failed(now, index, f"number of devices: {error}") for index in range(self._count)]
        self._count = max(self._count, min(count, _MOST_DEVICES))
        found: list[Sample] = []
        for index in range(self._count):
            if index < count:
                found.append(self._read(library, index, now))
            else:
                found.append(self._failed(now, index, f"NVML counts {count} devices, {self._count} before"))
        return [*found, *self._vanished(now)]

    def _begin(self) -> ModuleType:
        self._do("initialisation")
        library = importlib.import_module(_MODULE)
        library.nvmlInit()
        self.library = library
        return library

    def _without(self, now: float, why: str) -> list[Sample]:
        """Report that NVML cannot be used: an error of each device that was there, else a notice, once."""
        if self._known:
            text = f"NVML cannot be initialised any more: {why}"
            return [
                DeviceSample(now, self._node, index, uuid, error=text) for uuid, index in self._known.items()
            ]
        told, self._said = self._said, why
        return [] if told == why else [Notice(now, self._node, f"no GPU: NVML was not found ({why})")]

    def _vanished(self, now: float) -> list[Sample]:
        """Report devices of an earlier collector that are not there any more."""
        there = {one.uuid for one in self._identities.values()}
        text = "the device has vanished: NVML does not list it any more"
        return [
            DeviceSample(now, self._node, index, uuid, error=text)
            for uuid, index in self._known.items()
            if uuid not in there
        ]

    def _do(self, what: str) -> None:
        self.doing = (self.doing[0] + 1, what)

    def _failed(self, now: float, index: int, error: str, seconds: float = 0.0) -> DeviceSample:
        one = self._identities.get(index, Identity())
        return DeviceSample(now, self._node, index, one.uuid, one.model, call_seconds=seconds, error=error)

    def _read(self, library: ModuleType, index: int, now: float) -> DeviceSample:
        began = time.monotonic()
        values: dict[str, Any] = {}
        what = "handle"
        try:
            self._do(f"device {index}, handle")
            handle = library.nvmlDeviceGetHandleByIndex(index)
            if index not in self._identities:
                what = "identity"
                self._do(f"device {index}, identity")
                one = self._identities[index] = _identity(library, handle)
                self._addresses[one.pci] = index
            for what, read in _READERS.items():
                self._do(f"device {index}, {what}")
                values |= _unless_absent(library, functools.partial(read, library, handle)) or {}
        except library.NVMLError as error:
            return self._failed(now, index, f"{what}: {error}", time.monotonic() - began)
        if values.get("temperature_margin") is None and values.get("slowdown") and values.get("temperature"):
            values["temperature_margin"] = values["slowdown"] - values["temperature"]
        values.pop("slowdown", None)
        one = self._identities[index]
        seconds = time.monotonic() - began
        return DeviceSample(now, self._node, index, one.uuid, one.model, call_seconds=seconds, **values)


class Computing:
    """The processes that compute on the GPUs of this node.

    Args:
        devices: the GPUs; their library is used once it is initialised.
    """

    name = "NVML"
    starting = False

    def __init__(self, devices: Nvml) -> None:
        self._devices = devices
        self.doing = (0, "")

    def pids(self) -> tuple[set[int], str]:
        """Return the pids that NVML lists, and what could not be read."""
        library = self._devices.library
        if library is None:
            return set(), "NVML is not initialised"
        found: set[int] = set()
        problems = []
        self.doing = (self.doing[0] + 1, "number of devices")
        for index in range(min(library.nvmlDeviceGetCount(), _MOST_DEVICES)):
            self.doing = (self.doing[0] + 1, f"device {index}, processes")
            try:
                handle = library.nvmlDeviceGetHandleByIndex(index)
                for name in _PROCESSES:
                    listed = _unless_absent(library, functools.partial(getattr(library, name), handle))
                    if listed is not None:
                        found.update(one.pid for one in listed)
                        break
            except library.NVMLError as error:
                problems.append(f"device {index}, processes: {error}")
        return found, "; ".join(problems)


def _unless_absent(library: ModuleType, read: Callable[[], Any]) -> Any:
    """Return what a call returns; None: the device or the driver does not support it.

    Raises:
        NVMLError: the device is in trouble.
    """
    try:
        return read()
    except library.NVMLError as error:
        if error.value in [getattr(library, f"NVML_ERROR_{name}", None) for name in _ABSENT_ERRORS]:
            return None
        raise


def _identity(library: ModuleType, handle: Any) -> Identity:
    uuid = _unless_absent(library, lambda: library.nvmlDeviceGetUUID(handle)) or ""
    model = _unless_absent(library, lambda: library.nvmlDeviceGetName(handle)) or ""
    pci = _unless_absent(library, lambda: library.nvmlDeviceGetPciInfo(handle))
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}" if pci else ""
    return Identity(str(uuid), str(model), address)


def _fields(library: ModuleType, handle: Any, wanted: Sequence[Any]) -> list[float | None]:
    """Return the values of NVML's fields; None: not supported."""
    answers = _unless_absent(library, lambda: library.nvmlDeviceGetFieldValues(handle, wanted))
    if answers is None:
        return [None] * len(wanted)
    return [
        getattr(one.value, _MEMBERS.get(one.valueType, "ullVal")) if one.nvmlReturn == 0 else None
        for one in answers
    ]


def _clock_reasons(library: ModuleType, handle: Any) -> Values:
    try:
        return {"throttle_reasons": library.nvmlDeviceGetCurrentClocksEventReasons(handle)}
    except library.NVMLError as error:
        if error.value != library.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return {"throttle_reasons": library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}


def _memory(library: ModuleType, handle: Any) -> Values:
    found = library.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used": found.used, "memory_total": found.total}


def _remapped(library: ModuleType, handle: Any) -> Values:
    corrected, uncorrected, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_rows_correctable": corrected,
        "remapped_rows_uncorrectable": uncorrected,
        "remap_pending": bool(pending),
        "remap_failed": bool(failed),
    }


def _recovery(library: ModuleType, handle: Any) -> Values:
    (action,) = _fields(library, handle, [_RECOVERY_ACTION])
    return {} if action is None else {"recovery_action": int(action)}


def _nvlink(library: ModuleType, handle: Any) -> Values:
    found = [one for one in _fields(library, handle, _NVLINK_TOTALS) if one is not None]
    if not found:
        each = [(field, link) for field in _NVLINK_EACH for link in range(_LINKS)]
        found = [one for one in _fields(library, handle, each) if one is not None]
    return {"nvlink_errors": int(sum(found))} if found else {}


def _value(
    name: str, function: str, *arguments: int, scale: float = 1.0
) -> Callable[[ModuleType, Any], Values]:
    def read(library: ModuleType, handle: Any) -> Values:
        found = getattr(library, function)(handle, *arguments)
        found = found.value if isinstance(found, ctypes._SimpleCData) else found
        return {name: found if scale == 1.0 else found * scale}

    return read


_SM, _TEMPERATURE_GPU, _SLOWDOWN, _CORRECTED, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0, 1, 0
_READERS: dict[str, Callable[[ModuleType, Any], Values]] = {
    "temperature": _value("temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
    "temperature margin": _value("temperature_margin", "nvmlDeviceGetMarginTemperature"),
    "slowdown temperature": _value("slowdown", "nvmlDeviceGetTemperatureThreshold", _SLOWDOWN),
    "power": _value("power", "nvmlDeviceGetPowerUsage", scale=1e-3),
    "power limit": _value("power_limit", "nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
    "clock": _value("sm_clock", "nvmlDeviceGetClockInfo", _SM),
    "highest clock": _value("max_sm_clock", "nvmlDeviceGetMaxClockInfo", _SM),
    "clock reasons": _clock_reasons,
    "utilisation": lambda library, handle: {
        "utilization": library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    },
    "memory": _memory,
    "corrected ECC errors": _value("ecc_corrected", "nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
    "uncorrected ECC errors": _value(
        "ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE
    ),
    "remapped rows": _remapped,
    "recovery action": _recovery,
    "PCIe width": _value("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    "highest PCIe width": _value("pcie_max_width", "nvmlDeviceGetMaxPcieLinkWidth"),
    "PCIe generation": _value("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    "PCIe replays": _value("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
    "NVLink errors": _nvlink,
}
