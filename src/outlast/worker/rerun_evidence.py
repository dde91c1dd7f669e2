"""What a step's numbers say about ranks: whose they are, and whether two runs came to the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.core.numerics import Action, Check, Finding
from outlast.core.rerun_stats import relative_difference
from outlast.core.tally import Observation


def apart(one: float | None, other: float | None) -> float:
    """Return how far two losses lie apart; not at all where there are none."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return relative_difference(one, other)


def digests(seen: Observation, told: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return by rank what it computed from its own data alone.

    That is the loss; where there is one rank, so that nothing was reduced, its gradients as well.
    """
    return tuple(
        f"{'-' if loss is None else loss.hex()} {one.get('digest', '')}"
        for loss, one in zip(seen.losses, told, strict=True)
    )


def owners(seen: Observation, finding: Finding) -> tuple[int, ...]:
    """Return the ranks whose own numbers are bad; none where gradients were reduced and all of them are."""
    world = len(seen.losses)
    if world == 1 or finding.check in (Check.NAN_IN_LOSS, Check.RANK_OUTLIER):
        return finding.ranks
    bad = tuple(
        rank for rank, loss in enumerate(seen.losses) if loss is not None and not abs(loss) < float("inf")
    )
    return bad or (finding.ranks if len(finding.ranks) < world else ())


def finding_of(incident: Mapping[str, Any]) -> Finding:
    """Return a finding for an incident of which only the record is left."""
    step = int(incident["step"])
    what = str(incident.get("check", "a result"))
    value = float(incident.get("value") or "nan")
    return Finding(Check.NAN_IN_LOSS, Action.RAISE, step, (), what, value, f"{what} in step {step}", step)
