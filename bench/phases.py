"""phases: processes end or stop in each phase of a job, and what it needs is gone for a while in each.

One job of two ranks at a time (that of double_kills.py), in a mount namespace with a /dev/shm of its own. The
phases: the launcher starts, the ranks meet, a step, a save, a restore after a killed rank, the end, the
grace after SIGTERM. Each is met by the record, file or process that begins it. Required: the last launch ends
with 0 (the first one, unless its launcher was killed or the job was told to end), the weights are bitwise
those of a calm job, at most two steps are repeated, no other rank is convicted, and no process or shared
memory is left. A stopped launcher is continued; other stopped processes are not. A disk with an outage: its
file system is frozen, or it is a FUSE file system that answers nothing, errors, or is full, as NFS is. The
link between two nodes is cut by pauses.py. Needs root. Prints JSON lines; exits with 1 if anything was wrong.

    python bench/phases.py --out phases.jsonl               # goes on where an earlier run ended
    python bench/phases.py --cases 20 --only outages --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from double_kills import LIMIT, Job, calm_run
from peers import figures

from tests.support.launching import SCRIPTS

PROCESSES = ("agent", "cleaner", "zygote", "standby", "writer", "collector", "store host", "rank 0", "rank 1")
PHASES = ("start", "meeting", "step", "save", "restore", "end", "grace")
DISKS = ("hung", "failing", "full", "frozen")
SHARED_MEMORY = ("shm bytes", "shm inodes")
FOLDERS = ("runtime folder", "memory folder", "logs", "run folder")
HOWS = ("SIGKILL", "SIGSTOP")
HELPERS = ("cleaner", "zygote", "standby", "writer", "collector")
STOPPED_AGENT = 15.0  # seconds until it is continued
CALM, WIDTH, NAP = 40, 256, 0.05
INODES = 4096
LOOK = 0.001
THERE_WITHIN = 3.0  # seconds for a process to be there; a standby comes late, and a phase may have none
LAUNCHES = 3


@dataclass(frozen=True)
class Case:
    """One job: ``what`` ends or fails in ``phase``; ``how`` is a signal, or seconds."""

    phase: str
    what: str
    how: str

    @property
    def seconds(self) -> float:
        return 0.0 if self.how in HOWS else float(self.how)

    @property
    def steps(self) -> int:
        return CALM + round(self.seconds / NAP / 2)


def cases(seed: int, only: str, seconds: list[float]) -> list[Case]:
    """Return all cases, in an order that the seed draws: any beginning of it is a sample."""
    found = []
    for phase in PHASES:
        if only != "outages":
            found += [Case(phase, what, how) for what in PROCESSES for how in HOWS]
        if only != "processes":
            found += [Case(phase, what, f"{each:g}") for what in (*DISKS, *SHARED_MEMORY) for each in seconds]
            found += [Case(phase, what, "0") for what in FOLDERS]
    random.Random(seed).shuffle(found)
    return found


class Disk:
    """The file system that the run folder is on, which can have an outage."""

    def __init__(self, job: Job, what: str) -> None:
        self._switch = job.folder / "outage"
        self._mount = job.run
        self._frozen = what == "frozen"
        self._word = {"hung": "hang", "failing": "EIO", "full": "ENOSPC"}.get(what, "")
        self._server: subprocess.Popen[bytes] | None = None
        job.run.mkdir()
        if self._frozen:
            image = job.folder / "image"
            with open(image, "wb") as file:
                file.truncate(256 << 20)
            _run("mkfs.ext4", "-q", "-F", image)
            _run("mount", "-o", "loop,noatime", image, job.run)
        elif self._word:
            behind = job.folder / "behind"
            behind.mkdir()
            job.log = behind / "events.jsonl"
            words = (SCRIPTS / "faulty_files.py", behind, job.run, self._switch, os.getpid())
            command = [sys.executable, *map(str, words)]
            self._server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            assert self._server.stdout is not None
            if b"mounted" not in self._server.stdout.readline():
                raise SystemExit("no FUSE file system can be mounted here")

    def fail(self) -> None:
        if self._frozen:
            _run("fsfreeze", "--freeze", self._mount)
        else:
            whole = self._switch.with_suffix(".whole")
            whole.write_text(self._word)
            whole.rename(self._switch)

    def heal(self) -> None:
        if self._frozen:
            _run("fsfreeze", "--unfreeze", self._mount)
        else:
            self._switch.unlink(missing_ok=True)

    def close(self) -> None:
        if self._frozen or self._server is not None:
            subprocess.run(["umount", "-l", self._mount], check=False)
        if self._server is not None:
            self._server.kill()
            self._server.wait()


class SharedMemory:
    """/dev/shm without room."""

    def __init__(self, what: str) -> None:
        self._inodes = what == "shm inodes"
        self._filling = Path("/dev/shm/filling")

    def fail(self) -> None:
        self._filling.mkdir()
        with contextlib.suppress(OSError):
            if self._inodes:
                for number in range(2 * INODES):
                    (self._filling / str(number)).touch()
            with open(self._filling / "file", "wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass

    def heal(self) -> None:
        shutil.rmtree(self._filling)

    def close(self) -> None:
        shutil.rmtree(self._filling, ignore_errors=True)


class Folder:
    """A folder that somebody removes."""

    def __init__(self, job: Job, what: str) -> None:
        self._job, self._what = job, what

    def fail(self) -> None:
        runtime = f"outlast-{self._job.launchers[-1]}-*"
        shared = {"runtime folder": runtime, "memory folder": "outlast-memory-*"}
        found = [self._job.run / "logs"] if self._what == "logs" else [self._job.run]
        if self._what in shared:
            found = list(Path("/dev/shm").glob(shared[self._what]))
        for path in found:
            shutil.rmtree(path, ignore_errors=True)

    def heal(self) -> None:
        pass

    def close(self) -> None:
        pass


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=60, capture_output=True)


def begun(job: Job, case: Case, at: int) -> Callable[[], bool]:
    """Return what says whether the phase has begun."""
    records = job.records
    if case.phase == "start":
        what = {"agent": "launcher"}.get(case.what, case.what) if case.what in PROCESSES else "cleaner"
        runtime = f"outlast-{job.launchers[-1]}-*"
        return lambda: bool(job.find(what)) and bool(list(Path("/dev/shm").glob(runtime)))
    if case.phase in ("meeting", "restore"):
        wanted = 1 if case.phase == "meeting" else 2
        return lambda: sum(one["kind"] == "generation_started" for one in records()) >= wanted
    if case.phase == "save":
        saving = (job.log.parent / "checkpoints").glob
        return lambda: (
            len(job.steps()) >= at and (len(job.steps()) >= at + 12 or bool(list(saving(".tmp-*"))))
        )
    if case.phase == "end":
        return (job.folder / "weights").exists
    return lambda: len(job.steps()) >= at


class Play:
    """A case that is carried out."""

    def __init__(self, case: Case, seed: int, folder: Path) -> None:
        self.case = case
        dice = random.Random(f"{seed}/{case}")
        self.at = dice.randrange(12, 28)
        options = ["--nproc-per-node=2"]
        if case.what == "collector":
            config = folder / "config.toml"
            config.write_text('[health]\ntelemetry = "simulate:healthy,devices=1"\n')
            options = [f"--ft-cfg-path={config}"]
        elif case.how == "SIGSTOP":  # else it may take minutes until a rank is looked at
            options += ["--ft-rank-heartbeat-timeout=10", "--ft-initial-rank-heartbeat-timeout=40"]
        self.job = Job(folder, case.steps, WIDTH, tuple(options))
        self.outage: Disk | SharedMemory | Folder | None = None
        if case.what in DISKS:
            self.outage = Disk(self.job, case.what)
        elif case.what in SHARED_MEMORY:
            self.outage = SharedMemory(case.what)
        elif case.what in FOLDERS:
            self.outage = Folder(self.job, case.what)
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._killed_a_rank = self._done = False
        self._wanted = 0.0  # when the phase began
        self.told: list[str] = []

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _strike(self) -> None:
        case, job = self.case, self.job
        assert job.launcher is not None
        self._done = True
        if self.outage is not None:
            self.outage.fail()
            self.told.append(case.what)
            self._later(case.seconds, self.outage.heal)
            return
        pid = job.find("launcher" if case.what == "agent" else case.what)
        if not pid and time.monotonic() < self._wanted + THERE_WITHIN:
            self._done = False
        elif pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, case.how))
                self.told.append(f"{case.how} to {case.what}, pid {pid}")
                if case.how == "SIGSTOP" and case.what == "agent":
                    self._later(STOPPED_AGENT, lambda: _signal(pid, signal.SIGCONT))

    def look(self, ready: Callable[[], bool]) -> None:
        """Do what is due."""
        case, job = self.case, self.job
        assert job.launcher is not None
        for due in [one for one in self._due if time.monotonic() >= one[0]]:
            self._due.remove(due)
            due[1]()
        if self._done:
            return
        if case.phase == "restore" and not self._killed_a_rank:
            if len(job.steps()) >= self.at and (pid := job.find("rank 1")):
                _signal(pid, signal.SIGKILL)
                self._killed_a_rank = True
        elif self._wanted or ready():
            if case.phase == "grace" and not self._wanted:
                _signal(job.launcher.pid, signal.SIGTERM)
            self._wanted = self._wanted or time.monotonic()
            self._strike()

    def run(self, calm: str) -> dict[str, Any]:
        """Carry it out; return the line."""
        job, case = self.job, self.case
        bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True, cwd=job.folder)
        began, codes, wrong = time.monotonic(), [], []
        refused = case.phase == "start" and case.what in DISKS  # a run folder that cannot be used: 73
        again = refused or case.phase == "grace" or (case.what, case.how) == ("agent", "SIGKILL")
        launches = LAUNCHES if again else 1
        for _ in range(launches):
            job.start()
            assert job.launcher is not None
            ready = begun(job, case, self.at)
            deadline = time.monotonic() + LIMIT + case.seconds
            while job.launcher.poll() is None and time.monotonic() < deadline:
                self.look(ready)
                time.sleep(LOOK if not self._done else 0.02)
            if job.launcher.poll() is None:
                wrong.append(f"the launcher did not end within {LIMIT:.0f} s")
                job.launcher.kill()
            codes.append(job.launcher.wait())
            while self._due:  # an outage outlives the job
                self.look(lambda: False)
                time.sleep(0.02)
            if codes[-1] == 0 or wrong:
                break
        wrong += self._judged(codes, calm)
        if bystander.poll() is not None:
            wrong.append("a process beside the job was ended")
        bystander.kill()
        bystander.wait()
        line = {**asdict(case), "at": self.at, "told": self.told, "codes": codes}
        line |= {"lost": job.lost(), "seconds": round(time.monotonic() - began, 1), "wrong": wrong}
        return {**line, "load": round(os.getloadavg()[0], 1)}

    def _judged(self, codes: list[int], calm: str) -> list[str]:
        job, case, wrong = self.job, self.case, []
        if not self.told and not self._wanted:
            wrong.append("the phase was not met")
        if codes[-1] != 0:
            wrong.append(f"ended with {codes}")
        weights = job.folder / "weights"
        if not weights.exists():
            wrong.append("no weights")
        elif weights.read_text() != calm:
            wrong.append("other weights than those of the calm run")
        if max((step for _, step in job.steps()), default=0) != case.steps:
            wrong.append("the last step is missing")
        if job.lost() > (11 if case.what in (*SHARED_MEMORY, "memory folder") else 2):
            wrong.append(f"{job.lost()} steps lost")
        struck = case.what[-1] if case.what.startswith("rank") else "1" if case.phase == "restore" else ""
        for one in job.records():
            if one["kind"] != "fault_seen" or case.what in ("store host", "agent"):
                continue
            if str(one["rank"]) not in (struck, "1" if case.phase == "restore" else struck):
                wrong.append(f"rank {one['rank']} was convicted: {one['fault']}: {one['reason']}")
        if case.what == "run folder":
            wrong = [one for one in wrong if "lost" not in one]
        deadline = time.monotonic() + 20.0
        while (left := job.left() + _shared()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return wrong + left

    def close(self) -> None:
        if self.outage is not None:
            self.outage.close()
        for pid in self.job.seen:
            if self.job.left():
                _signal(pid, signal.SIGKILL)
        for path in Path("/dev/shm").iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _shared() -> list[str]:
    return [str(one) for one in Path("/dev/shm").iterdir() if one.name != "filling"]


def play(case: Case, seed: int, work: Path, calm: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"{case.phase}-{case.what}-".replace(" ", "-"), dir=work))
    play = Play(case, seed, folder)
    try:
        line = play.run(calm)
        if line["wrong"]:
            line["folder"] = str(folder)
            if play.job.run.is_mount():
                shutil.copytree(play.job.run, folder / "copy", ignore_dangling_symlinks=True)
    finally:
        play.close()
    if not line["wrong"]:
        shutil.rmtree(folder, ignore_errors=True)
    return line


def main() -> int:
    """Run the jobs that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, help="how many of them; all by default")
    parser.add_argument("--only", choices=["processes", "outages"], default="")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--what", nargs="+", help="only these processes and outages")
    parser.add_argument("--outages", type=float, nargs="+", default=[3.0, 30.0], metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after that many")
    parser.add_argument("--out", type=Path, help="JSON lines; cases that are in it are not repeated")
    parser.add_argument("--work", type=Path, help="folder for the jobs; those that went well are removed")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("namespaces and mounts need root")
    if not options.inside:
        command = ["unshare", "--mount", sys.executable, __file__, "--inside", *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode
    _run("mount", "-t", "tmpfs", "-o", f"mode=1777,size=512m,nr_inodes={INODES}", "tmpfs", "/dev/shm")
    known: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        known = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {Case(one["phase"], one["what"], one["how"]) for one in known if "phase" in one}
    wanted = [
        one
        for one in cases(options.seed, options.only, options.outages)
        if one.phase in options.phases and (options.what is None or one.what in options.what)
    ][: options.cases]
    out = figures.Lines(options.out)
    out.write(figures.surroundings(options.seed))
    work = options.work or Path(tempfile.mkdtemp(prefix="outlast-phases-"))
    work.mkdir(parents=True, exist_ok=True)
    end, bad, calm = time.monotonic() + options.seconds, 0, {}
    for case in [one for one in wanted if one not in done]:
        if time.monotonic() > end:
            break
        if case.steps not in calm:
            calm[case.steps] = calm_run(case.steps, WIDTH)
        line = play(case, options.seed, work, calm[case.steps])
        bad += bool(line["wrong"])
        out.write(line)
        figures.say(json.dumps(line))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
