"""verdicts: the causes that reruns find for rejected results, in many seeded tries of each kind of fault.

Ranks of one gloo group train a small model (DDP, dropout, batch norm), once without a fault and once with
one. The fault comes from outside of the measured code: a hook on an activation or a gradient, a poisoned
batch, a damaged state. The verdict must be right, with the right culprit; if training continues,
the weights must be bitwise those without the fault. On CPU each rank names a device of its own.

A try that does not end in time, or kills its ranks, is lost: it is counted and named, and the others continue
in new ranks. The output of the ranks is kept if a try was lost or a verdict is wrong.

    python bench/verdicts.py --ranks 4 --tries 100 --out verdicts.jsonl
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import figures
from peers.verdicts_ranks import launch
from torch import nn

from outlast import _torch_compat
from outlast.agreement.policy.votes import Flag, Reading
from outlast.agreement.worker.vote import GroupBallot, Numbers
from outlast.config import NumericsOptions
from outlast.errors import NonFinite
from outlast.ipc.exchange import StoreExchange
from outlast.numerics.policy.numerics import Finding
from outlast.numerics.policy.tally import Tally
from outlast.numerics.worker.guard import Guard
from outlast.rerun.worker.data import RerunDataIterator
from outlast.rerun.worker.rerun import RerunStateMachine
from outlast.rerun.worker.swap import digest

STEPS, MICRO_BATCHES, WIDTH = 8, 2, 16
LOADED = 3  # the step of the copy that is loaded in every try
PATIENCE = 120.0
OPTIONS = NumericsOptions(nan_in_loss_action="rerun", nan_in_grad_action="rerun")

# kind of fault -> the verdict that is right; which culprit, "" for none
EXPECTED = {
    "no fault": ("none", ""),
    "nan in the loss": ("transient", "device"),
    "inf in a gradient": ("transient", ""),
    "bit flip, once": ("transient", "device"),
    "bit flip, stays": ("persistent", "device"),
    "poisoned batch": ("data or model", ""),
    "corrupt replica": ("bad checkpoint", "copy"),
    "not deterministic": ("inconclusive", ""),
}


@dataclass
class Fault:
    """A fault of one try.

    Args:
        kind: a key of EXPECTED; empty: none.
        rank: where.
        step: when.
        draw: random value, the same on all ranks.
    """

    kind: str
    rank: int
    step: int
    draw: random.Random


class Votes:
    """Lets the ranks of one process group vote, try after try."""

    def __init__(self, ballot: GroupBallot) -> None:
        self._ballot = ballot

    def hear(self, index: int, reading: Reading, mismatch: bool) -> Tally:  # noqa: ARG002 - as the port has it
        return self._ballot.tally(frozenset({Flag.MISMATCH} if mismatch else ()), reading)

    def each(self, reading: Reading) -> tuple[Numbers, Numbers]:
        return self._ballot.numbers(reading)

    def found(self, finding: Finding | None) -> None:
        pass


class Training:
    """A model, its optimizer and its data, created from a seed; loads the state of a step."""

    def __init__(self, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.wrapped = nn.parallel.DistributedDataParallel(self.model, broadcast_buffers=False)
        self.seed, self.rank = seed, rank
        torch.manual_seed(seed + 1000 * rank)
        self._kept: list[tuple[Any, ...]] = []

    def batches(self, step: int, poisoned: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield micro-batches from a step on; those of one step are poisoned, -1: none."""
        for index in range(step * MICRO_BATCHES, STEPS * MICRO_BATCHES):
            generator = torch.Generator().manual_seed(self.seed * 7919 + index * 31 + self.rank)
            x = torch.randn(8, WIDTH, generator=generator)
            if index // MICRO_BATCHES == poisoned:
                x[index % 8, index % WIDTH] = float("nan")
            yield x, x.sum(1, keepdim=True)

    def keep(self) -> None:
        """Keep the state, as a checkpoint does."""
        states = (self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state())
        self._kept.append(copy.deepcopy(states))

    def load(self, step: int) -> None:
        """Go back to a kept state."""
        model, optimizer, generator = copy.deepcopy(self._kept[step])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad()
        torch.set_rng_state(generator)

    def spoil(self, draw: random.Random) -> None:
        """Damage the state like a wrongly assembled replica: a moment of the optimizer is infinite."""
        states = list(self.optimizer.state.values())
        moments = states[draw.randrange(len(states))]["exp_avg"].view(-1)
        moments[draw.randrange(len(moments))] = float("inf")

    def weights(self) -> str:
        """Return the digest of parameters and buffers."""
        return digest(self.model.state_dict().values())


def flip(values: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Return values with the highest bit of one exponent flipped: what was about 1 is about 1e38."""
    bits = values.detach().clone()
    near = [index for index, one in enumerate(bits.view(-1).tolist()) if 1e-3 < abs(one) < 2]
    flat = bits.view(torch.int32).view(-1)
    flat[near[draw.randrange(len(near))]] ^= 1 << 30
    return values + (bits - values.detach())


class Try:
    """One run with at most one fault, and its result."""

    def __init__(self, training: Training, votes: Votes, exchange: StoreExchange, fault: Fault) -> None:
        self._training = training
        self._votes = votes
        self._exchange = exchange
        self._fault = fault
        self._step = 0
        self._attempt = 0
        self._ranks = exchange.world_size
        training.model[2].register_forward_hook(self._activation)
        training.model[3].weight.register_hook(self._gradient)

    def run(self, start: int, places: tuple[str, ...], folder: Path) -> bool:
        """Train from a kept step on; say whether it finished.

        Args:
            start: the step.
            places: copies, the loaded one first; none: a fresh start.
            folder: for incidents.
        """
        training, fault = self._training, self._fault
        reruns = RerunStateMachine(
            training.model, training.optimizer, identity=lambda: f"GPU-{self._exchange.rank}"
        )
        guard = Guard(training.model, training.optimizer, OPTIONS, reruns)
        guard.bind(self._votes, lambda: self._step, self._exchange.rank, self._ranks)
        reruns.loaded(start, places[0] if places else "")
        reruns.begin(folder, self._exchange, lambda: [place.rpartition("/")[2] for place in places])
        poisoned = fault.step if fault.kind == "poisoned batch" and fault.rank == training.rank else -1
        data = RerunDataIterator(training.batches(start, poisoned))
        try:
            for step in range(start, STEPS):
                if len(training._kept) == step:
                    training.keep()
                self._train(step, guard, data)
        except NonFinite:
            return False
        return True

    def _train(self, step: int, guard: Guard, data: RerunDataIterator) -> None:
        self._step, self._attempt = step, -1
        while guard.should_run_forward_backward(data):
            self._attempt += 1
            for number in range(MICRO_BATCHES):
                x, y = next(data)
                loss = nn.functional.mse_loss(self._training.wrapped(x), y)
                if self._here("nan in the loss") and number == 0:
                    loss = loss * float("nan")
                guard.validate(loss)
                loss.backward()
        if guard.accepted:
            self._training.optimizer.step()
        self._training.optimizer.zero_grad()

    def _here(self, kind: str, lasting: bool = False) -> bool:
        fault = self._fault
        now = self._step >= fault.step if lasting else self._step == fault.step and self._attempt == 0
        return fault.kind == kind and now and fault.rank == self._training.rank

    def _activation(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        if self._fault.kind == "not deterministic":
            noise = int.from_bytes(os.urandom(2), "big") / 2**16
            bad = float("nan") if self._here("not deterministic") else 1e-4 * noise
            return output + bad
        flipped = self._here("bit flip, once") or self._here("bit flip, stays", lasting=True)
        return flip(output, self._fault.draw) if flipped else output

    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self._here("inf in a gradient"):
            return gradient
        found = gradient.clone()
        found.view(-1)[self._fault.draw.randrange(found.numel())] = float("inf")
        return found


def attempt(kind: str, seed: int, votes: Votes, exchange: StoreExchange, folder: Path) -> dict[str, Any]:
    """Return the result of one seeded try."""
    draw = random.Random(f"{kind} {seed}")
    first = 2 if kind != "corrupt replica" else LOADED + 1  # DDP regroups its gradients in step 1
    fault = Fault(kind, draw.randrange(exchange.world_size), draw.randrange(first, STEPS), draw)
    clean = Training(seed, exchange.rank)
    Try(clean, votes, exchange, Fault("", 0, 0, draw)).run(0, (), folder / "clean")
    training = Training(seed, exchange.rank)
    one = Try(training, votes, exchange, fault)
    if kind == "corrupt replica":
        ended = replica(training, one, clean, folder)
    else:
        ended = one.run(0, (), folder / "incidents")
    found = [json.loads(path.read_text()) for path in sorted((folder / "incidents").glob("*.json"))]
    verdict = found[0]["verdict"] if found else "none"
    culprit = {"device": f"GPU-{fault.rank}", "copy": f"replica/step-{LOADED:09d}.g1", "": ""}
    right, whose = EXPECTED[kind]
    same = training.weights() == clean.weights()
    weights = same if kind in ("no fault", "corrupt replica") or right == "transient" else None
    blamed = found[0]["culprit"] if found else ""
    well = verdict == right and blamed == culprit[whose] and weights is not False and len(found) <= 1
    return {
        **{"case": kind, "seed": seed, "verdict": verdict, "culprit": blamed, "rank": fault.rank},
        **{"step": fault.step, "finished": ended, "weights_same": weights, "right": well},
        "restarts": sum(a["remedy"] == "load another copy" for one in found for a in one["attempts"]),
        **({} if well else {"incidents": found}),
    }


def replica(training: Training, one: Try, clean: Training, folder: Path) -> bool:
    """Load a bad replica, train until another copy must be loaded, load that, continue."""
    places = (f"replica/step-{LOADED:09d}.g1", f"global/step-{LOADED - 1:09d}.g0")
    training._kept = copy.deepcopy(clean._kept)
    training.load(LOADED)
    training.spoil(one._fault.draw)
    if one.run(LOADED, places, folder / "incidents"):
        return True
    training.load(LOADED - 1)
    return one.run(LOADED - 1, places[::-1], folder / "incidents")


def measure(options: argparse.Namespace) -> None:
    """Be a rank; rank 0 prints a line for each try."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    votes = Votes(GroupBallot())
    store = _torch_compat.default_store()
    assert store is not None
    exchange = StoreExchange(store, rank, world, 1)
    if rank == 0:
        figures.say("begins")
    for kind, seed in planned(options)[options.begin :]:
        place = options.folder / kind.replace(" ", "-") / str(seed)
        found = attempt(kind, seed, votes, exchange, place)
        dist.barrier()
        if rank == 0:
            figures.say("found " + json.dumps(found))
    dist.destroy_process_group()


def planned(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return kind and seed of all tries, in their order."""
    return [(kind, options.seed + number) for kind in options.kinds for number in range(options.tries)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tries", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(EXPECTED), choices=list(EXPECTED))
    parser.add_argument("--seed", type=int, default=0, help="of the first try; the others count on from it")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds that a try may take")
    parser.add_argument("--folder", type=Path, help="be a rank; where incidents go")
    parser.add_argument("--begin", type=int, default=0, help="be a rank; number of the first try")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.folder is not None:
        measure(options)
        return
    lines = figures.Lines(options.out)
    lines.write(figures.surroundings(seed=options.seed))
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in options.kinds}
    began, taken = time.perf_counter(), 0

    def take(found: dict[str, Any]) -> None:
        nonlocal taken
        taken += 1
        line = {"record": "verdict", "ranks": options.ranks, **found}
        lines.write(line)
        if not found["right"]:
            sys.stderr.write(f"wrong: {json.dumps(line)}\n")
        counts[found["case"]].update(
            {
                "tries": 1,
                "right": int(found["right"]),
                "same": int(found["weights_same"] is True),
                "compared": int(found["weights_same"] is not None),
                "restarts": found["restarts"],
            }
        )

    folder, plan = Path(tempfile.mkdtemp(prefix="verdicts-")), planned(options)
    while taken < len(plan):
        place = folder / f"from-{taken}"
        words = ("--folder", str(place), "--begin", str(taken), *sys.argv[1:])
        command = (sys.executable, __file__, *words)
        why = launch(command, options.ranks, options.patience, place, take)
        if taken < len(plan):
            kind, seed = plan[taken]
            lost = {"record": "lost", "ranks": options.ranks, "case": kind, "seed": seed, "why": why}
            lines.write({**lost, "output": str(place)})
            sys.stderr.write(f"lost: {json.dumps({**lost, 'output': str(place)})}\n")
            counts[kind].update({"tries": 1, "lost": 1})
            taken += 1
    tell(options, counts, time.perf_counter() - began)
    if any(one["right"] != one["tries"] for one in counts.values()):
        raise SystemExit(f"verdicts are wrong or lost, see above; what the ranks wrote is in {folder}")
    shutil.rmtree(folder)


def tell(options: argparse.Namespace, counts: dict[str, Counter[str]], seconds: float) -> None:
    """Print the table."""
    figures.say(
        f"{'fault':<20}{'expected':<18}{'right':>10}{'lost':>6}{'weights the same':>18}{'restarts':>10}"
    )
    for kind, one in counts.items():
        same = f"{one['same']}/{one['compared']}" if one["compared"] else "-"
        right = f"{one['right']}/{one['tries']}"
        words = f"{kind:<20}{EXPECTED[kind][0]:<18}{right:>10}{one['lost']:>6}"
        figures.say(f"{words}{same:>18}{one['restarts']:>10}")
    figures.say(f"{options.ranks} ranks, {seconds:.0f} s")


if __name__ == "__main__":
    main()
