"""What follows from an XID, by NVIDIA's catalogue."""

from __future__ import annotations

import pytest

from outlast.health.policy.xids import Severity, in_words, severity


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (Severity.DEAD, {46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 140, 143, 158, 167}),
        (Severity.FAILING, {63, 92, 94, 156, 157, 164, 165, 168, 171, 172}),
        (Severity.LINK, {74, 121, 136, 137, *range(144, 151), 155}),
        (
            Severity.APPLICATION,
            {8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 45, 60, *range(68, 73), *range(75, 78), 80}
            | {*range(82, 87), 88, 89, *range(96, 106), *range(126, 136), 139},
        ),
        (Severity.RECOVERY, {154}),
    ],
)
def test_the_codes_that_say_something(kind: Severity, codes: set[int]) -> None:
    assert {code for code in range(-1, 200) if severity(code) is kind} == codes


@pytest.mark.parametrize("code", [0, 1, 154 + 1000, -1])
def test_other_codes_say_nothing(code: int) -> None:
    assert severity(code) is Severity.OTHER


NAMES = {
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
    **{code: "NVLink error" for code in range(144, 151)},
}


def test_an_xid_in_words_has_the_name_that_goes_with_its_code() -> None:
    named = {code: f"XID {code} ({name})" for code, name in NAMES.items()}
    assert {code: in_words(code) for code in range(-1, 1001)} == {
        code: named.get(code, f"XID {code}") for code in range(-1, 1001)
    }
