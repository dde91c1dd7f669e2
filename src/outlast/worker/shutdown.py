"""KempnerForge's ShutdownHandler, over what hears notices in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from outlast.core.config import Preemption
from outlast.core.errors import UsageError
from outlast.worker.preemption import GivingBack, install


class ShutdownHandler:
    """Heeds signals from the moment it is registered, by KempnerForge's names; a session takes it over.

    Args:
        timeout_sec: seconds after a notice at which the process exits whatever happens; 0: no such limit.
        options: all of them; ``timeout_sec`` wins.
    """

    def __init__(self, timeout_sec: float = 600.0, options: Preemption | None = None) -> None:
        self._options = replace(options or Preemption(), timeout_sec=timeout_sec)
        self._listener: GivingBack | None = None
        self._vote: Callable[[bool], bool] | None = None

    @property
    def shutdown_requested(self) -> bool:
        """Whether a notice has reached this process; ranks may differ in that."""
        if self._listener is None:
            return False
        self._listener.look()
        return self._listener.asked

    @property
    def signal_received(self) -> signal.Signals | None:
        """The first signal that was a notice."""
        number = 0 if self._listener is None else self._listener.first_signal
        return signal.Signals(number) if number else None

    def should_shutdown(self) -> bool:
        """Say whether any rank was told to stop, and the same on every rank; each calls it once a step.

        Where there is a process group, the answer is that to the ranks' last calls, so no rank is ever alone
        with it.

        Raises:
            ExchangeFailed: a rank has gone.
        """
        if self._vote is None:
            from outlast.worker.vote import should_shutdown

            self._vote = should_shutdown()
        return self._vote(self.shutdown_requested)

    def register(self) -> None:
        """Put the handlers in place; on the main thread, before torch is imported if need be.

        Raises:
            UsageError: this is not the main thread, or an option makes no sense.
        """
        self._listener = install(self._options)
        if self._listener is None and self._options.enable_exit_handler:
            raise UsageError("ShutdownHandler.register: call it on the main thread; no signal is heeded now")

    def unregister(self) -> None:
        """Put the old handlers back, unless a notice has come: until the process ends they stay."""
        if self._listener is not None:
            self._listener.release()

    def finish(self) -> None:
        """Say that the script has saved; the process still ends by its deadline at the latest."""
        if self._listener is not None and self._listener.asked:
            self._listener.resign("Graceful shutdown complete")
        self.unregister()
