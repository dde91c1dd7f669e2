"""Hangs of one kind, many times in one job, for bench/hang.py --tries: is the culprit named each time?

    outlast run --nproc-per-node=3 bench/hang_tries.py KIND SEED FOLDER

Each generation trains some steps and hangs: which rank, and at which step, is drawn from seed and generation.
The restart begins the next try. The culprit writes down that it hangs, so that verdicts can be compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hang_kinds
from peers import figures

RANKS = 3
STEPS = 40, 60  # of a generation, before it hangs
NEEDED = 0.95  # right culprits of each kind
PATIENCE = 240.0  # seconds to the next verdict
MANY = 10**6
LOOK = 0.2
TRIES = "tries.jsonl"
BY_RECORDER = "collective sequence numbers"


def ahead(_: float, __: Path) -> None:
    """Enter a collective that no other rank enters, and, without waiting for its end, the next one."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(7), dist.get_rank(), async_op=True)


KINDS: dict[str, Callable[[float, Path], object]] = {
    "late": lambda _, __: time.sleep(3600),
    "ahead": ahead,
    "deadlock": hang_kinds.crossed_locks,
    "stopped": lambda _, __: os.kill(os.getpid(), signal.SIGSTOP),
}


def play_all(tries: int, side_by_side: int, seed: int, lines: figures.Lines) -> int:
    """Play each kind that many times, several kinds at a time; return how many kinds had too few right."""
    with ThreadPoolExecutor(side_by_side) as pool:
        found = pool.map(lambda kind: (kind, list(play(kind, tries, seed))), KINDS)
        bad = 0
        for kind, records in found:
            for record in records:
                lines.write(record)
            summary = summed(kind, tries, records)
            lines.write(summary)
            figures.say(json.dumps(summary))
            for record in records:
                if not record["right"]:
                    figures.say(f"  {record['said'][-400:]}")
            bad += summary["right"] < NEEDED * tries
    return bad


def summed(kind: str, tries: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one kind."""
    took = [one["found_after"] for one in records if one["found_after"] is not None]
    return {
        "record": "tries",
        "kind": kind,
        "tries": tries,
        "found": len(took),
        "right": sum(one["right"] for one in records),
        "by_flight_recorder": sum(one["basis"] == BY_RECORDER for one in records),
        "found_after": round(statistics.median(took), 2) if took else None,
        "loadavg": os.getloadavg()[0],
    }


def play(kind: str, tries: int, seed: int) -> Iterator[dict[str, Any]]:
    """Run one job, and yield a record for each verdict."""
    with tempfile.TemporaryDirectory(prefix=f"hang-{kind}-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        command = [sys.executable, "-m", "outlast", "run", f"--nproc-per-node={RANKS}"]
        command += [f"--max-restarts={MANY}", f"--run-dir={folder / 'run'}"]
        with open(folder / "output.txt", "wb") as output:
            job = subprocess.Popen(
                [*command, str(Path(__file__).resolve()), kind, str(seed), text],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            known, latest = 0, time.monotonic()
            while known < tries and job.poll() is None and time.monotonic() < latest + PATIENCE:
                time.sleep(LOOK)
                faults = [
                    one for one in _lines(folder / "run" / "events.jsonl") if one["kind"] == "fault_seen"
                ]
                played = {one["generation"]: one for one in _lines(folder / TRIES)}
                for fault in faults[known:tries]:
                    yield judged(kind, fault, played.get(fault["generation"]))
                    known, latest = known + 1, time.monotonic()
            if known < tries:
                said = (folder / "output.txt").read_text(errors="replace")[-2000:]
                yield {**_record(kind), "said": f"{tries - known} tries had no end: {said}"}
        finally:
            _end(job)


def judged(kind: str, fault: dict[str, Any], played: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record of a verdict; without a hang that was played it is a false alarm."""
    if played is None:
        return {**_record(kind), "said": f"no rank hung: {fault['reason']}"}
    return {
        **_record(kind),
        "rank": played["rank"],
        "named": fault["rank"],
        "right": fault["fault"] == "hang" and fault["rank"] == played["rank"],
        "basis": fault["evidence"].get("found by", ""),
        "found_after": fault["clock"] - played["clock"],
        "said": f"rank {played['rank']} hung: {fault['reason']}",
    }


def _record(kind: str) -> dict[str, Any]:
    return {"record": "try", "kind": kind, "right": False, "basis": "", "found_after": None}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(60)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def main() -> None:
    import torch
    import torch.distributed as dist

    import outlast

    kind, seed, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    generation = int(os.environ["OUTLAST_GENERATION"])
    dice = random.Random(f"{kind} {seed} {generation}")
    culprit, hangs_at = dice.randrange(RANKS), dice.randint(*STEPS)
    torch.set_num_threads(1)
    weights = torch.nn.Linear(10, 10)
    with outlast.start(save_interval=20) as session:
        dist.init_process_group("gloo")
        session.restore(state=weights)
        for number, step in enumerate(session.steps(MANY)):
            if number == hangs_at and dist.get_rank() == culprit:
                place = {"generation": generation, "rank": culprit, "step": step, "clock": time.monotonic()}
                with open(folder / TRIES, "a") as file:
                    file.write(f"{json.dumps(place)}\n")
                KINDS[kind](0.0, folder)
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.005)


if __name__ == "__main__":
    main()
