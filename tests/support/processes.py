"""Other processes of this host, which may end while a test looks at them."""

from __future__ import annotations

from pathlib import Path

from outlast.ipc.processes import children_of


def command_line(pid: int) -> str:
    """Return the words of a process; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def child_running(parent: int, words: str) -> int:
    """Return the child of a process whose command line has these words; 0 when there is none."""
    return next((pid for pid in children_of(parent) if words in command_line(pid)), 0)
