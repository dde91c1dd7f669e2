"""The healthy pauses and real hangs of bench/hang.py, and the job that plays one.

    outlast run --nproc-per-node=3 bench/hang_kinds.py KIND SECONDS FOLDER

The job trains 60 short steps with a session, so that timeouts are learned, then plays its kind, then
trains 20 more steps. When the file FOLDER/playing appears, the benchmark does what must be done from outside
(signals, a debugger, a frozen disk).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import os
import pdb
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BEFORE, AFTER = 60, 20
CULPRIT = 1
BURN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


@dataclass(frozen=True)
class Kind:
    """One kind.

    Args:
        play: what a rank does, given its rank, the seconds and the folder.
        hang: it is a real hang; else a pause.
        ranks: of the job.
        culprits: ranks of which one must be named; -1: none can be.
        outside: what the benchmark does to the job meanwhile.
    """

    play: Callable[[int, float, Path], None]
    hang: bool
    ranks: int = 3
    culprits: tuple[int, ...] = (CULPRIT,)
    outside: str = ""


def nothing(rank: int, seconds: float, folder: Path) -> None:
    """Continue training, slowly enough for the benchmark to act."""


def burn(seconds: float) -> None:
    """Compute in Python and in torch."""
    import torch

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one = torch.randn(64, 64)
        for _ in range(20):
            one = torch.tanh(one @ one)
        sum(index * index for index in range(1000))


def on(rank: int, act: Callable[[float, Path], object]) -> Callable[[int, float, Path], None]:
    """Make one rank act, while the others continue to their next collective."""

    def play(mine: int, seconds: float, folder: Path) -> None:
        if mine == rank:
            act(seconds, folder)

    return play


def everywhere(act: Callable[[float, Path], object]) -> Callable[[int, float, Path], None]:
    """Make all ranks act."""

    def play(_: int, seconds: float, folder: Path) -> None:
        act(seconds, folder)

    return play


def first_and_barrier(rank: int, seconds: float, _: Path) -> None:
    import torch.distributed as dist

    if rank == 0:
        burn(seconds)
    dist.barrier()


def loader(seconds: float, _: Path) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(seconds)
            return index

    list(DataLoader(Slow(), num_workers=1))


def collect(seconds: float, _: Path) -> None:
    kept: list[object] = [[] for _ in range(300_000)]
    for one in kept:
        one.append(kept)  # type: ignore[attr-defined]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gc.collect()


def debugger(seconds: float, _: Path) -> None:
    read, write = os.pipe()

    def answer() -> None:
        time.sleep(seconds)
        os.write(write, b"c\n")

    threading.Thread(target=answer).start()
    with open(os.devnull, "w") as out:
        pdb.Pdb(stdin=os.fdopen(read), stdout=out, nosigint=True, readrc=False).set_trace()
        time.sleep(0)


def slow_import(seconds: float, folder: Path) -> None:
    path = folder / f"slow_{os.getpid()}.py"
    path.write_text(BURN.format(seconds))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def native(seconds: float, _: Path) -> None:
    """Compute in long calls of C that hold the interpreter lock."""
    size, end = 18, time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        re.match(r"(a+)+$", "a" * size + "b")
        size += time.monotonic() - began < seconds / 8


def save_again_and_again(seconds: float, folder: Path) -> None:
    import torch

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open(folder / f"state-{os.getpid()}", "wb") as file:
            torch.save({"one": torch.zeros(1_000_000)}, file)
            file.flush()
            os.fsync(file.fileno())


def save_to_frozen(_: float, folder: Path) -> None:
    import torch

    with open(folder / "disk" / "state", "wb") as file:
        torch.save({"one": torch.zeros(1_000_000)}, file)
        file.flush()
        os.fsync(file.fileno())


def write_to_frozen(_: float, folder: Path) -> None:
    with open(folder / "disk" / f"plain-{os.getpid()}", "wb") as file:
        file.write(b"x" * 1_000_000)


def late_server(seconds: float) -> int:
    """Serve one HTTP answer late; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    code = (
        "import socket, sys, time\n"
        "listener = socket.socket(fileno=int(sys.argv[1]))\n"
        "line, _ = listener.accept(); line.recv(4096); time.sleep(float(sys.argv[2]))\n"
        "line.sendall(b'HTTP/1.0 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok'); line.close()\n"
    )
    descriptor = listener.fileno()
    subprocess.Popen([sys.executable, "-c", code, str(descriptor), str(seconds)], pass_fds=[descriptor])
    return int(listener.getsockname()[1])


def download(seconds: float, _: Path) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{late_server(seconds)}/data", timeout=600) as answer:
        answer.read()


def raw_download(seconds: float, _: Path) -> None:
    with socket.create_connection(("127.0.0.1", late_server(seconds))) as line:
        line.sendall(b"GET /\r\n\r\n")
        while line.recv(4096):
            pass


def in_thread(act: Callable[[float, Path], object]) -> Callable[[float, Path], None]:
    def play(seconds: float, folder: Path) -> None:
        thread = threading.Thread(target=act, args=(seconds, folder))
        thread.start()
        thread.join()

    return play


def read_child(seconds: float, _: Path) -> None:
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo data"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        os.read(child.stdout.fileno(), 100)


def file_lock(rank: int, seconds: float, folder: Path) -> None:
    with open(folder / "lock", "w") as file:
        if rank:
            while not (folder / "locked").exists():
                time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_EX)
        if rank == 0:
            (folder / "locked").touch()
            burn(seconds)


def poll_for_file(rank: int, seconds: float, folder: Path) -> None:
    if rank == 0:
        burn(seconds)
        (folder / "prepared").touch()
    while not (folder / "prepared").exists():
        time.sleep(0.2)


def lock_twice(_: float, __: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def crossed_locks(_: float, __: Path) -> None:
    one, other = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def take(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            both.wait()
            with second:
                pass

    threading.Thread(target=take, args=(other, one), daemon=True).start()
    take(one, other)


def endless(_: float, __: Path) -> None:
    while True:
        pass


def endless_polls(_: float, folder: Path) -> None:
    while not (folder / "never").exists():
        time.sleep(0.1)


def try_again(seconds: float, _: Path) -> None:
    """Sleep as a library does that tries an upload again, for less than the 10 s that are granted."""
    time.sleep(min(seconds, 5.0))


def fifo(_: float, folder: Path) -> None:
    path = folder / "fifo"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # a writer that never writes
    with open(path) as file:
        file.read()
    os.close(held)


def native_read(library: ctypes.CDLL) -> None:
    """Wait in C for data that never come; a PyDLL holds the interpreter lock meanwhile."""
    library.read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def skips(rank: int, _: float, __: Path) -> None:
    import torch.distributed as dist

    if rank != CULPRIT:
        dist.barrier()


def mismatched(rank: int, _: float, __: Path) -> None:
    import torch
    import torch.distributed as dist

    one = torch.ones(1000)
    if rank == CULPRIT:
        dist.broadcast(one, CULPRIT)
        dist.barrier()
    else:
        dist.all_reduce(one)


def receives(rank: int, _: float, __: Path) -> None:
    import torch
    import torch.distributed as dist

    if rank == CULPRIT:
        dist.recv(torch.ones(7), 0)


def leaves_subgroup(rank: int, _: float, __: Path) -> None:
    """The culprit sleeps instead of entering a collective of a group of two."""
    import torch.distributed as dist

    pair = dist.new_group([0, CULPRIT])
    if rank == 0:
        dist.barrier(group=pair)
    if rank == CULPRIT:
        time.sleep(3600)


def crossed_groups(rank: int, _: float, __: Path) -> None:
    """Two ranks enter two groups in another order."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, CULPRIT]) for _ in range(2)]
    one = torch.ones(3)
    if rank < 2:
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(one, group=group)


def pauses() -> dict[str, Kind]:
    """Return the healthy pauses."""

    def pause(play: Callable[[int, float, Path], None], outside: str = "", ranks: int = 3) -> Kind:
        return Kind(play, hang=False, outside=outside, ranks=ranks)

    return {
        "evaluation": pause(everywhere(lambda seconds, _: burn(seconds))),
        "evaluation_of_rank_0": pause(first_and_barrier),
        "evaluation_alone": pause(everywhere(lambda seconds, _: burn(seconds)), ranks=1),
        "sleep_of_all": pause(everywhere(lambda seconds, _: time.sleep(seconds))),
        "sleep_of_one": pause(on(CULPRIT, try_again)),
        "sleep_in_fixed_section": pause(nothing, "section"),
        "frozen_disk_torch_save": pause(on(0, save_to_frozen), "freeze"),
        "frozen_disk_all_write": pause(everywhere(write_to_frozen), "freeze"),
        "stopped_saver": pause(nothing, "saver"),
        "slow_disk": pause(on(0, save_again_and_again)),
        "first_compile": pause(
            on(
                CULPRIT,
                lambda seconds, _: subprocess.run([sys.executable, "-c", BURN.format(seconds)], check=True),
            )
        ),
        "subprocess": pause(on(0, lambda seconds, _: subprocess.run(["sleep", str(seconds)], check=True))),
        "read_from_child": pause(on(CULPRIT, read_child)),
        "data_loader": pause(on(CULPRIT, loader)),
        "garbage_collection": pause(on(CULPRIT, collect)),
        "suspended_job": pause(nothing, "suspend"),
        "suspended_ranks": pause(nothing, "suspend-ranks"),
        "cpu_limited": pause(on(CULPRIT, lambda seconds, _: burn(seconds)), "limit"),
        "debugger": pause(nothing, "gdb"),
        "pdb": pause(on(0, debugger)),
        "long_import": pause(everywhere(slow_import)),
        "native_with_lock": pause(on(CULPRIT, native)),
        "download": pause(on(0, download)),
        "raw_download": pause(on(CULPRIT, raw_download)),
        "thread_that_downloads": pause(on(CULPRIT, in_thread(download))),
        "thread_that_computes": pause(on(CULPRIT, in_thread(lambda seconds, _: burn(seconds)))),
        "file_lock": pause(file_lock),
        "file_of_another_rank": pause(poll_for_file),
        "busy_host": pause(nothing, "load"),
    }


def hangs() -> dict[str, Kind]:
    """Return the real hangs."""

    def hang(act: Callable[[float, Path], object], **more: object) -> Kind:
        return Kind(on(CULPRIT, act), hang=True, **more)  # type: ignore[arg-type]

    return {
        "stopped": Kind(nothing, hang=True, outside="stop"),
        "lock": hang(lock_twice),
        "crossed_locks": hang(crossed_locks),
        "endless_loop": hang(endless),
        "endless_polls": hang(endless_polls),
        "sleep": hang(lambda _, __: time.sleep(3600)),
        "queue": hang(lambda _, __: queue.Queue[int]().get()),
        "fifo": hang(fifo),
        "native_with_lock_held": hang(lambda _, __: native_read(ctypes.PyDLL(None))),
        "native_without_lock": hang(lambda _, __: native_read(ctypes.CDLL(None))),
        "skipped_collective": Kind(skips, hang=True),
        "mismatched_collectives": Kind(mismatched, hang=True),
        "receives_from_nobody": Kind(receives, hang=True),
        "subgroup": Kind(leaves_subgroup, hang=True),
        "crossed_groups": Kind(crossed_groups, hang=True, culprits=(-1,)),
        "lock_alone": Kind(everywhere(lock_twice), hang=True, ranks=1, culprits=(0,)),
        "fifo_alone": Kind(everywhere(fifo), hang=True, ranks=1, culprits=(0,)),
        "lock_of_all": Kind(everywhere(lock_twice), hang=True, culprits=(-1,)),
    }


def main() -> None:
    import torch
    import torch.distributed as dist

    import outlast

    kind, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    chosen = {**pauses(), **hangs()}[kind]
    torch.set_num_threads(1)
    total = torch.zeros(1000)

    class State:
        def state_dict(self) -> dict[str, object]:
            return {"total": total}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            total.copy_(state["total"])

    saves = 1 if chosen.outside == "saver" else 10_000
    with outlast.start(save_interval=saves) as session:
        dist.init_process_group("gloo")
        session.restore(state=State())
        for step in session.steps(BEFORE + AFTER):
            if step == BEFORE:
                dist.barrier()
                if rank == 0:
                    (folder / "playing").touch()
                if chosen.outside:
                    while not (folder / "go").exists():
                        time.sleep(0.02)
                if chosen.outside == "section":
                    with session.section("evaluation"):
                        time.sleep(seconds)
                chosen.play(rank, seconds, folder)
            one = torch.full((1000,), float(step + rank))
            dist.all_reduce(one)
            total += one
            end = time.monotonic() + (0.2 if chosen.outside and step > BEFORE else 0.02)
            while time.monotonic() < end:
                pass
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
