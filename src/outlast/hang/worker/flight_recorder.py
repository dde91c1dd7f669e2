"""A rank's answer to its agent: its position in each group, by torch's flight recorder, and its stacks.

A thread answers, so also while the main thread waits in C. It uses no descriptor and no processor time until
it is asked: it waits for a signal that only it takes, and the agent sends the signal to this very thread,
whose id is in the heartbeat page. The answer is a file beside that page.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from outlast import _torch_compat, files
from outlast.ipc.processes import RECORDER_SIGNAL, answer_of

if TYPE_CHECKING:
    from types import FrameType

    from outlast.ipc.heartbeat_page import HeartbeatPage

THREAD = "outlast-recorder"
_FRAMES = 100  # innermost ones of a thread that are told, as by faulthandler
_OPERATIONS = 8  # latest collectives of a group that are told


class _Here:
    """This process's thread, the page whose agent may ask, and what is older than this generation."""

    thread: threading.Thread | None = None
    page: HeartbeatPage | None = None
    path = ""
    oldest = 0


def listen(page: HeartbeatPage, path: str | None) -> None:
    """Answer the agent of a page from now on; once a process."""
    if not path:
        return
    _Here.page, _Here.path = page, path
    if _Here.thread is not None and _Here.thread.is_alive():
        page.set_listener(_Here.thread.native_id or 0)
        return
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread inherits it
    try:
        _Here.thread = threading.Thread(target=_answer, name=THREAD, daemon=True)
        _Here.thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def forget() -> None:
    """Leave out what was recorded up to now: groups are made anew and number their collectives anew."""
    records = _torch_compat.recorded_collectives() if _Here.thread is not None else []
    _Here.oldest = max((one.record for one in records), default=_Here.oldest - 1) + 1


def _answer() -> None:
    if _Here.page is not None:
        _Here.page.set_listener(threading.get_native_id())
    while True:
        signal.sigwait([RECORDER_SIGNAL])
        try:
            _write(answer_of(_Here.path))
        except Exception:  # noqa: BLE001 - an answer that fails is none; training is not touched
            continue


def _write(path: str) -> None:
    answer = {"at": time.monotonic(), "groups": summary(), "stacks": stacks()}
    files.write_whole(path, json.dumps(answer).encode())


def stacks() -> str:
    """Return the stacks of all threads but this one, as faulthandler writes them, the main thread's last.

    The interpreter's lock is held meanwhile, so no thread changes the frames that are read. A dump from a
    signal handler has no such guarantee.
    """
    main, mine = threading.main_thread().ident, threading.get_ident()
    found = [
        (thread == main, thread, frame) for thread, frame in sys._current_frames().items() if thread != mine
    ]
    return "\n".join(_stack(thread, frame) for _, thread, frame in sorted(found, key=lambda one: one[0]))


def _stack(thread: int, frame: FrameType | None) -> str:
    lines = [f"Thread 0x{thread:016x} (most recent call first):"]
    while frame is not None and len(lines) <= _FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


def summary() -> list[dict[str, object]]:
    """Return how far this rank is in each of its groups."""
    newest: dict[str, int] = {}
    records = [one for one in _torch_compat.recorded_collectives() if one.record >= _Here.oldest]
    for one in records:
        newest[one.group] = max(newest.get(one.group, -1), one.instance)
    members = _torch_compat.members_of_groups()
    found: list[dict[str, object]] = []
    for group, instance in newest.items():
        mine = [one for one in records if (one.group, one.instance) == (group, instance)]
        pending = [one.number for one in mine if not one.left]
        found.append(
            {
                "group": group,
                "ranks": members.get(group, []),
                "entered": max(one.number for one in mine),
                "pending": min(pending, default=0),
                "operations": _operations(mine, min(pending, default=0)),
            }
        )
    return found


def _operations(mine: list[_torch_compat.Collective], pending: int) -> list[tuple[int, str]]:
    latest = sorted({one.number: one.name for one in mine}.items())
    return [one for one in latest if one[0] == pending] + latest[-_OPERATIONS:]
