"""In-process restart: a training function that is left on a fault, and entered again in the same process.

``@outlast.resilient`` works under ``outlast run``: the agent sees faults, calls every rank out of the
function, forks the ranks that died, and lets all of them in again as the next generation. What the function
does must therefore stand inside of it: making the process group, the model and the session.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlast import settings
from outlast.checkpoint.policy.manifest import some
from outlast.config import InProcessOptions
from outlast.errors import RestartsSpent, UsageError
from outlast.hang.policy.diagnosis import looks_like_victim
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker.abort import abort_process_groups
from outlast.inprocess.worker.cleanup import Leftovers, RandomStates, forget, put_away, take_seat
from outlast.inprocess.worker.interrupt import GateLine, Restart
from outlast.ipc.processes import state_of
from outlast.worker import bootstrap

__all__ = ["CallWrapper", "Restart", "resilient"]

_LOG = logging.getLogger("outlast")
_CALL_PATIENCE = 0.1  # seconds for the agent to say why a peer is gone
_TURN = 1.0  # seconds between two signs of life of a rank that waits for others to return
F = TypeVar("F", bound=Callable[..., Any])
Callback = Callable[["CallWrapper"], object]
_CALLBACKS = ("initialize", "abort", "finalize", "health_check", "completion", "terminate")


@dataclass(frozen=True)
class _Plan:
    """What ``outlast.resilient`` was told."""

    options: InProcessOptions
    callbacks: Mapping[str, tuple[Callback, ...]]


class CallWrapper:
    """What a call of a resilient function can ask; passed to a parameter that is annotated with this class.

    ``rank``, ``world_size`` and ``iteration`` (restarts of the run so far, equal on every rank) are those of
    the present call; ``reason`` says why the one before was left. Where in-process restart is off, there is
    one call.
    """

    def __init__(self, line: GateLine | None) -> None:
        self._line = line
        self.reason = ""
        self._see()

    def _see(self) -> None:
        context = settings.worker_context()
        self.rank, self.world_size = context.rank, context.world_size
        self.iteration = context.restart_count

    def ping(self) -> None:
        """Say that the rank is alive, in a stretch that is longer than its timeout."""
        heartbeat.attach(None).repeat()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Put interrupts off until the block ends; a peer that is gone can still fail what is inside."""
        if self._line is None:
            yield
            return
        self._line.hold()
        try:
            yield
        finally:
            self._line.unhold()


def resilient(function: F | None = None, /, **named: Any) -> Any:
    """Have a training function entered again after a fault, in the processes that live; a decorator.

    Args:
        function: what every rank calls on its main thread. It can be called again: what it makes, it makes
            anew.
        named: options of :class:`~outlast.config.InProcessOptions`, and callbacks (or lists
            of them, called in written order) that take the :class:`CallWrapper`: ``initialize`` before each
            call; ``abort`` when it was left, after the process groups were woken; ``finalize`` then;
            ``health_check`` last, and a rank that raises in it is replaced; ``completion`` when all ranks of
            the node have returned; ``terminate`` when this rank leaves for good.

    Raises:
        UsageError: an option makes no sense; on the call: there is no agent.
    """
    options = {name: value for name, value in named.items() if name not in _CALLBACKS}
    known = {spec.name for spec in dataclasses.fields(InProcessOptions)}
    unknown = sorted(options.keys() - known)
    if unknown:
        expected = ", ".join((*_CALLBACKS, *sorted(known)))
        raise UsageError(f"outlast.resilient: found {', '.join(unknown)}; expected some of {expected}")
    callbacks = {name: _as_tuple(name, named.get(name)) for name in _CALLBACKS}
    plan = _Plan(_checked(InProcessOptions(**options)), callbacks)

    def wrap(inner: F) -> F:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            context = settings.worker_context()
            options = _checked(settings.in_force(plan.options, "inprocess_restart", context))
            if not options.enabled:
                return inner(*args, **_handed(inner, CallWrapper(None), kwargs))
            return _Calls(inner, dataclasses.replace(plan, options=options), context).run(args, kwargs)

        return cast("F", call)

    return wrap if function is None else wrap(function)


def _checked(options: InProcessOptions) -> InProcessOptions:
    problems = options.problems()
    if problems:
        raise UsageError(f"outlast.resilient: {'; '.join(problems)}")
    return options


def _as_tuple(name: str, given: Callback | Sequence[Callback] | None) -> tuple[Callback, ...]:
    found = () if given is None else (given,) if callable(given) else tuple(given)
    if not all(map(callable, found)):
        raise UsageError(
            f"outlast.resilient: {name}: a function, or a list of them, expected; {given!r} found"
        )
    return found


class _Calls:
    """All calls of one resilient function in this process."""

    def __init__(self, function: Callable[..., Any], plan: _Plan, context: settings.WorkerContext) -> None:
        if not context.gate_path:
            raise UsageError(
                "outlast.resilient: there is no agent to call the ranks out of the function; start the script"
                " with outlast run, or give enabled=False"
            )
        wanted = plan.options.active_world_size
        if wanted is not None and wanted != context.world_size:
            raise UsageError(
                f"outlast.resilient: active_world_size is {wanted}, but {context.world_size} ranks run;"
                " spares are whole nodes, and the launcher keeps them: outlast run --spares"
            )
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            raise UsageError(
                "outlast.resilient: there is a process group already, made outside of the function; leaving"
                " the function shuts it down, and a rank that is forked anew would wait for the others where"
                " they are no more; make it inside, and destroy it before the function returns"
            )
        self._function, self._plan = function, plan
        self._line = GateLine(context.gate_path, self._woken)
        self._line.entered(context.generation)
        self._wrapper = CallWrapper(self._line)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call until it returns on every rank of the node; return what it returned."""
        states, hook, leftovers = RandomStates(), sys.excepthook, Leftovers()
        kwargs = _handed(self._function, self._wrapper, kwargs)
        try:
            while True:
                self._begin()
                returned, value = self._call(args, kwargs)
                if returned and self._all_returned():
                    self._each("completion")
                    return value
                value = None
                self._clean(leftovers)
                sys.excepthook = hook  # init_process_group wraps it each time
                self._wait_to_enter()
                states.bring_back()
        finally:
            self._line.disarm()
            self._line.say("leaves")
            self._each("terminate")

    def _begin(self) -> None:
        most = self._plan.options.max_iterations
        if most is not None and self._wrapper.iteration > most:
            raise RestartsSpent(
                f"the run was restarted {self._wrapper.iteration} times, max_iterations is {most}"
            )
        options = self._plan.options
        told = {"patience": options.patience, "silence": options.silence, "granularity": options.granularity}
        self._line.say("inside", **told)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Call the function once; return whether it returned, and what."""
        try:
            try:
                self._line.arm()
                self._each("initialize")
                value = self._function(*args, **kwargs)
            finally:
                self._line.disarm()
            return True, value
        except Restart as restart:
            self._line.say("unwinds")
            self._woken(str(restart))
            forget(restart)
        except Exception as error:  # noqa: BLE001 - told to the agent, which decides what follows
            self._failed(error, f"{type(error).__name__}: {error}")
            forget(error)
        return False, None

    def _failed(self, error: Exception, text: str) -> None:
        """Tell the agent; what a peer has caused is one line where the agent calls all ranks out anyway."""
        victim = looks_like_victim(text)
        if victim:
            self._woken(text)
        why = self._line.called(_CALL_PATIENCE) if victim else ""
        if why:
            _LOG.warning("interrupted, like all ranks: %s", why)
            self._line.say("unwinds")
            return
        bootstrap.report(error)
        self._line.say("failed")
        self._woken(text)

    def _woken(self, reason: str) -> None:
        done = abort_process_groups(reason)
        if done.failed:
            _LOG.warning("%s", done)

    def _all_returned(self) -> bool:
        """Wait for the other ranks of the node; return False when one of them failed meanwhile.

        How long they may take, only the launcher's timeouts can say: they may have other work to do. A wait
        that is longer than that at the gate is put into words once.
        """
        self._line.say("returned")
        patience, began, told = self._plan.options.gate_patience, time.monotonic(), False
        while True:
            word = self._line.wait(_TURN)
            if word is None:
                heartbeat.attach(None).touch()
                if not told and time.monotonic() - began >= patience:
                    told = True
                    _LOG.warning("outlast.resilient: %s", self._why_it_waits(patience))
            elif word["say"] == "release":
                return True
            elif word["say"] == "gone" or word["generation"] > self._line.generation:
                return False

    def _why_it_waits(self, seconds: float) -> str:
        agent = os.getppid()
        if state_of(agent) == "T":
            why = f"the launcher (pid {agent}) is stopped; SIGCONT resumes it"
        else:
            why = "others of this node are still inside; one that hangs is ended by the launcher's timeouts"
        return f"rank {self._wrapper.rank} returned {seconds:g} s ago and waits: {why}"

    def _clean(self, leftovers: Leftovers) -> None:
        self._each("abort")
        self._each("finalize")
        left = put_away()
        if left.devices:
            _LOG.warning(
                "outlast.resilient: %d gloo devices are still there after the function was left: %s",
                left.devices,
                left.why,
            )
        more = leftovers.more()
        if more:
            _LOG.warning(
                "outlast.resilient: %s still there after the function was left, as after the restart before:"
                " every restart will leave as many more; end in the function what it begins",
                some(more),
            )
        self._each("health_check")

    def _wait_to_enter(self) -> None:
        """Wait at the gate until all ranks may enter as the next generation.

        Raises:
            SystemExit: nobody let this rank in, or the agent has gone.
        """
        self._line.say("waits")
        patience = self._plan.options.gate_patience
        while True:
            word = self._line.wait(patience)
            if word is None or word["say"] == "gone":
                raise SystemExit(
                    f"outlast.resilient: the agent did not restart the function within {patience:g} s"
                )
            if word["say"] == "enter":
                if take_seat(word["seat"]):
                    break
                self._line.say("waits")
        self._line.entered(word["generation"])
        self._wrapper.reason = str(word["reason"])
        self._wrapper._see()

    def _each(self, name: str) -> None:
        for callback in self._plan.callbacks[name]:
            callback(self._wrapper)


def _handed(function: Callable[..., Any], wrapper: CallWrapper, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return named arguments; parameters that are annotated with :class:`CallWrapper` get it."""
    names = (CallWrapper, "CallWrapper", "inprocess.CallWrapper", "outlast.inprocess.CallWrapper")
    found = inspect.signature(function).parameters.values()
    return {**{one.name: wrapper for one in found if one.annotation in names}, **kwargs}
