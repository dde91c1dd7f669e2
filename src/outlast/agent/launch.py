"""From a command line to an agent that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outlast.agent import logs
from outlast.agent.agent import Agent
from outlast.agent.options import LaunchOptions
from outlast.observe.run_folder import RunFolder
from outlast.transport.processes import adopt_orphans

if TYPE_CHECKING:
    from outlast.core.preflight import Finding


def launch(options: LaunchOptions) -> int:
    """Run a script to its end, through whatever happens to its workers; return the exit code.

    Raises:
        OutlastError: nothing was started.
    """
    doubtful: Sequence[Finding] = ()
    if options.nodes.several:
        from outlast.agent import admission  # neither is it imported where a job has one node

        doubtful = admission.examine(options)
    folder = RunFolder(options.run_dir, options.nodes.name if options.nodes.several else "")
    run_id = folder.claim(options.run_id)
    try:
        options = replace(options, logs=logs.with_folder_of_run(options.logs, run_id))
        adopt_orphans()
        with Agent(options, folder, run_id) as agent:
            for finding in doubtful:
                agent.note(f"preflight: {finding.check.value}: {finding.found} ({finding.expected} expected)")
            return agent.run()
    finally:
        folder.release()
