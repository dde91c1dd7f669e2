"""What torchrun does besides its command line and its ranks' environment: timers, events, an error file."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from pathlib import Path

from outlast import settings
from outlast.agent.console import Console
from outlast.agent.elastic_events import ElasticEvents
from outlast.agent.file_timer import FileTimers
from outlast.agent.generation import Generation
from outlast.agent.options import LaunchOptions
from outlast.agent.root_cause import RootCause, hand_over
from outlast.core.errors import ExitCode
from outlast.core.events import Fault
from outlast.core.letters import Ending

_ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class Torchelastic:
    """Follows the generations of a job, and does for each what torchrun's agent does.

    Args:
        options: the command line.
        run_id: of the run.
        runtime: the runtime folder.
        console: where events are shown.
        inherited: this process's environment.

    Raises:
        UsageError: timers are wanted, and their FIFO cannot be made.
    """

    def __init__(
        self,
        options: LaunchOptions,
        run_id: str,
        runtime: Path,
        console: Console,
        inherited: Mapping[str, str],
    ) -> None:
        self._events = ElasticEvents(console, options, run_id)
        self._generation: Generation | None = None
        self._cause: RootCause | None = None
        wanted = inherited.get(_ENABLED) == "1"
        path = inherited.get(_TIMER_FILE) or str(runtime / "timers")
        self.timers = FileTimers(Path(path)) if wanted else None

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment has besides."""
        return {} if self.timers is None else {_TIMER_FILE: str(self.timers.path)}

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wake up for requests of timers."""
        if self.timers is not None:
            selector.register(self.timers, selectors.EVENT_READ, self.timers)

    def deadline(self, now: float) -> float | None:
        """Return when the next timer expires; None: there is none."""
        return None if self.timers is None else self.timers.deadline(now)

    def tick(self, say: Callable[[str], None]) -> None:
        """Take requests for timers, and end the workers whose timers have expired."""
        if self.timers is None:
            return
        self.timers.take()
        workers = [] if self._generation is None else self._generation.living()
        for timer, sent in self.timers.expire(worker.pid for worker in workers):
            rank = next((f"rank {one.rank}, " for one in workers if one.pid == timer.pid), "")
            done = f"signal {timer.number} was sent" if sent else "it is no living worker: nothing is done"
            say(f"timer {timer.scope!r} of {rank}pid {timer.pid} has expired; {done}")

    def begun(self, generation: Generation) -> None:
        """Take note that workers were started; timers of those before them mean nothing any more."""
        self._generation = generation
        if self.timers is not None:
            self.timers.forget()
        self._events.started(generation)

    def failed(self, fault: Fault, generation: Generation | None) -> None:
        """Take note of a fault of this node; the latest one may be what the job ends with."""
        if generation is None or fault.rank not in generation.ranks or fault.generation != generation.number:
            return
        codes = {worker.rank: worker.exit_code for worker in generation.workers}
        self._cause = RootCause(
            fault.generation, generation.logs[fault.rank].error_file, codes.get(fault.rank) or 0, fault.reason
        )

    def stopped(self, generation: Generation | None) -> None:
        """Take note that the last generation is ended now."""
        if generation is not None:
            self._events.ended(generation)

    def over(self, ending: Ending, number: int) -> str:
        """Tell the scheduler how the job has ended; return what went wrong, "" when nothing did.

        Args:
            ending: of the job.
            number: of the last generation.
        """
        self._events.over(self._generation, ending.exit_code)
        if not ending.exit_code:
            return ""
        cause = self._cause
        if cause is not None and (cause.generation != number or ending.exit_code >= ExitCode.SIGNAL_BASE):
            cause = None
        return hand_over(settings.error_file(), cause, ending.reason)

    def close(self) -> None:
        """Remove the FIFO of the timers."""
        if self.timers is not None:
            self.timers.close()
