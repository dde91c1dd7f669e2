"""Processes of a job that are killed, stopped or left behind, and files that vanish under it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launching import Run, is_gone, running, runtime_folders, until
from tests.support.processes import child_running, children_of, state_of, tree_of

pytestmark = pytest.mark.timeout(600)
STEPS = 60

TRAINING = """
import os, subprocess, sys, time
from pathlib import Path
import torch, outlast

HERE = Path(__file__).parent
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
options = outlast.CheckpointOptions(non_persistent_save_interval=1)
with outlast.start(save_interval=20, checkpoints=options) as session:
    done = session.restore(model=model, optimizer=optimizer)
    with open(HERE / "loaded", "a") as file:
        file.write(f"{done}\\n")
    for step in session.steps(int(sys.argv[1])):
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (HERE / "step.new").write_text(str(step + 1))
        (HERE / "step.new").rename(HERE / "step")
        time.sleep(0.02)
"""


class Training(Run):
    """A job of one rank that keeps every step in memory and every 20th on disk."""

    def __init__(self, folder: Path, steps: int = 100_000, options: tuple[str, ...] = ()) -> None:
        self.script = folder / "train.py"
        self.script.write_text(TRAINING)
        super().__init__(folder / "run", str(self.script), str(steps), options=options)

    @property
    def step(self) -> int:
        try:
            return int((self.script.parent / "step").read_text())
        except FileNotFoundError:
            return 0

    def reach(self, step: int) -> None:
        until(lambda: self.step >= step, lambda: f"step {step}:\n{self.console()}")

    def stands(self, seconds: float) -> bool:
        """Say whether the last step is that old."""
        return time.time() - (self.script.parent / "step").stat().st_mtime > seconds

    @property
    def writer(self) -> int:
        launcher = self.process
        assert launcher is not None
        return int(self.until(lambda: child_running(launcher.pid, "outlast.checkpoint.writer"), "a writer"))

    def on_disk(self) -> int:
        """Return the newest step that is committed."""
        return max((one["step"] for one in self.records("saved")), default=0)


def ended(run: Run) -> dict[str, object]:
    (found,) = run.records("run_ended")
    return found


LEAVES = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
nested = "sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait".format(here / f"nested-{generation}")
subprocess.Popen(["sh", "-c", nested], start_new_session=True)
daemon = "setsid sleep 1000 & echo $! > {0}.new; mv {0}.new {0}".format(here / f"daemon-{generation}")
subprocess.run(["sh", "-c", daemon], check=True)
while not all((here / f"{one}-{generation}").exists() for one in ("nested", "daemon")):
    time.sleep(0.01)
(here / f"ready-{generation}").touch()
while not (here / f"go-{generation}").exists():
    time.sleep(0.01)
sys.exit(3 if generation == "0" else 0)
"""


@pytest.mark.parametrize("end", ["restart", "agent"])
def test_nothing_that_a_rank_has_started_outlives_its_generation(tmp_path: Path, end: str) -> None:
    """Nor what has a session of its own, or a parent there; nor if the agent is killed."""
    script = tmp_path / "train.py"
    script.write_text(LEAVES)

    def left(generation: int) -> list[int]:
        until((tmp_path / f"ready-{generation}").exists, f"the rank; console:\n{run.console()}")
        found = [int((tmp_path / f"{one}-{generation}").read_text()) for one in ("nested", "daemon")]
        assert not any(map(is_gone, found))
        return found

    run = Run(tmp_path / "run", str(script), str(tmp_path), options=("--max-restarts=1",))
    with running(run):
        assert run.process is not None
        first = left(0)
        if end == "agent":
            run.process.send_signal(signal.SIGKILL)
            until(lambda: all(map(is_gone, first)), "the end of all processes")
            until(lambda: not runtime_folders(run.process.pid), "the runtime folder to go")
            return
        (tmp_path / "go-0").touch()
        second = left(1)
        assert all(map(is_gone, first)), "they have ended before the next generation"
        (tmp_path / "go-1").touch()
        assert run.finish() == 0, run.console()
    assert all(map(is_gone, second))


SHARES = """
import os, signal, sys, time
from multiprocessing import shared_memory
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
prefix = f"outlast_test_{os.environ['TORCHELASTIC_RUN_ID']}"
found = [one for one in os.listdir("/dev/shm") if one.startswith(prefix)]
found = [one for one in found if not one.startswith(f"{prefix}-{generation}")]
with open(here / "found", "a") as file:
    file.write("".join(f"{one}\\n" for one in found))
names = [f"{prefix}-{generation}-{rank}-{number}" for number in range(100)]  # to remove them takes a while
made = [shared_memory.SharedMemory(name, create=True, size=1) for name in names]
(here / f"made-{generation}-{rank}").touch()
while not all((here / f"made-{generation}-{one}").exists() for one in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
if generation < 2:
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
for memory in made:
    memory.close()
    memory.unlink()
"""


@pytest.mark.parametrize("ranks", [2, 1])
def test_the_shared_memory_of_killed_ranks_does_not_pile_up(tmp_path: Path, ranks: int) -> None:
    """Of one rank without a zygote nothing is left but the process that is to remove it."""
    script = tmp_path / "train.py"
    script.write_text(SHARES)
    others = Path(f"/dev/shm/outlast_test_other_{os.getpid()}")
    others.touch()
    try:
        words, options = (str(script), str(tmp_path)), ("--nproc-per-node=2",)
        if ranks == 1:
            words, options = (sys.executable, *words), ("--no-python",)
        run = Run(tmp_path / "run", *words, options=options, cold=ranks == 1)
        with running(run):
            assert run.finish() == 0, run.console()
        assert (tmp_path / "found").read_text() == ""
        assert others.exists()
    finally:
        others.unlink()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_writer_that_is_killed_or_stopped_while_the_job_ends_is_replaced(
    tmp_path: Path, number: int
) -> None:
    with running(Training(tmp_path)) as run:
        assert isinstance(run, Training)
        run.reach(25)
        first = run.writer
        run.process.send_signal(signal.SIGTERM)
        os.kill(first, number)
        assert run.finish() == 143, run.console()
    assert run.on_disk() > 20, run.console()
    assert is_gone(first)


def pipes_of(pid: int) -> set[str]:
    """Return the pipes that a process has open."""
    found = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    return {one for one in found if one.startswith("pipe:")}


def test_a_writer_that_is_killed_after_the_ranks_have_ended_is_replaced(tmp_path: Path) -> None:
    """It is stopped meanwhile, so that it cannot be done before."""
    with running(Training(tmp_path, options=("--max-restarts=0",))) as run:
        assert isinstance(run, Training)
        run.reach(25)
        (rank,), writer, launcher = run.pids(), run.writer, run.process.pid
        os.kill(writer, signal.SIGSTOP)
        os.kill(rank, signal.SIGKILL)
        run.until(lambda: not pipes_of(writer) & pipes_of(launcher), "the writer to be left alone")
        os.kill(writer, signal.SIGKILL)
        assert run.finish() == 1, run.console()
    assert run.on_disk() > 20, run.console()
    assert is_gone(writer)


def test_a_save_that_no_writer_is_there_for_names_the_memory_and_not_the_disk(tmp_path: Path) -> None:
    """The launcher stands still, so that nobody replaces the writer that is killed."""
    with running(Training(tmp_path, steps=60)) as run:
        assert isinstance(run, Training)
        run.reach(25)
        memory = json.loads((run.folder / "memory.json").read_text())["memory"]
        writer = run.writer
        run.process.send_signal(signal.SIGSTOP)
        os.kill(writer, signal.SIGKILL)
        until(lambda: run.stands(4.0), run.console)
        run.process.send_signal(signal.SIGCONT)
        assert run.finish() == 0, run.console()
    reasons = [one["reason"] for one in run.records("note")]
    assert any(memory in one for one in reasons), reasons
    assert not any(str(run.folder / "checkpoints") in one for one in reasons), reasons


def test_no_process_of_a_killed_launcher_keeps_the_run_folder_locked(tmp_path: Path) -> None:
    """All of them stand still when the launcher is killed; the same command can be started at once."""
    held: dict[int, int] = {}
    try:
        with running(Training(tmp_path)) as run:
            assert isinstance(run, Training)
            run.reach(5)
            for pid in tree_of(run.process.pid)[1:]:
                with contextlib.suppress(ProcessLookupError):
                    held[pid] = os.pidfd_open(pid)
                    signal.pidfd_send_signal(held[pid], signal.SIGSTOP)
            writer = run.writer
            run.process.kill()
            run.process.wait()
            with open(run.folder / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where another has it
            until(lambda: state_of(writer) == "T", "the writer to stand still")
    finally:
        for descriptor in held.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            os.close(descriptor)
    until(lambda: all(map(is_gone, held)), "the end of all")
    assert runtime_folders(run.process.pid) == []


def ignores(pid: int, *numbers: int) -> bool:
    """Say whether a process ignores signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16)
    return all(mask >> number - 1 & 1 for number in numbers)


def test_a_launcher_ends_though_what_cleans_up_after_it_was_stopped(tmp_path: Path) -> None:
    script, go = tmp_path / "rank.sh", tmp_path / "go"
    script.write_text("while [ ! -e $1 ]; do sleep 0.05; done")
    held = -1
    try:
        with running(Run(tmp_path / "run", "sh", str(script), str(go), options=("--no-python",))) as run:
            run.pids()
            stubborn = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
            (cleaner,) = (pid for pid in children_of(run.process.pid) if ignores(pid, *stubborn))
            held = os.pidfd_open(cleaner)
            signal.pidfd_send_signal(held, signal.SIGSTOP)
            until(lambda: state_of(cleaner) == "T", "the cleaner to be stopped")
            go.touch()
            assert run.finish(60) == 0, run.console()
            assert is_gone(cleaner)
    finally:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(held, signal.SIGKILL)
            os.close(held)
    assert runtime_folders(run.process.pid) == []


@pytest.mark.parametrize("sudden", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_runtime_folder_that_was_removed_is_made_again(tmp_path: Path, sudden: bool) -> None:
    """At once, if workers are to be started; else soon."""
    with running(Training(tmp_path, steps=200)) as run:
        assert isinstance(run, Training)
        run.reach(25)
        (folder,) = runtime_folders(run.process.pid)
        shutil.rmtree(folder)
        if not sudden:
            until((folder / "control").exists, "the folder to be made again")
        os.kill(run.pids()[0], signal.SIGKILL)
        assert run.finish() == 0, run.console()
    assert ended(run)["exit_code"] == 0
    loaded = (tmp_path / "loaded").read_text().split()
    assert len(loaded) == 2
    assert int(loaded[1]) >= 20
    assert runtime_folders(run.process.pid) == []


@pytest.mark.long
def test_a_launcher_that_fails_brings_the_newest_state_to_disk(tmp_path: Path) -> None:
    with running(Training(tmp_path)) as run:
        assert isinstance(run, Training)
        run.reach(37)
        shutil.rmtree(run.folder / "logs")
        (run.folder / "logs").touch()
        os.kill(run.pids()[0], signal.SIGKILL)
        assert run.finish() == 73, run.console()
    assert ended(run)["exit_code"] == 73
    assert run.on_disk() >= 36
    assert runtime_folders(run.process.pid) == []


ENDS_EARLY = """
here=$1
if [ "$RANK" = 0 ]; then echo $$ > $here/pid.new; mv $here/pid.new $here/pid; exit 0; fi
while [ ! -e $here/go ]; do sleep 0.05; done
"""
REUSES = """
import os, signal, subprocess, sys, time
from pathlib import Path
here, end, command = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
launcher = subprocess.Popen(command)
def until(condition):
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
until((here / "pid").exists)
number = int((here / "pid").read_text())
until(lambda: not os.path.exists(f"/proc/{number}"))
while True:
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if bystander.pid == number:
        break
    bystander.kill()
    bystander.wait()
if end == "agent":
    launcher.kill()
(here / "go").touch()
launcher.wait()
until(lambda: not list(Path("/dev/shm").glob(f"outlast-{launcher.pid}-*")))
(here / "result").write_text(f"{launcher.returncode} {bystander.poll()}")
"""
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

needs_namespace = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="namespaces of processes cannot be made here",
)


@needs_namespace
@pytest.mark.leaves("/dev/shm/outlast-memory-")  # of the launcher that is killed
@pytest.mark.parametrize("end", ["job", pytest.param("agent", marks=pytest.mark.long)])
def test_a_process_with_the_number_of_a_rank_that_has_ended_is_not_killed(tmp_path: Path, end: str) -> None:
    (tmp_path / "rank.sh").write_text(ENDS_EARLY)
    words = ("sh", str(tmp_path / "rank.sh"), str(tmp_path))
    run = Run(tmp_path / "run", *words, options=("--no-python", "--nproc-per-node=2"))
    run.command[:0] = [*NAMESPACE, sys.executable, "-c", REUSES, str(tmp_path), end]
    with running(run):
        assert run.finish() == 0, run.console()
    code = -signal.SIGKILL if end == "agent" else 0
    assert (tmp_path / "result").read_text() == f"{code} None"


FAILS_FIRST = """
here=$1
grep -qx $$ $here/pids 2>/dev/null && { echo $$ >> $here/pids; sleep 0.5; exit 0; }
echo $$ >> $here/pids
exit 3
"""
HANDS_OUT_AGAIN = """
import subprocess, sys, time
from pathlib import Path
here, command = Path(sys.argv[1]), sys.argv[2:]
launcher = subprocess.Popen(command)
while launcher.poll() is None:
    pids = (here / "pids").read_text().split() if (here / "pids").exists() else []
    if pids and not Path("/proc", pids[-1]).exists():
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(int(pids[-1]) - 1))
    time.sleep(0.001)
sys.exit(launcher.returncode)
"""


@needs_namespace
def test_a_rank_with_the_number_of_one_that_failed_has_its_own_exit_code(tmp_path: Path) -> None:
    """Ranks fail until one has the number of the last, which each new process gets if it can."""
    (tmp_path / "rank.sh").write_text(FAILS_FIRST)
    words = ("sh", str(tmp_path / "rank.sh"), str(tmp_path))
    run = Run(tmp_path / "run", *words, options=("--no-python", "--max-restarts=3"))
    run.command[:0] = [*NAMESPACE, sys.executable, "-c", HANDS_OUT_AGAIN, str(tmp_path)]
    with running(run):
        assert run.finish() == 0, run.console()
    *failed, last = (tmp_path / "pids").read_text().split()
    assert last in failed
    assert len(run.records("fault_seen")) == len(failed), run.console()


MEETING = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
here = Path(sys.argv[1])
(here / os.environ["RANK"]).write_text(os.environ["MASTER_PORT"])
(here / os.environ["RANK"]).rename(here / f"port-{os.environ['RANK']}")
while not (here / "go").exists():
    time.sleep(0.01)
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def store_host(launcher: int, port: int) -> int:
    """Return the child of a launcher that alone listens at a port; 0: there is none yet."""
    found = [
        child.pid
        for child in psutil.Process(launcher).children()
        for one in child.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]
    return found[0] if len(found) == 1 else 0


def test_ranks_do_not_wait_for_a_store_whose_host_was_killed_before_they_met(tmp_path: Path) -> None:
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    run = Run(tmp_path / "run", str(script), str(tmp_path), options=("--nproc-per-node=2",), cold=True)
    with running(run):
        assert run.process is not None
        run.until((tmp_path / "port-0").exists)
        port = int((tmp_path / "port-0").read_text())
        host = run.until(lambda: store_host(run.process.pid, port), "the host of the store")
        os.kill(host, signal.SIGKILL)
        until(lambda: is_gone(host), "the end of the store host")
        (tmp_path / "go").touch()
        assert run.finish() == 0, run.console()
    faults = [(one["fault"], one["rank"]) for one in run.records("fault_seen")]
    assert ("crash", -1) in faults, "beside it perhaps a rank that has met it already"
    assert [one["action"] for one in run.records("action_taken")] == ["restart-in-job", "stop"]
