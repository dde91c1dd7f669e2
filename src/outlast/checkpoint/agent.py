"""The agent's side of its checkpoint writer: where its memory folder is, and where its records arrive."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outlast import files
from outlast.checkpoint.policy.manifest import place_of
from outlast.checkpoint.replica.handshake import NOBODY, Credentials
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, Stage, default_root
from outlast.checkpoint.writer_process import SaverProcess
from outlast.errors import NodeUnfit, RunFolderUnusable
from outlast.ipc.control import Inbox
from outlast.ipc.processes import cannot_start
from outlast.launcher.command.options import LaunchOptions
from outlast.observe.run_folder import RunFolder


def _is_private(root: Path) -> bool:
    """Return whether there is a memory folder; what a stranger has put in its place is none."""
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


class Saving(SaverProcess):
    """The writer of this node, as the launcher's agent holds it.

    Args:
        options: of the launcher.
        folder: the run folder.
        runtime: the runtime folder.
        run_id: of the run; its memory folder is found again by the next launcher.
        trust: what this node proves to others, and whether it may commit; None: the job has one node.

    Raises:
        RunFolderUnusable: there can be no memory folder.
        NodeUnfit: no process can be started.
    """

    def __init__(
        self, options: LaunchOptions, folder: RunFolder, runtime: Path, run_id: str, trust: Trust | None
    ) -> None:
        config, node = options.config.checkpoints, options.nodes.name if options.nodes.several else ""
        self.inbox = Inbox(runtime / "saver")  # takes its records
        own = config.non_persistent_local_ckpt_dir
        bases = (own,) if own else ("", str(runtime.parent), tempfile.gettempdir())
        roots = [default_root(run_id, folder.root, node, base) for base in bases]
        root = next((root for root in roots if _is_private(root)), roots[len(roots) // 2])
        try:
            MemoryFolder(root).make()
        except (OSError, RunFolderUnusable) as error:
            what = f"{root}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise RunFolderUnusable(
                f"memory folder {what}; nothing was started; non_persistent_local_ckpt_dir in"
                " [checkpoints] names another place for it"
            ) from error
        try:
            folder.note_memory(root)
        except RunFolderUnusable:
            with suppress(OSError):  # there were states in it before
                root.rmdir()
            raise
        known, lease = (NOBODY, "") if trust is None else (trust.credentials, str(trust.lease))
        super().__init__(root, str(self.inbox.path), folder.events, known, lease)
        if trouble := self.tend():
            raise NodeUnfit(f"{trouble}; nothing was started")

    def tend(self) -> str:
        """See to it that the writer runs; return what to report about it; empty: nothing."""
        try:
            return self.ensure()
        except OSError as error:
            return cannot_start("the checkpoint writer", error)

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
        """Release the writer; kill it if it is still at work: its states in memory stay for the next."""
        self.hang_up()
        if not self.ended():
            self.kill()
        self.inbox.close()
