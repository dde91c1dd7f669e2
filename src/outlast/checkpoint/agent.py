"""The agent's side of its checkpoint writer: start it, restart it, take its records, let it finish."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outlast import files
from outlast.checkpoint.policy.manifest import place_of
from outlast.checkpoint.replica.handshake import Credentials
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.writer_process import SaverProcess
from outlast.errors import NodeUnfit, RunFolderUnusable
from outlast.ipc.control import Inbox
from outlast.ipc.processes import cannot_start
from outlast.launcher.command.options import LaunchOptions
from outlast.observe.run_folder import RunFolder


def _is_private(root: Path) -> bool:
    """Say whether there is a memory folder; what a stranger has put in its place is none."""
    try:
        files.require_private(root)
    except (OSError, RunFolderUnusable):
        return False
    return True


@dataclass(frozen=True)
class Trust:
    """What the processes of a node need where the job has several.

    Args:
        lease: file that says whether this node may commit.
        credentials: what it proves to others.
    """

    lease: Path
    credentials: Credentials


class Saving:
    """The writer of this node; ``fileno()`` is readable when a record waits.

    Args:
        options: of the launcher.
        folder: the run folder.
        runtime: the runtime folder.
        run_id: of the run; its memory folder is found again by the next launcher.
        trust: what this node proves to others, and whether it may commit; None: the job has one node.

    Raises:
        RunFolderUnusable: there can be no memory folder.
    """

    def __init__(
        self, options: LaunchOptions, folder: RunFolder, runtime: Path, run_id: str, trust: Trust | None
    ) -> None:
        config, node = options.config.checkpoints, options.nodes.name if options.nodes.several else ""
        self._inbox = Inbox(runtime / "saver")
        own = config.non_persistent_local_ckpt_dir
        bases = (own,) if own else ("", str(runtime.parent), tempfile.gettempdir())
        roots = [default_root(run_id, folder.root, node, base) for base in bases]
        self.root = next((root for root in roots if _is_private(root)), roots[len(roots) // 2])
        try:
            MemoryFolder(self.root).make()
        except (OSError, RunFolderUnusable) as error:
            what = f"{self.root}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise RunFolderUnusable(
                f"memory folder {what}; nothing was started; non_persistent_local_ckpt_dir in"
                " [checkpoints] names another place for it"
            ) from error
        try:
            folder.note_memory(self.root)
        except RunFolderUnusable:
            with suppress(OSError):  # there were states in it before
                self.root.rmdir()
            raise
        path = "" if trust is None else str(trust.lease)
        known = Credentials() if trust is None else trust.credentials
        self._process = SaverProcess(self.root, str(self._inbox.path), folder.events, known, path)
        try:
            self._process.ensure()
        except OSError as error:
            why = cannot_start("the checkpoint writer", error)
            raise NodeUnfit(f"{why}; nothing was started") from error

    @property
    def path(self) -> Path:
        """The file of the socket that takes its records."""
        return self._inbox.path

    def bind_again(self) -> None:
        """Listen for records once more, after the socket's file was removed.

        Raises:
            OSError: it cannot be made.
        """
        self._inbox.bind_again()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._inbox.fileno()

    @property
    def pid(self) -> int:
        """The writer's process, 0 when there is none."""
        return self._process.pid

    def lines(self) -> Iterator[str]:
        """Yield the records that have arrived."""
        return self._inbox.lines()

    def tend(self) -> str:
        """See to it that the writer runs; return what is to be said about it, if anything."""
        try:
            return self._process.ensure()
        except OSError as error:
            return cannot_start("the checkpoint writer", error)

    def hang_up(self) -> None:
        """Say that the job is over."""
        self._process.hang_up()

    def finished(self) -> bool:
        """Return whether the writer has ended by itself; one that is killed before that is replaced."""
        return self._process.finished()

    def unsaved(self) -> str:
        """Return what to report of a state that the writer has left in memory; empty: there is none."""
        members = MemoryFolder(self.root).members()
        if members is None:
            return ""
        tier = Stage(members.stage, members.private).tier
        newest = max(tier.names(), key=lambda name: place_of(name)[::-1], default="")
        if not newest:
            return ""
        return (
            f"step {place_of(newest)[0]} did not come to disk ({members.tier}) and stays in memory"
            f" ({tier.folder}) until this node is restarted; make room, then start the same command again on"
            " this node: it brings that to disk"
        )

    def close(self) -> None:
        """Let go; a writer that is still at work is killed, and what it had in memory stays for the next."""
        self._process.hang_up()
        if not self._process.ended():
            self._process.kill()
        self._inbox.close()
