"""Buffers in the memory folder: files on tmpfs whose pages are there already and are used again.

The first write into a page costs six to ten times a later one, so buffers are made ahead, mapped
once, and come back through the pool when the copy that they were part of is dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from outlast.checkpoint.content.memory import Loan, address_of, populate
from outlast.checkpoint.content.transfers import WINDOW
from outlast.checkpoint.save.host_memory import is_memory
from outlast.checkpoint.tiers.memory_folder import Stage, pool_of
from outlast.errors import RunFolderUnusable

_REST = 1.0  # nothing is done for so many times the duration of a window, where training goes on beside
_NICENESS = 10  # of the thread: it takes a tenth of a processor where training uses all of it
_LENDS = 16 << 20  # bytes; a smaller file is loaded through private memory
_AT_ONCE = 256 << 20  # bytes; a save waits for a buffer of that size rather than be put off
_AGAIN = 1.0  # seconds until buffers that were in use, or made, are looked for
_TURN_SECONDS = 300.0  # for which the end of the making of another one is waited for
_POLL = 0.001  # seconds; a buffer comes free when the writer has written a copy to disk
_BLOCK = 512  # bytes; st_blocks counts in them
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_REGISTERED_WITHIN = 60.0  # seconds: a driver that does not answer holds no save back


class Mapping(mmap.mmap):
    """A file in memory, registered with the driver so that a device copies into it at its full speed.

    Copies into ordinary pages of tmpfs run at 14 to 16 GB/s on an H200, into registered ones at 52 to 55
    (DeepSpeed, pull request 8283). Registration takes 0.1 to 0.3 s a GB, once a mapping; it is released
    before the file is unmapped. CUDA and HIP.
    """

    valid = 0  # bytes that the file still has
    registered: tuple[int, ...] = ()  # addresses of its parts
    tried = False  # to register it

    def register(self, device: int | None, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Register it once; if the driver refuses, copies into it are slower, and nothing else changes.

        On a thread of its own: an error of the driver stays with the thread until some other call reports it.

        Args:
            device: of this rank; None: it uses none yet, and nothing is done.
            goes_on: called before each window; False ends the registration.
        """
        if device is None or self.tried or not len(self):
            return
        self.tried = True
        thread = threading.Thread(
            target=self._register, args=(device, goes_on), name="registering", daemon=True
        )
        thread.start()
        thread.join(_REGISTERED_WITHIN)

    def _register(self, device: int, goes_on: Callable[[], bool]) -> None:
        done: list[int] = []
        with contextlib.suppress(RuntimeError, AttributeError), torch.cuda.device(device):
            library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            begin = address_of(self)
            for low in range(0, len(self), WINDOW):
                if not goes_on() or int(
                    library.cudaHostRegister(begin + low, min(WINDOW, len(self) - low), _PORTABLE)
                ):
                    break
                done.append(begin + low)
        self.registered = tuple(done)

    def unregister(self) -> None:
        """Release what is registered, before the file is no longer mapped."""
        parts, self.registered = self.registered, ()
        with contextlib.suppress(RuntimeError, AttributeError):  # the driver has gone
            for part in parts:
                torch.cuda.cudart().cudaHostUnregister(part)  # type: ignore[no-untyped-call]

    def shorten(self, nbytes: int) -> None:
        """Release what is registered and reaches beyond a size to which the file is about to be cut."""
        end, before = address_of(self) + nbytes, self.registered
        kept = tuple(part for part in before if part + WINDOW <= end)
        self.valid, self.registered = nbytes, before[len(kept) :]
        self.unregister()
        self.registered = kept

    def __del__(self) -> None:
        """Release what is registered."""
        self.unregister()


def current_device() -> int | None:
    """Return the device of the calling thread; None where this process has used none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Buffer:
    """A claimed buffer.

    Args:
        path: its place as a part of a copy that is being staged.
        memory: its content, shared with everybody who opens the file.
    """

    path: Path
    memory: mmap.mmap


class Buffers:
    """Makes and claims the buffers of one safetensors file; one rank alone does.

    Args:
        stage: where they are.
        session: of the ranks.
        file: name of the file in every copy.
        limit: how many there may be.
        waiting: entered around a wait for the disk.
    """

    def __init__(
        self,
        stage: Stage,
        session: str,
        file: str,
        limit: int,
        waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._stage = stage
        self._session = session
        self._file = file
        self._name = pool_of(file)
        self._pool = stage.pool / self._name
        self._limit = limit
        self.waiting = waiting
        self._changed = threading.Condition()  # of what follows
        self._stopped = threading.Event()  # no more buffers are made beside training
        self._making = False  # a buffer is made, mapped or lent; one at a time
        self._mapped: dict[int, Mapping] = {}  # by inode, since files go from folder to folder
        self._awaited = threading.Event()  # a save waits for the buffer that is being made
        self._beside = False  # a thread prepares buffers while training goes on
        self._lacking = False  # it has still some to make
        self._lent: Path | None = None
        self._pid = os.getpid()
        self._device: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory, and not on the disk of the run folder."""
        return self._stage.private

    @property
    def ready(self) -> bool:
        """Whether a save need not wait for the pages of a buffer."""
        return not self._lacking or any(map(_has_pages, self._stage.free(self._name)))

    def prepare_beside(self, nbytes: int) -> None:
        """Begin to fill the pool, if it is in memory, with buffers of a size, as far as there is room."""
        if not self.in_memory:
            return
        self._device = current_device()  # not that of the thread, which would be the first one
        self._beside, self._lacking = True, nbytes > _AT_ONCE
        atexit.register(self._stop_at_exit)

        def work() -> None:
            with contextlib.suppress(OSError):
                os.nice(_NICENESS)  # of this thread, on Linux
            try:
                self.prepare(nbytes)
            finally:
                self._beside = self._lacking = False

        _start(work)

    def prepare(self, nbytes: int) -> None:
        """Map the buffers in the pool, and fill it with new ones of a size.

        Raises:
            OSError: there is no room for them.
        """
        pool = self._pool
        pool.mkdir(mode=0o700, exist_ok=True)  # not its parents: a writer that is done may have removed them
        waits = True
        while waits:
            for free in self._stage.free(self._name):
                self._fill(free, nbytes)
            while self._fill(None, nbytes):
                pass
            self._lacking = False
            with self._changed:  # saves took some before they were registered here
                waits = self._device is not None and any(not one.tried for one in self._mapped.values())
            waits = waits and not self._stopped.wait(_AGAIN)

    def _fill(self, path: Path | None, nbytes: int) -> bool:
        """Make a buffer beside training, or map one; meanwhile its name is hidden, and no save takes it.

        Args:
            path: of one in the pool; None: a new one.
            nbytes: its size.

        Returns:
            Whether there was one to map, or one less than may be.
        """
        hidden = self._pool / f".{os.urandom(8).hex() if path is None else path.name.lstrip('.')}"
        with self._changed:
            waited = self._await(lambda: not self._making)
            have = len(self._stage.free(self._name)) + self._stage.in_use(self._file)
            if not waited or self._stopped.is_set() or (path is None and have >= self._limit):
                return False
            if path is not None:
                try:
                    os.rename(path, hidden)  # also one to its own name, to see that no save has taken it
                except FileNotFoundError:
                    return False
            self._making = True
        try:
            self._map(hidden, nbytes, self._rest, self._device)
            os.rename(hidden, self._pool / hidden.name[1:])
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                hidden.unlink() if path in (None, hidden) else os.rename(hidden, path)
            raise
        finally:
            self._end_making()
        return True

    def _await(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, ``_changed`` being held, until something is done; return whether it is in time."""
        deadline = time.monotonic() + (_TURN_SECONDS if timeout is None else timeout)
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, _AGAIN))  # the writer gives no notice
        return True

    def _hurried(self) -> bool:
        """Return whether no buffer is being made; if one is, its thread makes no more pauses."""
        if self._making:
            self._awaited.set()
        return not self._making

    def _end_making(self) -> None:
        with self._changed:
            self._making = False
            self._awaited.clear()  # for the next one, a save that waits asks again
            self._changed.notify_all()

    def _rest(self, took: float) -> None:
        """Pause after a window, for training, until a save waits for the buffer.

        Raises:
            OSError: no more buffers are to be made.
        """
        self._awaited.wait(_REST * took)
        if self._stopped.is_set():
            raise OSError(errno.ECANCELED, "no more buffers are made")

    def _stop_at_exit(self) -> None:
        """Make no more buffers: a thread in the driver must not meet the end of the interpreter."""
        if os.getpid() == self._pid:  # a process that was forked has no such thread
            self._stop()

    def _stop(self) -> None:
        """Make no more buffers beside training, and wait until none is being made."""
        self._stopped.set()
        with self._changed:
            self._await(self._hurried)

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
        deadline = time.monotonic() + timeout
        self._device = current_device()
        folder = self._stage.staging(copy, self._session)
        if not folder.is_dir():
            self._stage.make()
            folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / self._file
        if not self._has_room() and not self._await_room(deadline, nudge):
            return None
        makes = took = False

        def taken_or_hurried() -> bool:  # a buffer that is being made is ready before a new one
            nonlocal took
            took = self._take(path)
            return took or self._hurried()

        try:
            with self._changed:
                if not self._await(taken_or_hurried, deadline - time.monotonic()):
                    return None
                if not took:
                    makes = self._making = True
            memory = self._map(path, nbytes, device=self._device if makes or not self._beside else None)
        except OSError as error:
            path.unlink(missing_ok=True)
            error.filename = str(path)
            raise
        finally:
            if makes:
                self._end_making()
        if any(_size(free) > nbytes for free in self._stage.free(self._name)):
            _start(lambda: self._cut(nbytes))
        return Buffer(path, memory)

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

    def lend(self, file: str, nbytes: int) -> Loan | None:
        """Lend a buffer to a load until :meth:`take_back`; meanwhile no save takes it, and no other is made.

        Args:
            file: that is loaded.
            nbytes: its size.

        Returns:
            Its memory; None: the file is small, the file is not that of this pool, the pool is on a disk, all
            buffers are in use, or the file system refused.
        """
        if file != self._file or nbytes < _LENDS or not (self.in_memory and is_memory(self._stage.root)):
            return None
        self.take_back()
        path = self._pool / f".{os.urandom(8).hex()}"
        try:
            with self._changed:
                if not self._await(self._hurried) or not (self._stage.free(self._name) or self._has_room()):
                    return None
                self._pool.mkdir(mode=0o700, exist_ok=True)
                self._take(path)
                self._making, self._lent = True, path
            memory, inode = self._map(path, nbytes, populates=False), path.lstat().st_ino
        except OSError:
            self.take_back()
            return None

        def reserve(begin: int, size: int) -> None:
            with self._opened(path) as (descriptor, status):
                if status.st_ino != inode:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
                os.posix_fallocate(descriptor, begin, size)

        return Loan(memory, reserve)

    @property
    def lends(self) -> bool:
        """Whether a buffer is lent."""
        return self._lent is not None

    def take_back(self) -> None:
        """End the loan, if there is one: return the buffer to the pool, or remove it if pages are missing."""
        path, self._lent = self._lent, None
        if path is None:
            return
        try:
            status = path.lstat()
            if _has_pages(path):
                os.rename(path, self._pool / path.name[1:])
            else:
                path.unlink()
                with self._changed:
                    self._mapped.pop(status.st_ino, None)
        except FileNotFoundError:  # with the memory folder
            pass
        finally:
            self._end_making()

    def _take(self, path: Path) -> bool:
        """Take a buffer out of the pool, preferably a mapped one; return whether there was one.

        While none is being made, hidden ones were left by makers that were killed.

        Args:
            path: its name from now on.
        """
        free = [one for one in self._stage.free(self._name) if not (self._making and _is_hidden(one))]
        if free:
            os.rename(min(free, key=lambda one: one.lstat().st_ino not in self._mapped), path)
        return bool(free)

    def _cut(self, nbytes: int) -> None:
        """Release the memory of free buffers beyond the size that is needed by now."""
        for free in self._stage.free(self._name):
            with self._changed:  # for one at a time: a claim may wait
                if not _is_hidden(free) and _size(free) > nbytes:
                    with self._opened(free) as (descriptor, _):
                        self._shorten(descriptor, nbytes)

    def _shorten(self, descriptor: int, nbytes: int) -> None:
        known = self._mapped.get(os.fstat(descriptor).st_ino)
        if known is not None:
            known.shorten(nbytes)
        os.ftruncate(descriptor, nbytes)

    def hand_over(self, to: Buffers | None) -> None:
        """Move the free buffers to another pool, or remove them; this rank needs few of them from now on.

        Args:
            to: takes it; None: it is removed.
        """
        self._stop()
        with self._changed, contextlib.suppress(OSError):
            if to is not None:
                to._mapped.update(self._mapped)
                to._pool.mkdir(mode=0o700, exist_ok=True)
            self._mapped.clear()
            for free in self._stage.free(self._name):
                if to is None:
                    free.unlink()
                else:
                    os.rename(free, to._pool / free.name)

    def close(self) -> None:
        """Unmap the buffers, which keep descriptors open; the files stay."""
        self._stop()
        atexit.unregister(self._stop_at_exit)
        with self._changed:
            self._mapped.clear()

    def _map(
        self,
        path: Path,
        nbytes: int,
        rest: Callable[[float], object] | None = None,
        device: int | None = None,
        populates: bool = True,
    ) -> Mapping:
        """Set the size of a file, see that it has its pages, and return its content.

        Args:
            path: of the file, which nobody else takes meanwhile.
            nbytes: its size.
            rest: called after each window of :func:`populate`; None: a save waits.
            device: for which the memory is registered; None: it is not, or later.
            populates: False: the writer allocates the pages.
        """
        with self._opened(path) as (descriptor, status):
            with self._changed:
                known = self._mapped.get(status.st_ino)
                if known is not None and known.valid >= nbytes:
                    if status.st_size > nbytes:
                        self._shorten(descriptor, nbytes)
                elif known is not None:
                    self._mapped.pop(status.st_ino).unregister()
                    known = None
            if known is None:
                os.ftruncate(descriptor, nbytes)
                known = Mapping(descriptor, nbytes)
                known.valid = nbytes
                if populates and self.in_memory:
                    populate(descriptor, known, rest or (lambda _: None))
                elif populates:
                    os.posix_fallocate(descriptor, 0, nbytes)
            if not self.in_memory:  # each save has another file, and pinned pages of a disk's are not written
                return known
            known.register(device, lambda: rest is None or not self._stopped.is_set())
            with self._changed:
                if len(self._mapped) >= 2 * self._limit:
                    self._mapped.clear()
                self._mapped[status.st_ino] = known
            return known

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[tuple[int, os.stat_result]]:
        """Open a buffer; a script may close all descriptors meanwhile, and have files of its own there."""
        descriptor = self._stage.open_buffer(path)
        status = os.fstat(descriptor)
        try:
            yield descriptor, status
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(status, os.fstat(descriptor)):
                    os.close(descriptor)


def _start(work: Callable[[], None]) -> None:
    """Do something to buffers in a thread."""

    def do() -> None:
        with contextlib.suppress(OSError, RunFolderUnusable):  # the next save will say so
            work()

    threading.Thread(target=do, name="buffers", daemon=True).start()


def _is_hidden(path: Path) -> bool:
    """Return whether a buffer of a pool is being made, or was when its maker was killed."""
    return path.name.startswith(".")


def _has_pages(path: Path) -> bool:
    """Return whether a buffer has all of its pages."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return 0 < status.st_size <= status.st_blocks * _BLOCK
    return False


def _size(path: Path) -> int:
    """Return the size of a buffer; 0: it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0
