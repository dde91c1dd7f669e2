"""Write down what a rank's script can see of how it was started; argv[1] is the folder."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def child(queue: Any, number: int) -> None:
    queue.put((number, __name__ != "", multiprocessing.current_process().name.split("-")[0]))


def by_start_method(method: str) -> list[Any]:
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue, 7))
    process.start()
    answer = queue.get()
    process.join()
    return [*answer, process.exitcode]


def open_files() -> list[str]:
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        kind = "socket" if stat.S_ISSOCK(mode) else "fifo" if stat.S_ISFIFO(mode) else "file"
        inherited = os.get_inheritable(int(name))
        if inherited:
            found.append(f"{name}:{kind}" if int(name) > 2 else name)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    see = {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "path0": sys.path[0],
        "name": __name__,
        "file": __file__,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "main_is_me": sys.modules["__main__"].__dict__ is globals(),
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "handlers": {
            name: str(signal.getsignal(getattr(signal, name))).split(" at ")[0]
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")
        },
        "files": open_files(),
        "threads": [threading.current_thread().name, threading.active_count()],
        "session_leader": os.getsid(0) == os.getpid(),
        "starts": {method: by_start_method(method) for method in ("fork", "spawn", "forkserver")},
        "loader": [batch.tolist() for batch in DataLoader(Squares(), batch_size=4, num_workers=2)],
        "torch_threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "unbuffered": sys.stdout.write_through,
        "stdin": sys.stdin.read(),
        "cwd": os.getcwd(),
        "executable": sys.executable,
        "flags": [sys.flags.optimize, sys.flags.isolated, sys.flags.no_site],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(see))
    atexit.register(lambda: (folder / f"exit-{rank}").write_text("atexit ran"))


if __name__ == "__main__":
    main()
