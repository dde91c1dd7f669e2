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
    assert {code for code in (*range(-1, 200), 1154) if severity(code) is kind} == codes
    assert all(str(code) in in_words(code) for code in codes)
