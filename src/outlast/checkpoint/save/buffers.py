"""Buffers in the memory folder: files on tmpfs whose pages are there already and are used again.

The first write into a page costs six to ten times a later one, so buffers are made ahead, mapped
once, and come back through the pool when the copy that they were part of is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from outlast.checkpoint.content.memory import populate
from outlast.checkpoint.save.mapping import Mapping, current_device
from outlast.checkpoint.tiers.memory_folder import Stage, pool_of
from outlast.errors import RunFolderUnusable

_REST = 9.0  # nothing is done for so many times the duration of a window, where training goes on beside
_POLL = 0.001  # seconds; a buffer comes free when the writer has written a copy to disk


@dataclass(frozen=True)
class Buffer:
    """A claimed buffer.

    Args:
        path: its place as a part of a copy that is being staged.
        memory: its content, shared with everybody who opens the file.
        waited: seconds until one was free.
    """

    path: Path
    memory: mmap.mmap
    waited: float


class Buffers:
    """Makes and claims the buffers of one safetensors file; one rank alone does.

    Args:
        stage: where they are.
        session: of the ranks.
        file: name of the file in every copy.
        limit: how many there may be.
    """

    def __init__(self, stage: Stage, session: str, file: str, limit: int) -> None:
        self._stage = stage
        self._session = session
        self._file = file
        self._name = pool_of(file)
        self._pool = stage.pool / self._name
        self._prepares = True
        self._limit = limit
        self.waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext  # for the disk
        self._making = threading.Lock()  # else claim() and prepare() would make one more than allowed
        self._awaited = threading.Event()  # a save waits for the buffer that is being made
        self._mapped: dict[int, Mapping] = {}  # by inode, since files go from folder to folder
        self._device: int | None = None

    def prepare_beside(self, nbytes: int) -> None:
        """Begin to fill the pool with buffers of a size, as far as there is room."""
        self._device = current_device()  # not that of the thread, which would be the first one
        _beside(lambda: self.prepare(nbytes))

    def prepare(self, nbytes: int) -> None:
        """Fill the pool with buffers of a size.

        Raises:
            OSError: there is no room for them.
        """
        pool = self._pool
        pool.mkdir(mode=0o700, exist_ok=True)  # not its parents: a writer that is done may have removed them
        for _ in range(self._limit):
            while self._awaited.is_set() and self._prepares:  # a save takes the one that has just been made
                time.sleep(_POLL)
            with self._making:
                have = len(self._stage.free(self._name)) + self._stage.in_use(self._file)
                if have >= self._limit or not self._prepares:
                    return
                path = pool / f".{os.urandom(8).hex()}"
                try:
                    self._map(path, nbytes, self._rest)
                    os.rename(path, pool / path.name[1:])
                except OSError:
                    path.unlink(missing_ok=True)
                    raise

    def _rest(self, took: float) -> None:
        """Let training have the memory to itself after a window, until a save waits for the buffer.

        Raises:
            OSError: no more buffers are to be made.
        """
        self._awaited.wait(_REST * took)
        if not self._prepares:
            raise OSError(errno.ECANCELED, "no more buffers are made")

    def _stop(self) -> None:
        self._prepares = False
        self._awaited.set()

    def claim(self, copy: str, nbytes: int, timeout: float, nudge: Callable[[], None]) -> Buffer | None:
        """Take a buffer for a copy; None when none came free in time.

        Args:
            copy: name of the copy.
            nbytes: size of the file.
            timeout: seconds to wait for one.
            nudge: called now and then while waiting: sees to it that the writer is awake.

        Raises:
            OSError: there is no room for another one.
        """
        began = time.monotonic()
        self._device = current_device()
        folder = self._stage.staging(copy, self._session)
        if not folder.is_dir():
            self._stage.make()
            folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / self._file
        if not self._has_room() and not self._await_room(began + timeout, nudge):
            return None
        self._awaited.set()
        try:
            with self._making:  # one that is nearly there is sooner ready than another one
                self._take(path)
                memory = self._map(path, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            error.filename = str(path)
            raise
        finally:
            self._awaited.clear()
        if any(_size(free) > nbytes for free in self._stage.free(self._name)):
            _beside(lambda: self._cut(nbytes))
        return Buffer(path, memory, time.monotonic() - began)

    def _has_room(self) -> bool:
        return self._stage.in_use(self._file) < self._limit

    def _await_room(self, deadline: float, nudge: Callable[[], None]) -> bool:
        """Wait until the writer has written a copy to disk; return whether it has."""
        with self.waiting():
            while not self._has_room():
                if time.monotonic() > deadline:
                    return False
                nudge()
                time.sleep(_POLL)
        return True

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool of which the writer will not learn."""
        with contextlib.suppress(OSError):
            os.rename(buffer.path, self._pool / os.urandom(8).hex())
            buffer.path.parent.rmdir()  # where no other rank stages, too

    def _take(self, path: Path) -> None:
        """Take a buffer out of the pool if there is one."""
        for free in self._stage.free(self._name):
            if not free.name.startswith("."):
                os.rename(free, path)
                return

    def _cut(self, nbytes: int) -> None:
        """Give back the memory of free buffers beyond the size that is needed by now."""
        for free in self._stage.free(self._name):
            with self._making:  # for one at a time: a claim may wait
                if _size(free) > nbytes:
                    descriptor = self._stage.open_buffer(free)
                    try:
                        self._forget(os.fstat(descriptor).st_ino)
                        os.ftruncate(descriptor, nbytes)
                    finally:
                        os.close(descriptor)

    def _forget(self, inode: int) -> None:
        """Let go of the mapping of a file that is about to be cut."""
        known = self._mapped.pop(inode, None)
        if known is not None:
            known.unregister()

    def hand_over(self, to: Buffers | None) -> None:
        """Give the free buffers to another pool, or remove them; this rank needs few of them from now on.

        Args:
            to: takes it; None: it is removed.
        """
        self._stop()
        with self._making, contextlib.suppress(OSError):
            self._mapped.clear()
            if to is not None:
                to._pool.mkdir(mode=0o700, exist_ok=True)
            for free in self._stage.free(self._name):
                if to is None:
                    free.unlink()
                else:
                    os.rename(free, to._pool / free.name)

    def close(self) -> None:
        """Unmap the buffers, which keep descriptors open; the files stay."""
        self._stop()
        with self._making:
            self._mapped.clear()

    def _map(self, path: Path, nbytes: int, rest: Callable[[float], object] = lambda _: None) -> Mapping:
        """Set the size of a file, allocate its pages, and return its content; see :func:`populate`."""
        descriptor = self._stage.open_buffer(path)
        try:
            status = os.fstat(descriptor)
            known = self._mapped.get(status.st_ino)
            if known is not None and len(known) == nbytes == status.st_size:
                known.register(self._device)
                return known
            self._forget(status.st_ino)
            os.ftruncate(descriptor, nbytes)
            memory = Mapping(descriptor, nbytes)
            populate(descriptor, memory, rest)
            memory.register(self._device)
            if len(self._mapped) >= 2 * self._limit:
                self._mapped.clear()
            self._mapped[status.st_ino] = memory
            return memory
        finally:
            os.close(descriptor)


def _beside(work: Callable[[], None]) -> None:
    """Do something to buffers in a thread."""

    def do() -> None:
        with contextlib.suppress(OSError, RunFolderUnusable):  # the next save will say so
            work()

    threading.Thread(target=do, name="buffers", daemon=True).start()


def _size(path: Path) -> int:
    """Return the size of a buffer; 0: it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0
