"""Hard rules: what one look at a device decides, without a score.

Each rule has a number of looks in a row that must agree, since a reading may be wrong once. A value that is
not known changes nothing: it neither confirms a condition nor ends it. A condition ends after as many looks
that deny it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.health.policy.telemetry import DeviceSample

ACTIONS = {1: "reset", 2: "reboot", 3: "drain P2P", 4: "drain and reset"}  # NVML's field 230
LOADED = 0.2  # share of the time in which a kernel ran: an idle link may lower its width
SILENT = 45.0  # seconds; three times the 15 s after which NVSentinel gives up a probe
GONE = 30.0  # seconds without a sample of a device while others were read: three intervals
BOOT_GRACE = 600.0  # seconds; links fail while nodes boot: 214 of 288 alarms of NVSentinel #1701 were that
BURST = 180.0  # seconds in which the same XID of a device counts once (NVSentinel)
DAY = 86400.0
LINK_FAILURES = 2  # within a day


@dataclass(frozen=True)
class Rule:
    """What one rule says of a sample.

    Args:
        name: of the rule.
        holds: None: not known.
        reason: if it holds.
        looks: in a row that must agree.
    """

    name: str
    holds: bool | None
    reason: str
    looks: int


def rules_of(sample: DeviceSample, booting: bool) -> tuple[Rule, ...]:
    """Return what every rule says of a sample; ``booting``: links may still be training."""
    action, width, widest = sample.recovery_action, sample.pcie_width, sample.pcie_max_width
    name = ACTIONS.get(action or 0, f"action {action}")
    narrow = None if width is None or widest is None or booting else width < widest
    if narrow and (sample.utilization is None or sample.utilization < LOADED):
        narrow = None
    return (
        Rule("remap_failed", sample.remap_failed, "a row could not be remapped", 1),
        Rule("recovery", None if action is None else action != 0, f"the driver asks for {name}", 1),
        Rule("width", narrow, f"PCIe width is {width} of {widest} lanes under load", 3),
        Rule("unreadable", bool(sample.error), f"it cannot be read: {sample.error[:120]}", 3),
    )


class Looks:
    """Counts looks that agree, for the rules of one device."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self.hard: dict[str, str] = {}

    def take(self, rules: Iterable[Rule]) -> list[str]:
        """Take what the rules say; return the reasons of those that have begun to hold."""
        new = []
        for rule in rules:
            if rule.holds is None:
                continue
            row = self._rows.get(rule.name, 0)
            # Above 0: looks in a row that confirm it; below: that deny it.
            row = max(1, row + 1) if rule.holds else min(-1, row - 1)
            self._rows[rule.name] = row
            if row >= rule.looks:
                if rule.name not in self.hard:
                    new.append(rule.reason)
                self.hard[rule.name] = rule.reason
            elif row <= -rule.looks:
                self.hard.pop(rule.name, None)
        return new

    def set(self, name: str, reason: str) -> bool:
        """Take a rule that holds from now on; return whether it did not before."""
        new = name not in self.hard
        self.hard[name] = reason
        return new
