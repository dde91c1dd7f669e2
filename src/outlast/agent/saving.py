"""The agent's hold on its saver: start it, start it again, take its records, let it finish."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from outlast.agent.options import LaunchOptions
from outlast.checkpoint.tiers.memory_folder import MemoryFolder, default_root
from outlast.core.errors import RunFolderUnusable
from outlast.observe.run_folder import RunFolder
from outlast.transport.control import Inbox
from outlast.transport.permit import Permit
from outlast.transport.saver_process import SaverProcess


class Saving:
    """The saver of this node; ``fileno()`` is readable when a record waits.

    Args:
        options: whether checkpoints are asynchronous; without that there is no saver.
        folder: the run folder.
        runtime: the runtime folder.
        run_id: of the run; its memory folder is found again by the next launcher.
        permit: says whether this node may commit; None: the job has one node.

    Raises:
        RunFolderUnusable: there can be no memory folder.
    """

    def __init__(
        self, options: LaunchOptions, folder: RunFolder, runtime: Path, run_id: str, permit: Permit | None
    ) -> None:
        config, node = options.config.checkpoints, options.nodes.name if options.nodes.several else ""
        self.root: Path | None = None
        self._inbox = Inbox(runtime / "saver")
        self._process: SaverProcess | None = None
        if config.async_save:
            own = config.non_persistent_local_ckpt_dir
            bases = (own,) if own else ("", str(runtime.parent), tempfile.gettempdir())
            roots = [default_root(run_id, folder.root, node, base) for base in bases]
            self.root = next((root for root in roots if root.exists()), roots[len(roots) // 2])
            try:
                MemoryFolder(self.root).make()
            except OSError as error:
                raise RunFolderUnusable(
                    f"memory folder {self.root}: {error.strerror}; nothing was started;"
                    " non_persistent_local_ckpt_dir in [checkpoints] names another place for it"
                ) from error
            folder.note_memory(self.root)
            path = "" if permit is None else str(permit.path)
            self._process = SaverProcess(self.root, str(self._inbox.path), folder.events, path)
            self._process.ensure()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._inbox.fileno()

    @property
    def pid(self) -> int:
        """The saver's process, 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    def lines(self) -> Iterator[str]:
        """Yield the records that have arrived."""
        return self._inbox.lines()

    def tend(self) -> str:
        """See to it that the saver runs; return what is to be said about it, if anything."""
        return "" if self._process is None else self._process.ensure()

    def hang_up(self) -> None:
        """Say that the job is over."""
        if self._process is not None:
            self._process.hang_up()

    def ended(self) -> bool:
        """Say whether the saver has ended."""
        return self._process is None or self._process.ended()

    def close(self) -> None:
        """Let go; a saver that is still at work is killed, and what it had in memory stays for the next."""
        if self._process is not None:
            self._process.hang_up()
            if not self._process.ended():
                self._process.kill()
        self._inbox.close()
