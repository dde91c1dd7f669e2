"""The gates of all nodes: whether living ranks can be entered again, and until when they are waited for.

In an in-process restart no node is given its part of the next generation before the ranks of all wait, or
are gone: else the first that entered would be taken for hung while they wait for the last. A node ends what
does not come, so each answers within what it said beforehand. Where one does not, the restart goes on as a
restart of the workers, in the same generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outlast.core.manifest import some

if TYPE_CHECKING:
    from outlast.core.events import Action, Fault
    from outlast.core.lead_events import Offer


class Gates:
    """What whoever coordinates knows of them.

    Args:
        letters: seconds that an answer may take beyond what a node needs for it.
    """

    def __init__(self, letters: float) -> None:
        self._letters = letters
        self._able: dict[str, bool | None] = {}
        self._patience: dict[str, float] = {}
        self._fault: Fault | None = None
        self.until = math.inf  # when waiting ends

    def told(self, node: str, offer: Offer) -> None:
        """Take what a node says of its ranks."""
        self._able[node], self._patience[node] = offer.able, offer.patience

    def able(self, fault: Fault, nodes: Iterable[str]) -> bool | None:
        """Say whether the living ranks of nodes can be entered again.

        Args:
            fault: it says so of its own node, later than that node's last word.
            nodes: those with ranks that are there.

        Returns:
            None: nobody speaks of it. A node without a living rank is no obstacle: its ranks are forked.
        """
        words = [True if node == fault.node and fault.reenters else self._able.get(node) for node in nodes]
        return None if True not in words else False not in words

    @property
    def called(self) -> Fault | None:
        """The fault whose in-process restart is on its way; None: none is."""
        return self._fault

    def call(self, action: Action, fault: Fault | None, nodes: Iterable[str], now: float) -> None:
        """Begin a restart; wait for the ranks of nodes if they are to be entered again."""
        self.close()
        if action.reenter and fault is not None:
            self._fault = fault
            longest = max((self._patience.get(node, 0.0) for node in nodes), default=0.0)
            self.until = now + longest + self._letters

    def close(self) -> None:
        """Wait no more: all have answered, or something else is done."""
        self._fault, self.until = None, math.inf


def late(silent: Iterable[str]) -> str:
    """Say, in one sentence, that nodes did not bring their ranks to the gate in time."""
    return f"{some(sorted(silent))} did not bring the ranks to the gate in time"
