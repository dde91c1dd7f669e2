"""The rehearsal of ``outlast doctor``: a short job at the real world size goes through every recovery path.

``outlast run`` starts the script in a scratch run folder with a save every few steps. The job is told to end,
goes on from a damaged checkpoint, loses a rank, and has a rank stopped. What was seen is read from its event
log.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from outlast import settings
from outlast.chaos import campaign, faults
from outlast.chaos.commands import example
from outlast.chaos.faults import Observer
from outlast.config import Config
from outlast.doctor import policy
from outlast.doctor.policy import PATHS, Diagnosis, Measured
from outlast.errors import ExitCode, OutlastError
from outlast.ipc.processes import adopt_orphans, die_with_parent
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import (
    FaultKind,
    FaultSeen,
    FirstStep,
    Progress,
    Quarantined,
    Record,
    Saved,
)
from outlast.stragglers.policy.options import StragglerAction

_SAVE_INTERVAL = 5  # steps
_LOOK = 0.02  # seconds between two looks at the event log
_ENDS = {signal.SIGINT, signal.SIGTERM}
_ENDING = 6.0  # seconds that are kept for the end of the job
_SHARE_FOR_SAVES = 0.4  # of the time that is left after the first step
_LEAST_TIMEOUT = 5.0  # seconds without a heartbeat; a busy machine is silent for one or two
_STEPS = 20  # that the timeout of the rehearsal is long
_STARTS = 3  # as long as the start took: a job that is not running again by then does not go on
_ENDS_WITHIN = 10.0  # seconds in which a launcher ends whose ranks have finished
_ENDS_AT_LEAST = 2.0  # likewise, where no time is left
_FINISHED = "the script finished before this could be tried; give it more steps"
_MOST_SAID = 4096  # bytes of the job's output that are looked at for the reason


@dataclass(frozen=True)
class Wish:
    """What is rehearsed.

    Args:
        script: None: the packaged example.
        arguments: of the script.
        ranks: on this machine.
        config: of the job; its timeouts, places and intervals of saves are replaced.
        place: folder in which the scratch folder is made.
    """

    script: Path | None
    arguments: tuple[str, ...]
    ranks: int
    config: Config
    place: Path


def carry_out(wish: Wish, deadline: float) -> tuple[list[Diagnosis], Measured]:
    """Rehearse until ``deadline`` (monotonic); return a diagnosis for each path, and what was measured.

    Nothing is left: no process, no shared memory, and no file in the scratch folder. What the script itself
    writes elsewhere stays.
    """
    adopt_orphans()  # whatever the job leaves behind becomes a child of this process, and is found
    ours, before = campaign.children(), frozenset(campaign.shared_memory())
    try:
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=wish.place))
    except OSError as error:
        return [policy.unrehearsed("start", f"{wish.place}: {error.strerror}")], Measured("")
    job = _Job(wish, folder, deadline - _ENDING)
    found: list[Diagnosis] = []
    try:
        for one in _paths(job):
            found.append(one)
        done = {one.check for one in found}
        why = "the path before it did not go on" if time.monotonic() < job.until else "no time was left"
        found += [policy.unrehearsed(path, why) for path in PATHS if path not in done]
    finally:
        job.end()
        job.observer.look()
        left = campaign.leftovers(job.observer, ours, before)
        _remove(folder)
    found.append(policy.leftovers(left))
    source = f"the rehearsal of {wish.script or 'the packaged example'}"
    return found, replace(policy.measured(source, job.observer.records), interval=0.0)


def _remove(folder: Path) -> None:
    """Remove the scratch folder; something that is about to end may still write into it."""
    until = time.monotonic() + _ENDING
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < until:
        time.sleep(_LOOK)
        shutil.rmtree(folder, ignore_errors=True)


def _paths(job: _Job) -> Iterator[Diagnosis]:
    """Go through the paths in the order in which one needs another; end where the job does not go on."""
    with job.launched({}):
        began = time.monotonic()
        if not job.see(lambda new: _any(new, FirstStep)):
            yield job.no_start(time.monotonic() - began)
            return
        job.start = time.monotonic() - began
        yield policy.rehearsed("start", f"first step after {job.start:.1f} s")
        if not job.see(lambda _: len(job.copies()) > 1, _SHARE_FOR_SAVES):
            if job.has_finished():
                yield policy.unrehearsed("preemption", _FINISHED)
                return
            for path in ("preemption", "damaged-copy"):
                yield policy.unrehearsed(
                    path, "no two checkpoints came: has the script a session that saves?"
                )
            yield from _crash(job)
            return
        done = _preemption(job)
        yield done
    if not done.ok:
        return
    step = policy.measured("", job.observer.records).step
    silence = max(_LEAST_TIMEOUT, _STEPS * step)
    fixed = {"rank_heartbeat_timeout": silence, "rank_section_timeouts": {"step": silence}}
    try:
        damaged = faults.newest_checkpoint(faults.find(job.run_dir))
        faults.flip_bit(damaged, random.Random(0))
    except (OutlastError, OSError) as error:
        yield policy.unrehearsed("damaged-copy", str(error))
        return
    with job.launched({"fault_tolerance": fixed}):
        loaded = _damaged(job, damaged.name)
        yield loaded
        if loaded.ok:
            yield from _crash(job)
            yield from _hang(job, silence)


def _preemption(job: _Job) -> Diagnosis:
    told = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code = job.exit_code()
    records = job.observer.records
    reached = max((one.step for one in records if isinstance(one, Progress)), default=0)
    saved = max((one.step for one in records if isinstance(one, Saved)), default=-1)
    took = f"after {time.monotonic() - told:.1f} s"
    if code == ExitCode.SIGNAL_BASE + signal.SIGTERM and saved >= reached:
        return policy.rehearsed("preemption", f"step {saved} was saved, and the job ended {took}")
    if code == ExitCode.OK:
        return policy.unrehearsed("preemption", _FINISHED)
    ended = "did not end" if code is None else f"ended with exit code {code}"
    newest = f"step {saved} the last one that was saved" if saved >= 0 else "none was saved"
    return job.failed(
        "preemption",
        told,
        f"the job {ended} {took}, step {reached} was the last one, {newest}: {job.said()}",
    )


def _damaged(job: _Job, name: str) -> Diagnosis:
    def set_aside(new: Sequence[Record]) -> bool:
        return any(isinstance(one, Quarantined) and one.checkpoint == name for one in new)

    began = time.monotonic()
    if job.see(lambda new: set_aside(new) and _any(new, FirstStep)):
        return policy.rehearsed("damaged-copy", f"{name} was set aside, an older copy was loaded")
    if job.has_finished() and set_aside(job.new):
        return policy.unrehearsed("damaged-copy", f"{name} was set aside; {_FINISHED}")
    return job.failed("damaged-copy", began, f"{name}, of which one bit was changed: {job.said()}")


def _crash(job: _Job) -> Iterator[Diagnosis]:
    yield _hurt(job, "crash", signal.SIGKILL, "was killed")


def _hang(job: _Job, silence: float) -> Iterator[Diagnosis]:
    if time.monotonic() + silence > job.until:
        yield policy.unrehearsed("hang", f"it takes {silence:.0f} s to be seen, {_STEPS} steps")
        return
    found = _hurt(job, "hang", signal.SIGSTOP, "was stopped")
    kinds = [one.fault for one in job.new if isinstance(one, FaultSeen)]
    if found.ok and FaultKind.HANG.value not in kinds:
        found = policy.broken("hang", f"a stopped rank was seen as {', '.join(kinds)}")
    yield found


def _hurt(job: _Job, path: str, number: int, what: str) -> Diagnosis:
    """Send a signal to the last rank, and wait for the first step of the next generation."""
    rank, began = job.wish.ranks - 1, time.monotonic()
    job.mark()
    try:
        faults.signal_rank(faults.find(job.run_dir), rank, number)
    except OutlastError as error:
        return policy.unrehearsed(path, _FINISHED) if job.has_finished() else policy.broken(path, str(error))
    if job.see(lambda new: _any(new, FaultSeen) and _any(new, FirstStep)):
        took = time.monotonic() - began
        return policy.rehearsed(path, f"rank {rank} {what}; the next step was there after {took:.1f} s")
    if job.process.poll() is None:
        return job.failed(
            path, began, f"rank {rank} {what}; no step came in {time.monotonic() - began:.0f} s"
        )
    if job.has_finished():
        return policy.unrehearsed(path, _FINISHED)
    return policy.broken(path, f"rank {rank} {what}, and the job ended: {job.said()}")


def _any(records: Sequence[Record], kind: type) -> bool:
    return any(isinstance(one, kind) for one in records)


class _Job:
    """The job of a rehearsal, launch after launch in one run folder."""

    def __init__(self, wish: Wish, folder: Path, until: float) -> None:
        self.wish = wish
        self.until = until
        self.run_dir = folder / "run"
        self.observer = Observer(RunFolder(self.run_dir).events)
        self.start = 0.0  # seconds from the launch to the first step
        self.process: subprocess.Popen[bytes]
        self._output = folder / "output"
        self._config = folder / "rehearsal.toml"
        self._mark = 0
        self._began = False

    @contextmanager
    def launched(self, more: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Start the job with more options than those of every rehearsal, and end it."""
        tables = _options(self.wish.config, more)
        # Also a script that names a global tier itself saves to this one: the file has priority.
        tables["checkpoints"]["global_url"] = str(self.run_dir.parent / "global")
        self._config.write_text(_toml(tables))
        words = [sys.executable, "-m", "outlast", "run", "--nproc-per-node", str(self.wish.ranks)]
        words += ["--run-dir", str(self.run_dir), "--config", str(self._config)]
        words += [str(self.wish.script or example()), *self.wish.arguments]
        words += ["--steps", "1000000"] if self.wish.script is None else []
        self.mark()
        # A signal that ends this process in the middle of the start would leave a launch that nobody ends.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        try:
            self._launch(words, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield
        finally:
            self.end()

    def _launch(self, words: Sequence[str], mask: Iterable[signal.Signals | int]) -> None:
        parent = os.getpid()

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(parent)

        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                words,
                env={name: one for name, one in settings.inherited().items() if not name.startswith("PET_")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=begin,  # noqa: PLW1509 - the checks' thread has ended
            )
        self._began = True

    def mark(self) -> None:
        """Let the records from now on be the new ones."""
        self.observer.look()
        self._mark = len(self.observer.records)

    @property
    def new(self) -> list[Record]:
        """The records since the mark."""
        return self.observer.records[self._mark :]

    def see(self, condition: Callable[[Sequence[Record]], bool], share: float = 1.0) -> bool:
        """Wait until the new records are as wanted; False: the job has ended, or a share of the time has."""
        now = time.monotonic()
        until = now + share * (self.until - now)
        while True:
            ended = self.process.poll() is not None
            self.observer.look()
            if condition(self.new):
                return True
            if ended or time.monotonic() > until:
                return False
            time.sleep(_LOOK)

    def copies(self) -> list[Path]:
        """Return the committed checkpoints on disk."""
        return [path.parent for path in RunFolder(self.run_dir).checkpoints.glob("step-*.g*/COMMIT")]

    def exit_code(self) -> int | None:
        """Return the exit code of the launch; None: it has not ended in time."""
        try:
            code = self.process.wait(max(0.1, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        self.observer.look()
        return code

    def has_finished(self) -> bool:
        """Say whether the script has come to its end, which is no failure; a job that ends has a moment."""
        left = self.until - time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(min(_ENDS_WITHIN, max(_ENDS_AT_LEAST, left)))
        return self.process.poll() == ExitCode.OK

    def no_start(self, seconds: float) -> Diagnosis:
        """Return what is told when no step came."""
        code = self.process.poll()
        if code == ExitCode.OK:
            return policy.unrehearsed("start", f"{_FINISHED}, without a step that was reported")
        if code is None:
            return policy.unrehearsed("start", f"no step was reported in {seconds:.0f} s: {self.said()}")
        return policy.broken(
            "start", f"the job ended with exit code {code} before its first step: {self.said()}"
        )

    def failed(self, path: str, began: float, found: str) -> Diagnosis:
        """Return what is told of a path that did not go on: nothing where time was short."""
        waited = time.monotonic() - began
        if self.process.poll() is None and waited < _STARTS * self.start:
            why = f"{waited:.0f} s were left for it, and the start took {self.start:.0f} s"
            return policy.unrehearsed(path, why)
        return policy.broken(path, found)

    def said(self) -> str:
        """Return the newest fault, or the last line of the output."""
        reasons = [one.reason for one in self.new if isinstance(one, FaultSeen)]
        if reasons:
            return reasons[-1]
        with open(self._output, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_SAID))
            lines = file.read(_MOST_SAID).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self) -> None:
        """End the launch, if there is one; its ranks end with it."""
        if self._began:
            campaign.stop(self.process)


def _options(config: Config, more: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tables of a rehearsal.

    They are those of the job, less what is measured, what leaves the folder, and what needs other nodes.
    """
    found = {table: settings.changed(getattr(config, table)) for table in settings.TABLES}
    dropped = {
        "checkpoints": (
            *("save_interval_seconds", "non_persistent_save_interval", "keep_ancestors"),
            *("global_url", "global_options", "global_every"),
        ),
        "preemption": ("preempt_time", "notice_file", "exit_signals", "enable_exit_handler"),
        "health": ("ledger",),
        "parallelism": tuple(found["parallelism"]),
        "stragglers": ("action",) if config.stragglers.action is StragglerAction.REPLACE else (),
        "tripwire": ("tripwire_replicas",),
        "fault_tolerance": (
            *("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout"),
            *("rank_section_timeouts", "max_restarts", "max_restarts_per_day"),
        ),
    }
    for table, names in dropped.items():
        for name in names:
            found[table].pop(name, None)
    found["checkpoints"]["save_interval"] = _SAVE_INTERVAL
    for table, values in more.items():
        found[table].update(values)
    return found


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {_value(one)}" for name, one in values.items())]
    return "\n".join(lines) + "\n"


def _value(one: Any) -> str:
    if isinstance(one, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_value(value)}" for name, value in one.items()) + " }"
    if isinstance(one, (list, tuple)):
        return "[" + ", ".join(map(_value, one)) + "]"
    return json.dumps(one.value if isinstance(one, Enum) else one).replace("Infinity", "inf")
