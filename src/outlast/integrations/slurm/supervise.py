"""The batch step of a Slurm job, and what runs on each of its nodes.

The batch step (``outlast slurm supervise``) starts one agent a node with ``srun``, waits, and decides what
follows. On each node ``outlast slurm step`` starts ``outlast run`` and notes which signals came. Slurm
signals every process of a step, so neither of them passes signals on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast import files, settings
from outlast.errors import ExitCode, RunFolderUnusable, UsageError
from outlast.integrations.budget import Budget, newest_step
from outlast.integrations.requeue import Decision, Ending, Limits, NodeEnd, Outcome
from outlast.integrations.schedulers import Slurm, node_options
from outlast.integrations.slurm import commands
from outlast.integrations.slurm.commands import Child, JobStatus, Noted, SlurmError
from outlast.observe.run_folder import RunFolder
from outlast.ports import Allocation

_SETTLE = 3.0  # from a signal to the batch step until it is clear that the nodes did not get it
_NOTE_BYTES = 1 << 20
_AGENTS = 4  # times that an agent is started on a node in one allocation


@dataclass(frozen=True)
class Files:
    """What this integration keeps in the run folder."""

    run: RunFolder

    @property
    def excluded(self) -> Path:
        """Nodes that the job is to be kept off: a JSON object, node to reason."""
        return self.run.root / "excluded_nodes.json"

    def notes(self, job_id: str, restart: int) -> Path:
        """Return the folder of what the nodes of one allocation note."""
        return self.run.root / "slurm" / f"{job_id}-{restart}"


def say(text: str) -> None:
    """Write one line to the job's output."""
    sys.stderr.write(f"outlast slurm: {text}\n")
    sys.stderr.flush()


def supervise(run_dir: str, limits: Limits, extra: Sequence[str], command: Sequence[str]) -> int:
    """Run a job's agents and decide what follows; return the exit code of the batch step.

    Args:
        run_dir: the run folder, on a file system that every node sees.
        limits: of the requeues.
        extra: arguments of ``srun``.
        command: the command line of ``outlast run``.

    Raises:
        UsageError: this is no batch job of Slurm.
        RunFolderUnusable: the budget cannot be read or written.
    """
    variables = settings.inherited()
    allocation = Slurm().detect(variables)
    if allocation is None:
        raise UsageError(
            "SLURM_JOB_ID is not set: outlast slurm supervise runs inside a batch job; nothing was started; "
            "outlast slurm submit writes one"
        )
    job_id = allocation.job
    with Noted() as noted:
        files = Files(RunFolder(run_dir))
        budget = Budget(files.run, "slurm", job_id, limits)
        refused = budget.begin()
        if refused is not None:
            return _carry_out(refused, files, allocation)
        restart = int(variables.get("SLURM_RESTART_COUNT", "0"))
        notes = files.notes(job_id, restart)
        _make(notes)
        say(f"job {job_id}, allocation {restart + 1}, nodes {variables.get('SLURM_JOB_NODELIST', '?')}")
        code = _wait_for_step(srun_command(variables, notes, extra, command), job_id, notes, noted)
        state = _status(job_id)
        ending = Ending(
            code,
            tuple(read_notes(notes)),
            int(variables.get("SLURM_JOB_NUM_NODES", "1")),
            newest_step(files.run),
            state.state,
            state.overrun,
        )
        return _carry_out(budget.end(ending), files, allocation)


def srun_command(
    variables: Mapping[str, str], notes: Path, extra: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command that starts one agent a node."""
    nodes = variables.get("SLURM_JOB_NUM_NODES", "1")
    found = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    found += ["--kill-on-bad-exit=0", "--wait=0"]
    if int(nodes) > 1:
        found.append("--no-kill")  # what is done about a lost node is the agents' business
    if variables.get("SLURM_CPUS_PER_TASK"):  # srun does not take it over by itself from 22.05 on
        found.append(f"--cpus-per-task={variables['SLURM_CPUS_PER_TASK']}")
    step = [sys.executable, "-m", "outlast", "slurm", "step", "--notes", str(notes), "--"]
    return [*found, *extra, *step, *command]


def _wait_for_step(command: Sequence[str], job_id: str, notes: Path, noted: Noted) -> int:
    child = Child(command)
    told, deadline = 0, 0.0
    while True:
        code = child.wait(noted, _SETTLE if deadline else 30.0)
        if code is not None:
            return code
        if noted.numbers and not told:
            told, deadline = noted.numbers[0], time.monotonic() + _SETTLE
        if deadline and time.monotonic() >= deadline:
            deadline = 0.0
            _pass_on(told, job_id, notes)


def _pass_on(number: int, job_id: str, notes: Path) -> None:
    """Give a signal that reached only the batch step to the nodes, once."""
    if any(node.signals for node in read_notes(notes)) or _status(job_id).state == "COMPLETING":
        return
    try:
        steps = commands.signal_steps(job_id, "TERM")
    except SlurmError as error:
        say(f"signal {number} reached the batch step only, and could not be passed on: {error}")
        return
    say(f"signal {number} reached the batch step only (--signal=B:...); TERM went to {', '.join(steps)}")


def _carry_out(decision: Decision, files: Files, allocation: Allocation) -> int:
    said, job_id = f"{decision.outcome.value}: {decision.reason}", allocation.job
    code = int(decision.exit_code)
    say(said if decision.outcome is Outcome.REQUEUE else f"{said}; exit code {code}")
    if decision.outcome is not Outcome.REQUEUE:
        return code
    code = Slurm().requeue(allocation, decision.reason)
    nodes = sorted(files.run.read(files.excluded) or {})
    if nodes:
        try:
            say(f"the next allocation is kept off {commands.exclude(job_id, nodes)}")
        except SlurmError as error:
            say(f"{error}; the job goes on, maybe on the same nodes")
    return code


def read_notes(folder: Path) -> list[NodeEnd]:
    """Return what the nodes noted; a torn or foreign file is no note."""
    found = []
    for path in sorted(folder.glob("node-*.json")):
        try:
            note = json.loads(files.read_whole(path, _NOTE_BYTES))
            code = None if note["exit_code"] is None else int(note["exit_code"])
            found.append(NodeEnd(str(note["node"]), code, tuple(map(int, note["signals"]))))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _make(folder: Path) -> None:
    try:
        files.make_run_folder(folder)
    except OSError as error:
        raise RunFolderUnusable(f"{folder}: {error.strerror}; nothing was started") from error


def _status(job_id: str) -> JobStatus:
    try:
        return commands.status(job_id)
    except SlurmError as error:
        say(f"{error}; it is taken for running")
        return JobStatus("", overrun=False)


def step(notes: str, command: Sequence[str]) -> int:
    """Run ``outlast run`` on this node, note the signals that come, and return its exit code.

    An agent that was killed is started again while nobody asked the job to end: the others, or its own run
    folder, know where the job is.

    Args:
        notes: the folder for the note.
        command: the command line of ``outlast run``.
    """
    variables = settings.inherited()
    node = variables.get("SLURMD_NODENAME") or os.uname().nodename
    path = Path(notes) / f"node-{int(variables.get('SLURM_NODEID', '0')):05d}.json"
    run = Path(notes).absolute().parent.parent.name
    agent = [sys.executable, "-m", "outlast", "run", *meeting(variables, run), *command]
    killed = ExitCode.SIGNAL_BASE + signal.SIGKILL
    with Noted() as noted:
        left = _AGENTS - 1
        while (code := _run_agent(agent, node, path, noted)) == killed and left and not noted.numbers:
            left -= 1
            say(f"{node}: the agent was killed; it is started again ({left} more time(s) at most)")
        return code


def _run_agent(agent: Sequence[str], node: str, path: Path, noted: Noted) -> int:
    folder = RunFolder(path.parent)
    child = Child(agent)
    code, written = None, -1
    while code is None:
        code = child.wait(noted)
        if code is not None or len(noted.numbers) != written:
            written = len(noted.numbers)
            note = {"node": node, "exit_code": code, "signals": noted.numbers[:written]}
            try:
                folder.write(path, note)
            except OSError as error:
                say(f"{path}: {error.strerror}; the batch step has only the exit code")
    return code


def meeting(variables: Mapping[str, str], run: str) -> list[str]:
    """Return the options by which the agents of several nodes find each other; none for one node.

    The batch step runs on the first node, and its ``srun`` tells every task its address.

    Args:
        variables: the environment of the step.
        run: what the job is called; the same after a requeue.
    """
    allocation = Slurm().detect(variables)
    if allocation is None or allocation.nodes == 1:
        return []
    return [*node_options(allocation), f"--rdzv-id={run}"]
