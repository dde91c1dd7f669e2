"""Slurm's programs, called with a deadline; and one child process, waited for together with signals."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from outlast import files
from outlast.errors import ExitCode, OutlastError

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK = 30.0


class Noted:
    """Takes the signals that end a job and only notes them; a context manager."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.signal(number, self._take) for number in STOPPING}

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.numbers.append(number)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._reader

    def forget_wakeups(self) -> None:
        """Make the descriptor wait for the next signal."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return


class Child:
    """A process that was started, and its end as a shell would tell it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command)
        self._ended = os.pidfd_open(self._process.pid)

    def wait(self, noted: Noted, seconds: float = _LOOK) -> int | None:
        """Wait for its end, a signal or the deadline; return the exit code, None while it runs."""
        files.readable((self._ended, noted.fileno()), seconds)
        noted.forget_wakeups()
        code = self._process.poll()
        if code is None:
            return None
        os.close(self._ended)
        return ExitCode.SIGNAL_BASE - code if code < 0 else code


PATIENCE = 60.0  # seconds for one answer; slurmctld of a busy cluster takes its time
_NO_LIMIT = ("UNLIMITED", "NOT_SET", "")


class SlurmError(OutlastError):
    """A program of Slurm is not there, or refused."""


@dataclass(frozen=True)
class JobStatus:
    """A job as ``squeue`` shows it.

    Args:
        state: the long form, as RUNNING.
        overrun: its time limit has passed.
    """

    state: str
    overrun: bool


def call(command: Sequence[str], expected: str) -> str:
    """Run one of Slurm's programs and return what it prints.

    The program inherits a mask that keeps the signals of a job's end from it: Slurm sends them to every
    process of a batch step, and the answer is wanted just then.

    Args:
        command: the program and its arguments.
        expected: what was wanted of it, for the message.

    Raises:
        SlurmError: it is not there, refused, or did not answer in time.
    """
    shown = " ".join(command)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]}: no such program in PATH; expected {expected}; "
            "Slurm's client programs are needed where this runs, inside a container as well"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{shown}: no answer in {PATIENCE:.0f} s; expected {expected}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if found.returncode != 0:
        said = " ".join((found.stderr or found.stdout).split()) or "nothing said"
        raise SlurmError(f"{shown}: exit code {found.returncode} ({said}); expected {expected}")
    return found.stdout


def parse_status(text: str) -> JobStatus:
    """Read ``STATE|time left`` of one job; an empty text is a job that Slurm no longer shows."""
    state, _, left = text.strip().partition("|")
    digits = left.replace(":", "").replace("-", "")
    overrun = left not in _NO_LIMIT and (not digits.isdigit() or int(digits) == 0 or left.startswith("-"))
    return JobStatus(state.strip(), overrun)


def status(job_id: str) -> JobStatus:
    """Return a job's state.

    Raises:
        SlurmError: ``squeue`` does not say.
    """
    return parse_status(call(("squeue", "-h", "-j", job_id, "-o", "%T|%L"), "the state of the job"))


def requeue(job_id: str) -> None:
    """Ask for another allocation for the running job.

    Raises:
        SlurmError: Slurm refused; with --no-requeue, or JobRequeue=0 and no --requeue, it does.
    """
    call(("scontrol", "requeue", job_id), "the job back in the queue (it needs #SBATCH --requeue)")


def exclude(job_id: str, nodes: Sequence[str]) -> str:
    """Keep a requeued job off nodes, besides those that it is kept off already; return the list.

    Raises:
        SlurmError: Slurm refused; it does so for a job that runs.
    """
    shown = call(("scontrol", "show", "job", "-o", job_id), "the job's ExcNodeList")
    known = next((word[12:] for word in shown.split() if word.startswith("ExcNodeList=")), "")
    found = ",".join([*([] if known in ("", "(null)") else [known]), *nodes])
    call(("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={found}"), f"the job kept off {found}")
    return found


def signal_steps(job_id: str, name: str) -> list[str]:
    """Send a signal to every step of a job, the batch step aside; return the steps.

    Raises:
        SlurmError: Slurm refused.
    """
    listed = call(("squeue", "-h", "-s", "-j", job_id, "-o", "%i"), "the steps of the job").split()
    steps = [step for step in listed if not step.endswith((".batch", ".extern", ".interactive"))]
    for step in steps:
        call(("scancel", f"--signal={name}", step), f"{name} sent to step {step}")
    return steps
