"""KempnerForge's ShutdownHandler: a script's view of the preemption handler of its process.

This module does not import torch, so that a script can register the handler first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from outlast.config import PreemptionOptions
from outlast.errors import UsageError
from outlast.preemption.worker import PreemptionHandler, install


class ShutdownHandler:
    """Handles signals from :meth:`register` on; a session takes it over.

    Args:
        timeout_sec: seconds after a notice at which the process exits in any case; 0: no limit.
        options: all of them; ``timeout_sec`` wins.
    """

    def __init__(self, timeout_sec: float = 600.0, options: PreemptionOptions | None = None) -> None:
        self._options = replace(options or PreemptionOptions(), timeout_sec=timeout_sec)
        self._listener: PreemptionHandler | None = None
        self._vote: Callable[[bool], bool] | None = None

    @property
    def shutdown_requested(self) -> bool:
        """Whether a notice has reached this process; ranks may differ."""
        if self._listener is None:
            return False
        self._listener.look()
        return self._listener.asked

    @property
    def signal_received(self) -> signal.Signals | None:
        """The first signal that announced the end."""
        number = 0 if self._listener is None else self._listener.first_signal
        return signal.Signals(number) if number else None

    def should_shutdown(self) -> bool:
        """Return whether any rank was told to stop, equally on all ranks; each calls it once a step.

        With a process group the answer is that to the ranks' previous calls, so that all ranks get it.

        Raises:
            ExchangeFailed: a rank has ended.
        """
        if self._vote is None:
            from outlast.agreement.worker.vote import should_shutdown

            self._vote = should_shutdown()
        return self._vote(self.shutdown_requested)

    def register(self) -> None:
        """Install the handlers, on the main thread; torch need not be imported yet.

        Raises:
            UsageError: this is not the main thread, or an option is invalid.
        """
        self._listener = install(self._options)
        if self._listener is None and self._options.enable_exit_handler:
            raise UsageError("ShutdownHandler.register: call it on the main thread; no signal is heeded now")

    def unregister(self) -> None:
        """Restore the old handlers, unless a notice has come."""
        if self._listener is not None:
            self._listener.release()

    def finish(self) -> None:
        """Report that the script has saved; the process still ends by its deadline."""
        if self._listener is not None and self._listener.asked:
            self._listener.resign("Graceful shutdown complete")
        self.unregister()
