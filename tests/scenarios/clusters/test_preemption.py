"""Jobs on a real Slurm that are told to end: every rank's state is saved, and the job comes back for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scenarios.clusters.test_slurm import OUTLAST, Job
from tests.support.launching import SCRIPTS, until
from tests.support.ranks import copies, lines
from tests.support.slurm_cluster import SlurmCluster, missing

SCRIPT = SCRIPTS / "preempted.py"
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "a cluster can be started"),
    pytest.mark.timeout(420),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Trained(Job):
    """A job of two ranks under the launcher; it is done after a number of steps."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, steps: int, *words: str, submit: tuple[str, ...] = ()
    ):
        self.trace = folder / "trace"
        run = ("--run-dir", str(folder / "run"), "--nproc-per-node=2")
        script = (str(SCRIPT), str(self.trace), str(folder / "run"), str(steps), *words)
        options = ("--lead=60", "--sbatch=exclusive", *submit)
        job_id = cluster.ask(*OUTLAST, "slurm", "submit", *options, "--", *run, *script).strip()
        super().__init__(cluster, folder, job_id)

    def ends(self) -> dict[str, str]:
        (self.trace / "hurry").touch()
        return super().ends()

    def reaches(self, step: int) -> None:
        def there() -> bool:
            return all(
                any(one.get("step", -1) >= step for one in lines(self.trace / f"rank-{rank}"))
                for rank in (0, 1)
            )

        until(there, f"step {step}; output:\n{self.output()}")

    def resumed(self) -> list[list[int]]:
        """Return, for each rank, at which step each of its processes began, and at which the first ended."""
        found = []
        for rank in (0, 1):
            told = lines(self.trace / f"rank-{rank}")
            starts = [one["restored"] for one in told if "restored" in one]
            found.append([*starts, next((one["ended"] for one in told if "ended" in one), -1)])
        return found


def test_a_signal_to_every_process_twice_is_one_save_and_one_requeue(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Trained(cluster, tmp_path, 400, "loader", "pace=0.05")
    job.reaches(10)
    cluster.ask("scancel", "--signal=TERM", job.id)
    time.sleep(0.3)
    cluster.ask("scancel", "--signal=TERM", job.id)
    job.shows("allocation 2")
    assert job.ends()["JobState"] == "COMPLETED", job.output()
    first, second = job.resumed()
    assert first == second
    assert first[0] == 0
    assert first[1] == first[2] > 10, job.output()
    assert job.outcomes() == ["requeue", "finish"]


def test_a_signal_to_one_rank_alone_gives_the_job_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Nothing else hears of it: the exit code of the ranks is what asks for the next allocation."""
    job = Trained(cluster, tmp_path, 400, "pace=0.05")
    job.reaches(10)
    os.kill(rank_pids(job)[1], signal.SIGTERM)
    job.shows("allocation 2")
    assert job.ends()["JobState"] == "COMPLETED", job.output()
    first, second = job.resumed()
    assert first == second
    assert first[1] == first[2] > 10, job.output()
    assert job.ledger()["history"][0]["exit_code"] == 75


def rank_pids(job: Trained) -> list[int]:
    """Return the pids of the ranks, by the event log of their launcher."""
    started = [one for one in lines(job.run / "events.jsonl") if one["kind"] == "generation_started"]
    return [int(pid) for pid in started[-1]["pids"]]


def preempt(cluster: SlurmCluster) -> None:
    cluster.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")


def test_a_job_that_is_preempted_while_it_saves_comes_back_with_that_save(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The save takes 5 s of the 20 that the partition gives."""
    job = Trained(cluster, tmp_path, 400, "slow=5", "pace=0.05", submit=("--partition=low",))
    job.reaches(10)
    (job.trace / "slow").touch()
    preempt(cluster)
    job.shows("Graceful shutdown complete")
    (job.trace / "slow").unlink()
    job.shows("allocation 2")
    assert job.ends()["JobState"] == "COMPLETED", job.output()
    first, second = job.resumed()
    assert first == second
    assert first[1] == first[2] > 10, job.output()


def test_a_save_that_outlasts_the_grace_costs_the_steps_since_the_one_before(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    words = ("slow=200", "pace=0.05", "interval=5")
    job = Trained(cluster, tmp_path, 400, *words, submit=("--partition=low",))
    job.reaches(12)
    until(lambda: copies(job.run), "a copy")
    (job.trace / "slow").touch()
    with ends_of(rank_pids(job)) as ended:
        preempt(cluster)
        job.shows("SIGTERM")
        until(ended, f"the end of the ranks:\n{job.output()}")
    (job.trace / "slow").unlink()
    job.shows("allocation 2")
    assert job.ends()["JobState"] == "COMPLETED", job.output()
    first, second = job.resumed()
    assert first[1] == second[1] >= 5, job.output()
    assert first[1] % 5 == 0


@contextlib.contextmanager
def ends_of(pids: list[int]) -> Iterator[Callable[[], bool]]:
    """Yield what says whether all of these processes have ended; one that nobody reaps has."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    try:
        yield lambda: len(poller.poll(0)) == len(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
