"""Where a run first went wrong, by computing it again: from which copy, and at which steps to look."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What is computed again and compared.

    Args:
        start: completed steps that the replay begins with; 0 without a copy: from the script's own beginning.
        reason: why it begins there.
        copies: steps of the copies that are compared, ascending.
        records: steps of the recorded digests that are compared, ascending.
        save_interval: at which steps the replay saves: its multiples.
        compare_interval: at which steps the replay digests its parameters: its multiples.
    """

    start: int
    reason: str
    copies: tuple[int, ...]
    records: tuple[int, ...]
    save_interval: int
    compare_interval: int

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps at which something is compared, ascending."""
        return tuple(sorted({*self.copies, *self.records}))


def plan(
    copies: Mapping[int, str], records: Collection[int], start: int | None, end: int | None
) -> Plan | str:
    """Return what to compute again, or why nothing can be compared.

    Args:
        copies: for each step of which there is a whole copy, how far the run believes it ("proven", ...).
        records: steps of which digests were recorded.
        start: begin with the copy of this step, 0: with none; None: with the newest proven one that has
            something to compare behind it, else the oldest.
        end: compare no step beyond it; None: all that there is.
    """
    last = max((*copies, *records), default=0) if end is None else end
    newest = max((step for step in (*copies, *records) if step <= last), default=0)
    behind = [step for step, word in copies.items() if word == "proven" and step < newest]
    reason = "--from says so"
    if start and start not in copies:
        there = ", ".join(map(str, sorted(copies))) or "none"
        return f"there is no whole copy of step {start}; there are: {there}"
    if start is None and behind:
        start, reason = max(behind), "the newest proven copy with something to compare behind it"
    elif start is None and copies:
        start = min(copies)
        reason = "the oldest copy: none that is proven has something to compare behind it"
    elif start is None:
        start, reason = 0, "the beginning: there is no copy"
    within = tuple(step for step in sorted(copies) if start < step <= last)
    noted = tuple(step for step in sorted(records) if start < step <= last)
    if not within and not noted:
        return f"nothing to compare after step {start}: no copy and no recorded digest up to step {last}"
    return Plan(start, reason, within, noted, math.gcd(*within) or last, math.gcd(*noted) or last)


@dataclass(frozen=True)
class Bracket:
    """Where the replay and the run part.

    Args:
        right: the last step at which they were seen to be equal, or the start.
        wrong: the next step that was looked at, where they differ; None: they differ nowhere.
        probes: the steps that were looked at, in that order.
    """

    right: int
    wrong: int | None
    probes: tuple[int, ...]


def bisect(
    start: int, steps: Sequence[int], known: Mapping[int, bool], equal: Callable[[int], bool]
) -> Bracket:
    """Find two neighbouring steps between which the run went wrong, with few looks.

    What is wrong stays wrong, therefore of n steps at most log2(n) + 2 are looked at. Both ends of the answer
    were looked at: where a difference did heal, the answer is one of the places where it began.

    Args:
        start: where both begin with the same state.
        steps: at which they can be compared, ascending, all after the start.
        known: what is known without a look: whether they are equal.
        equal: looks, which is dear.
    """
    said = {step: known[step] for step in steps if step in known}
    probes: list[int] = []

    def look(at: int) -> bool:
        step = steps[at]
        if step not in said:
            said[step] = equal(step)
            probes.append(step)
        return said[step]

    known_wrong = [at for at, step in enumerate(steps) if said.get(step) is False]
    high = known_wrong[0] if known_wrong else len(steps) - 1
    if look(high):
        return Bracket(steps[high], None, tuple(probes))
    low = max((at for at in range(high) if said.get(steps[at])), default=-1)
    wrong = bisect_left(range(high), True, low + 1, key=lambda at: not look(at))
    return Bracket(steps[wrong - 1] if wrong else start, steps[wrong], tuple(probes))
