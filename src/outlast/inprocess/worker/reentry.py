"""In-process restart: a training function that is called again after a fault, in the same process.

``@outlast.resilient`` works under ``outlast run``: the agent sees faults, interrupts every rank's function,
forks the ranks that died, and restarts all of them as the next generation. The function must therefore create
the process group, the model and the session itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from outlast import settings
from outlast._torch_compat import connect_to_stores_in_steps
from outlast.checkpoint.policy.manifest import some
from outlast.config import InProcessOptions
from outlast.errors import RestartsSpent, UsageError
from outlast.hang.policy.diagnosis import looks_like_victim
from outlast.hang.worker import heartbeat
from outlast.inprocess.worker import device
from outlast.inprocess.worker.abort import abort_process_groups, to_outlive_watchdog
from outlast.inprocess.worker.cleanup import Leftovers, forget, put_away, take_seat
from outlast.inprocess.worker.interrupt import GateLine, Restart
from outlast.ipc.processes import state_of
from outlast.rerun.worker.data import capture_generators, restore_generators
from outlast.worker import bootstrap

__all__ = ["CallWrapper", "Restart", "resilient"]

_LOG = logging.getLogger("outlast")
_CALL_PATIENCE = 0.1  # seconds for the agent to say why a peer is gone
_TURN = 1.0  # seconds between two heartbeats of a rank that waits for others to return
F = TypeVar("F", bound=Callable[..., Any])
Callback = Callable[["CallWrapper"], object]
_CALLBACKS = ("initialize", "abort", "finalize", "health_check", "completion", "terminate")


@dataclass(frozen=True)
class _Plan:
    """The arguments of ``outlast.resilient``."""

    options: InProcessOptions
    callbacks: Mapping[str, tuple[Callback, ...]]


class CallWrapper:
    """The state of a call of a resilient function, passed to a parameter annotated with this class.

    ``rank``, ``world_size`` and ``iteration`` (restarts of the run so far, equal on every rank) are those of
    the current call; ``reason`` is why the previous one was left. With in-process restart off, there is one
    call.
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
        """Send a heartbeat, in a phase that takes longer than the timeout."""
        heartbeat.attach(None).repeat()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Delay interrupts until the block ends; a lost peer can still fail a collective inside."""
        if self._line is None:
            yield
            return
        self._line.hold()
        try:
            yield
        finally:
            self._line.unhold()


def resilient(function: F | None = None, /, **named: Any) -> Any:
    """Restart the function in process after a fault; a decorator.

    Args:
        function: called by every rank on its main thread, possibly several times, so it must create all of
            its state.
        named: options of :class:`~outlast.config.InProcessOptions`, and callbacks (or lists
            of them, called in this order) that take the :class:`CallWrapper`: ``initialize`` before each
            call; ``abort`` after the function was left and the process groups were aborted; ``finalize``
            then; ``health_check`` last, and a rank that raises in it is replaced; ``completion`` when all
            ranks of the node have returned; ``terminate`` when this rank leaves for good.

    Raises:
        UsageError: an option is invalid; on the call: there is no agent.
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
                "outlast.resilient: there is no agent; start the script with outlast run, or pass"
                " enabled=False"
            )
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            raise UsageError(
                "outlast.resilient: found a process group that was created outside of the function, expected"
                " none: a restart destroys it, and forked ranks would wait for it; create it inside, and"
                " destroy it before the function returns"
            )
        settings.export(to_outlive_watchdog(settings.inherited()))
        connect_to_stores_in_steps()
        self._function, self._plan = function, plan
        self._line = GateLine(context.gate_path, self._woken)
        self._line.entered(context.generation)
        self._wrapper = CallWrapper(self._line)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function until it returns on every rank of the node; return its value."""
        states, hook, leftovers = capture_generators(), sys.excepthook, Leftovers()
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
                restore_generators(states)
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
        told = {
            "patience": options.patience,
            "silence": options.hang_timeout,
            "granularity": options.granularity,
        }
        self._line.say("inside", **told)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Call the function once; return whether it returned, and its value."""
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
        except Exception as error:  # noqa: BLE001 - reported to the agent, which decides
            self._failed(error, f"{type(error).__name__}: {error}")
            forget(error)
        return False, None

    def _failed(self, error: Exception, text: str) -> None:
        """Report the error; if a peer caused it and the agent interrupts all ranks anyway, log one line."""
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

        Only the launcher's timeouts bound this wait, since the others may have more work. A wait longer than
        the one at the barrier is logged once.
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
            why = (
                "other ranks of this node have not returned; a hung one is killed by the launcher's timeouts"
            )
        return f"rank {self._wrapper.rank} returned {seconds:g} s ago and waits: {why}"

    def _clean(self, leftovers: Leftovers) -> None:
        self._each("abort")
        self._each("finalize")
        left = put_away()
        if left.devices:
            _LOG.warning(
                "outlast.resilient: %d gloo devices are left after the function was interrupted: %s",
                left.devices,
                left.why,
            )
        more = leftovers.more()
        if more:
            _LOG.warning(
                "outlast.resilient: %s left after the function was interrupted, as after the last restart:"
                " each restart leaks as many; end in the function what it starts",
                some(more),
            )
        device.require_usable()
        self._each("health_check")

    def _wait_to_enter(self) -> None:
        """Wait at the barrier until all ranks restart as the next generation.

        Raises:
            SystemExit: the wait timed out, or the agent is gone.
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
    """Return named arguments; parameters annotated with :class:`CallWrapper`, or with it or None, get it."""
    found = inspect.signature(function).parameters.values()
    return {**{one.name: wrapper for one in found if _asks_for_it(one.annotation)}, **kwargs}


def _asks_for_it(annotation: object) -> bool:
    if isinstance(annotation, str):
        optional = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]", annotation.strip())
        texts = (optional[1] if optional else annotation).split("|")
        return any(re.fullmatch(r"(?:\w+\.)*CallWrapper", text.strip()) for text in texts)
    if get_origin(annotation) in (Union, types.UnionType):
        return CallWrapper in get_args(annotation)
    return annotation is CallWrapper
