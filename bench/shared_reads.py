"""How much data-parallel replicas read from the storage that they share when they load a checkpoint.

    python bench/shared_reads.py --replicas 4 16 --mib 256

Each replica is a process on this host, and a node of its own (memory folder, checkpoint writer, name) unless
--per-node has another number; the checkpoint is in one folder. Replicas save once and end; new ones load, in
turns together and each for itself. Counted are the bytes that the ranks asked the kernel for in
``session.restore`` (rchar in /proc/self/io, which has neither sockets nor mapped memory). The least is one
state, whatever the number of replicas; each for itself they read as many states as there are replicas.

Lines of JSON: replicas, how ("together", "alone"), bytes of the state, bytes read, states read, seconds of
the slowest restore, load of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT = 900.0


def counted() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def rank(run: str, mib: int, how: str) -> None:
    """Be one replica: save where nothing was saved, else load."""
    import torch
    import torch.distributed as dist

    import outlast
    from outlast.checkpoint.load import parallel

    if how == "alone":
        parallel._LEAST_BYTES = 1 << 60
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = {"weights": {str(key): torch.randn(mib << 14) for key in range(16)}}  # a sixteenth each
    with outlast.start(run, save_interval=10**6) as session:
        before, began = counted(), time.monotonic()
        step = session.restore(**state)
        found = {"read": counted() - before, "seconds": time.monotonic() - began, "step": step}
        if step == 0:
            for one in state["weights"].values():
                one.add_(1)
            session.step_done(1)
            assert session.save(wait=True)
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def job(run: Path, replicas: int, per_node: int, mib: int, how: str) -> list[dict[str, float]]:
    """Run as many replicas; return what each says."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(replicas)}
    common |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(per_node)}
    processes = []
    for each in range(replicas):
        node, local = divmod(each, per_node)
        own = {
            "RANK": str(each),
            "GROUP_RANK": str(node),
            "OUTLAST_NODE": f"n{node}",
            "LOCAL_RANK": str(local),
        }
        words = [sys.executable, __file__, "--rank", str(run), str(mib), how]
        processes.append(
            subprocess.Popen(
                words,
                env={**os.environ, **common, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = []
    for process in processes:
        out, errors = process.communicate(timeout=TIMEOUT)
        if process.returncode:
            raise SystemExit(errors)
        said.append(json.loads(out.strip().splitlines()[-1]))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--per-node", type=int, default=1, help="replicas of a node")
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--turns", type=int, default=1, help="of together, alone, alone, together")
    parser.add_argument("--folder", default=None, help="where the checkpoint is")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run, mib, how = options.rank
        rank(run, int(mib), how)
        return
    for replicas in options.replicas:
        run = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir=options.folder)) / "run"
        try:
            job(run, replicas, options.per_node, options.mib, "together")
            for how in ("together", "alone", "alone", "together") * options.turns:
                said = job(run, replicas, options.per_node, options.mib, how)
                assert all(one["step"] == 1 for one in said), said
                nbytes, read = options.mib << 20, sum(int(one["read"]) for one in said)
                line = {
                    "replicas": replicas,
                    "per_node": options.per_node,
                    "how": how,
                    "state": nbytes,
                    "read": read,
                }
                line |= {
                    "states": round(read / nbytes, 3),
                    "seconds": round(max(one["seconds"] for one in said), 2),
                }
                print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)
        finally:
            shutil.rmtree(run.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
