"""Processes of other accounts of this host, and a folder that they share."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

STRANGER, VICTIM = 4242, 4343


def as_account(uid: int, act: Callable[[], object], groups: tuple[int, ...] = ()) -> None:
    """Do something in a process of another account."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the child must not go on with the tests
            os.write(2, f"as uid {uid}: {error!r}\n".encode())
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, f"what uid {uid} was to do failed"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Give a folder in which everybody may make files, as in /tmp."""
    found = Path(f"/tmp/outlast-shared-{os.urandom(6).hex()}")
    found.mkdir()
    found.chmod(0o1777)
    try:
        yield found
    finally:
        shutil.rmtree(found)
