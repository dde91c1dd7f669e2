"""How long a restart waits after a start that completed no step.

What fails at a start may be an outage (a name server, a file server, a hub), which a restart meets again a
moment later. So each cause is answered after 0, 2, 10 and then 60 s. A restart for another cause that no
step has followed counts once: the job was already started again at once. A completed step resets all. The
budgets bound the number of restarts; a wait only spreads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.fields import whole

DELAYS = (0.0, 2.0, 10.0, 60.0)  # seconds
_KEPT = 64  # causes


class BackOff:
    """Counts the restarts for each cause since a step was completed."""

    def __init__(self) -> None:
        self._restarts: dict[str, int] = {}

    def delay(self, cause: str) -> float:
        """Return the seconds that the next restart for a cause waits."""
        return DELAYS[min(self.tries(cause), len(DELAYS) - 1)]

    def tries(self, cause: str) -> int:
        """Return the number of restarts since a step was completed, those for other causes as one."""
        same = self._restarts.get(cause, 0)
        return same + (len(self._restarts) > (cause in self._restarts))

    def has(self, cause: str) -> bool:
        """Say whether a restart for a cause was counted since a step was completed."""
        return cause in self._restarts

    def restarted(self, cause: str) -> None:
        """Count a restart for a cause."""
        self._restarts[cause] = self._restarts.pop(cause, 0) + 1
        while len(self._restarts) > _KEPT:
            del self._restarts[next(iter(self._restarts))]

    def stepped(self) -> None:
        """Reset all: a step was completed."""
        self._restarts.clear()

    def state(self) -> dict[str, Any]:
        """Return what another leader of the same launch must know, as JSON values."""
        return dict(self._restarts)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> BackOff:
        """Return the counts that an earlier leader left.

        Raises:
            TypeError, ValueError: the state is invalid.
        """
        found = cls()
        found._restarts = {
            str(name): whole(count, at_least=1) for name, count in list(dict(state).items())[-_KEPT:]
        }
        return found
