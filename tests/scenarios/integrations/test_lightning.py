"""Lightning's Trainer under the launcher: killed, preempted, with damaged checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.frameworks import alone, job, needs, reached
from tests.support.launching import DEADLINE, SCRIPTS, Run, running

pytestmark = needs("lightning")
SCRIPT = "lightning_trainer.py"
PREEMPTED = 75


@pytest.mark.long
def test_a_killed_job_reports_true_steps_and_lightnings_checkpoints(tmp_path: Path) -> None:
    """Gradients of two batches make a step; it saves after every third."""
    with running(job(tmp_path / "job", SCRIPT, "explicit", fatal=5)) as run:
        assert run.finish() == 0, run.console()
    assert "OutlastCallback:" not in run.console(), "the attached one gives way to the script's"
    (fault,) = run.records("fault_seen")
    assert fault["step"] in (4, 5)  # of the slowest rank
    assert fault["source"] != "counted"
    assert {3, 6, 9, 12, 15} <= {one["step"] for one in run.records("script_saved")}


@pytest.mark.long
def test_a_preempted_job_saves_where_last_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "explicit", pace=0.3)
    with running(run):
        run.until(reached(folder / "steps-0", 8))
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == PREEMPTED, run.console()
    steps = [json.loads((folder / f"steps-{rank}").read_text().splitlines()[-1])["step"] for rank in (0, 1)]
    assert steps[0] == steps[1] < 16, "all ranks stop after the same step"
    import torch

    assert torch.load(folder / "kept" / "last.ckpt", weights_only=False)["global_step"] == steps[0]


def test_damage_is_found_and_the_newest_whole_checkpoint_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "lightning_damage.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


LOADERS = (
    *("shuffled", "generator", "weighted", "own sampler", "stream", "workers", "persistent"),
    *("torchdata", "torchdata, workers", "torchdata, placed"),
)


@pytest.mark.long
@needs("torchdata")
def test_a_fit_goes_on_with_the_same_samples_whatever_its_loader(tmp_path: Path) -> None:
    """Fits are left within epochs, and after the last batch of one."""
    command = [sys.executable, str(SCRIPTS / "lightning_places.py"), str(tmp_path), *LOADERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = {one["kind"]: one["found"] for one in map(json.loads, lines)}
    assert set(found) == set(LOADERS)
    for kind, fits in found.items():
        quiet = fits.pop("()")
        assert [len(batch or ()) for batch in quiet[1]] == [4, 4, 4, 4, 4, 2] * 3, kind
        assert all(each == quiet for each in fits.values()), kind


@pytest.mark.long
@needs("torchdata")
def test_ranks_with_torchdatas_loader_are_killed_and_see_each_sample_once(tmp_path: Path) -> None:
    """An epoch has 5 steps; it saves after steps 8 and 10. One kill is within an epoch, one after it."""
    found = {}
    for fatal in ("-1", "9,10"):
        folder = tmp_path / fatal
        folder.mkdir()
        words = ("lightning_torchdata.py", str(folder), fatal)
        with running(Run(folder / "run", *words, options=("--nproc-per-node", "2"))) as run:
            assert run.finish() == 0, run.console()
        seen: dict[int, list[int]] = {}
        for rank in (0, 1):
            lines = (folder / f"samples-{rank}").read_text().splitlines()
            for step, samples in {step: samples for step, samples in map(json.loads, lines)}.items():
                seen.setdefault(step, []).extend(samples)
        epochs = [[one for step in range(5 * at, 5 * at + 5) for one in seen[step]] for at in range(3)]
        assert [sorted(one) for one in epochs] == [list(range(40))] * 3
        found[fatal] = [seen, *((folder / f"done-{rank}").read_text() for rank in (0, 1))]
    assert found["-1"] == found["9,10"]


@pytest.mark.long
def test_another_fit_does_not_begin_with_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "1")
    with running(Run(tmp_path / "run", "lightning_folds.py", str(tmp_path), options=options)) as run:
        assert run.finish() == 0, run.console()
    starts = [path.read_text().splitlines() for path in sorted(run.folder.glob("logs/gen-*/*/stdout.log"))]
    found = [[line.split()[1:] for line in lines if line.startswith("fit ")] for lines in starts]
    refused = [["other", "-1", "0", "refused"], ["verified", "-1", "0", "refused"]]
    assert found[0] == [["first", "0", "8"], ["longer", "8", "4"], *refused]
    assert found[1] == [["first", "-1", "0"], ["longer", "-1", "0"], *refused, ["own", "8", "4"]]


@pytest.mark.long
def test_outside_of_the_launcher_nothing_is_attached(tmp_path: Path) -> None:
    done = alone(tmp_path / "job", SCRIPT, "explicit")
    assert done.returncode == 0, done.stderr
    assert "outlast" not in (done.stdout + done.stderr).replace("from entry point 'outlast'", "")
