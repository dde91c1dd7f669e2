"""A rank is killed or stopped, or the job preempted, with each framework: it ends bit for bit as without."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.frameworks import ENVIRONMENT, job, lines_of, skip_without
from tests.support.launching import Run, running

pytestmark = pytest.mark.timeout(600)  # some frameworks import for long
PREEMPTED = 75
LONG = pytest.mark.long
FRAMEWORKS = {  # script, what it does undisturbed, its files of results
    "torch": ("dcp_training.py", "none", "weights"),
    "accelerate": ("accelerate_resumed.py", "plain", "done"),
    "transformers": ("hf_trainer.py", "outlast", "done"),
    "lightning": ("lightning_trainer.py", "stored", "done"),
    "deepspeed": ("deepspeed_resumed.py", "zero2", "done"),
    "torchtitan": ("torchtitan_trainer.py", "none", "weights"),
    "megatron": ("megatron_core.py", "none", "weights"),
}
ZERO = ("zero1,torch", "zero2,frozen", "zero3,frozen", "zero0,bf16", "zero1,bf16", "zero3,bf16")
KILLED = [  # framework, what it does, and undisturbed, the step of the kill, those to go on from
    ("torch", "killed", "none", 9, [6]),
    pytest.param("torch", "damaged", "none", 9, [3], marks=LONG),
    ("accelerate", "plain", "plain", 14, range(4, 15)),
    pytest.param("accelerate", "seedable,workers", "seedable,workers", 14, range(4, 15), marks=LONG),
    ("transformers", "outlast", "plain", 5, [3]),
    pytest.param("transformers", "outlast", "plain", 7, [6], marks=LONG),
    ("lightning", "stored", "both", 7, [6]),
    ("deepspeed", "zero0", "zero0", 10, [4, 8, 9]),
    *(pytest.param("deepspeed", way, way, 10, [4, 8, 9], marks=LONG) for way in ZERO),
    ("torchtitan", "none", "plain", 9, [6]),
    pytest.param("torchtitan", "async", "plain", 9, [3, 6], marks=LONG),  # the save of 6 may not be whole yet
    pytest.param("torchtitan", "plain", "plain", 9, [6], marks=LONG),
    pytest.param("torchtitan", "damaged", "plain", 9, [3], marks=LONG),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the folder of a run without faults; each way is run once."""

    @cache
    def ran(framework: str, way: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / "job"
        with running(job(folder, FRAMEWORKS[framework][0], way), **ENVIRONMENT) as run:
            assert run.finish() == 0, run.console()
        return folder

    return ran


def results(folder: Path, framework: str) -> list[str]:
    return [(folder / f"{FRAMEWORKS[framework][2]}-{rank}").read_text() for rank in (0, 1)]


def computed(folder: Path) -> dict[str, str]:
    """Return what the last pass over each batch of rank 0 computed; a batch is known by its place."""
    return dict(line.rpartition(" ")[::2] for line in lines_of(folder / "steps-0"))


def resumed(run: Run, folder: Path) -> int:
    """Return the step that the second generation went on from."""
    if (folder / "resumed-0").exists():
        return int(re.findall(r"\d+", (folder / "resumed-0").read_text())[-1])
    loaded = [one["step"] for one in run.records("loaded") if one["step"]]
    announced = [one["resumed"] for one in run.records("progress") if one["resumed"] > 0]
    return (loaded or announced)[0]


@pytest.mark.parametrize(("framework", "way", "quiet", "fatal", "steps"), KILLED)
def test_a_killed_job_ends_as_without(
    tmp_path: Path,
    undisturbed: Callable[[str, str], Path],
    framework: str,
    way: str,
    quiet: str,
    fatal: int,
    steps: list[int],
) -> None:
    skip_without(framework)
    whole, folder = undisturbed(framework, quiet), tmp_path / "job"
    with running(job(folder, FRAMEWORKS[framework][0], way, fatal=fatal), **ENVIRONMENT) as run:
        assert run.finish() == 0, run.console()
    assert len(run.records("fault_seen")) == 1
    assert resumed(run, folder) in steps
    assert results(folder, framework) == results(whole, framework)
    if framework in ("accelerate", "deepspeed"):
        assert computed(folder) == computed(whole)
    if framework == "lightning":
        counts = json.loads((whole / "counts-0").read_text())
        assert counts["gathered"] == counts["saves"] > 0, "once for each save, though there are two callbacks"
    if framework == "torch":
        assert {9, 12} <= {one["step"] for one in run.records("script_saved")}


def saved(run: Run) -> int:
    """Return the pid of rank 1 once there is a checkpoint."""
    run.until(lambda: run.records("saved") or run.records("script_saved"), "a checkpoint")
    return run.pids()[1]


@LONG
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_job_with_a_stopped_rank_ends_as_without(
    tmp_path: Path, undisturbed: Callable[[str, str], Path], framework: str
) -> None:
    skip_without(framework)
    script, way, _ = FRAMEWORKS[framework]
    options = ("--ft-rank-heartbeat-timeout", "10")
    with running(job(tmp_path / "job", script, way, pace=0.5, options=options), **ENVIRONMENT) as run:
        os.kill(saved(run), signal.SIGSTOP)
        assert run.finish() == 0, run.console()
    assert "hang" in [one["fault"] for one in run.records("fault_seen")]
    assert results(tmp_path / "job", framework) == results(undisturbed(framework, way), framework)


@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=() if name == "torch" else LONG) for name in FRAMEWORKS]
)
def test_a_preempted_job_goes_on_with_the_same_command(
    tmp_path: Path, undisturbed: Callable[[str, str], Path], framework: str
) -> None:
    skip_without(framework)
    script, way, _ = FRAMEWORKS[framework]
    folder = tmp_path / "job"
    run = job(folder, script, way, pace=0.5)
    with running(run, **ENVIRONMENT):
        os.kill(saved(run), signal.SIGTERM)
        assert run.finish() == PREEMPTED, run.console()
    last = [lines_of(folder / f"steps-{rank}")[-1:] for rank in (0, 1)]
    if framework not in ("accelerate", "deepspeed"):
        assert last[0] == last[1], "all ranks stop after the same step"
    own = sorted((folder / "checkpoints").glob("step-*")) if framework == "torch" else []
    for path in own[:-1]:
        for file in path.iterdir():
            os.utime(file, (4e9, 4e9))  # as after a copy of the folder, or where the clock was set back
    with running(run, **ENVIRONMENT):
        assert run.finish() == 0, run.console()
    if own:
        assert [(folder / f"resumed-{rank}").read_text() for rank in (0, 1)] == [own[-1].name] * 2
    assert results(folder, framework) == results(undisturbed(framework, way), framework)
