"""Transformers' Trainer under the launcher: killed, preempted, restored; and ways that are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.frameworks import alone, job, lines_of, needs, reached
from tests.support.launching import DEADLINE, SCRIPTS, Run, running

pytestmark = needs("transformers", "accelerate")
SCRIPT = "hf_trainer.py"


@pytest.mark.long
def test_a_run_that_is_done_trains_nothing_more(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        done = alone(tmp_path / "job", SCRIPT, "outlast")
        assert done.returncode == 0, done.stderr
        weights = json.loads((tmp_path / "job" / "done-0").read_text())["weights"]
        found.append((weights, lines_of(tmp_path / "job" / "steps-0")))
    assert found[0] == found[1]


@pytest.mark.long
def test_the_callback_reports_true_steps_and_the_trainers_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with running(job(folder, SCRIPT, "callback", fatal=8)) as run:
        assert run.finish() == 0, run.console()
    (fault,) = run.records("fault_seen")
    assert fault["step"] in (7, 8)  # of the slowest rank
    assert fault["source"] != "counted"
    assert {one["step"] for one in run.records("script_saved")} == {3, 6, 9, 12}


@pytest.mark.long
def test_the_callback_gives_the_job_back_with_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run = job(folder, SCRIPT, "callback", pace=0.3)
    with running(run):
        run.until(reached(folder / "steps-0", 4))
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.finish() == 75, run.console()
    steps = [json.loads((folder / f"steps-{rank}").read_text().splitlines()[-1])["step"] for rank in (0, 1)]
    assert steps[0] == steps[1] < 12, "all ranks stop after the same step"
    assert (folder / "hf" / f"checkpoint-{steps[0]}" / "trainer_state.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["by length", "stream", "persistent"])
def test_a_killed_trainer_takes_the_same_samples_whatever_its_data(tmp_path: Path, kind: str) -> None:
    """Samplers that draw from the global generators, data without a length, workers that persist."""
    ends = {}
    for name, ways in (("quiet", ("quiet",)), ("killed", ("fatal", "quiet"))):
        folder = tmp_path / name
        folder.mkdir()
        for way in ways:
            command = [sys.executable, str(SCRIPTS / "hf_places.py"), kind, way]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=folder
            )
            assert done.returncode == (-signal.SIGKILL if way == "fatal" else 0), done.stdout + done.stderr
        ends[name] = json.loads((folder / "end").read_text())
    seen = ends["killed"].pop("seen")
    whole = ends["quiet"].pop("seen")
    epochs = [sorted(one for batch in whole[at : at + 6] for one in batch) for at in (0, 6, 12)]
    assert epochs == [list(map(float, range(24)))] * 3
    assert whole[len(whole) - len(seen) :] == seen
    assert len(seen) == 10, "it went on after step 8"
    assert ends["killed"] == ends["quiet"]


@pytest.mark.long
def test_another_number_of_ranks_goes_on_from_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for ranks, steps in ((2, 4), (1, 7)):
        command = ("--nproc-per-node", str(ranks))
        with running(Run(folder / "run", "hf_shrunk.py", str(folder), str(steps), options=command)) as run:
            assert run.finish() == 0, run.console()
    assert [int(line) for line in lines_of(folder / "steps-0")] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.long
def test_without_a_launcher_the_callback_does_nothing(tmp_path: Path) -> None:
    done = alone(tmp_path / "job", SCRIPT, "callback")
    assert done.returncode == 0, done.stderr
    assert "outlast" not in done.stdout + done.stderr
    assert not (tmp_path / "job" / "outlast-runs").exists()


def test_ways_that_would_be_wrong_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "hf_refusals.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


def folds(run: Run) -> list[list[str]]:
    """Return the number, step, trained, state and draw of each training, over all generations."""
    paths = sorted((run.folder / "logs").glob("gen-*/rank-00000/stdout.log"))
    lines = [line.split() for path in paths for line in path.read_text().splitlines()]
    return [words[1:] for words in lines if words[:1] == ["fold"]]


@pytest.mark.long
def test_a_killed_training_of_several_goes_on_and_complete_ones_train_nothing(tmp_path: Path) -> None:
    found = []
    for words in (("NAMED",), ("NAMED", str(tmp_path / "mark"))):
        run = Run(tmp_path / str(len(words)), "hf_folds.py", *words, options=("--nproc-per-node", "1"))
        with running(run):
            assert run.finish() == 0, run.console()
        found.append(folds(run))
    calm, (first, again, *rest) = found
    assert [one[:3] for one in calm] == [[str(at), str(8 - at), str(8 - at)] for at in range(3)]
    assert first == calm[0]
    assert again == [*calm[0][:2], "0", *calm[0][3:]], "its final state is there again, nothing is trained"
    assert [one[3:] for one in rest] == [one[3:] for one in calm[1:]]
    assert 0 < int(rest[0][2]) < 7
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["fold-0", "fold-1", "fold-2"]


@pytest.mark.long
def test_a_second_training_without_a_name_is_refused(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "1", "--max-restarts", "0")
    with running(Run(tmp_path / "run", "hf_folds.py", "PLAIN", options=options)) as run:
        assert run.finish() == 93, run.console()
    assert [one[0] for one in folds(run)] == ["0"]
    (fault,) = run.records("fault_seen")
    assert "UsageError" in fault["signature"]
    assert "training_name" in fault["signature"] + run.console()
