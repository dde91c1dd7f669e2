"""The memory of ended workers: the next ones start when the driver has freed it, or a note says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.launching import Run, running, until
from tests.support.nvml_library import StandIn

HEALTH = """\
[health]
telemetry = "{telemetry}"
kernel_log = "{log}"
telemetry_interval = 0.2
call_timeout = {timeout}
"""
LINGERS = 3  # seconds

# Each rank, and a process that it starts, hold memory of a device. A rank begins with what has been freed.
SCRIPT = """
import os, pathlib, subprocess, sys, time, outlast
driver, trace = map(pathlib.Path, sys.argv[1:3])
rank = int(os.environ["RANK"])
freed = driver.with_name(driver.name + ".freed")
begun = freed.read_text().split() if freed.exists() else []
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pids = [str(os.getpid()), str(child.pid)]
with open(f"{driver}.processes", "a") as file:
    file.write("".join(f"{rank} {pid}\\n" for pid in pids))
with open(trace / f"rank-{rank}", "a") as file:
    file.write(" ".join(pids) + ";" + " ".join(begun) + "\\n")
for step in range(1, 100_000):
    outlast.progress(step)
    time.sleep(0.05)
"""

# One rank of two ends; the other one goes on in its process. Torch is needed for the aborts only.
REENTERING = """
import os, pathlib, sys, time, outlast
driver, trace = map(pathlib.Path, sys.argv[1:3])
freed = driver.with_name(driver.name + ".freed")

@outlast.resilient
def train():
    rank, pid = int(os.environ["RANK"]), os.getpid()
    begun = freed.read_text().split() if freed.exists() else []
    with open(f"{driver}.processes", "a") as file:
        file.write(f"{rank} {pid}\\n")
    with open(trace / f"rank-{rank}", "a") as file:
        file.write(f"{pid};{' '.join(begun)}\\n")
    for step in range(1, 100_000):
        outlast.progress(step)
        time.sleep(0.05)

train()
"""


class Job:
    """Two ranks that compute on the devices of the stand-in."""

    def __init__(
        self, folder: Path, script: str = SCRIPT, telemetry: str = "nvml", timeout: float = 20.0
    ) -> None:
        self.driver = StandIn(folder)
        self.trace = folder / "trace"
        self.trace.mkdir()
        log, config, program = folder / "kernel.log", folder / "outlast.toml", folder / "train.py"
        log.touch()
        program.write_text(script)
        config.write_text(HEALTH.format(telemetry=telemetry, log=log, timeout=timeout))
        options = ("--config", str(config), "--nproc-per-node", "2")
        words = (str(self.driver.path), str(self.trace))
        self.run = Run(folder / "run", str(program), *words, options=options)

    def start_of(self, rank: int, generation: int) -> tuple[list[int], set[int]]:
        """Return the processes of a rank, and those whose memory had been freed when it began."""
        path = self.trace / f"rank-{rank}"

        def lines() -> list[str]:
            found = path.read_text().splitlines() if path.exists() else []
            return found if len(found) >= generation else []

        what = f"rank {rank} of generation {generation}"
        line = until(lines, lambda: f"{what}\n{self.run.console()}")[generation - 1]
        pids, freed = ([int(pid) for pid in part.split()] for part in line.split(";"))
        return pids, set(freed)

    def trains(self) -> list[list[int]]:
        """Wait until the collector has read a device; return the processes of each rank."""
        pids = [self.start_of(rank, 1)[0] for rank in range(2)]
        read = lambda: [one for one in self.run.records("telemetry") if one["what"] == "device"]  # noqa: E731
        until(read, "a record of a device")
        return pids

    def notes(self) -> list[str]:
        """Return what the agent reported of the memory of ended workers."""
        return [
            one["reason"]
            for one in self.run.records("note")
            if "NVML" in one["reason"] or "GPU" in one["reason"]
        ]


def test_the_next_workers_start_when_the_memory_of_all_before_is_free(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for device in range(2):
        job.driver.put(device, lingers=LINGERS)
    with running(job.run, **job.driver.environment) as run:
        first, second = job.trains()
        os.kill(first[0], signal.SIGKILL)
        for rank in range(2):
            _, freed = job.start_of(rank, 2)
            assert {first[0], *second} <= freed, "it has started before"
        (note,) = job.notes()
        run.until(lambda: note in run.console())


def test_processes_that_nvml_does_not_list_are_not_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with running(job.run, **job.driver.environment):
        first, _ = job.trains()
        job.driver.processes.write_text("0 1\n1 1\n")  # as in a container: others, and numbers of the host
        os.kill(first[0], signal.SIGKILL)
        job.start_of(0, 2)
        assert job.notes() == []


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path, timeout=0.5)
    with running(job.run, **job.driver.environment) as run:
        first, _ = job.trains()
        job.driver.put(0, hang=1)
        os.kill(first[0], signal.SIGKILL)
        job.start_of(0, 2)
        (note,) = job.notes()
        run.until(lambda: note in run.console())


@pytest.mark.long
def test_without_telemetry_nothing_is_asked(tmp_path: Path) -> None:
    job = Job(tmp_path, telemetry="off")
    job.driver.put(0, lingers=1000)
    with running(job.run, **job.driver.environment):
        first, _ = job.start_of(0, 1)
        os.kill(first[0], signal.SIGKILL)
        job.start_of(0, 2)
        assert job.notes() == []


@pytest.mark.long
def test_a_rank_that_is_replaced_while_others_stay_waits_for_its_own_memory(tmp_path: Path) -> None:
    job = Job(tmp_path, REENTERING)
    job.driver.put(1, lingers=LINGERS)
    with running(job.run, **job.driver.environment):
        (kept,), (ended,) = job.trains()
        os.kill(ended, signal.SIGKILL)
        (replaced,), freed = job.start_of(1, 2)
        assert replaced != ended
        assert ended in freed
        assert kept not in freed
        (same,), _ = job.start_of(0, 2)
        assert same == kept


@pytest.mark.long
def test_a_kept_rank_that_is_killed_as_it_does_not_leave_is_replaced_when_its_memory_is_free(
    tmp_path: Path,
) -> None:
    options = "(hang_timeout=20, hard_timeout=22)"
    job = Job(tmp_path, REENTERING.replace("@outlast.resilient", f"@outlast.resilient{options}"))
    job.driver.put(0, lingers=LINGERS)
    with running(job.run, **job.driver.environment):
        (stopped,), (ended,) = job.trains()
        os.kill(stopped, signal.SIGSTOP)
        os.kill(ended, signal.SIGKILL)
        (replaced,), freed = job.start_of(0, 2)
        assert replaced != stopped
        assert stopped in freed
        until(lambda: str(stopped) in job.run.console(), job.run.console)
