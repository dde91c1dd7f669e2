"""A loop with a DeepSpeed engine whose state a session keeps: killed, preempted, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from outlast.errors import ExitCode
from tests.support.frameworks import alone, job, lines_of, reached
from tests.support.launching import running, until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed: not installed; docs/how-to/deepspeed.md says how to install it",
)
SCRIPT = "deepspeed_resumed.py"


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def finals(folder: Path) -> list[str]:
    return [(folder / f"done-{rank}").read_text() for rank in (0, 1)]


def steps(folder: Path, rank: int) -> dict[str, str]:
    """Return what the last pass over each batch computed; a batch is known by its place."""
    return dict(line.rpartition(" ")[::2] for line in lines_of(folder / f"steps-{rank}"))


@pytest.mark.parametrize(
    "way", ["zero0", "zero1,torch", "zero2,frozen", "zero3,frozen", "zero0,bf16", "zero1,bf16", "zero3,bf16"]
)
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path, way: str) -> None:
    with running(job(tmp_path / "whole", SCRIPT, way)) as whole:
        assert whole.finish() == 0, whole.console()
    with running(job(tmp_path / "killed", SCRIPT, way, fatal=10)) as killed:
        assert killed.finish() == 0, killed.console()
    (loaded, *_) = (one for one in killed.records("loaded") if one["step"])
    assert loaded["step"] in (4, 8, 9)  # 9: from memory; an epoch has 5.5 steps
    assert finals(tmp_path / "killed") == finals(tmp_path / "whole")
    assert finals(tmp_path / "whole")[0].startswith("16 ")
    for rank in (0, 1):
        assert steps(tmp_path / "killed", rank) == steps(tmp_path / "whole", rank)


def test_a_preempted_run_goes_on_with_the_same_command(tmp_path: Path) -> None:
    with running(job(tmp_path / "whole", SCRIPT, "zero2")) as whole:
        assert whole.finish() == 0, whole.console()
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "zero2", pace=0.2)
    with running(run):
        until(reached(folder / "steps-0", 5), run.console)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == int(ExitCode.PREEMPTED), run.console()
    assert not (folder / "done-0").exists()
    with running(run):
        assert run.finish() == 0, run.console()
    assert finals(folder) == finals(tmp_path / "whole")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("model", "resume: found a Linear, expected the engine"),
        ("none", "no loader was given; call resume(engine, loader)"),
        ("unknown", "the loader was not given to resume"),
        ("repeating", "a RepeatingLoader has no epochs; give the loader that it repeats"),
        ("elastic", "found elastic_checkpoint, whose state is not saved here; use AnnouncedLoop"),
        ("longer", "found a run that ended 1 micro-batches after its last optimizer step"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, way: str, said: str) -> None:
    done = alone(tmp_path, "deepspeed_refused.py", way)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
