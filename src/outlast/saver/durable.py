"""Writing copies of the memory tier to the durable one, one at a time, beside everything else."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from outlast.checkpoint.inventory import read_manifest
from outlast.checkpoint.tier import DirectoryTier
from outlast.core.errors import OutlastError
from outlast.core.manifest import COMMIT, MANIFEST, rank_files
from outlast.saver.sealing import content_of


@dataclass(frozen=True)
class Written:
    """How writing one copy went.

    Args:
        name: of the copy.
        nbytes: of its files; 0 when it was there already.
        error: why it is not there; empty: it is.
    """

    name: str
    nbytes: int = 0
    error: str = ""


class DurableWriter:
    """A thread that writes copies; nothing that it runs into ends it.

    Args:
        done: called in the thread after each copy.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._orders: queue.SimpleQueue[tuple[str, DirectoryTier, DirectoryTier, tuple[int, ...]]]
        self._orders = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self.busy_with = ""
        threading.Thread(target=self._serve, name="durable", daemon=True).start()

    def write(self, name: str, source: DirectoryTier, target: DirectoryTier, ranks: tuple[int, ...]) -> None:
        """Begin to write a copy; only when :attr:`busy_with` is empty.

        Args:
            name: of the copy.
            source: the memory tier.
            target: the durable tier.
            ranks: whose files lie on this node.
        """
        self.busy_with = name
        self._orders.put((name, source, target, ranks))

    def result(self) -> Written | None:
        """Return how it went once it is over; then the next one may begin."""
        try:
            written = self._results.get_nowait()
        except queue.Empty:
            return None
        self.busy_with = ""
        return written

    def _serve(self) -> None:
        while True:
            name, source, target, ranks = self._orders.get()
            try:
                written = Written(name, write_copy(name, source, target, ranks))
            except Exception as error:  # noqa: BLE001 - the keeper reports it, and the next copy may go well
                known = isinstance(error, (OSError, OutlastError))
                written = Written(name, error=str(error) if known else f"{type(error).__name__}: {error}")
            self._results.put(written)
            self._done()


def write_copy(name: str, source: DirectoryTier, target: DirectoryTier, ranks: tuple[int, ...]) -> int:
    """Copy one copy from tier to tier, byte for byte, and commit it; return its size.

    A copy of that name that is there already stays as it is. The bytes are not digested again:
    their digests were taken before, and every load compares.

    Raises:
        DamagedCopy: manifest or COMMIT in the source are not as they were written.
        OSError: the file system refused; nothing of the copy is left in the target.
    """
    with source.open(name) as folder:
        manifest, _ = read_manifest(folder, name)
        ends = {file: folder.read(file) for file in (MANIFEST, COMMIT)}
    if name in target.names():
        return 0
    files = [file for rank in ranks for file in rank_files(rank, manifest.world_size)]
    temporary = target.begin(name)
    try:
        with ExitStack() as stack:
            contents = {file: stack.enter_context(content_of(source.folder / name / file)) for file in files}
            target.write(temporary, contents)
        target.write(temporary, ends)
        target.commit(temporary, name)
    except OSError:
        with contextlib.suppress(OSError):
            target.discard(temporary)
        raise
    return sum(manifest.file(file).nbytes for file in files)
