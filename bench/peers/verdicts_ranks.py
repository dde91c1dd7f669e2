"""The ranks of bench/verdicts.py: start, output, and a time limit."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START = 300.0  # seconds to the first word of rank 0: a busy machine imports torch slowly
Take = Callable[[dict[str, Any]], None]


def launch(command: Sequence[str], ranks: int, patience: float, folder: Path, take: Take) -> str:
    """Start ranks and pass on rank 0's results; return why they did not finish, empty: they did.

    Args:
        command: of a rank.
        ranks: how many.
        patience: seconds for which rank 0 may be silent after its start.
        folder: for their output; created here.
        take: called with the result of a try.

    Raises:
        SystemExit: they did not start.
    """
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(ranks):
        with open(folder / f"log-{rank}", "wb") as log:
            output = subprocess.PIPE if rank == 0 else log
            own = {**common, "RANK": str(rank)}
            started.append(subprocess.Popen(command, env=own, stdout=output, stderr=log))
    try:
        return _follow(started, patience, take)
    finally:
        for one in started:
            one.kill()
            one.wait()


def _follow(ranks: list[subprocess.Popen[bytes]], patience: float, take: Take) -> str:
    assert ranks[0].stdout is not None
    source, rest = ranks[0].stdout.fileno(), b""
    if not select.select([source], [], [], max(patience, START))[0]:
        raise SystemExit(f"no group of ranks came about within {max(patience, START):g} s")
    while select.select([source], [], [], patience)[0]:
        more = os.read(source, 1 << 16)
        if not more:
            break
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            if line.startswith(b"found "):
                take(json.loads(line[6:]))
    else:
        return f"nothing for {patience:g} s"
    try:
        codes = [one.wait(patience) for one in ranks]
    except subprocess.TimeoutExpired:
        return f"no end for {patience:g} s"
    return f"ranks ended with {codes}" if any(codes) else ""
