"""Stands on PATH as ``outlast``: leaves its arguments in a folder and does what a file there says.

``run-dir/do-RANK`` holds what to exit with; SIGTERM leaves ``run-dir/term-RANK`` and exits 143.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

DEADLINE = 300.0


def main() -> int:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
    rank, folder = given["--node-rank"], Path(given["--run-dir"])
    token = Path(given["--token-file"])

    def leave(number: int, _frame: FrameType | None) -> None:
        (folder / f"term-{rank}").touch()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    seen = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "words": sys.argv[1:],
        "endpoint": given["--rdzv-endpoint"],
        "token": token.read_text(),
        "mode": token.stat().st_mode & 0o777,
        "node": os.environ.get("RAY_RAYLET_PID", ""),
    }
    part = folder / f".agent-{rank}"
    part.write_text(json.dumps(seen))
    part.rename(folder / f"agent-{rank}.json")
    order = folder / f"do-{rank}"
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if order.exists() and (text := order.read_text()):
            return int(text)
        time.sleep(0.02)
    return 99


if __name__ == "__main__":
    sys.exit(main())
