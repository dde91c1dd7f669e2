"""What NVRx's ``inprocess.Wrapper`` takes: objects that get the state of the call and return it.

Whatever takes a :class:`FrozenState` will do; the classes are there to be derived from and composed.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outlast.errors import UsageError


class RestartError(Exception):
    """An error of a plug-in: this rank leaves and is replaced."""


class HealthCheckError(RestartError):
    """This rank is not healthy; another process takes its place."""


class TimeoutError(RestartError):  # noqa: A001 - NVRx's name
    """A plug-in took too long."""


class RestartAbort(BaseException):
    """Ends the job without another restart."""


class Mode(enum.Enum):
    """What a rank does; here every rank is ACTIVE."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


@dataclass(frozen=True)
class FrozenState:
    """The state of a call.

    Args:
        rank, world_size: of this call; the active ones are the same.
        initial_rank, initial_world_size: of the first call in this process.
        iteration: restarts of the run so far.
        fn_exception: None; the agent keeps what was raised.
    """

    rank: int
    world_size: int
    active_rank: int
    active_world_size: int
    initial_rank: int
    initial_world_size: int
    iteration: int = 0
    mode: Mode = Mode.ACTIVE
    fn_exception: Exception | None = None


class _Plugin:
    """Called with the state, which it returns."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state."""
        return state


class Initialize(_Plugin):
    """Called before each call of the function; an error means another restart."""


class Abort(_Plugin):
    """Called after the function was left and the process groups were aborted; NVRx calls it beside it."""


class Finalize(_Plugin):
    """Called after the abort; a rank that raises in it is replaced."""


class HealthCheck(_Plugin):
    """Called last before a restart; a rank that raises in it is replaced."""


class Completion(_Plugin):
    """Called when all ranks of the node have returned."""


class Terminate(_Plugin):
    """Called when this rank leaves for good."""


class Compose(_Plugin):
    """Plug-ins one after the other: the one listed last is called first, as in NVRx.

    It is an instance of the closest class that all of them derive from and that can be derived from.
    """

    def __new__(cls, *instances: Callable[..., Any]) -> Any:
        """Return an object of a class for these plug-ins."""
        for kind in type(instances[0]).mro() if instances else []:
            common = all(isinstance(one, kind) for one in instances)
            if common and kind.__module__ != "builtins" and not issubclass(kind, Compose):
                with contextlib.suppress(TypeError):  # written in C with a __new__ of its own, or final
                    return object.__new__(type(cls.__name__, (cls, kind), {}))
        return object.__new__(cls)

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances

    def __call__(self, *arguments: Any) -> Any:
        """Return what the one listed first returns; each gets what the one before it returned.

        A plug-in that returns None instead of a state passes the state on.
        """
        found: Any = arguments[0] if arguments else None
        for one in reversed(self.instances):
            found = one(*arguments)
            if found is None and arguments not in ((), (None,)):
                warnings.warn(f"{one!r} returned None, called with {arguments}", stacklevel=2)
            if found is None and arguments and isinstance(arguments[0], FrozenState):
                found = arguments[0]
            if isinstance(found, tuple):
                arguments = found
            elif arguments:
                arguments = (found,)
        return found


class RetryController(Initialize):
    """Ends the job when there were too many restarts, or there are too few ranks.

    Args:
        max_iterations: calls that are allowed; None: no limit besides the launcher's budgets.
        min_world_size, min_active_world_size: ranks that are needed.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = max_iterations
        self.needed = max(min_world_size, min_active_world_size)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Check the state.

        Raises:
            RestartAbort: the job ends.
        """
        most = self.max_iterations
        if most is not None and state.iteration >= most:
            raise RestartAbort(f"RetryController: {state.iteration} restarts, max_iterations is {most}")
        if state.world_size < self.needed:
            raise RestartAbort(
                f"RetryController: found {state.world_size} ranks, at least {self.needed} needed"
            )
        return state


class AbortTorchDistributed(Abort):
    """Changes nothing: outlast aborts and destroys the process groups itself.

    Raises:
        UsageError: a folder for traces is given.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        if torch_fr_trace_path is not None:
            raise UsageError(
                f"AbortTorchDistributed: torch_fr_trace_path={torch_fr_trace_path!r} has no effect here,"
                " leave it out: the launcher keeps what the flight recorder knows with the evidence of a hang"
            )


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, also without CUDA, which NVRx's needs.

    Args:
        timeout: for the function.
        fn, args, kwargs: what is called.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self._call = lambda: fn(*args, **(kwargs or {}))

    def __call__(self, state: FrozenState) -> FrozenState:
        """Call it.

        Raises:
            TimeoutError: it takes too long.
            Exception: what it raises; NVRx does not see that.
        """
        _in_thread(self._call, self.timeout, type(self).__name__)
        return state


class CudaHealthCheck(HealthCheck):
    """Waits for the device, twice, because an error shows after the first time; nothing without CUDA.

    Args:
        timeout: for the first wait.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Check the device of this process.

        Raises:
            TimeoutError: it does not answer.
            Exception: what CUDA raises.
        """
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
            _in_thread(lambda: torch.cuda.synchronize(device), self.timeout, type(self).__name__)
            torch.cuda.synchronize(device)
        return state


def _in_thread(function: Callable[[], object], timeout: timedelta, name: str) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{name}: not done after {timeout.total_seconds():g} s; this rank is replaced")
    if raised:
        raise raised[0]
