"""Run a scenario: start a run, inject each fault when it is due, start the run again when its agent is gone.

The campaign acts like an operator: it sees the run folder and the processes, and can start a command. It
waits for observations, never for a guessed time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.chaos import faults
from outlast.chaos import faults as targets
from outlast.chaos.faults import Observer
from outlast.chaos.policy import FAULTS, Injection, Scenario, Target
from outlast.errors import OutlastError
from outlast.ipc.processes import adopt_orphans, children_of, is_alive, kill_if, start_ticks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence, Set

    from outlast.chaos.faults import Made
    from outlast.recovery.policy.events import Record

_LOOK = 0.005  # seconds between two looks at the run; far below a step
_GONE_PATIENCE = 10.0  # for every worker to end after its agent
_LEFT_PATIENCE = 5.0  # for everything else that a run has to end or to remove by itself
_Known = tuple[int, int]  # a process: its pid, and when it was started
_SHARED_MEMORY = (Path("/dev/shm"), Path(tempfile.gettempdir()))


@dataclass(frozen=True)
class Plan:
    """A run and what is done to it.

    Args:
        command: starts the run, and starts it again after its agent was killed.
        run_dir: its run folder, which the command names too.
        traces: folder of the traces that its ranks write; None: there are none.
        output: file that its output is appended to.
        injections: the scenario; empty: the run is only watched.
        patience: seconds within which each injection must become due, and the run end after the last.
    """

    command: Sequence[str]
    run_dir: Path
    traces: Path | None
    output: Path
    injections: tuple[Injection, ...] = ()
    patience: float = 600.0


@dataclass
class Conduct:
    """How a campaign went.

    Args:
        exit_code: of the last launch.
        records: the event log.
        made: the faults that were made.
        problems: why the scenario was not carried out as planned.
        leftovers: processes and files that outlived the run.
        outlived: seconds that the longest-lived worker lived after its agent, for each killed agent.
        seconds: how long everything took.
    """

    exit_code: int = -1
    records: list[Record] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    outlived: list[float] = field(default_factory=list)
    seconds: float = 0.0


def carry_out(plan: Plan) -> Conduct:
    """Run the plan's command to its end under its scenario."""
    adopt_orphans()  # whatever the run leaves behind becomes a child of this process, and is found
    ours = children()
    before = frozenset(shared_memory())
    conduct = Conduct()
    began = time.monotonic()
    observer = Observer(plan.run_dir / "events.jsonl", plan.traces)
    try:
        _conduct(plan, conduct, observer)
    finally:
        observer.look()
        conduct.records = observer.records
        conduct.leftovers = leftovers(observer, ours, before)
        conduct.seconds = time.monotonic() - began
    return conduct


def _conduct(plan: Plan, conduct: Conduct, observer: Observer) -> None:
    scenario = Scenario(plan.injections, plan.patience)
    process = _start(plan)
    try:
        deadline = time.monotonic() + plan.patience
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                conduct.exit_code = process.wait(_LOOK)
                break
            seen = observer.look()
            for injection in scenario.handle(seen, time.monotonic()):
                workers = {_known(pid) for pid in observer.newest_workers()}
                made = _make(plan, injection, conduct)
                deadline = time.monotonic() + plan.patience
                if made and FAULTS[injection.fault].target is Target.AGENT:
                    process.wait(_GONE_PATIENCE)
                    conduct.outlived.append(_wait_until_gone(workers, made.clock))
                    process = _start(plan)
            if why := scenario.tick(time.monotonic()):
                conduct.problems.append(why)
                return
        else:
            conduct.problems.append(
                f"the run did not end within {plan.patience:g} s after the last injection"
            )
    finally:
        stop(process)
    conduct.problems += [f"the run ended before {one.fault} was due" for one in scenario.left]
    if conduct.exit_code:
        conduct.problems.append(
            f"the run ended with exit code {conduct.exit_code}; its output is in {plan.output}"
        )


def _start(plan: Plan) -> subprocess.Popen[bytes]:
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    with open(plan.output, "ab") as output:
        return subprocess.Popen(
            list(plan.command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _make(plan: Plan, injection: Injection, conduct: Conduct) -> Made | None:
    try:
        made = faults.inject(targets.find(plan.run_dir), injection.fault, injection.rank, injection.seed)
    except OutlastError as error:
        conduct.problems.append(f"{injection.fault}: {error}")
        return None
    conduct.made.append(made)
    return made


def _known(pid: int) -> _Known:
    return pid, start_ticks(pid)


def _lives(process: _Known) -> bool:
    """Return whether a process lives; its pid may belong to another process by now."""
    pid, began = process
    return bool(began) and start_ticks(pid) == began and is_alive(pid)


def children() -> set[_Known]:
    """Return the children of this process, orphans that it has adopted and dead ones included."""
    return {_known(pid) for pid in children_of(os.getpid())}


def _wait_until_gone(processes: Collection[_Known], since: float) -> float:
    """Return how many seconds after ``since`` the last of the processes ended; infinity: not in time."""
    deadline = time.monotonic() + _GONE_PATIENCE
    while any(map(_lives, processes)):
        if time.monotonic() > deadline:
            return float("inf")
        time.sleep(_LOOK)
    return time.monotonic() - since


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run that took too long; its workers end with the agent."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GONE_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_GONE_PATIENCE)


def leftovers(observer: Observer, ours: Set[_Known], before: Set[Path]) -> list[str]:
    """Kill what still runs some seconds after the end of the run; return what it was.

    Args:
        observer: of the run.
        ours: the :func:`children` before the run.
        before: what was in :func:`shared_memory` then.
    """
    deadline = time.monotonic() + _LEFT_PATIENCE
    while left := [*_processes(ours), *_files(observer, before)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK)
    strangers = children() - ours
    for pid, began in strangers:
        kill_if(pid, lambda pid, began=began: start_ticks(pid) == began)  # type: ignore[misc]
    _wait_until_gone(strangers, deadline)
    _processes(ours)
    return left


def _processes(ours: Set[_Known]) -> list[str]:
    """Name the living orphans that this process has adopted; reap the dead ones."""
    found: list[str] = []
    for process in children() - ours:
        pid, _ = process
        if _lives(process):
            found.append(f"process {pid} ({_command_of(pid)})")
        else:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return sorted(found)


def _command_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:120]
        )
    except OSError:
        return "?"


def _files(observer: Observer, before: Set[Path]) -> list[str]:
    """Name the new files in shared memory whose name has the pid of one of the run's processes."""
    pids = {str(pid) for pid in (*observer.agents, *observer.workers)}
    return sorted(
        f"file {path}"
        for path in shared_memory()
        if path not in before and pids.intersection(re.findall(r"\d+", path.name))
    )


def shared_memory() -> Iterator[Path]:
    """Yield what is in /dev/shm and in the folder of temporary files."""
    return (path for folder in _SHARED_MEMORY if folder.is_dir() for path in folder.iterdir())
