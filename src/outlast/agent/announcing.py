"""What is said about faults and what follows, to people and to the event log."""

from __future__ import annotations

from outlast.agent.console import Console
from outlast.agent.generation import Generation
from outlast.agent.journal import Journal
from outlast.core.copies import TrustChange
from outlast.core.events import Fault, Rung
from outlast.core.lead_events import Judged
from outlast.core.trust import Trust


class Announcer:
    """Says it on the console and in the journal.

    Args:
        console: for people.
        journal: the event log.
        decides: faults of this node are judged in this process.
    """

    def __init__(self, console: Console, journal: Journal, decides: bool) -> None:
        self._console = console
        self._journal = journal
        self._decides = decides

    def judged(self, judged: Judged, generation: Generation | None) -> None:
        """Say what is done, and about which fault."""
        action, fault = judged.action, judged.fault
        if action.rung is Rung.NONE:
            self._journal.note(action.reason)
            return
        if fault is not None:
            self._journal.fault(fault)
            follows = f"{'stop' if action.rung is Rung.STOP else action.rung.value}: {action.reason}"
            if self._decides:
                self._describe(fault, generation, follows)
            else:
                words = f"{fault.kind.value} on {fault.node}: {fault.reason}"
                self._console.say(f"{words}\n  -> {follows}")
        elif action.exit_code:
            self._console.say(f"{action.rung.value}: {action.reason}")
        self._journal.action(action)

    def reported(self, fault: Fault, generation: Generation | None) -> None:
        """Say what happened on this node, where somebody else judges it."""
        if not self._decides:
            self._describe(fault, generation, "whoever coordinates is told")

    def trust(self, change: TrustChange) -> None:
        """Say that a copy is believed more, or less."""
        self._journal.trust(change)
        if change.trust == Trust.QUARANTINED.value:
            self._console.say(f"{change.place} is {change.trust}: {change.reason}")

    def _describe(self, fault: Fault, generation: Generation | None, follows: str) -> None:
        """Show a fault with what its rank left to read."""
        log, text = None, ""
        if generation is not None and fault.rank in generation.ranks:
            place = generation.logs[fault.rank]
            log = place.stderr or place.stdout
            failure = generation.failure(fault.rank) if (fault.exit_code or 0) > 0 else None
            text = failure.traceback if failure is not None and place.hides_errors else ""
        self._console.fault(fault, log, text, follows)
