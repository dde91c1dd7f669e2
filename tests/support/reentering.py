"""Jobs of the script ``reentering.py``: faults in a resilient function, and what came of them.

A folder has the script's traces in ``trace``, and the run in ``run``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.launching import DEADLINE, Run, runtime_folders
from tests.support.ranks import lines

STEPS = 24
WORLD = 4
Result = tuple[str, dict[tuple[int, int], str]]


def reentering(folder: Path, *faults: str, options: tuple[str, ...] = (), ranks: int = WORLD) -> Run:
    """Return a run whose ranks meet faults, each as what@rank@step@generation."""
    arguments = (str(folder / "trace"), str(STEPS), "10", *faults)
    every = ("--nproc-per-node", str(ranks), *options)
    return Run(folder / "run", "reentering.py", *arguments, options=every)


def one_a_generation(*faults: tuple[str, int]) -> list[str]:
    """Return faults (what, rank) as words: one in each generation, four steps after the one before."""
    return [f"{what}@{rank}@{4 * number + 1}@{number}" for number, (what, rank) in enumerate(faults, 1)]


def told(folder: Path, kind: str, **wanted: Any) -> Iterator[dict[str, Any]]:
    """Yield what ranks have written of a kind."""
    for path in sorted((folder / "trace").glob("rank-*")):
        for one in lines(path):
            if one["kind"] == kind and wanted.items() <= one.items():
                yield one


def processes(folder: Path, generation: int) -> dict[int, int]:
    """Return the pids of a generation, by rank."""
    return {one["rank"]: one["pid"] for one in told(folder, "entered", generation=generation)}


def replaced(folder: Path, generation: int, after: int = 0) -> set[int]:
    """Return the ranks that a later generation, usually the next one, has in other processes."""
    before, later = processes(folder, generation), processes(folder, after or generation + 1)
    assert set(before) == set(later) == set(range(WORLD))
    return {rank for rank in before if before[rank] != later[rank]}


def generations(folder: Path) -> list[int]:
    return sorted({one["generation"] for one in told(folder, "entered")})


def losses(folder: Path) -> dict[tuple[int, int], str]:
    """Return the loss of each rank and step; one that was computed twice must agree with itself."""
    found: dict[tuple[int, int], str] = {}
    for one in told(folder, "step"):
        assert found.setdefault((one["rank"], one["step"]), one["loss"]) == one["loss"], one
    return found


def result(folder: Path) -> Result:
    """Return the digest of the weights, equal on all ranks, and the losses."""
    ends = [one["digest"] for one in told(folder, "done")]
    assert len(ends) == WORLD
    (digest,) = set(ends)
    return digest, losses(folder)


def finished(run: Run, faultless: Result, deadline: float = DEADLINE) -> None:
    """Check that the run ended well, with the very state and losses of the run without a fault."""
    assert run.finish(deadline) == 0, run.console()
    assert run.process is not None
    assert result(run.folder.parent) == faultless, run.console()
    assert runtime_folders(run.process.pid) == []


def actions(run: Run) -> list[str]:
    """Return what was done."""
    return [one["action"] for one in run.records("action_taken")]


def faults_seen(run: Run) -> list[tuple[str, int]]:
    return [(one["fault"], one["rank"]) for one in run.records("fault_seen")]
