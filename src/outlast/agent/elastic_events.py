"""torchelastic's events on the console, for ``--event-log-handler=console``.

Source: torch 2.13, elastic/agent/server/api.py (``_construct_event``) and elastic/events/api.py.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from outlast.agent.console import Console
from outlast.agent.generation import Generation
from outlast.agent.options import LaunchOptions
from outlast.agent.processes import Worker


class ElasticEvents:
    """Shows when workers start and how they end, one JSON line each.

    Args:
        console: shows them.
        options: the command line.
        run_id: of the run.
    """

    def __init__(self, console: Console, options: LaunchOptions, run_id: str) -> None:
        self._console = console
        self._options = options
        self._run_id = run_id
        self._began = time.monotonic()
        self._on = options.event_log == "console"

    def started(self, generation: Generation) -> None:
        """Tell that the workers of a generation run."""
        for worker in generation.workers if self._on else ():
            self._tell("START", generation, worker)

    def ended(self, generation: Generation) -> None:
        """Tell how the workers of the last generation have ended."""
        for worker in generation.workers if self._on else ():
            state = (
                "TERMINATED" if worker.exit_code is None else "FAILED" if worker.exit_code else "SUCCEEDED"
            )
            self._tell(state, generation, worker)

    def over(self, generation: Generation | None, exit_code: int) -> None:
        """Tell that the agent has ended; as in torchrun, it succeeds also where workers have failed."""
        if self._on:
            self._tell("SUCCEEDED" if exit_code < 128 else "FAILED", generation)

    def _tell(self, state: str, generation: Generation | None, worker: Worker | None = None) -> None:
        group = None if generation is None else generation.assignment
        inner: dict[str, Any] = {
            "group_world_size": None if group is None else group.nodes,
            "entry_point": os.path.basename(self._options.script.target),
        }
        error = None
        if worker is not None and generation is not None:
            failed = state == "FAILED"
            inner |= {
                "local_rank": [worker.rank - generation.ranks.start],
                "role_rank": [worker.rank],
                "role_world_size": [generation.world_size],
                "exit_code": [worker.exit_code if failed else None],
                "worker_pid": [worker.pid if failed else None],
            }
            failure = generation.failure(worker.rank) if failed else None
            error = (
                json.dumps({"message": "<NONE>" if failure is None else failure.message}) if failed else None
            )
        metadata = {
            "run_id": self._run_id,
            "global_rank": None if worker is None else worker.rank,
            "group_rank": None if group is None else group.node_rank,
            "worker_id": None if worker is None else str(worker.pid),
            "role": self._options.world.role,
            "hostname": os.uname().nodename,
            "state": state,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": "outlast",
            "raw_error": error,
            "metadata": json.dumps(inner),
            "agent_restarts": 0 if generation is None else generation.number - 1,
            "duration_ms": None,
        }
        source = "AGENT" if worker is None else "WORKER"
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": 0,
            "metadata": metadata,
        }
        self._console.line(json.dumps(event))
