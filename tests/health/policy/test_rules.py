"""Hard rules: what one sample says, and how many in a row must say it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.health.policy.rules import Looks, Rule, rules_of
from outlast.health.policy.telemetry import DeviceSample

LOADED = DeviceSample(
    *(0.0, "n1", 0),
    utilization=0.9,
    remap_failed=False,
    recovery_action=0,
    pcie_width=16,
    pcie_max_width=16,
)


def rule(name: str, sample: DeviceSample, booting: bool = False) -> Rule:
    return next(one for one in rules_of(sample, booting) if one.name == name)


def test_a_healthy_device_breaks_no_rule_and_what_is_not_known_says_nothing() -> None:
    assert [one.holds for one in rules_of(LOADED, False)] == [False] * 4
    assert [one.holds for one in rules_of(DeviceSample(0.0, "n1", 0), False)] == [None, None, None, False]
    found = rule("unreadable", replace(LOADED, error="on fire"))
    assert (found.holds, "on fire" in found.reason) == (True, True)


@pytest.mark.parametrize(
    ("width", "widest", "utilization", "holds"),
    [
        (8, 16, 0.2, True),
        (8, 16, 0.199, None),  # an idle link may lower its width
        (8, 16, None, None),
        (16, 16, 0.0, False),
        (16, 16, None, False),
        (0, 16, 0.9, True),
        (None, 16, 0.9, None),
        (8, None, 0.9, None),
    ],
)
def test_a_link_is_narrow_under_load_only(
    width: int | None, widest: int | None, utilization: float | None, holds: bool | None
) -> None:
    sample = replace(LOADED, pcie_width=width, pcie_max_width=widest, utilization=utilization)
    assert rule("width", sample).holds is holds
    assert rule("width", sample, booting=True).holds is None


@pytest.mark.parametrize(
    ("action", "holds"), [(None, None), (0, False), *((one, True) for one in (1, 2, 3, 4, 5))]
)
def test_the_driver_may_ask_for_an_action(action: int | None, holds: bool | None) -> None:
    assert rule("recovery", replace(LOADED, recovery_action=action)).holds is holds


def taken(needed: int, said: str) -> str:
    """Return for each look whether the rule holds then; looks say yes, no or nothing (``-``)."""
    looks, found = Looks(), ""
    for one in said:
        looks.take([Rule("width", {"y": True, "n": False, "-": None}[one], f"reason {len(found)}", needed)])
        found += "y" if "width" in looks.hard else "n"
    return found


@pytest.mark.parametrize(
    ("needed", "said", "holds"),
    [
        (1, "ynyn", "ynyn"),
        (3, "yyy", "nny"),
        (3, "yynyy", "nnnnn"),
        (3, "yy-y", "nnny"),
        (3, "yyynnyynnn", "nnyyyyyyyn"),
        (3, "yyynn-n", "nnyyyyn"),
        (3, "nnnnnyyy", "nnnnnnny"),
    ],
)
def test_as_many_looks_end_a_rule_as_begin_it(needed: int, said: str, holds: str) -> None:
    assert taken(needed, said) == holds


def test_a_rule_is_told_once_and_keeps_its_latest_reason() -> None:
    looks = Looks()
    assert [looks.take([Rule("a", True, f"reason {number}", 2)]) for number in range(4)] == [
        *([], ["reason 1"], [], [])
    ]
    assert looks.hard == {"a": "reason 3"}
    assert not looks.set("a", "reason 4")
    assert looks.set("b", "reason 5")
    assert looks.hard == {"a": "reason 4", "b": "reason 5"}
