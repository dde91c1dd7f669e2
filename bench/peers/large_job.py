"""One rank with a state of some GiB, for bench/large.py: it trains with one thread, and kills itself once.

How it saves is ``--system``: not at all, by DCP's ``async_save`` as torchrun's users do, or by an outlast
session, eager or lazy. Each completed step is a line: when its batch began, when its optimizer was done, and
when the next one may begin, which is after whatever a save stops training for.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402 - the first statement takes the time
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
from collections.abc import Generator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

WIDTH = 2048
COPIES = 3  # of each parameter: itself, and Adam's two moments
BATCH = 4
KEPT = 2  # checkpoints of DCP


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True, choices=("plain", "dcp", "eager", "lazy"))
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two saves")
    parser.add_argument("--die", type=int, required=True, help="step after which it kills itself, once")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


class Trace:
    """Lines of what happened, each with CLOCK_MONOTONIC."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "trace.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        self._file.write(
            json.dumps({"what": what, "clock": time.monotonic(), "pid": os.getpid(), **values}) + "\n"
        )


def build(gib: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = max(1, round(gib * 2**30 / (COPIES * 4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Dcp:
    """DCP's async_save, as its tutorial has it: the save before is waited for, then the next one begins."""

    def __init__(self, folder: Path, every: int) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("gloo")
        self._dcp, self._folder, self._every = dcp, folder / "dcp", every
        self._pending: Any = None

    def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        whole = [int(one.parent.name) for one in self._folder.glob("*/.metadata")]
        if not whole:
            return 0
        state = self.state(model, optimizer)
        self._dcp.load(state, checkpoint_id=self._folder / str(max(whole)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return max(whole)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step % self._every:
            return
        self.finish()
        self._pending = self._dcp.async_save(
            self.state(model, optimizer), checkpoint_id=self._folder / str(step)
        )

    def finish(self) -> None:
        """Wait for the latest save, and remove those that are too old."""
        if self._pending is not None:
            self._pending.result()
            whole = sorted(int(one.parent.name) for one in self._folder.glob("*/.metadata"))
            for old in whole[:-KEPT]:
                shutil.rmtree(self._folder / str(old))


def by_session(options: argparse.Namespace, trace: Trace) -> Generator[tuple[int, Any, Any], None, None]:
    import outlast

    checkpoints = outlast.CheckpointOptions(
        save_interval=options.every,
        non_persistent_save_interval=options.every,
        keep_last_n=KEPT,
        staging=options.system,
    )
    session = outlast.start(checkpoints=checkpoints)
    model, optimizer = build(options.gib)
    trace.write("built")
    session.restore(model=model, optimizer=optimizer)
    trace.write("restored")
    for step in session.steps(options.steps):
        yield step, model, optimizer


def by_hand(options: argparse.Namespace, trace: Trace) -> Generator[tuple[int, Any, Any], None, None]:
    dcp = Dcp(options.folder, options.every) if options.system == "dcp" else None
    model, optimizer = build(options.gib)
    trace.write("built")
    first = 0 if dcp is None else dcp.restore(model, optimizer)
    trace.write("restored")
    for step in range(first, options.steps):
        yield step, model, optimizer
        if dcp is not None:
            dcp.save(model, optimizer, step + 1)
    if dcp is not None:
        dcp.finish()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    trace = Trace(options.folder)
    trace.write("started", began=STARTED)
    steps = by_session if options.system in ("eager", "lazy") else by_hand
    died = options.folder / "died"
    with contextlib.closing(steps(options, trace)) as loop:
        for step, model, optimizer in loop:
            began = time.monotonic()
            train(model, optimizer, step)
            trace.write("step", step=step + 1, began=began)
            if step + 1 == options.die and options.system != "plain" and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    trace.write("over")


if __name__ == "__main__":
    main()
