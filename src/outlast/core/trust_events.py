"""What can happen to a copy, or to the training that goes on from it, that says how far it is to be believed.

A copy is named by its place, ``tier/name``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """The bytes of a copy were handed to its tier."""

    place: str


@dataclass(frozen=True)
class Committed:
    """A copy exists; of those that an earlier process left this must be said before the load."""

    place: str


@dataclass(frozen=True)
class Verified:
    """A copy was read back, and its digests fit."""

    place: str


@dataclass(frozen=True)
class Damaged:
    """The bytes of a copy are not those that were committed."""

    place: str
    reason: str


@dataclass(frozen=True)
class Released:
    """A person says that a copy may be loaded again, or (``with_path``) the fault was not due to it.

    Args:
        place: the copy.
        reason: why.
        with_path: what was saved after it was loaded is doubted no more for that load.
    """

    place: str
    reason: str
    with_path: bool = False


@dataclass(frozen=True)
class Removed:
    """A copy does not exist any more."""

    place: str


@dataclass(frozen=True)
class Loaded:
    """The ranks go on from a state whose shards were verified; a fresh start is a load of no copy.

    Args:
        step: completed steps.
        places: the copies from which shards were read.
        generation: whose copies are saved on the path that begins here; -1: not known.
    """

    step: int
    places: tuple[str, ...]
    generation: int = -1


@dataclass(frozen=True)
class CleanStep:
    """Every rank has completed a step, and nothing was wrong with it; steps may be left out."""

    step: int


@dataclass(frozen=True)
class Faulted:
    """A fault ended this path of training.

    Args:
        step: completed steps when it happened; -1 before the first one. Of what is told by clean steps and
            by this, the later one counts.
        kind: value of a ``FaultKind``, or ``NON_FINITE``.
        signature: equal for equal causes.
        lasting: nothing is left to be tried but another state, however long ago this one was loaded.
        agreed: ranks that should hold the same last did after so many steps; -1: never since the load.
            None: the fault is not about that.
        speaks: it speaks against the state that was loaded, if it came soon after the load.
    """

    step: int
    kind: str
    signature: str
    lasting: bool = False
    agreed: int | None = None
    speaks: bool = False


Event = Written | Committed | Verified | Damaged | Released | Removed | Loaded | CleanStep | Faulted
