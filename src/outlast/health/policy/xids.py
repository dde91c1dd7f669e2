"""What an XID means for its device, by the actions of NVIDIA's XID catalogue.

Source: the catalogue of 172 codes (https://docs.nvidia.com/deploy/xid-errors). Its immediate action decides:
``RESET_GPU`` and ``RESTART_BM`` end the work of the device, ``RESTART_APP`` speaks of the program. Codes for
which the catalogue has a workflow or no action are placed by their names, as DCGM, gpud and NVSentinel do.
"""

from __future__ import annotations

from enum import Enum


class Severity(str, Enum):
    """What follows from an XID."""

    DEAD = "dead"  # the device does no more work until it is reset or replaced
    FAILING = "failing"  # it works, and is likely to fail
    LINK = "link"  # a link failed; links recover, and fail at planned reboots
    APPLICATION = "application"  # the program, unless it stays with one device
    RECOVERY = (
        "recovery"  # the driver's recovery action has changed; the action itself is read from the device
    )
    OTHER = "other"  # nothing follows for the device


_CODES: dict[Severity, tuple[int, ...]] = {
    # RESET_GPU, RESTART_BM; 48 (double bit error) has a workflow that ends there, 167 (PCIe fatal
    # timeout) no action
    Severity.DEAD: (46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 140, 143, 158, 167),
    # corrected errors too frequent, remapped rows, contained error, retired resources, lifetime of power
    # smoothing, less memory, uncorrectable DRAM and SRAM errors that the driver survived
    Severity.FAILING: (63, 92, 94, 156, 157, 164, 165, 168, 171, 172),
    Severity.LINK: (74, 121, 136, 137, 144, 145, 146, 147, 148, 149, 150, 155),
    # RESTART_APP without those above; 43 and 45 follow an error of the program or another XID
    Severity.APPLICATION: (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85),
        *(86, 88, 89, 96, 97, 98, 99, *range(100, 106), *range(126, 136), 139),
    ),
    Severity.RECOVERY: (154,),
}
_SEVERITY = {code: severity for severity, codes in _CODES.items() for code in codes}
_NAMES = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "reset channel verification error",
    45: "preemptive channel removal",
    46: "GPU timeout",
    48: "double bit ECC error",
    62: "PMU halted",
    63: "rows are remapped",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "too many corrected ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    121: "C2C link error",
    136: "link training failed",
    137: "NVLink privilege error",
    140: "ECC error was not recovered",
    143: "GPU initialisation error",
    154: "recovery action changed",
    156: "resource retired",
    157: "resource could not be retired",
    158: "GPU fatal timeout",
    167: "PCIe fatal timeout",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}


def severity(xid: int) -> Severity:
    """Return what an XID means for its device."""
    return _SEVERITY.get(xid, Severity.OTHER)


def in_words(xid: int) -> str:
    """Return an XID with its name, as in ``XID 79 (GPU has fallen off the bus)``."""
    name = _NAMES.get(xid, "NVLink error" if 144 <= xid <= 150 else "")
    return f"XID {xid} ({name})" if name else f"XID {xid}"
