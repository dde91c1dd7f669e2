"""Start the agent for a command line of ``outlast run``."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outlast import settings
from outlast.cluster.agent import network
from outlast.errors import RunFolderBusy, RunFolderUnusable
from outlast.ipc.control import open_standard_streams
from outlast.ipc.descriptors import raise_limit
from outlast.ipc.processes import adopt_orphans, identity, lives
from outlast.launcher.command.options import LaunchOptions
from outlast.launcher.output import logs
from outlast.launcher.signals import Signals
from outlast.launcher.workers.head_start import HeadStart
from outlast.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from outlast.health.policy.preflight import Finding

_SHARED = "/dev/shm"
_LAUNCHES = 1000  # of one script at a time, or folders that such launches have left


def launch(options: LaunchOptions) -> int:
    """Run a script to its end, restarting its workers after faults; return the exit code.

    Raises:
        OutlastError: nothing was started.
    """
    open_standard_streams()
    options = replace(options, caveats=(*options.caveats, *_temporary_files()))
    network.check_master(options)
    warnings: Sequence[Finding] = ()
    if options.nodes.several:
        from outlast.health.agent import preflight  # not imported for a job of one node

        warnings = preflight.admit(options)
    folder, run_id, notice = _claim(options)
    try:
        options = replace(options, caveats=(*options.caveats, *notice))
        options = replace(options, logs=logs.with_folder_of_run(options.logs, run_id))
        adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it does not learn how children end
        raise_limit()
        signals = Signals(
            options.signals, options.config.preemption.notices
        )  # a zygote inherits what is ignored
        with HeadStart(options, folder, settings.inherited()) as zygotes:
            return _supervise(options, folder, run_id, signals, zygotes, warnings)
    finally:
        folder.release()


def _temporary_files() -> tuple[str, ...]:
    """Ensure that there is a folder of temporary files, which torch needs as well; return what to report.

    Raises:
        RunFolderUnusable: there is none, and shared memory cannot be used in its place.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        if not os.access(_SHARED, os.W_OK | os.X_OK):
            raise RunFolderUnusable(
                f"{error.strerror}, and {_SHARED} cannot be written either; nothing was started; name a"
                " folder with TMPDIR"
            ) from error
        settings.export({"TMPDIR": _SHARED})
        return (
            f"no folder of temporary files can be written: {_SHARED} is used (TMPDIR), also by the ranks",
        )
    return ()


def _supervise(
    options: LaunchOptions,
    folder: RunFolder,
    run_id: str,
    signals: Signals,
    zygotes: HeadStart,
    warnings: Sequence[Finding],
) -> int:
    from outlast.launcher.agent import Agent  # its modules take 0.3 s, in which the zygote imports, too

    with Agent(options, folder, run_id, signals, zygotes) as agent, _metrics(options, folder, agent.note):
        for finding in warnings:
            agent.note(f"preflight: {finding.check.value}: {finding.found} ({finding.expected} expected)")
        return agent.run()


def _metrics(
    options: LaunchOptions, folder: RunFolder, note: Callable[[str], object]
) -> contextlib.AbstractContextManager[None]:
    """Serve the metrics of this node while the job runs, where the user wants that."""
    if not options.metrics_port:
        return contextlib.nullcontext()
    from outlast.observe.metrics import endpoint

    node = options.nodes.name if options.nodes.several else ""
    return endpoint.serving(options.metrics_port, folder.root, node, note)


def _claim(options: LaunchOptions) -> tuple[RunFolder, str, tuple[str, ...]]:
    """Claim the run folder; if the user named none and another launch holds it, create one beside it.

    An existing folder is never used instead, because it holds the checkpoints of another launch. While
    leftover processes of a killed launcher hold the lock, no folder is created: the same command must resume.

    Raises:
        RunFolderBusy: another launch holds the folder, and the user named it or no living launcher holds it.
        RunFolderUnusable: it cannot be created or written.
    """
    folder = RunFolder(options.run_dir, options.nodes.name if options.nodes.several else "")
    try:
        run_id = folder.claim(options.run_id, identity())
        differs = folder.other_launch((options.script.target, *options.script.args))
        return folder, run_id, (differs,) if differs else ()
    except RunFolderBusy as error:
        living = lives(folder.holder())
        if living is None and not options.named:
            raise RunFolderBusy(
                f"run folder {options.run_dir}: held by a process that cannot be seen from here (another host"
                " or container), or that leftovers of a killed launcher keep; nothing was started; wait for"
                " it, or choose another folder with --run-dir"
            ) from error
        if not living or options.named:
            raise
    folder = _beside(options.run_dir)
    notice = (
        f"{options.run_dir} is in use by another launch; this one has a new run folder, {folder.root}."
        f" To go on with it later: --run-dir {folder.root}"
    )
    return folder, folder.claim(who=identity()), (notice,)


def _beside(run_dir: str) -> RunFolder:
    """Create a folder that did not exist.

    Raises:
        RunFolderBusy: there are too many.
        RunFolderUnusable: it cannot be created.
    """
    for number in range(2, _LAUNCHES):
        path = f"{run_dir}-{number}"
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderUnusable(f"run folder {path}: {error.strerror}; nothing was started") from error
        return RunFolder(path)
    raise RunFolderBusy(
        f"run folder {run_dir}: in use, and {_LAUNCHES} folders are beside it; name one with --run-dir"
    )
