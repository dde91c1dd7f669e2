"""One rank of one system under bench/checkpoint.py; rank 0 writes a JSON line for each measurement."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the folder of the script whose part this is
if any(one.startswith(("nvrx", "torchsnapshot", "lm-")) for one in sys.argv):
    from peers.checkpoint_others import SYSTEMS  # also in the processes that NVRx spawns from here
else:
    from peers.checkpoint_systems import SYSTEMS
from peers.checkpoint_raw import Raw, State, drop, warm  # noqa: E402 - found along the path set above
from peers.checkpoint_systems import System  # noqa: E402


class Block:
    """A job of one system that is measured.

    Args:
        system: which.
        state: this rank's.
        raw: measures the host.
        out: file that rank 0 appends to.
    """

    def __init__(self, system: System, state: State, raw: Raw, out: Path) -> None:
        self.system, self.state, self.raw = system, state, raw
        self._out = out
        self._step = 0
        self._units = 1

    def all(self, measured: dict[str, float]) -> dict[str, float]:
        """Return the slowest rank's figures."""
        found: list[Any] = [None] * self.system.world
        dist.all_gather_object(found, measured)
        return {key: max(one[key] for one in found) for key in measured}

    def write(self, kind: str, **figures: Any) -> None:
        if self.system.rank == 0:
            record = {"record": kind, **figures, "loadavg": os.getloadavg()[0]}
            with self._out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def timed(self, *parts: Callable[[], object]) -> list[float]:
        """Return the seconds of each part, one after the other; all ranks start together."""
        dist.barrier()
        found, before = [], time.perf_counter()
        for part in parts:
            part()
            now = time.perf_counter()
            found.append(now - before)
            before = now
        return found

    def calibrate(self, seconds: float) -> None:
        """Find the amount of computing that takes a given time on an idle host."""
        self._square = torch.randn(512, 512)
        self.compute()
        once = self.timed(self.compute)[0]
        self._units = max(1, int(seconds / once) + 1)

    def compute(self) -> None:
        """Replace forward and backward: work that does not change the state."""
        for _ in range(self._units):
            for _ in range(10):
                torch.mm(self._square, self._square)

    def host(self) -> dict[str, float]:
        """Measure the raw speed of the host."""
        found = {}
        measures: list[tuple[str, Callable[[], float]]] = [
            ("memcpy", self.raw.copy),
            ("memmove", self.raw.move),
            ("buffered", lambda: self.raw.write(direct=False)),
            ("direct", lambda: self.raw.write(direct=True)),
        ]
        for name, measure in measures:
            dist.barrier()
            found[name] = measure()
        return found

    def save(self, busy: bool) -> dict[str, float]:
        """Save once; busy: training continues meanwhile."""
        self.state.change()
        self._step += 1
        system, step = self.system, self._step
        os.sync()

        def wait() -> None:
            system.fence()
            self.state.optimizer.step()

        if busy:
            alone = self.timed(self.compute)[0]
            call, computed, fence, rest = self.timed(
                lambda: system.save(step), self.compute, wait, lambda: system.finish(step)
            )
            return {
                "stall": call + fence,
                "fence": fence,
                "alone": alone,
                "computed": computed,
                "total": call + computed + fence + rest,
            }
        call, rest = self.timed(lambda: system.save(step), lambda: system.finish(step))
        return {"call": call, "total": call + rest}

    def forget_all_but(self, kept: int) -> None:
        dist.barrier()
        if self._step > kept:
            self.system.forget(self._step - kept)

    def saves(self, rounds: int) -> None:
        """Save several times, with raw measurements before and after each."""
        before = self.all(self.host())
        for number in range(rounds + 1):
            for busy in (False, True) if number and not self.system.blocking else (False,):
                found = self.all(self.save(busy))
                self.forget_all_but(2)
                after = self.all(self.host())
                kind = "busy" if busy else "first" if number == 0 else "save"
                both = {key: (before[key] + after[key]) / 2 for key in after}
                self.write(kind, **found, raw=both)
                before = after

    def loads(self, rounds: int) -> None:
        """Load several times, from disk with and without page cache, and from memory."""
        self._expected = self.state.fingerprint()
        files = self.system.files(self._step)
        for number in range(rounds):
            for cold in (True, False):
                measures: list[tuple[str, Callable[[], float]]] = [
                    ("raw", lambda: self.timed(self.raw.read)[0]),
                    ("load", self._load),
                ]
                if cold:
                    measures.append(("direct", lambda: self.timed(lambda: self.raw.read(direct=True))[0]))
                found = {}
                for name, measure in measures if number % 2 == 0 else reversed(measures):
                    (drop if cold else warm)([self.raw.path, *files])
                    found[name] = measure()
                found["digest"] = self.raw.digest()
                self.write("cold" if cold else "warm", **self.all(found))
        dist.barrier()
        if self.system.rank == 0 and type(self.system).written is not System.written:
            self.write("written", **self.system.written(self._step))
        self._load_from_memory()
        pages = {"huge": self.raw.fresh(huge=True), "ordinary": self.raw.fresh(huge=False)}
        self.write("fresh", **self.all(pages))

    def _load(self) -> float:
        self.state.change()
        seconds = self.timed(lambda: self.system.load(self._step))[0]
        self._check()
        return seconds

    def _load_from_memory(self) -> None:
        self.state.change()
        loaded: list[bool] = []
        seconds = self.timed(lambda: loaded.append(self.system.load_from_memory()))[0]
        if loaded[0]:
            self._check()
            self.write("memory", **self.all({"load": seconds}))

    def _check(self) -> None:
        if self.state.fingerprint() != self._expected:
            raise SystemExit("other values were loaded than had been saved")

    def crowd(self, saves: int) -> None:
        """Save repeatedly as fast as possible, for the measurement of memory."""
        for _ in range(saves):
            self.state.change()
            self._step += 1
            self.system.save(self._step)
            self.compute()
            self.system.fence()
            self.state.optimizer.step()
            if self._step % 2 == 0 or type(self.system).__name__[:3] != "Out":
                self.system.finish(self._step)
                self.forget_all_but(2)
        self.system.finish(self._step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    for name in ("rank", "world", "port", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--watch", action="store_true", help="wait for the watcher of memory before saving")
    options = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.world))
    where = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=where, rank=options.rank, world_size=options.world)
    seed = 0 if SYSTEMS[options.system].replicas else options.rank
    state = State(int(options.gib * 2**30 / options.world), seed)
    system = SYSTEMS[options.system](state, options.folder)
    raw = None if options.watch else Raw(state, options.folder, f"raw-{options.rank}")
    block = Block(system, state, raw, options.folder / "measured.jsonl")  # type: ignore[arg-type]
    block.calibrate(options.compute)
    threads = torch.get_num_threads()
    nbytes = block.all({"nbytes": state.nbytes})["nbytes"] * options.world
    memory = str(getattr(system, "memory", ""))
    block.write("about", nbytes=nbytes, threads=threads, note=system.note, memory=memory)
    if options.watch:  # what start() takes counts as well
        go = options.folder / "go"
        while not go.exists():
            time.sleep(0.01)
        dist.barrier()
        system.start()
        block.crowd(2 * options.rounds)
    else:
        system.start()
        block.saves(options.rounds)
        block.loads(options.rounds)
    block.write("over")
    system.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
