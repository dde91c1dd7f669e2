"""Lists what a rank imports up to its first steps, so that a zygote can import it ahead of a restart.

The list has the modules in the order in which their imports began. For each it says which environment
variables the script had changed by then; one that is imported while the script has changed more than that
(:mod:`outlast.worker.surroundings`) is not listed. Only modules of installed packages are listed
(:mod:`outlast.worker.installed`), and never those in the script's own folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from outlast import settings
from outlast.errors import UsageError
from outlast.ipc.control import Reporter
from outlast.ipc.heartbeat_page import HeartbeatPage
from outlast.observe.policy import codec
from outlast.recovery.policy.events import ImportsSeen
from outlast.settings import WorkerContext
from outlast.worker.installed import Installed
from outlast.worker.surroundings import AT_START, changed, surroundings

REPORT_AT = (3, 30, 300)  # heartbeats: Transformers and Lightning import more at their first logs and saves
_MOST_NAMES = 20_000
_MOST_CHANGES = 200  # times that the script changes variables between two imports


class Learner(MetaPathFinder):
    """Notes each import of this process as it begins; finds no module itself.

    Args:
        page: the rank's heartbeat page, whose heartbeats say when to report.
        context: the rank's place in the job.
        own: the script's folder.
        hidden: returns a module that was imported before the script began; None: it was not.
    """

    def __init__(
        self, page: HeartbeatPage, context: WorkerContext, own: str, hidden: Callable[[str], object]
    ) -> None:
        self._page = page
        self._context = context
        self._own = own
        self._hidden = hidden
        self._pid = os.getpid()
        self._names: dict[str, int] = {}  # and the index of the environment of its import
        self._first = self._latest = dict(settings.variables())
        self._changes: list[dict[str, str | None]] = [{}]
        self._around = AT_START | surroundings()
        self._installed: dict[str, bool] = {}

    def begin(self) -> None:
        """Note imports from now on."""
        sys.meta_path.insert(0, self)
        self._page.early = self._at_heartbeat

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the names of the import system
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Note that an import begins."""
        standard = fullname.partition(".")[0] in sys.stdlib_module_names
        if not standard and fullname not in self._names and self._hidden(fullname) is None:
            here = settings.variables()
            if here != self._latest and len(self._changes) < _MOST_CHANGES:
                self._latest = dict(here)
                self._changes.append(_changes(self._first, self._latest))
            if len(self._names) < _MOST_NAMES and not changed(self._around, surroundings()):
                self._names[fullname] = len(self._changes) - 1
        return None

    def _at_heartbeat(self, number: int) -> None:
        if number in REPORT_AT and os.getpid() == self._pid:
            try:
                self._report(number)
            except Exception as caught:  # noqa: BLE001 - modules may raise anything; training goes on
                sys.stderr.write(f"[outlast] imports are not learned: {type(caught).__name__}: {caught}\n")
        if number >= REPORT_AT[-1]:
            self._page.early = None
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)

    def _report(self, number: int) -> None:
        context = self._context
        found = list(self._found())
        tops = sorted({name.partition(".")[0] for name, _ in found})
        told = {
            "names": found,
            "changes": self._changes,
            "places": {top: place for top in tops if (place := _place(top)) is not None},
        }
        path = Path(context.control_path).with_name(f"imports-{context.generation}-{context.rank}.json")
        path.write_text(json.dumps(told))
        reporter = Reporter(context.control_path)
        record = ImportsSeen(
            time.time(), time.monotonic(), context.generation, context.rank, len(found), number
        )
        reporter.send(codec.encode(record))
        reporter.close()

    def _found(self) -> Iterator[tuple[str, int]]:
        """Yield the modules that were imported and are installed."""
        installed = Installed(self._own)
        for name, change in list(self._names.items()):  # threads import, too
            top = name.partition(".")[0]
            if name in sys.modules and top in sys.modules:
                if top not in self._installed:
                    self._installed[top] = installed.has(top)
                if self._installed[top]:
                    yield name, change


def _changes(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> dict[str, str | None]:
    """Return the variables that differ; None: one was removed."""
    found: dict[str, str | None] = {
        os.fsdecode(name): os.fsdecode(value) for name, value in now.items() if before.get(name) != value
    }
    return found | {os.fsdecode(name): None for name in before.keys() - now.keys()}


def _place(top: str) -> tuple[str, int, int] | None:
    """Return file, size and time of a package: another version of it has others."""
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if spec is None or not spec.has_location or not spec.origin:
        return None
    try:
        status = os.stat(spec.origin)
    except OSError:
        return None
    return spec.origin, status.st_size, status.st_mtime_ns


def begin(
    page: HeartbeatPage, kind: str, target: str, hidden: Callable[[str], object] = lambda _: None
) -> None:
    """List the imports of this rank, if its agent asks for them."""
    try:
        context = settings.worker_context()
    except UsageError:  # a session says so
        return
    if context.control_path and context.warm_imports:
        own = os.path.dirname(os.path.realpath(target)) if kind == "file" else os.path.realpath(os.getcwd())
        Learner(page, context, own, hidden).begin()
