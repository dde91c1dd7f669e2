"""Jobs on a real Slurm: saved and requeued when they are stopped, and only then."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS, until
from tests.support.slurm_cluster import SlurmCluster, missing

TRAINING = SCRIPTS / "allocated.py"
OUTLAST = (sys.executable, "-m", "outlast")
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "a cluster can be started"),
    pytest.mark.timeout(420),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """A submitted job and what it leaves to read."""

    def __init__(self, cluster: SlurmCluster, folder: Path, job_id: str) -> None:
        self.cluster = cluster
        self.run = folder / "run"
        self.finish = folder / "finish"
        self.id = job_id

    def output(self) -> str:
        path = self.run / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def shows(self, text: str, times: int = 1) -> None:
        def what() -> str:
            now = self.cluster.job(self.id)
            return f"{text!r} {times} times; {now['JobState']}, {now['Reason']}; output:\n{self.output()}"

        until(lambda: self.output().count(text) >= times, what)

    def ends(self) -> dict[str, str]:
        """Wait for the end of the job and return its fields."""
        self._settled()
        return self.cluster.job(self.id)

    def _settled(self) -> None:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        until(
            lambda: self.cluster.job(self.id)["JobState"] in over,
            lambda: f"the end of the job:\n{self.output()}",
        )

    def ran(self) -> int:
        """Return for how many seconds this allocation has run."""
        hours, minutes, seconds = (int(part) for part in self.cluster.job(self.id)["RunTime"].split(":"))
        return 3600 * hours + 60 * minutes + seconds

    def limit(self, minutes: int) -> None:
        """Set the time limit of an allocation; one that ends just now is not changed, but the next one."""
        words = ("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")
        shown = f"{minutes // 60:02}:{minutes % 60:02}:00"

        def is_set() -> bool:
            self.cluster.ask(*words, check=False)
            return self.cluster.job(self.id)["TimeLimit"] == shown

        until(is_set, f"a time limit of {shown}")

    def ledger(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "slurm.json").read_text())
        return found

    def outcomes(self) -> list[str]:
        return [entry["outcome"] for entry in self.ledger()["history"]]


def submit(cluster: SlurmCluster, folder: Path, ending: str, *options: str, restarts: int = 3) -> Job:
    words = (
        "--run-dir",
        str(folder / "run"),
        f"--max-restarts={restarts}",
        str(TRAINING),
        str(folder / "finish"),
        ending,
    )
    job_id = cluster.ask(*OUTLAST, "slurm", "submit", "--lead=60", *options, "--", *words).strip()
    return Job(cluster, folder, job_id)


@pytest.mark.long
def test_a_preempted_job_whose_ranks_exit_0_comes_back_and_goes_on(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, "clean", "--sbatch=exclusive", "--partition=low")
    job.shows("step 5\n")
    cluster.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    job.shows("restored", times=2)
    job.finish.touch()
    ended = job.ends()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert job.outcomes() == ["requeue", "finish"]
    first, second = job.output().split("allocation 2")
    stopped_at = max(int(line.split()[1]) for line in first.splitlines() if line.startswith("step "))
    assert "stopped" in first
    # The script leaves its loop in the step that it printed last, or the session ends the loop after it.
    assert any(f"restored {step}\n" in second for step in (stopped_at, stopped_at + 1))


@pytest.mark.long
def test_a_time_limit_with_lead_is_a_save_and_a_requeue(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The limit is set when the job trains: before, Slurm's signal could come earlier than its handlers."""
    text = cluster.ask(
        *(*OUTLAST, "slurm", "submit", "--dry-run", "--", "--run-dir", str(tmp_path / "run")),
        *(str(TRAINING), str(tmp_path / "finish"), "clean"),
    )
    (tmp_path / "run").mkdir()
    batch = tmp_path / "short.sbatch"
    batch.write_text(text.replace("--signal=TERM@180", "--signal=TERM@60 --time=60"))
    job = Job(cluster, tmp_path, cluster.ask("sbatch", "--parsable", str(batch)).strip())
    job.shows("step 5\n")
    job.limit(minutes=(job.ran() + 30) // 60 + 1)  # it passes in 30 to 90 s
    job.shows("stopped")
    job.limit(minutes=60)
    job.shows("restored", times=2)
    job.finish.touch()
    assert job.ends()["JobState"] == "COMPLETED"
    assert job.outcomes() == ["requeue", "finish"]
    assert job.ledger()["history"][0]["signals"] == [15]


@pytest.mark.long
def test_what_would_come_back_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "at-step-2")
    ended = job.ends()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "93:0", "0")
    assert job.outcomes() == ["give up"]


@pytest.mark.long
def test_requeues_without_progress_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "at-once", "--max-no-progress=2", restarts=0)
    ended = job.ends()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "93:0")
    assert job.outcomes() == ["requeue", "give up"]


def test_a_cancelled_job_stays_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "clean")
    job.shows("step 5\n")
    cluster.ask("scancel", job.id)
    ended = job.ends()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.long
def test_the_next_allocation_is_kept_off_an_excluded_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "clean")
    job.shows("step 5\n")
    node = cluster.job(job.id)["NodeList"]
    (job.run / "excluded_nodes.json").write_text(json.dumps({node: "a test says so"}))
    cluster.ask("scancel", "--signal=TERM", job.id)
    job.shows("restored", times=2)
    now = cluster.job(job.id)
    assert (now["ExcNodeList"], now["NodeList"] != node) == (node, True)
    job.finish.touch()
    assert job.ends()["JobState"] == "COMPLETED"


@pytest.mark.long
def test_a_signal_to_the_batch_step_alone_is_passed_on_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "clean")
    job.shows("step 5\n")
    cluster.ask("scancel", "--batch", "--signal=TERM", job.id)
    job.shows("restored", times=2)
    assert job.ledger()["history"][0]["signals"] == [15]
    job.finish.touch()
    assert job.ends()["JobState"] == "COMPLETED"


@pytest.mark.long
def test_the_loss_of_a_node_counts_as_an_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "clean")
    job.shows("step 5\n")
    node = cluster.job(job.id)["NodeList"]
    try:
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=a test")
        job.shows("restored", times=2)
    finally:
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    job.finish.touch()
    assert job.ends()["JobState"] == "COMPLETED"
    assert job.outcomes()[-1] == "finish"
