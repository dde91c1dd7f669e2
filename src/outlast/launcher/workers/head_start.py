"""The first zygote of a launch, started before the agent's modules are imported: it imports meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outlast.launcher.command.options import LaunchOptions, ScriptKind, StartKind
from outlast.launcher.workers.environment import common_environment
from outlast.launcher.workers.own_source import needless, starts_early
from outlast.launcher.workers.zygote import Zygote

if TYPE_CHECKING:
    from outlast.observe.run_folder import RunFolder

KEPT = "imports.json"  # in the run folder: what earlier launches have imported ahead


def program_of(options: LaunchOptions) -> tuple[str, str, Sequence[str], int]:
    """Return the program of every rank, and the number of ranks, as a zygote takes them."""
    script = options.script
    kind = "module" if script.kind is ScriptKind.MODULE else "file"
    return kind, script.target, script.args, options.world.nproc_per_node


class HeadStart:
    """Starts zygotes; the first one when this is made. A context manager; it ends that one if nobody took it.

    On several nodes there is no such zygote, nor where an earlier launch has learned what the ranks import:
    what it would be started with is not known yet.

    Args:
        options: of the launch.
        folder: of the run.
        inherited: this process's environment.
    """

    def __init__(self, options: LaunchOptions, folder: RunFolder, inherited: Mapping[str, str]) -> None:
        self._first: Zygote | None = None
        self._with: tuple[Any, ...] = ()
        unknown = options.nodes.several or (options.warm_imports and (folder.own / KEPT).exists())
        if unknown or options.start is StartKind.COLD or options.script.kind is ScriptKind.COMMAND:
            return
        imports = options.preload, needless(options)
        given = program_of(options), common_environment(options, inherited), imports
        self._with = (*given, "", False, starts_early(options))
        try:
            self._first = Zygote(*self._with)
        except OSError:  # the agent tries again, and says why it cannot
            self._with = ()

    def zygote(self, *given: Any) -> Zygote:
        """Return the first zygote if it was started with the same, once; otherwise start one.

        Raises:
            OSError: it cannot be started.
        """
        first, self._first = self._first, None
        if first is not None and given == self._with:
            return first
        if first is not None:
            first.end()
        return Zygote(*given)

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.end()
