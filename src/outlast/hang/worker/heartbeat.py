"""Heartbeats of a rank: its heartbeat page, and heartbeats for scripts without a session.

A script that never calls :func:`outlast.start` still sends heartbeats if it was forked from the zygote: each
optimizer step counts as a step, through torch's own global post-step hook. A script that reports its steps
(:func:`outlast.progress`) sends heartbeats with those; its optimizer steps are heartbeats that count no step.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outlast.errors import UsageError
from outlast.hang.worker import flight_recorder
from outlast.ipc.heartbeat_page import PAGE_BYTES, HeartbeatPage, RankState, Section
from outlast.stragglers.worker.windows import Windows

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from outlast.stragglers.worker.sections import DeviceSection


class _Here:
    """This process's page, and the hook that sends them for scripts without a session."""

    page: HeartbeatPage | None = None
    path: str | None = None
    windows: Windows | None = None
    hook: RemovableHandle | None = None
    session = False  # it says what a step is
    announced: int | None = None  # the latest step that the script announced; None: it announces none
    times = 0
    warm_after = 0
    ends = False  # the end of the interpreter is reported


def attach(path: str | None, optimizers: ModuleType | None = None) -> HeartbeatPage:
    """Open this process's page once; without a launcher it is memory that nobody reads.

    Args:
        path: of the page.
        optimizers: torch.optim.optimizer where it was imported, and is hidden from the script.
    """
    if _Here.page is not None:
        return _Here.page
    page = _Here.page = HeartbeatPage.open(path) if path else HeartbeatPage(bytearray(PAGE_BYTES))
    _Here.path = path
    _Here.windows = Windows(page) if page.times.steps else None
    page.words[3] = os.getpid()
    page.mark("started")
    optimizers = optimizers or sys.modules.get("torch.optim.optimizer")
    if path and optimizers is not None:
        _Here.hook = _beat_with_optimizers(page, optimizers)
    elif path:
        sys.meta_path.insert(0, _AwaitOptimizers(page))
    return page


def change(path: str) -> HeartbeatPage:
    """Go on with another page: this process has become a rank of another generation."""
    _stop_counting()
    if _Here.windows is not None:
        _Here.windows.close()
    _Here.page, _Here.session, _Here.announced = None, False, None
    page = attach(path)
    flight_recorder.forget()
    tell_of_collectives()
    return page


def tell_of_collectives() -> None:
    """Let the agent ask how far this rank is in the order of collectives; only once there is a group."""
    if _Here.page is not None:
        flight_recorder.listen(_Here.page, _Here.path)


def take_over() -> None:
    """Stop counting optimizer steps: from here on the session says what a step is.

    Raises:
        UsageError: the script announces its steps.
    """
    if _Here.announced is not None:
        raise UsageError(
            "outlast.start: this process has called outlast.progress, and a session announces its steps"
            " itself; leave one of the two out"
        )
    _stop_counting()
    _Here.session = True


def _stop_counting() -> None:
    if _Here.hook is not None:
        _Here.hook.remove()
        _Here.hook = None


class _AwaitOptimizers(MetaPathFinder):
    """Sets the hook when the script has imported torch's optimizers."""

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module that is waited for."""
        if fullname != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_set(module: ModuleType) -> None:
                execute(module)
                if _Here.page is self._page and not _Here.session:
                    _Here.hook = _beat_with_optimizers(self._page, module)

            found.loader.exec_module = execute_and_set  # type: ignore[method-assign]
        return found


def timed(section: Section) -> Section | DeviceSection:
    """Return a section of this process's page, timed on the device too where there is one."""
    return section if _Here.windows is None else _Here.windows.on_device(section)


def announces() -> bool:
    """Say whether the script has announced a step."""
    return _Here.announced is not None


def begin_announcing(path: str, warm_after: int) -> None:
    """Let the script say what a step is.

    Args:
        path: of the heartbeat page.
        warm_after: so many announcements teach no timeout.

    Raises:
        UsageError: there is a session.
    """
    if _Here.session:
        raise UsageError(
            "outlast.progress: this process has a session, which announces its steps itself; leave one of the"
            " two out"
        )
    attach(path)
    if not _Here.ends:
        _Here.ends = True
        atexit.register(_end)
    if _Here.announced is None:
        _Here.announced, _Here.times, _Here.warm_after = -1, 0, warm_after


def _end() -> None:
    """Begin the time of the interpreter's end: the timeouts of steps no longer apply."""
    if _Here.page is not None and _Here.announced is not None:
        _Here.page.repeat()
        _Here.page.set_state(RankState.DONE)


def announce(step: int, stays: bool, resumed: bool = False) -> None:
    """Send a heartbeat with a step of the script's own.

    Args:
        step: completed steps.
        stays: a step that is lower than the one before changes nothing.
        resumed: a framework has resumed from that step, and has completed none yet.
    """
    page, before = _Here.page, _Here.announced
    if page is None or before is None:
        return
    if before < 0:
        page.begin_announcing(step, resumed)
    elif step > before:
        page.mark("first_step")
    now = _Here.announced = max(step, before) if stays else step
    _Here.times += 1
    page.set_state(RankState.RUNNING)
    page.outside()
    page.learning = _Here.times > _Here.warm_after
    page.heartbeat(now)
    page.touch()


def _beat_with_optimizers(page: HeartbeatPage, optimizers: Any) -> RemovableHandle:
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            tell_of_collectives()
        page.mark("first_step")
        page.set_state(RankState.RUNNING)
        page.outside()
        page.heartbeat(steps if _Here.announced is None else _Here.announced)
        page.touch()

    handle: RemovableHandle = optimizers.register_optimizer_step_post_hook(count)
    return handle
