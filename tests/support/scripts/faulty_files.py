"""A file system that shows a folder, and fails as another file says: a disk or a file server with an outage.

arguments: the folder, where it is mounted, the path of that other file, and the process with which this one
ends. While the file exists, and has in it

- ``hang``: nothing is answered, as by a server that is gone and whose clients wait;
- the name of an error (``EIO``, ``EROFS``): every call gets it;
- ``ENOSPC``: every call that needs room gets it.

It speaks the kernel's FUSE protocol (linux/fuse.h, version 7.31) over /dev/fuse, which takes root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = (
    *range(1, 7),
    *range(8, 14),
)
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT = 14, 15, 16, 17, 18, 20, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, BATCH_FORGET, RENAME2 = (
    *range(27, 31),
    *(35, 36, 42, 45),
)
NO_ANSWER = (FORGET, INTERRUPT, BATCH_FORGET)
NEED_ROOM = (WRITE, CREATE, MKDIR, MKNOD, SYMLINK, LINK)
ALWAYS = (INIT, RELEASE, RELEASEDIR)
SET_MODE, SET_OWNER, SET_GROUP, SET_SIZE, SET_ATIME, SET_MTIME, SET_FILE = 1, 2, 4, 8, 16, 32, 64
MOST = 1 << 20  # bytes of a write
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22

source, mount, switch, owner = sys.argv[1:]
device = os.open("/dev/fuse", os.O_RDWR)
lock = threading.RLock()
paths: dict[int, str] = {1: source}  # by node
nodes: dict[str, int] = {source: 1}
listings: dict[int, list[tuple[bytes, int, int]]] = {}
Answer = Callable[[int, bytes], bytes]


def place(node: int, name: bytes = b"") -> str:
    with lock:
        path = paths[node]
    return os.path.join(path, os.fsdecode(name)) if name else path


def known(path: str) -> int:
    with lock:
        if path not in nodes:
            nodes[path] = max(paths) + 1
            paths[nodes[path]] = path
        return nodes[path]


def forgotten(path: str) -> None:
    with lock:
        nodes.pop(path, None)


def moved(old: str, new: str) -> None:
    with lock:
        forgotten(new)
        for path in [one for one in nodes if one == old or one.startswith(old + "/")]:
            number = nodes.pop(path)
            paths[number] = new + path[len(old) :]
            nodes[paths[number]] = number


def attributes(found: os.stat_result, node: int) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    seconds, rest = [one // 10**9 for one in times], [one % 10**9 for one in times]
    numbers = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, 4096, 0)
    return struct.pack("<QQQQQQIIIIIIIIII", node, found.st_size, found.st_blocks, *seconds, *rest, *numbers)


def entry(path: str) -> bytes:
    found, node = os.lstat(path), known(path)
    return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes(found, node)


def names(data: bytes) -> list[bytes]:
    return data.split(b"\0")


def told(node: int, file: int = -1) -> bytes:
    found = os.fstat(file) if file >= 0 else os.lstat(place(node))
    return struct.pack("<QII", 0, 0, 0) + attributes(found, node)


def lookup(node: int, data: bytes) -> bytes:
    return entry(place(node, names(data)[0]))


def getattr_(node: int, data: bytes) -> bytes:
    flags, _, file = struct.unpack_from("<IIQ", data)
    return told(node, file if flags & 1 else -1)


def setattr_(node: int, data: bytes) -> bytes:
    valid, _, file, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, owner, group = (
        struct.unpack_from("<IIQQQQQQIIIIIII", data)
    )
    target: Any = file if valid & SET_FILE else place(node)
    if valid & SET_MODE:
        os.chmod(target, stat.S_IMODE(mode))
    if valid & (SET_OWNER | SET_GROUP):
        os.chown(target, owner if valid & SET_OWNER else -1, group if valid & SET_GROUP else -1)
    if valid & SET_SIZE:
        os.truncate(target, size)
    if valid & (SET_ATIME | SET_MTIME):
        os.utime(target, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
    return told(node, file if valid & SET_FILE else -1)


def readlink(node: int, _: bytes) -> bytes:
    return os.fsencode(os.readlink(place(node)))


def symlink(node: int, data: bytes) -> bytes:
    name, target, *_ = names(data)
    os.symlink(os.fsdecode(target), place(node, name))
    return entry(place(node, name))


def mkdir(node: int, data: bytes) -> bytes:
    path = place(node, names(data[8:])[0])
    os.mkdir(path, struct.unpack_from("<I", data)[0])
    return entry(path)


def mknod(node: int, data: bytes) -> bytes:
    path = place(node, names(data[16:])[0])
    os.mknod(path, *struct.unpack_from("<II", data))
    return entry(path)


def unlink(node: int, data: bytes) -> bytes:
    path = place(node, names(data)[0])
    os.unlink(path)
    forgotten(path)
    return b""


def rmdir(node: int, data: bytes) -> bytes:
    path = place(node, names(data)[0])
    os.rmdir(path)
    forgotten(path)
    return b""


def rename(node: int, data: bytes, skip: int = 8) -> bytes:
    old, new, *_ = names(data[skip:])
    before, after = place(node, old), place(struct.unpack_from("<Q", data)[0], new)
    with lock:
        os.rename(before, after)
        moved(before, after)
    return b""


def rename2(node: int, data: bytes) -> bytes:
    if struct.unpack_from("<I", data, 8)[0]:
        raise OSError(errno.EINVAL, "flags of a rename")
    return rename(node, data, 16)


def link(node: int, data: bytes) -> bytes:
    path = place(node, names(data[8:])[0])
    os.link(place(struct.unpack_from("<Q", data)[0]), path)
    return entry(path)


def opened(path: str, flags: int, *mode: int) -> bytes:
    return struct.pack("<QII", os.open(path, flags & ~(os.O_DIRECT | os.O_NOFOLLOW), *mode), 0, 0)


def open_(node: int, data: bytes) -> bytes:
    return opened(place(node), struct.unpack_from("<I", data)[0])


def create(node: int, data: bytes) -> bytes:
    flags, mode = struct.unpack_from("<II", data)
    path = place(node, names(data[16:])[0])
    file = opened(path, flags | os.O_CREAT, mode)
    return entry(path) + file


def read(_: int, data: bytes) -> bytes:
    file, at, size = struct.unpack_from("<QQI", data)
    return os.pread(file, size, at)


def write(_: int, data: bytes) -> bytes:
    file, at, size = struct.unpack_from("<QQI", data)
    return struct.pack("<II", os.pwrite(file, data[40 : 40 + size], at), 0)


def statfs(node: int, _: bytes) -> bytes:
    found = os.statvfs(place(node))
    counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
    return struct.pack("<QQQQQIIII", *counts, found.f_bsize, 255, found.f_frsize, 0) + bytes(24)


def release(_: int, data: bytes) -> bytes:
    os.close(struct.unpack_from("<Q", data)[0])
    return b""


def fsync(_: int, data: bytes) -> bytes:
    os.fsync(struct.unpack_from("<Q", data)[0])
    return b""


def nothing(_: int, __: bytes) -> bytes:
    return b""


def init(_: int, __: bytes) -> bytes:
    limits = (7, 31, 65536, BIG_WRITES | MAX_PAGES, 16, 12, MOST, 1, MOST >> 12, 0, 0, 0)
    return struct.pack("<IIIIHHIIHHII", *limits) + bytes(24)


def opendir(node: int, _: bytes) -> bytes:
    with os.scandir(place(node)) as found:
        listing = [
            (os.fsencode(one.name), one.inode(), stat.S_IFMT(one.stat(follow_symlinks=False).st_mode) >> 12)
            for one in found
        ]
    with lock:
        number = max(listings, default=0) + 1
        listings[number] = listing
    return struct.pack("<QII", number, 0, 0)


def readdir(_: int, data: bytes) -> bytes:
    number, at, size = struct.unpack_from("<QQI", data)
    body = b""
    for place_, (name, inode, kind) in enumerate(listings[number][at:], at + 1):
        one = struct.pack("<QQII", inode, place_, len(name), kind) + name
        one += bytes(-len(one) % 8)
        if len(body) + len(one) > size:
            break
        body += one
    return body


def releasedir(_: int, data: bytes) -> bytes:
    listings.pop(struct.unpack_from("<Q", data)[0], None)
    return b""


CALLS: dict[int, Answer] = {
    LOOKUP: lookup,
    GETATTR: getattr_,
    SETATTR: setattr_,
    READLINK: readlink,
    SYMLINK: symlink,
    MKNOD: mknod,
    MKDIR: mkdir,
    UNLINK: unlink,
    RMDIR: rmdir,
    RENAME: rename,
    RENAME2: rename2,
    LINK: link,
    OPEN: open_,
    CREATE: create,
    READ: read,
    WRITE: write,
    STATFS: statfs,
    RELEASE: release,
    FSYNC: fsync,
    FLUSH: nothing,
    FSYNCDIR: nothing,
    INIT: init,
    OPENDIR: opendir,
    READDIR: readdir,
    RELEASEDIR: releasedir,
}


def outage() -> str:
    """Return how calls fail now; "": they do not."""
    with suppress(OSError), open(switch) as file:
        return file.read().strip() or "hang"
    return ""


def failure(call: int) -> int:
    while call not in ALWAYS and (kind := outage()):
        if kind == "ENOSPC" and call not in NEED_ROOM:
            return 0
        if kind != "hang":
            return int(getattr(errno, kind))
        time.sleep(0.02)
    return 0


def serve(call: int, request: int, node: int, data: bytes) -> None:
    error, body = failure(call), b""
    if not error and call not in CALLS:
        error = errno.ENOSYS
    if not error:
        try:
            body = CALLS[call](node, data)
        except OSError as refused:
            error = refused.errno or errno.EIO
        except KeyError:
            error = errno.ESTALE
    with suppress(OSError):  # the caller was interrupted
        os.write(device, struct.pack("<IiQ", 16 + len(body), -error, request) + body)


def end_with(process: int) -> None:
    select.select([process], [], [])
    os._exit(0)


threading.Thread(target=end_with, args=(os.pidfd_open(int(owner)),), daemon=True).start()
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
if libc.mount(b"faulty", mount.encode(), b"fuse", 0, options.encode()):
    raise OSError(ctypes.get_errno(), "mount")
os.umask(0)
print("mounted", flush=True)
while True:
    try:
        found = os.read(device, MOST + 4096)
    except OSError as error:
        if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
            continue
        break
    _, call, request, node, *_ = struct.unpack_from("<IIQQIIII", found)
    if call in NO_ANSWER:
        continue
    if call != INIT and outage():
        threading.Thread(target=serve, args=(call, request, node, found[40:]), daemon=True).start()
    else:
        serve(call, request, node, found[40:])
