"""Tells Kubeflow Trainer how far a TrainJob is, which ``kubectl get trainjob`` then shows.

The controller (2.2 or newer, feature gate TrainJobStatus) sets three variables in every container: a URL, the
file of its CA certificate, and the file of a token that it renews. After a step the script stores how far it
is. A thread posts the newest value, at most every five seconds (the interval of Kubeflow's own SDK), with a
bound on every wait. A failed post is counted and tried again with the next value, each time later; no error
reaches the training.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.errors import UsageError

EVERY = 5.0  # seconds between two posts: Kubeflow SDK 0.5, _MIN_UPDATE_INTERVAL_SECONDS
LONGEST_WAIT = 80.0  # seconds between two posts where all fail
MOST_METRICS = 256  # what the controller's schema allows
_TIMEOUT = 5.0  # seconds: Kubeflow SDK 0.5
_MOST_BYTES = 65536


@dataclass(frozen=True)
class StatusServer:
    """Where to post, as the controller says it.

    Args:
        url: of the TrainJob's status; https.
        ca_file: certificates that the server's is checked with; "": the system's.
        token_file: read again for each post, since it is renewed.
        timeout: seconds for each wait on the network.
    """

    url: str
    ca_file: str = ""
    token_file: str = ""
    timeout: float = _TIMEOUT

    def post(self, status: Mapping[str, Any]) -> None:
        """Send one status.

        Raises:
            OSError: a file cannot be read, or the server cannot be reached or refused.
            ValueError: the URL is not https.
            http.client.HTTPException: the answer is no HTTP.
        """
        if not self.url.startswith("https://"):
            raise ValueError(f"{self.url}: not https; the token was not sent")
        headers = {"Content-Type": "application/json"}
        if self.token_file:
            headers["Authorization"] = f"Bearer {Path(self.token_file).read_text().strip()}"
        body = json.dumps({"trainerStatus": status}).encode()
        context = ssl.create_default_context(cafile=self.ca_file or None)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _StayHere()
        )
        request = urllib.request.Request(self.url, body, headers, method="POST")
        with opener.open(request, timeout=self.timeout) as answer:
            answer.read(_MOST_BYTES)


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the token is for this server only."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def status_server(environment: Mapping[str, str]) -> StatusServer | None:
    """Return the server that the environment names, None outside of a TrainJob."""
    url = environment.get("KUBEFLOW_TRAINER_SERVER_URL", "")
    if not url:
        return None
    names = ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
    ca_file, token_file = (environment.get(name, "") for name in names)
    return StatusServer(url, ca_file, token_file)


_Said = tuple[int, Mapping[str, float | int | str], float]


@dataclass
class _State:
    """What the script and the thread share, under the lock."""

    newest: _Said | None = None
    first: tuple[int, float] | None = None
    closing: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class TrainJobProgress:
    """How far a TrainJob is, posted by a thread of rank 0; does nothing outside of a TrainJob.

    Args:
        total_steps: completed steps at which the job is done.
        server: where to post; None: nowhere.
        every: seconds between two posts at least.

    Raises:
        UsageError: ``total_steps`` is less than 1.
    """

    def __init__(self, total_steps: int, server: StatusServer | None, every: float = EVERY) -> None:
        if total_steps < 1:
            raise UsageError(f"total_steps={total_steps}: expected 1 or more")
        self.sent = 0
        self.failed = 0
        self.last_failure = ""
        self._total, self._server, self._every = total_steps, server, every
        self._state = _State()
        self._thread = threading.Thread(target=self._run, name="outlast-progress", daemon=True)
        if server is not None:
            self._thread.start()

    @classmethod
    def of_environment(cls, total_steps: int) -> TrainJobProgress:
        """Return one that posts where this process is rank 0 of a TrainJob.

        Raises:
            UsageError: ``total_steps`` is less than 1.
        """
        server = status_server(settings.inherited()) if settings.worker_context().rank == 0 else None
        return cls(total_steps, server)

    def completed(self, steps: int, metrics: Mapping[str, float | int | str] | None = None) -> None:
        """Say how many steps are completed; returns at once.

        Args:
            steps: that are completed, since the job's first start.
            metrics: their newest values; of more than 256, the first count.
        """
        state, now = self._state, time.monotonic()
        with state.changed:
            state.first = state.first or (steps, now)
            state.newest = (steps, dict(metrics or {}), now)
            state.changed.notify()

    def close(self, timeout: float = _TIMEOUT) -> None:
        """Send what was said last, and end; waits no longer than the timeout, in seconds."""
        with self._state.changed:
            self._state.closing = True
            self._state.changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        wait = 0.0
        while True:
            said = self._next(wait)
            if said is None:
                return
            wait = self._every if self._send(said) else min(max(2 * wait, self._every), LONGEST_WAIT)

    def _next(self, wait: float) -> _Said | None:
        """Return what is to be sent, once the wait is over; None: there will be nothing."""
        state, due = self._state, time.monotonic() + wait
        with state.changed:
            state.changed.wait_for(lambda: state.closing, timeout=max(due - time.monotonic(), 0.0))
            while state.newest is None and not state.closing:
                state.changed.wait(timeout=60.0)
            newest, state.newest = state.newest, None
            return newest

    def _status(self, steps: int, metrics: Mapping[str, float | int | str], when: float) -> dict[str, Any]:
        done = min(max(steps, 0), self._total)
        status: dict[str, Any] = {
            "progressPercentage": math.floor(100 * done / self._total),
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        first_step, first_time = self._state.first or (steps, when)
        if steps > first_step:
            left = (self._total - done) * (when - first_time) / (steps - first_step)
            status["estimatedRemainingSeconds"] = math.ceil(left)
        if metrics:
            status["metrics"] = [
                {"name": str(name), "value": str(value)}
                for name, value in islice(metrics.items(), MOST_METRICS)
            ]
        return status

    def _send(self, said: _Said) -> bool:
        assert self._server is not None
        try:
            self._server.post(self._status(*said))
        except Exception as error:  # noqa: BLE001 - a recorder is counted; a user's metric may raise anything
            self.failed += 1
            self.last_failure = f"{type(error).__name__}: {error}"
            return False
        self.sent += 1
        return True
