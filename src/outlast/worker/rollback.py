"""Going back to an older checkpoint within the process, all ranks together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.loading.restorer import Restored
from outlast.core.errors import NonFinite
from outlast.core.numerics import Finding
from outlast.core.rollback import plan
from outlast.settings import WorkerContext


class Rollback:
    """Knows what was tried, and loads something older.

    Args:
        checkpointer: of the session.
        context: what the launcher said.
        timeout: seconds that ranks wait for each other.
    """

    def __init__(self, checkpointer: Checkpointer, context: WorkerContext, timeout: float) -> None:
        self._checkpointer = checkpointer
        self._context = context
        self._timeout = timeout
        self._tried: set[str] = set()

    def go(self, finding: Finding, first: bool, state: Mapping[str, object]) -> Restored:
        """Load the newest trusted checkpoint from before the bad steps, after the first time an older one.

        Newer ones of this generation are set aside, since their steps will be saved again.

        Args:
            finding: why.
            first: there was progress since the last rollback, or none before.
            state: the live objects.

        Raises:
            NonFinite: there is nothing to go back to; on every rank.
            NoUsableCheckpoint: copies exist, none can be trusted.
        """
        if first:
            self._tried.clear()
        here = self._checkpointer
        names = here.names() if here.alone else []
        listed = json.loads(here.exchange.gather("copies", json.dumps(names), self._timeout)[0])
        if not here.alone:
            self._refuse(finding, "a rollback within the job needs all copies on one node and no global_url")
        way = plan(listed, self._context.generation, finding.since, self._tried)
        if way is None:
            self._refuse(finding, f"no checkpoint from before step {finding.since} is there to go back to")
        here.put_away(way.put_away, f"rolled back: {finding.reason}")
        here.exchange.gather("put away", "", self._timeout)
        found = here.restore(state, (*self._context.avoid, *way.avoid))
        if found is None:
            self._refuse(finding, "no checkpoint is left to go back to")
        self._tried.add(found.name)
        return found

    def _refuse(self, finding: Finding, why: str) -> NoReturn:
        error = NonFinite(finding.what, finding.value, finding.step)
        error.args = (f"{finding.reason}; {why}: the worker ends",)
        raise error
