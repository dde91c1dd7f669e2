"""integrity: whether every damaged checkpoint is found and survived, and how other formats handle damage.

Two ranks save three checkpoints of a small GPT-like model with AdamW. Each trial takes a fresh
copy of all three, damages one file of the newest (a flipped bit, a zeroed page of 4 KiB, a
truncation; file, place and bit drawn from the seed) and restores. It is *found* if the
copy is in quarantine with a reason that names the damaged file, and *survived* if both
ranks then hold the checkpoint before it, bit for bit. Anything else is a miss, is printed, and
ends the run with status 1.

The same state, saved by torch.save, safetensors and torch DCP, gets damage of the same kinds.
There *found* is an exception (or a crash), *silent* a load without one that gives wrong values,
*harmless* a load that gives the right values. Prints JSON lines.

    python bench/integrity.py --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peers import figures
from peers.disk_loads import load
from safetensors.torch import load_file, save_file

from outlast.checkpoint.checkpointer import Checkpointer, Identity
from outlast.checkpoint.policy.manifest import copy_name
from outlast.checkpoint.save.staging import Order
from outlast.checkpoint.tiers.memory_folder import MemoryFolder
from outlast.checkpoint.writer_process import SaverProcess
from outlast.config import CheckpointOptions
from outlast.ipc.exchange import StoreExchange, SystemClock

WORLD = 2
STEPS = (10, 20, 30)
NEWEST = copy_name(30, 1)
PAGE = 4096
TRIALS = {"bit flipped": 200, "page zeroed": 20, "file truncated": 8}
PATIENCE = 120.0
EQUAL, SILENT, RAISED = 0, 3, 4
FINE = "found and survived"

Change = Callable[[random.Random, Path], str]


class Rank:
    """One rank's model and optimizer, trained a little so that the moments are not zero."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(256, 128),
            *(torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0) for _ in range(2)),
            torch.nn.Linear(128, 256),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self) -> None:
        self.model(torch.randint(256, (4, 16))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
        return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same bits; a NaN equals itself."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and torch.equal(left[key].reshape(-1).view(torch.uint8), right[key].reshape(-1).view(torch.uint8))
        for key in left
    )


# Damage. Each returns what it did.


def flip_bit(dice: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    bit = dice.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit % 8} of byte {bit // 8}"


def zero_page(dice: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    pages = [begin for begin in range(0, len(content), PAGE) if any(content[begin : begin + PAGE])]
    begin = dice.choice(pages)
    content[begin : begin + PAGE] = bytes(len(content[begin : begin + PAGE]))
    path.write_bytes(content)
    return f"bytes {begin} to {min(begin + PAGE, len(content))}"


def truncate(dice: random.Random, path: Path) -> str:
    size = path.stat().st_size
    left = dice.randrange(size)
    os.truncate(path, left)
    return f"{left} of {size} bytes left"


CHANGES: dict[str, Change] = {"bit flipped": flip_bit, "page zeroed": zero_page, "file truncated": truncate}


@dataclass(frozen=True)
class Trial:
    """One damage: its kind, its file and its random generator."""

    damage: str
    file: str
    dice: random.Random


def trials(seed: int, system: str, files: list[str]) -> Iterator[Trial]:
    """Yield the damages for a system; every file is hit equally often, whatever its size."""
    dice = random.Random(f"{seed}:{system}")
    for damage, count in TRIALS.items():
        for number in range(count):
            file = files[number % len(files)]
            yield Trial(damage, file, random.Random(dice.randrange(2**64)))


# outlast.


def together(part: Callable[[StoreExchange], Any]) -> list[Any]:
    """Run a function as every rank, each in a thread, and return what each returned or raised."""
    store = dist.HashStore()
    answers: list[Any] = [TimeoutError("this rank never came back")] * WORLD

    def run(rank: int) -> None:
        try:
            answers[rank] = part(StoreExchange(store, rank, WORLD, 1))
        except Exception as error:  # noqa: BLE001 - a trial that fails in any way is a miss
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    return answers


def about(exchange: StoreExchange) -> tuple[Identity, StoreExchange, CheckpointOptions]:
    identity = Identity("integrity", 1, exchange.rank, WORLD)
    return identity, exchange, CheckpointOptions(timeout=PATIENCE, keep_last_n=len(STEPS))


def save_all(folder: Path, seed: int) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Save every step on every rank; return what each rank held at each step."""
    ranks = [Rank(seed * WORLD + rank) for rank in range(WORLD)]
    memory = MemoryFolder(folder.with_name("memory"))
    saver = SaverProcess(memory.root, "", folder.with_name("events.jsonl"))

    def join(exchange: StoreExchange) -> Checkpointer:
        ensure = saver.ensure if exchange.rank == 0 else lambda: ""
        found = Checkpointer(folder, *about(exchange), SystemClock(), lambda _: None, memory, ensure)
        found.restore(state_of(ranks[exchange.rank]))
        return found

    joined: list[Any] = together(join)
    held: dict[int, list[dict[str, torch.Tensor]]] = {}
    for step in STEPS:
        for rank in ranks:
            rank.train()
        held[step] = [{key: value.clone() for key, value in rank.tensors().items()} for rank in ranks]

        def part(exchange: StoreExchange, step: int = step) -> bool:
            rank = exchange.rank
            saved: bool = joined[rank].save(Order(step, True, "a trial"), state_of(ranks[rank]))
            return saved

        answers = together(part)
        if answers != [True] * WORLD:
            raise SystemExit(f"step {step} could not be saved: {answers}")
    for one in joined:
        one.close()
    saver.hang_up()
    while not saver.ended():
        time.sleep(0.01)
    return held


def state_of(rank: Rank) -> dict[str, object]:
    return {"model": rank.model, "optimizer": rank.optimizer}


def problem_of(folder: Path, file: str, expected: list[dict[str, torch.Tensor]]) -> str:
    """Restore a damaged folder; return the error, empty if the damage was found and survived."""
    ranks = [Rank(1000 + rank) for rank in range(WORLD)]

    def part(exchange: StoreExchange) -> Any:
        return load(folder, *about(exchange), state_of(ranks[exchange.rank]))

    for rank, restored in enumerate(together(part)):
        if restored is None or isinstance(restored, Exception) or restored.step != STEPS[-2]:
            return f"rank {rank}: {restored!r}"
        if not same(ranks[rank].tensors(), expected[rank]):
            return f"rank {rank}: other bits than those of step {restored.step}"
    try:
        reason = json.loads((folder / "quarantine" / f"{NEWEST}.reason.json").read_text())
    except (OSError, ValueError) as error:
        return f"no reason in quarantine: {error}"
    if not (folder / "quarantine" / NEWEST).is_dir() or (folder / NEWEST).exists():
        return "not in quarantine"
    return "" if file in reason["file"] else f"the reason names {reason['file']}"


def run_outlast(seed: int, place: Path) -> bool:
    """Run all trials; return whether none was missed."""
    held = save_all(place / "saved", seed)
    files = sorted(path.name for path in (place / "saved" / NEWEST).iterdir())
    ranks = [Rank(1000 + rank) for rank in range(WORLD)]
    sound = together(lambda exchange: load(place / "saved", *about(exchange), state_of(ranks[exchange.rank])))
    whole = all(
        not isinstance(found, Exception) and found is not None and found.step == STEPS[-1] for found in sound
    ) and all(same(ranks[rank].tensors(), held[STEPS[-1]][rank]) for rank in range(WORLD))
    figures.say(json.dumps({"record": "control", "system": "outlast", "undamaged_loads": whole}))
    counts: Counter[tuple[str, str, str]] = Counter()
    for trial in trials(seed, "outlast", files):
        shutil.copytree(place / "saved", place / "trial")
        what = CHANGES[trial.damage](trial.dice, place / "trial" / NEWEST / trial.file)
        problem = problem_of(place / "trial", trial.file, held[STEPS[-2]])
        counts[trial.damage, trial.file, "missed" if problem else FINE] += 1
        if problem:
            miss = {"record": "miss", "damage": trial.damage, "file": trial.file, "what": what}
            figures.say(json.dumps({**miss, "problem": problem}))
        shutil.rmtree(place / "trial")
    report("outlast", counts)
    fine = sum(number for (_, _, result), number in counts.items() if result == FINE)
    return whole and fine == sum(TRIALS.values())


def report(system: str, counts: Counter[tuple[str, str, str]]) -> None:
    """Print the results of each kind of damage, in total and by file."""
    for damage, count in TRIALS.items():
        results: Counter[str] = Counter()
        files: dict[str, dict[str, int]] = {}
        for (kind, file, result), number in sorted(counts.items()):
            if kind == damage:
                results[result] += number
                files.setdefault(file, {})[result] = number
        line = {"record": "integrity", "system": system, "damage": damage, "trials": count, **results}
        figures.say(json.dumps({**line, "by_file": files}))


# Others.


def save_dcp(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.save(dict(tensors), checkpoint_id=str(folder), no_dist=True)


def load_dcp(folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    return found


Save = Callable[[dict[str, torch.Tensor], Path], Any]
Load = Callable[[Path, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
OTHERS: dict[str, tuple[Save, Load]] = {
    "torch.save": (
        lambda tensors, folder: torch.save(tensors, folder / "state.pt"),
        lambda folder, _: torch.load(folder / "state.pt", weights_only=True),
    ),
    "safetensors": (
        lambda tensors, folder: save_file(tensors, folder / "state.safetensors"),
        lambda folder, _: load_file(folder / "state.safetensors"),
    ),
    "torch DCP": (save_dcp, load_dcp),
}


def outcome(load: Load, folder: Path, expected: dict[str, torch.Tensor]) -> str:
    """Load in a forked process, because damaged pickles may crash it, and return the result."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(PATIENCE))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            status = EQUAL if same(load(folder, expected), expected) else SILENT
        except BaseException:  # noqa: BLE001 - DCP raises a BaseException; any exception is a find
            status = RAISED
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {EQUAL: "harmless", SILENT: "silent", RAISED: "found"}.get(status, "crashed")


def run_other(system: str, seed: int, place: Path, tensors: dict[str, torch.Tensor]) -> None:
    save, load = OTHERS[system]
    (place / "saved").mkdir()
    save(tensors, place / "saved")
    if outcome(load, place / "saved", tensors) != "harmless":
        raise SystemExit(f"{system} does not load its own undamaged files")
    files = sorted(path.name for path in (place / "saved").iterdir())
    counts: Counter[tuple[str, str, str]] = Counter()
    for trial in trials(seed, system, files):
        shutil.copytree(place / "saved", place / "trial")
        CHANGES[trial.damage](trial.dice, place / "trial" / trial.file)
        counts[trial.damage, trial.file, outcome(load, place / "trial", tensors)] += 1
        shutil.rmtree(place / "trial")
    report(system, counts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage checkpoints and see what is found.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
    figures.say(json.dumps(figures.surroundings(options.seed)))
    with tempfile.TemporaryDirectory() as name:
        for system in (*OTHERS, "outlast"):
            (Path(name) / system).mkdir()
        trained = Rank(options.seed)
        trained.train()
        tensors = {key: value.clone() for key, value in trained.tensors().items()}
        for system in OTHERS:
            run_other(system, options.seed, Path(name) / system, tensors)
        whole = run_outlast(options.seed, Path(name) / "outlast")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
