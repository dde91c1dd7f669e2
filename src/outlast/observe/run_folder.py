"""The run folder: all files of one run, and the lock of its writer.

One run, one folder, one writer: the holder of the lock. The run id is drawn when the folder is created;
checkpoints contain it, so that a shard of another run is never taken for one of this run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast import files, settings
from outlast._version import VERSION
from outlast.checkpoint.policy.manifest import is_training, parse_copy_name
from outlast.errors import RunFolderBusy, RunFolderUnusable
from outlast.observe import recorder
from outlast.observe.policy.launches import arguments_that_differ, unwrapped
from outlast.recovery.policy.events import RunStarted, Saved

FORMAT = 1  # of run.json and job_state.json; what another version wrote is refused, never guessed at
WRITER = {"format": FORMAT, "outlast": VERSION}
_MOST_BYTES = 64 << 20  # of a small JSON file
_MOST_GENERATION = 1 << 53
_LOCK_BYTES = 256  # what the holder of the lock says of itself
CURES = {
    "run.json": 'write {"run_id": "...", "format": 1} into it; MANIFEST.json of any checkpoint names the run',
    "events.jsonl": "remove it, or move it away: the run then has a new event log",
    "job_state.json": "remove it to continue without it: this resets restart budgets and suspect checkpoints",
}


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
        self.request = own / "request.json"
        self.job_state = self.root / "job_state.json"
        self.token = self.root / "token"
        self.board = self.root / "leader.json"
        self._memory = own / "memory.json"
        self._lock: int | None = None
        self._place: tuple[int, int] | None = None  # device and inode of the claimed folder

    def node_events(self) -> dict[str, Path]:
        """Return the event log of each node, by name; none where the job had one node."""
        found = sorted(self.root.glob("nodes/*/events.jsonl"))
        return {path.parent.name: path for path in found}

    def claim(self, run_id: str = "", who: str = "") -> str:
        """Create the folder if needed, take its lock and return the run id.

        Args:
            run_id: the id that the user asked for; empty: the folder's own, or a new one.
            who: what tells this process from others; it begins with the pid, and is kept in the lock file.

        Raises:
            RunFolderBusy: another process holds the lock.
            RunFolderUnusable: the folder or its event log cannot be written, is of another account in a
                place that all accounts share, has no folder in the place of its checkpoints, belongs to
                another run id, or does not say to which.
        """
        try:
            files.make_run_folder(self.root, settings.in_pod())
            self.own.mkdir(parents=True, exist_ok=True)
            files.require_folder_or_nothing(self.checkpoints)
            lock = files.open_regular(self.own / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunFolderUnusable(
                f"run folder {self.root}: {error.strerror}; nothing was started; "
                "choose another one with --run-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found, holder = _line(lock), pid_in(lock)
            os.close(lock)
            if found in (who, str(os.getpid())):
                raise RunFolderBusy(
                    f"run folder {self.own}: held by an open session of this process; close it first"
                ) from error
            raise RunFolderBusy(
                f"run folder {self.own}: held by another run (pid {holder}); nothing was started; "
                "wait for it, or choose another folder with --run-dir"
            ) from error
        self._lock = lock
        try:
            self._place = _place_of(self.root)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{who or os.getpid()}\n".encode(), 0)
            self._require_log()
            return self._identify(run_id)
        except RunFolderUnusable:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise RunFolderUnusable(
                f"run folder {self.root}: {error.strerror}; nothing was started"
            ) from error

    def _require_log(self) -> None:
        """Refuse a run that could not tell of itself: its event log is there, and cannot be written."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.close(files.open_regular(self.events, os.O_RDWR | os.O_APPEND))
        except OSError as error:
            raise RunFolderUnusable(
                f"{self.events}: {error.strerror}; nothing was started; {CURES[self.events.name]}"
            ) from error

    def _identify(self, run_id: str) -> str:
        path = self.root / "run.json"
        known = self._checked(path)
        if known is None:
            if not run_id and self._copies():
                raise RunFolderUnusable(
                    f"{path} is missing, but {self.checkpoints} holds checkpoints: of which run is not known;"
                    f" nothing was started; {CURES[path.name]}"
                )
            self._first(path, {"run_id": run_id or uuid.uuid4().hex[:12], **WRITER})
            known = self._checked(path)
        found = None if known is None else known.get("run_id")
        if not isinstance(found, str) or not found:
            raise RunFolderUnusable(f"{path}: no run id is in it; nothing was started; {CURES[path.name]}")
        if run_id and found != run_id:
            raise RunFolderUnusable(
                f"run folder {self.root}: belongs to run {found!r}, asked for {run_id!r}; nothing was "
                "started; give each run a folder of its own with --run-dir"
            )
        return found

    def _first(self, path: Path, value: dict[str, Any]) -> None:
        """Write a JSON file unless another node has; all nodes use the first one."""
        mine = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        self.write(mine, value)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if not path.exists():  # a file system without links: of two nodes at once the last one counts
                os.replace(mine, path)
        finally:
            mine.unlink(missing_ok=True)

    def note_memory(self, root: Path) -> None:
        """Record the memory folder of this run, on the node that holds the lock.

        Raises:
            RunFolderUnusable: that cannot be written.
        """
        try:
            self.write(self._memory, {"memory": str(root)})
        except OSError as error:
            raise RunFolderUnusable(f"{self._memory}: {error.strerror}; nothing was started") from error

    @property
    def memory(self) -> Path | None:
        """The memory folder of the latest launch; None: there was none."""
        found = (self.peek(self._memory) or {}).get("memory")
        return Path(found) if isinstance(found, str) else None

    def holder(self) -> str:
        """Return what the last process to take the lock has said of itself; see :meth:`claim`."""
        try:
            lock = files.open_regular(self.own / "lock")
        except OSError:
            return ""
        try:
            return _line(lock)
        finally:
            os.close(lock)

    def is_held(self) -> bool:
        """Say whether a process holds the lock."""
        try:
            lock = files.open_regular(self.own / "lock")
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(lock)
        return False

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # of a file system with an outage; the lock is released
                os.close(self._lock)
            self._lock = None

    def moved(self) -> bool:
        """Say whether the claimed folder is not at its path any more: renamed, or removed."""
        try:
            return self._place is not None and _place_of(self.root) != self._place
        except FileNotFoundError:
            return True
        except OSError:  # whoever writes there reports the outage
            return False

    def recall(self) -> dict[str, Any] | None:
        """Return the content of ``job_state.json``; None: there is no such file.

        Raises:
            RunFolderUnusable: it cannot be read, or another version wrote it.
        """
        return self._checked(self.job_state)

    def next_generation(self) -> int:
        """Return the generation of a session without a launcher: 0 in a new run."""
        return self._newest(-1) + 1

    def newest_generation(self) -> int:
        """Return the newest generation in checkpoints and event logs; 0: none."""
        return self._newest(0)

    def newest_copy_generation(self) -> int:
        """Return the newest generation in checkpoints; 0: none."""
        return max(
            (generation for _, generation in self._copies() if generation < _MOST_GENERATION), default=0
        )

    def _newest(self, least: int) -> int:
        found = [least, *(generation for _, generation in self._copies())]
        for log in (self.events, *self.node_events().values()):
            with contextlib.suppress(OSError):
                found += [one.generation for one in recorder.read(log).records]
        return max(one for one in found if one < _MOST_GENERATION)

    def other_launch(self, command: Sequence[str]) -> str:
        """Return how a launch differs from the one that made the checkpoints here; empty: it does not.

        That is the newest one that saved, or, where the log has none, the newest one.

        Args:
            command: program and arguments of this launch.
        """
        if not command or not self._copies():
            return ""
        before: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            saved = recorder.latest(self.events, RunStarted, before=Saved)
            found = saved or recorder.latest(self.events, RunStarted)
            before = () if found is None else found.command
        if not before:
            return ""
        then, now = unwrapped(before), unwrapped(command)
        if os.path.realpath(then[0]) != os.path.realpath(now[0]):
            return (
                f"{self.root} has checkpoints of {then[0]}, and this launch starts {now[0]}: it goes on"
                " from them if names and shapes fit; another --run-dir begins a new run"
            )
        if any(one.endswith(recorder.CUT) for one in before):
            return ""
        differ = arguments_that_differ(then[1:], now[1:])
        return differ and (
            f"{self.root} has checkpoints of a launch with other arguments: now {differ}; what a checkpoint"
            " holds, such as the learning rate of an optimizer, comes from there; another --run-dir begins a"
            " new run"
        )

    def _copies(self) -> list[tuple[int, int]]:
        """Return step and generation of each checkpoint, quarantined ones included; no link is followed."""
        names: list[str] = []
        below = [path for folder in self.trainings() for path in (folder, folder / "quarantine")]
        inner = [path for path in (self.checkpoints / "quarantine", *below) if not path.is_symlink()]
        for place in (self.checkpoints, *inner):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names += os.listdir(place)
        return [found for name in names if (found := parse_copy_name(name.partition("~")[0]))]

    def training(self, name: str) -> Path:
        """Return the folder of the checkpoints of a training; an empty name: of the only one.

        Raises:
            RunFolderUnusable: a symbolic link is in its place; that of the only training may be one.
        """
        if not name:
            return self.checkpoints
        found = self.checkpoints / name
        if found.is_symlink():
            raise RunFolderUnusable(
                f"{found}: a folder is expected; it is a symbolic link; nothing was read or written there;"
                f" put the folder itself there; {self.checkpoints} may be a link to another file system"
            )
        return found

    def trainings(self) -> list[Path]:
        """Return the folders of trainings that have a name."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(self.checkpoints))
            return [self.checkpoints / name for name in names if is_training(name)]
        return []

    def _checked(self, path: Path) -> dict[str, Any] | None:
        found = self.read(path)
        if found is not None and found.get("format") != FORMAT:
            writer = found.get("outlast")
            known = isinstance(writer, str) and writer.isprintable()
            raise RunFolderUnusable(
                f"{path}: its format is {found.get('format')!r}"
                f"{f' (written by outlast {writer})' if known else ''}, outlast {VERSION} reads {FORMAT};"
                f" nothing was started; use the version that wrote it, or {CURES[path.name]}"
            )
        return found

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file; None: there is no such file.

        Raises:
            RunFolderUnusable: it cannot be read, or is torn; the text says what to do.
        """
        try:
            found = json.loads(files.read_whole(path, _MOST_BYTES))
            if isinstance(found, dict):
                return found
            why = f"it holds a JSON {type(found).__name__}, an object is expected"
        except FileNotFoundError:
            return None
        except OSError as error:
            why = str(error.strerror)
        except (ValueError, RecursionError) as error:
            why = f"it is torn or no JSON ({error})"
        cure = CURES.get(path.name, "restore it, or remove it")
        raise RunFolderUnusable(f"{path}: {why}; nothing was started; {cure}")

    def peek(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON object in a file that may be missing or torn, and is not essential."""
        try:
            return self.read(path)
        except RunFolderUnusable:
            return None

    def write(self, path: Path, value: dict[str, Any], durable: bool = True) -> None:
        """Replace a small JSON file atomically, if durable also on power loss.

        Raises:
            OSError: the file system refused; the old file is untouched.
        """
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # pids repeat on a shared folder
        try:
            with open(temporary, "x") as file:
                json.dump(value, file, indent=1)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:
                files.sync_folder(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _place_of(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _line(lock: int) -> str:
    return os.pread(lock, _LOCK_BYTES, 0).decode(errors="replace").strip()


def pid_in(lock: int) -> str:
    """Return the pid that an open lock file names; "unknown": none."""
    return next(iter(_line(lock).split()), "unknown")
