"""What another account may have put there: which folders and files are used, and how much of one is read.

A *private* folder is one in a place that all accounts of a host share, such as ``/dev/shm``. It has to be a
directory of this account, without permissions for anybody else, on a way that nobody else can change. The run
folder has weaker rules, see :func:`require_own_run_folder`: a group may share it, and a file server may show
another owner than the account that writes.

No open waits: a FIFO or a device in the place of a file is refused. No read is larger than its caller says.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import pwd
import select
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from outlast.errors import RunFolderUnusable

if TYPE_CHECKING:
    from pathlib import Path

AnyPath = str | os.PathLike[str]
T = TypeVar("T")

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
UNFIT = {errno.EINVAL, errno.EFBIG}  # of open_regular and read_whole: no regular file, or too large
OUTAGE = NO_ROOM | {errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN}
_ROOM_POLL = 0.05

TOKEN_BYTES = 4096
_MOST_LINKS = 40  # on a way, as in the kernel
_READ_BYTES = 1 << 20
_ALL_IDS = 4294967295
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFREG: "a file",
}


def is_outage(error: BaseException) -> bool:
    """Return whether a file system refused for a reason that may pass by itself."""
    return isinstance(error, OSError) and error.errno in OUTAGE


def make_private(folder: AnyPath) -> None:
    """Make a private folder and those above it that are missing; one that is there must be private.

    Raises:
        RunFolderUnusable: it is not a folder, not of this account, or others may enter or replace it.
        OSError: the file system refused.
    """
    missing = []
    for place in reversed(_places(folder)):
        if os.path.lexists(place):
            break
        missing.append(place)
    for place in reversed(missing):
        with suppress(FileExistsError):  # another process of this job, or a stranger: that is looked at now
            os.mkdir(place, 0o700)
    require_private(folder)


def when_there_is_room(
    work: Callable[[], T],
    patience: float,
    waits: Callable[[OSError], None] = lambda _: None,
    passing: Collection[int] = NO_ROOM,
) -> T:
    """Do something that needs room in a file system; while there is none, wait and try again.

    Shared memory is everybody's on a host: what fills it is often gone a moment later.

    Args:
        work: may be done several times.
        patience: in seconds.
        waits: called before each wait.
        passing: numbers of the errors that may pass.

    Raises:
        OSError: there is still no room, or the file system refused for another reason.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in passing or time.monotonic() > deadline:
                raise
            waits(error)
            time.sleep(_ROOM_POLL)


def make_folder(folder: AnyPath, private: bool) -> None:
    """Make a folder and those above it that are missing; ``private``: for this account alone.

    Raises:
        RunFolderUnusable: it is to be private, and what is there is not.
        OSError: the file system refused.
    """
    if private:
        make_private(folder)
    else:
        os.makedirs(folder, exist_ok=True)


def make_below(base: Path, folder: Path) -> None:
    """Make a folder and its parents up to a base, which must exist: it may have been moved away.

    Raises:
        OSError: the file system refused, or there is no base.
    """
    for one in [*reversed([each for each in folder.parents if base in each.parents]), folder]:
        with suppress(FileExistsError):
            os.mkdir(one)


def require_private(folder: AnyPath) -> None:
    """Check that a folder is private.

    Raises:
        RunFolderUnusable: it is not; names the owner.
        OSError: the file system refused, or there is no such folder.
    """
    status = os.lstat(folder)
    expected = f"a folder of {_name(os.geteuid())} that nobody else may enter is expected"
    if not stat.S_ISDIR(status.st_mode):
        raise RunFolderUnusable(f"{folder}: {expected}; it is {_kind(status)} of {_name(status.st_uid)}")
    if status.st_uid != os.geteuid():
        raise RunFolderUnusable(f"{folder}: {expected}; it belongs to {_name(status.st_uid)}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise RunFolderUnusable(
            f"{folder}: {expected}; others may (its mode is {mode:o}); chmod 700 closes it"
        )
    for place, at in _way(os.path.dirname(os.path.abspath(folder))):
        if at.st_uid not in _trusted():
            raise RunFolderUnusable(
                f"{folder}: {place}, on the way to it, belongs to {_name(at.st_uid)}, who could put another"
                f" folder in its place; folders of root or {_name(os.geteuid())} are expected there"
            )
        if stat.S_ISDIR(at.st_mode) and at.st_mode & stat.S_IWOTH and not at.st_mode & stat.S_ISVTX:
            raise RunFolderUnusable(
                f"{folder}: everybody may rename what is in {place}, on the way to it (its mode is"
                f" {stat.S_IMODE(at.st_mode):o}); chmod +t {place} prevents that"
            )


def require_folder_or_nothing(path: AnyPath) -> None:
    """Check that a folder is at a path, or can be made there; a link to a folder is one.

    Raises:
        RunFolderUnusable: something else is there.
    """
    try:
        status = os.stat(path)
    except OSError:
        try:
            status = os.lstat(path)  # a link that leads nowhere, or in a circle
        except OSError:
            return
    if not stat.S_ISDIR(status.st_mode):
        raise RunFolderUnusable(
            f"{os.fspath(path)}: a folder is expected; it is {_kind(status)}; nothing was started; move it"
            " away, or choose another run folder with --run-dir"
        )


def make_run_folder(folder: AnyPath, in_pod: bool = False) -> None:
    """Make a run folder and those above it that are missing; see :func:`require_own_run_folder`.

    Raises:
        RunFolderUnusable: likewise; nothing was made in the folder of a stranger.
        OSError: the file system refused.
    """
    require_own_run_folder(folder, in_pod)
    os.makedirs(folder, exist_ok=True)
    require_own_run_folder(folder, in_pod)  # a stranger may have made it meanwhile


def require_own_run_folder(folder: AnyPath, in_pod: bool = False, called: str = "run folder") -> None:
    """Check that a run folder was not put there by a stranger; one that is missing, that it can be made.

    Where everybody may make folders (``/tmp``), it has to be of this account or root, and so has each folder
    on the way to it; and there nobody may rename folders of others (the sticky bit). Elsewhere the owner of
    the place decides who may write there: a project's folder has another owner, a group writes into it, a
    file server shows root as nobody.

    Args:
        folder: of the run.
        in_pod: volumes of a pod may lack the sticky bit (an ``emptyDir`` does): only its containers see them.
        called: what errors call it.

    Raises:
        RunFolderUnusable: another account owns it in a place where everybody may write, or may rename it.
        OSError: the file system refused.
    """
    trusted = _trusted()
    there = next(place for place in reversed(_places(folder)) if os.path.lexists(place))
    way = [(place, os.path.dirname(place), at.st_uid) for place, at in _way(there)]
    if there != os.path.abspath(folder):
        way.append((os.path.abspath(folder), there, os.geteuid()))  # is made there
    for place, parent, uid in way:
        mode = os.stat(parent).st_mode
        if not mode & stat.S_IWOTH or place == parent:
            continue
        if not mode & stat.S_ISVTX and not in_pod:
            raise RunFolderUnusable(
                f"{called} {folder}: everybody may rename what is in {parent} (its mode is"
                f" {stat.S_IMODE(mode):o}), so another account could put another one in its place;"
                f" nothing was started; chmod +t {parent} prevents that"
            )
        if uid in trusted:
            continue
        if uid == _account_in(there):
            continue
        raise RunFolderUnusable(
            f"{called} {folder}: {place} belongs to {_name(uid)}, and everybody may write in {parent}:"
            f" another account could have put it there; a folder of {_name(os.geteuid())} is expected;"
            " nothing was started"
        )


def open_private(path: AnyPath, flags: int = os.O_RDONLY) -> int:
    """Open a file in a private folder: a regular one of this account, with one name.

    Raises:
        RunFolderUnusable: it is something else; names the owner.
        OSError: the file system refused, or there is no such file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _foreign(path, os.lstat(path)) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(descriptor)
        raise _foreign(path, status)
    return descriptor


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, mode: int = 0o644, follow: bool = False) -> int:
    """Open a regular file, without waiting for whatever else may be there; one to be written has one name.

    Args:
        path: of the file.
        flags: of ``os.open``; with ``O_TRUNC`` it is emptied once it is known to be one.
        mode: of a new file.
        follow: symbolic links are followed: the user named the path.

    Raises:
        OSError: the file system refused, or it is no regular file.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and os.path.lexists(path):
            raise _not_regular(path, os.lstat(path)) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _not_regular(path, status)
    if status.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
        os.close(descriptor)
        text = f"a file with one name is expected, it has {status.st_nlink} (hard links)"
        raise OSError(errno.EMLINK, text, os.fspath(path))
    if flags & os.O_TRUNC:
        try:
            os.ftruncate(descriptor, 0)
        except BaseException:  # raised again: the caller has no descriptor to close
            os.close(descriptor)
            raise
    return descriptor


def read_whole(path: AnyPath, limit: int, follow: bool = False) -> bytes:
    """Return the content of a regular file that is no larger than a limit.

    Raises:
        OSError: the file system refused, it is no regular file, or it is larger.
    """
    return read_open(open_regular(path, follow=follow), path, limit)


def read_private(path: AnyPath, limit: int) -> bytes:
    """Return the content of a file in a private folder; see :func:`open_private` and :func:`read_whole`."""
    return read_open(open_private(path), path, limit)


def read_text(path: AnyPath, limit: int) -> str:
    """Return the text of a file that the user has named, links and all; see :func:`read_whole`.

    Raises:
        OSError: likewise, and where it is no UTF-8.
    """
    try:
        return read_whole(path, limit, follow=True).decode()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "it is not text in UTF-8", os.fspath(path)) from error


def write_whole(path: AnyPath, content: bytes) -> None:
    """Replace a file in one rename; until then it has a name that nobody can guess, and no link has it.

    Raises:
        OSError: the file system refused; the old file is untouched.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        error.filename = os.fspath(path)
        raise


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder, in order; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def sync_folder(path: AnyPath) -> None:
    """Sync a folder, so that the name of a new file survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: AnyPath) -> None:
    """Remove whatever is at a path of ours, a folder included; nothing there is no error."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return


def read_open(descriptor: int, path: AnyPath, limit: int) -> bytes:
    """Return what an open file holds, and close it; see :func:`read_whole`."""
    try:
        size = os.fstat(descriptor).st_size
        content = bytearray()
        while size <= limit and len(content) <= limit:
            chunk = os.read(descriptor, min(_READ_BYTES, limit + 1 - len(content)))
            if not chunk:
                return bytes(content)
            content += chunk
    finally:
        os.close(descriptor)
    found = max(size, len(content))
    raise OSError(errno.EFBIG, f"it has {found} bytes, at most {limit} are expected", os.fspath(path))


def _places(path: AnyPath) -> list[str]:
    """Return a path's folders, from the root to the path itself."""
    found = [os.path.abspath(path)]
    while (parent := os.path.dirname(found[-1])) != found[-1]:
        found.append(parent)
    return found[::-1]


def _way(path: AnyPath, links: int = _MOST_LINKS) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything that a path leads through, what symbolic links on it lead through included."""
    for place in _places(path):
        status = os.lstat(place)
        yield place, status
        if stat.S_ISLNK(status.st_mode):
            if not links:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
            around = os.path.realpath(os.path.dirname(place))
            yield from _way(os.path.join(around, os.readlink(place)), links - 1)


def _trusted() -> tuple[int, ...]:
    """Return the accounts that may replace anything of this one: itself, and root."""
    return (0, os.geteuid(), *_unmapped())


@functools.cache
def _unmapped() -> tuple[int, ...]:
    """Return who owns the host's files in a user namespace that does not know the host's root."""
    with suppress(OSError, ValueError):
        with open("/proc/self/uid_map") as file:
            first, _, count = map(int, file.readline().split())
        if (first, count) != (0, _ALL_IDS):
            with open("/proc/sys/kernel/overflowuid") as file:
                return (int(file.read(16)),)
    return ()


def _account_in(folder: AnyPath) -> int:
    """Return as which account a file system shows this one: an NFS server may show root as nobody."""
    probe = os.path.join(folder, f".account-{os.urandom(8).hex()}")
    try:
        descriptor = os.open(
            probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(probe)


def _foreign(path: AnyPath, status: os.stat_result) -> RunFolderUnusable:
    links = f" with {status.st_nlink} names" if status.st_nlink > 1 and stat.S_ISREG(status.st_mode) else ""
    return RunFolderUnusable(
        f"{os.fspath(path)}: a file of {_name(os.geteuid())} is expected; it is {_kind(status)}{links} of"
        f" {_name(status.st_uid)}"
    )


def _not_regular(path: AnyPath, status: os.stat_result) -> OSError:
    return OSError(errno.EINVAL, f"a regular file is expected, it is {_kind(status)}", os.fspath(path))


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def readable(sources: Iterable[int], seconds: float) -> list[int]:
    """Return which descriptors can be read within some seconds; select() refuses numbers beyond 1023."""
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return [source for source, _ in poll.poll(math.ceil(1000 * seconds))]
