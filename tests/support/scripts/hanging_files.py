"""A file system with one file, ``data``, that answers nothing while another file exists: a server that hangs.

arguments: folder to mount at, path of that other file

It speaks the kernel's FUSE protocol (linux/fuse.h, version 7.31) over /dev/fuse, which takes root.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from contextlib import suppress

LOOKUP, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR = 1, 3, 14, 15, 18, 25, 26, 27
FORGET, INTERRUPT, BATCH_FORGET = 2, 36, 42
NO_ENTRY, NO_CALL = 2, 38
SIZE = 1 << 20
FOLDER, FILE = 1, 2

mount, switch = sys.argv[1], sys.argv[2]
device = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
if libc.mount(b"hanging", mount.encode(), b"fuse", 0, options.encode()):
    raise OSError(ctypes.get_errno(), "mount")


def attributes(node: int) -> bytes:
    mode, size = (0o40755, 4096) if node == FOLDER else (0o100644, SIZE)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(request: int, body: bytes = b"", error: int = 0) -> None:
    with suppress(OSError):
        os.write(device, struct.pack("<IiQ", 16 + len(body), -error, request) + body)


def serve(call: int, request: int, node: int, data: bytes) -> None:
    while os.path.exists(switch) and call != INIT:
        time.sleep(0.05)
    if call == INIT:
        limits = (7, 31, 65536, 0, 16, 12, 131072, 1, 32, 0, 0, 0)
        answer(request, struct.pack("<IIIIHHIIHHII", *limits) + bytes(24))
    elif call == LOOKUP and data.split(b"\0")[0] == b"data":
        answer(request, struct.pack("<QQQQII", FILE, 0, 0, 0, 0, 0) + attributes(FILE))
    elif call == LOOKUP:
        answer(request, error=NO_ENTRY)
    elif call == GETATTR:
        answer(request, struct.pack("<QII", 0, 0, 0) + attributes(node))
    elif call in (OPEN, OPENDIR):
        answer(request, struct.pack("<QII", 1, 1, 0))
    elif call == READ:
        _, at, size = struct.unpack_from("<QQI", data)
        answer(request, bytes(min(size, max(0, SIZE - at))))
    elif call in (FLUSH, RELEASE):
        answer(request)
    elif call not in (FORGET, INTERRUPT, BATCH_FORGET):
        answer(request, error=NO_CALL)


print("mounted", flush=True)
while True:
    try:
        found = os.read(device, 1 << 18)
    except OSError:
        break
    _, call, request, node, *_ = struct.unpack_from("<IIQQIIII", found)
    threading.Thread(target=serve, args=(call, request, node, found[40:]), daemon=True).start()
