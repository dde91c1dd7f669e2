"""Files that are being written: named after their process, and removed once that cannot finish them.

Such a file is removed if its process ran on this host since its start and is gone, or if an earlier
generation of this run wrote it: a process of that may live on a node that is cut off, and must not finish it.
Others stay, such as those of another run on another host.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from outlast import settings
from outlast.ipc.processes import start_ticks

_NAME = re.compile(r"\..+\.run-([0-9a-f]*)-(\d+)\.on-([0-9a-f]*)-(\d+)-(\d+)-[0-9a-f]+\.part", re.DOTALL)
_SHOWN = 40  # characters of the name to be; a name has 255 bytes at most


@contextlib.contextmanager
def written_to(target: Path) -> Iterator[Path]:
    """Yield where this process is to create a file before it gets its name; an exception removes that."""
    run, generation, host, pid, began = _here()
    where = f"run-{run}-{generation}.on-{host}-{pid}-{began}"
    part = target.with_name(f".{target.name[:_SHOWN]}.{where}-{os.urandom(8).hex()}.part")
    try:
        yield part
    except BaseException:  # raised again: Ctrl-C, too, leaves no half of a file behind
        part.unlink(missing_ok=True)
        raise


def remove_stale(folder: Path) -> None:
    """Remove what processes of ours have left unfinished in a folder; what cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is not None and _is_stale(*found.groups()):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        os.unlink(entry.path)


def _is_stale(run: str, generation: str, host: str, pid: str, began: str) -> bool:
    our_run, our_generation, our_host, our_pid, _ = _here()
    if host and host == our_host:
        return int(pid) != our_pid and start_ticks(int(pid)) != int(began)
    return bool(run) and run == our_run and int(generation) < our_generation


def _here() -> tuple[str, int, str, int, int]:
    """Return run, generation, host since its start, process, and when that began; "": not known."""
    context = settings.worker_context()
    run = _digest(context.run_id, os.path.realpath(context.run_dir)) if context.run_id else ""
    host = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        host = _digest(boot, os.readlink("/proc/self/ns/pid"))  # each namespace counts its processes
    return run, context.generation, host, os.getpid(), start_ticks(os.getpid())


def _digest(*words: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode("\0".join(words)))
