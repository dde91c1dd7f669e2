"""What is done to a job that runs well: a save, the replacement of this node, the end of the job.

The node's health decides for the first two, or a person asks for any of them (``outlast request``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from outlast.agreement.agent import StepAgreements
from outlast.health.policy.emergency import Decision, Do
from outlast.launcher.output.file_thread import FileThread
from outlast.observe import requests
from outlast.observe.requests import Request, What
from outlast.recovery.policy.events import Fault, FaultKind
from outlast.recovery.policy.job import Event, StopRequested

_EVERY = 1.0  # seconds between two looks for a request


class Requests:
    """Takes requests to this agent; a file system that hangs keeps nobody waiting.

    Args:
        path: of the file in which somebody asks.
        thread: looks at it.
    """

    def __init__(self, path: Path, thread: FileThread) -> None:
        self._path = path
        self._files = thread
        self._found: list[Request | str] = []
        self._due = 0.0
        thread.hand(lambda: requests.remove(path))  # it was for a launcher before this one

    def deadline(self) -> float:
        """Return when to look next."""
        return self._due

    def look(self, now: float) -> list[Request | str]:
        """Return what has been taken since the look before; a text says what is ignored, and why."""
        if now >= self._due:
            self._due = now + _EVERY
            self._files.hand(self._take, key="request", patience=0.0)
        taken = []
        while self._found:
            taken.append(self._found.pop(0))
        return taken

    def _take(self) -> None:
        found = requests.take(self._path)
        if found is not None:
            self._found.append(found)


class Planned:
    """Carries out what is planned for this node.

    Args:
        node: its name.
        several: the job has other nodes.
        requests: what people ask for.
        agreements: through which ranks are asked to save.
        note: takes what a person should read.
    """

    def __init__(
        self,
        node: str,
        several: bool,
        requests: Requests,
        agreements: StepAgreements,
        note: Callable[[str], None],
    ) -> None:
        self._node = node
        self._several = several
        self.requests = requests
        self._agreements = agreements
        self._note = note

    def decided(self, decision: Decision, generation: int, step: int) -> Iterable[Event]:
        """Carry out what the health of the node asks for; return what is to be reported."""
        if decision.do is Do.SAVE:
            return self._save(f"health: all ranks save: {decision.reason}")
        if self._several:
            failing = f"{self._node} is failing"
            return self._leave(f"{failing}: {decision.reason}", failing, generation, step)
        self._note(f"health: this node is failing, and it is the only one: {decision.reason}")
        return ()

    def asked(self, request: Request | str, generation: int, step: int) -> Iterable[Event]:
        """Carry out what somebody asks for; return what is to be reported.

        Args:
            request: a text says why one is ignored.
            generation: whose ranks run here; 0: none.
            step: completed steps of it.
        """
        if isinstance(request, str):
            self._note(request)
        elif request.what is What.STOP:
            self._note(f"the job saves and ends, as {request.by} has asked")
            return (StopRequested(signal.SIGTERM),)
        elif not generation:
            self._note(f"ignored: {request.by} has asked for {request.what.value}: no ranks run here now")
        elif request.what is What.SAVE:
            return self._save(
                f"ranks are asked to save, for {request.by}; a plain script does not hear of it"
            )
        elif self._several:
            reason = f"{request.by} has asked to drain {self._node}"
            return self._leave(reason, f"{self._node} is drained", generation, step)
        else:
            self._note(f"ignored: {request.by} has asked to drain {self._node}: it is the only node")
        return ()

    def _save(self, why: str) -> Iterable[Event]:
        self._note(why)
        self._agreements.ask_save()
        return ()

    def _leave(self, reason: str, signature: str, generation: int, step: int) -> Iterable[Event]:
        return (Fault(FaultKind.FAILING, self._node, -1, generation, step, reason, signature),)
