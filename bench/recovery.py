"""recovery: time from kill -9 of a rank to the next step, compared with torchrun and NVRx's ft_launcher.

Each block is one job with several kills; blocks of the systems alternate (ABBA) in one run on one
host. The job is the same everywhere: the model of examples/train_gpt.py on 4 ranks over gloo,
a checkpoint every N steps; torchrun and NVRx save it with torch.save. The seed draws the victim and the
moment.

The recovery has these parts: detect (the launcher knows), stop (the old workers are gone), spawn
(the script's first statement runs on every rank), import (its imports are done), group (process
group, model and optimizer), load (the state is loaded), replay (every rank has completed a step).
"caught up" is when the interrupted step has been repeated.

    python bench/recovery.py --kills 20 --ft-launcher /path/to/ft_launcher --out recovery.jsonl

To compare with another checkout of outlast in the same run:

    python bench/recovery.py --systems outlast checkout --checkout /path/to/another
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import figures, systems
from peers.systems import Line, System

PARTS = ("detect", "stop", "spawn", "import", "group", "load", "replay")
BOUNDS = ("detected", "gone", "started", "imported", "group", "loaded", "first_step")
LOOK = 0.002
PATIENCE = 120.0
SETTLED = 5  # steps after a start before the next kill may come


@dataclass(frozen=True)
class Kill:
    """One measured recovery; times in seconds after the kill."""

    total: float
    caught_up: float
    parts: dict[str, float]
    steps_lost: int


class Lost(Exception):
    """The job did not recover."""


def wait_until_settled(system: System, steps: int, beyond: int = -1) -> set[int]:
    """Wait until the running workers have completed some steps, the last after ``beyond``; return pids."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and system.alive():
        system.traces.update()
        lines = system.traces.lines
        if all(lines):
            pids = {rank_lines[-1].pid for rank_lines in lines}
            made = all(sum(line.pid in pids for line in rank_lines[-steps:]) == steps for rank_lines in lines)
            if made and all(rank_lines[-1].step > beyond for rank_lines in lines):
                return pids
        time.sleep(LOOK)
    raise Lost(f"{system.name} did not train; see {system.work / 'output.txt'}")


def wait_until_back(
    system: System, killed: float, old: set[int], step: int
) -> tuple[float, list[Line], list[Line]]:
    """Return when the old workers were gone, and each rank's first step and its repetition of ``step``."""
    gone = 0.0
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and system.alive():
        system.traces.update()
        if not gone and not any(exists(pid) for pid in old):
            gone = time.monotonic()
        first, again = system.traces.since(killed, old), system.traces.since(killed, old, step)
        if gone and first and again:
            return gone, first, again
        time.sleep(LOOK)
    raise Lost(f"{system.name} did not come back; see {system.work / 'output.txt'}")


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def kill_once(system: System, dice: random.Random, interval: int) -> Kill:
    """Kill one rank at a drawn moment and measure the recovery.

    No two kills of a job are at the same step: outlast stops a job that is killed three times at one step.
    """
    furthest = max((line.step for lines in system.traces.lines for line in lines), default=-1)
    pids = wait_until_settled(system, SETTLED + dice.randrange(interval), furthest + 1)
    victim = dice.choice(system.traces.lines)[-1].pid
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    system.traces.update()
    step = max(line.step for lines in system.traces.lines for line in lines[-1:])
    gone, first, again = wait_until_back(system, killed, pids, step)
    came_back = max(line.clock for line in first)
    marks = system.marks(killed, {line.pid for line in first}) | {"gone": gone, "first_step": came_back}
    parts, before = {}, killed
    for part, bound in zip(PARTS, BOUNDS, strict=True):
        at = max(before, marks.get(bound, before))
        parts[part], before = at - before, at
    caught_up = max(line.clock for line in again) - killed
    return Kill(came_back - killed, caught_up, parts, step + 1 - min(line.step for line in first))


def block(name: str, options: argparse.Namespace, dice: random.Random, lines: figures.Lines) -> list[Kill]:
    """Run one job under one launcher and kill it several times."""
    done: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix=f"recovery-{name}-", ignore_cleanup_errors=True) as folder:
        system = systems.start(
            name,
            Path(folder),
            options.ranks,
            options.save_interval,
            options.ft_launcher,
            options.checkout,
        )
        try:
            for _ in range(options.kills_per_block):
                kill = kill_once(system, dice, options.save_interval)
                done.append(kill)
                record: dict[str, Any] = {"record": "kill", "system": name, **vars(kill)}
                lines.write({**record, "loadavg": os.getloadavg()[0]})
                figures.say(
                    f"  {name}: first step after {kill.total:.3f} s, caught up after {kill.caught_up:.3f} s"
                )
        except Lost as lost:
            lines.write({"record": "lost", "system": name, "reason": str(lost)})
            figures.say(f"  {lost}\n{(Path(folder) / 'output.txt').read_text()[-2000:]}")
        finally:
            system.stop()
    return done


def report(kills: dict[str, list[Kill]], lines: figures.Lines) -> None:
    """Print and write the summary."""
    figures.say(f"\n{'seconds, median':<12}" + "".join(f"{part:>9}" for part in PARTS))
    for name, found in kills.items():
        if not found:
            continue
        parts = {part: figures.summary([kill.parts[part] for kill in found]) for part in PARTS}
        figures.say(f"{name:<12}  " + "".join(f"{parts[part]['median']:9.3f}" for part in PARTS))
        total = figures.summary([kill.total for kill in found])
        caught_up = figures.summary([kill.caught_up for kill in found])
        lost = figures.summary([kill.steps_lost for kill in found])
        record = {"total": total, "caught_up": caught_up, "steps_lost": lost, "parts": parts}
        lines.write({"record": "summary", "system": name, **record})
    ours = figures.summary([kill.total for kill in kills.get("outlast", [])])
    figures.say("\nkill to first completed step:")
    for name, found in kills.items():
        total = figures.summary([kill.total for kill in found])
        if not total["n"]:
            figures.say(f"{name:<12} no recovery was measured")
            continue
        ratio = total["median"] / ours["median"] if ours["n"] else float("nan")
        lines.write({"record": "ratio", "system": name, "to_outlast": ratio})
        figures.say(
            f"{name:<12} n {total['n']}  median {total['median']:.3f} s  p99 {total['p99']:.3f} s  "
            f"min {total['min']:.3f} s  {ratio:.1f} x outlast"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="per system")
    parser.add_argument("--kills-per-block", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", default=["outlast", "torchrun", "nvrx"])
    parser.add_argument("--ft-launcher", type=Path, help="NVRx's ft_launcher; without it NVRx is left out")
    parser.add_argument(
        "--checkout", type=Path, default=systems.ROOT, help="of outlast, for the system named checkout"
    )
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lines = figures.Lines(options.out)
    if "nvrx" in options.systems and not (options.ft_launcher and options.ft_launcher.exists()):
        options.systems.remove("nvrx")
        lines.write({"record": "left out", "system": "nvrx", "reason": "ft_launcher is not installed"})
        figures.say("nvrx: not installed (--ft-launcher names none); left out")
    lines.write(figures.surroundings(options.seed, arguments=" ".join(map(str, vars(options).values()))))
    dice = random.Random(options.seed)
    kills: dict[str, list[Kill]] = {name: [] for name in options.systems}
    for name in figures.abba(options.systems, -(-options.kills // options.kills_per_block)):
        figures.say(f"{name}, load {os.getloadavg()[0]:.2f}")
        kills[name] += block(name, options, dice, lines)
    report(kills, lines)


if __name__ == "__main__":
    main()
