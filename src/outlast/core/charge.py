"""Whom a fault is laid to: one that looks like a victim's may turn out to be another's consequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outlast.core.diagnosis import GUESSED, WAITS, looks_like_victim
from outlast.core.events import Fault, FaultKind
from outlast.core.seating import Seat

VICTIM_WAITS = 0.3  # seconds; the end of the rank that caused it is known within milliseconds of the error
HANG_WAITS = 1.0  # the nodes' watchers find the silence of one collective within two looks of each other


def waits(fault: Fault, ping_timeout: float) -> float:
    """Return for how long a fault may turn out to be another's consequence, in seconds.

    Where ranks only wait, and no timeout of the user's found it, the network may be down for a moment: it
    gets as long as a node may be silent.
    """
    if fault.kind is FaultKind.ERROR and looks_like_victim(fault.signature):
        return VICTIM_WAITS
    if fault.kind is FaultKind.HANG and (fault.rank < 0 or WAITS in fault.evidence):
        return HANG_WAITS + (ping_timeout if GUESSED in fault.evidence else 0.0)
    return 0.0


def laid_to_its_node(fault: Fault, seats: Iterable[Seat]) -> Fault:
    """Return the fault at the node of its rank.

    Any rank may tell of a wrong replica or a convicted device, and a node whose ranks wait of a hung rank.
    """
    told_elsewhere = fault.kind is FaultKind.HANG and WAITS in fault.evidence
    if not told_elsewhere and fault.kind not in (FaultKind.CORRUPT, FaultKind.REFUSED):
        return fault
    return next((replace(fault, node=seat.name) for seat in seats if fault.rank in seat.ranks), fault)


def is_nobodys(fault: Fault) -> bool:
    """Say whether replicas differ and none of them is known to be wrong, so that no node is."""
    return fault.kind is FaultKind.CORRUPT and fault.rank < 0
