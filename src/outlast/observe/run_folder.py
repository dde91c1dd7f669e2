"""The run folder: everything that one run leaves on disk, and who may write there.

One run, one folder, one writer: whoever holds the lock. The run id is drawn when the folder
is made and stays; checkpoints carry it, so that a shard of another run is never taken for
one of this run.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Any

from outlast.core.errors import RunFolderBusy, RunFolderUnusable


class RunFolder:
    """Paths below the folder of a run, and its small JSON files.

    Where a job has several nodes, each has a folder of its own below it; checkpoints and what outlives a
    launch are the job's.

    Args:
        root: the folder; it exists once :meth:`claim` has been called.
        node: name of this node, where the job has several.
    """

    def __init__(self, root: str | os.PathLike[str], node: str = "") -> None:
        self.root = Path(root).absolute()
        own = self.root / "nodes" / node if node else self.root
        self.own = own
        self.events = own / "events.jsonl"
        self.checkpoints = self.root / "checkpoints"
        self.logs = own / "logs"
        self.incidents = own / "incidents"
        self.ft_state = own / "ft_state.json"
        self.job_state = self.root / "job_state.json"
        self.token = self.root / "token"
        self.board = self.root / "coordinator.json"
        self._memory = own / "memory.json"
        self._lock: int | None = None

    def node_events(self) -> dict[str, Path]:
        """Return the event log of each node, by name; none where the job had one node."""
        found = sorted(self.root.glob("nodes/*/events.jsonl"))
        return {path.parent.name: path for path in found}

    def claim(self, run_id: str = "") -> str:
        """Make the folder if need be, take its lock and return the run id.

        Args:
            run_id: the id that the user asked for; empty: the folder's own, or a new one.

        Raises:
            RunFolderBusy: another process holds the lock.
            RunFolderUnusable: the folder cannot be written, or belongs to another run id.
        """
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderUnusable(
                f"run folder {self.root}: {error.strerror}; nothing was started; "
                "choose another one with --run-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise RunFolderBusy(
                f"run folder {self.own}: held by another run (pid {holder}); nothing was started; "
                "wait for it, or choose another folder with --run-dir"
            ) from error
        self._lock = lock
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return self._identify(run_id)
        except OSError as error:
            raise RunFolderUnusable(
                f"run folder {self.root}: {error.strerror}; nothing was started"
            ) from error

    def _identify(self, run_id: str) -> str:
        path = self.root / "run.json"
        known = self.read(path)
        if known is None:
            known = {"run_id": run_id or uuid.uuid4().hex[:12], "format": 1}
            self.write(path, known)
            known = self.read(path) or known
        found = str(known.get("run_id", ""))
        if run_id and found != run_id:
            raise RunFolderUnusable(
                f"run folder {self.root}: belongs to run {found!r}, asked for {run_id!r}; nothing was "
                "started; give each run a folder of its own with --run-dir"
            )
        return found

    def note_memory(self, root: Path) -> None:
        """Write down where the memory folder of this run is, on the node that holds the lock."""
        self.write(self._memory, {"memory": str(root)})

    @property
    def memory(self) -> Path | None:
        """The memory folder of the latest launch; None: there was none."""
        found = (self.read(self._memory) or {}).get("memory")
        return Path(found) if isinstance(found, str) else None

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file, None where there is none or it is torn."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, path: Path, value: dict[str, Any], durable: bool = True) -> None:
        """Replace a small JSON file as a whole, also on power loss where it has to be durable.

        Raises:
            OSError: the file system refused; the old file is untouched.
        """
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # pids repeat on a shared folder
        try:
            with open(temporary, "w") as file:
                json.dump(value, file, indent=1)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
