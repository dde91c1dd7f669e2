"""The example with three kinds of parallelism in worlds of forked ranks, one after the other; no launcher.

layouts.py FOLDER WORLD...

A world is TP:PP:DP:STEPS, "2:2:2:6", or TP:PP:DP:STEPS:KILLED, in which rank 1 is killed after so many steps;
the others then wait for it in vain, and are killed, too. It prints nothing; the example's trace is in FOLDER.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed.pipelining  # noqa: F401 - once for all ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt_3d.py"
spec = importlib.util.spec_from_file_location("train_gpt_3d", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def live(rank: int, ranks: int, port: int, kill_after: int) -> None:
    os.environ |= {
        **{
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        },
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "layouts"},
    }
    if kill_after and rank == 1:
        step = example.Trainer.step

        def dying(*args: Any) -> Any:
            dying.done += 1  # type: ignore[attr-defined]
            if dying.done > kill_after:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args)

        dying.done = 0  # type: ignore[attr-defined]
        example.Trainer.step = dying
    example.main()


def run(folder: Path, world: str) -> None:
    tp, pp, dp, steps, *killed = map(int, world.split(":"))
    sys.argv[1:] = ["--tp", str(tp), "--pp", str(pp), "--steps", str(steps), "--save-interval", "1"]
    sys.argv += ["--trace", str(folder / "trace")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(tp * pp * dp):
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                live(rank, tp * pp * dp, port, killed[0] if killed else 0)
            except BaseException:  # noqa: BLE001 - the last frame of this process
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        pids[pid] = rank
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if os.WIFSIGNALED(status) and killed and rank == 1:
            for other in pids:
                os.kill(other, signal.SIGKILL)
        elif status and not killed:
            raise SystemExit(f"{world}: rank {rank} ended with {status}")


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    for world in sys.argv[2:]:
        began = time.monotonic()
        run(folder, world)
        print(f"{world}: {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    worlds = sys.argv[2:]
    main()
