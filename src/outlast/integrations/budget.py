"""The budget of requeues in the run folder: what one allocation of a job leaves for the next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from outlast import files
from outlast.checkpoint.policy.manifest import parse_copy_name
from outlast.checkpoint.tiers.tier import DirectoryTier
from outlast.errors import RunFolderUnusable
from outlast.integrations.requeue import Decision, Ending, Ledger, Limits, begin, decide
from outlast.observe.run_folder import RunFolder


class Budget:
    """Bounds the requeues of one job.

    Args:
        run: the run folder, on a file system that outlives the allocation.
        scheduler: whose job it is; ``<scheduler>.json`` holds the budget, ``<scheduler>-reason.json`` why the
            last allocation ended.
        job: the scheduler's id of the job; another job starts with a full budget.
        limits: of the requeues.

    Raises:
        RunFolderUnusable: the budget cannot be read, here or in :meth:`begin`; or written, in any method.
    """

    def __init__(self, run: RunFolder, scheduler: str, job: str, limits: Limits) -> None:
        self._run, self._job, self._limits = run, job, limits
        self._path = run.root / f"{scheduler}.json"
        self._reason = run.root / f"{scheduler}-reason.json"
        try:
            self._ledger = Ledger.from_json(run.read(self._path), job)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderUnusable(
                f"{self._path}: no budget of requeues in it ({error!r}); nothing was started; "
                "remove the file to start with a full budget"
            ) from error

    def begin(self) -> Decision | None:
        """Count an allocation that begins; return why it must not, where earlier ones made no progress."""
        self._ledger, refused = begin(self._ledger, newest_step(self._run), self._limits)
        self._write(self._path, self._ledger.to_json())
        if refused is not None:
            self._explain(refused)
        return refused

    def end(self, ending: Ending) -> Decision:
        """Count an allocation that has ended, and return what follows."""
        self._ledger, decision = decide(self._ledger, ending, self._limits)
        self._write(self._path, self._ledger.to_json())
        self._explain(decision)
        return decision

    def _explain(self, decision: Decision) -> None:
        told = {"outcome": decision.outcome.value, "reason": decision.reason}
        code = int(decision.exit_code)
        self._write(self._reason, {"job_id": self._job, "time": time.time(), **told, "exit_code": code})

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        try:
            files.make_run_folder(self._run.root)
            self._run.write(path, value)
        except OSError as error:
            raise RunFolderUnusable(
                f"{path}: {error.strerror}; without it no requeue is bounded, so none is asked for"
            ) from error


def newest_step(run: RunFolder) -> int:
    """Return the newest step with a committed copy in the run folder, -1 where there is none."""
    parsed = [parse_copy_name(name) for name in DirectoryTier(run.checkpoints).names()]
    return max((found[0] for found in parsed if found is not None), default=-1)
