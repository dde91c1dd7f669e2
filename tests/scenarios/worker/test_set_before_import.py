"""What a script sets before it imports torch counts, though the zygote has imported torch already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import SCRIPTS, Run, running

pytestmark = pytest.mark.timeout(420)  # several imports of torch, and of its compiler

ALL = (
    "OMP_NUM_THREADS=2",
    "MKL_NUM_THREADS=2",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
    "TORCH_COMPILE_DISABLE=1",
    "TORCHINDUCTOR_MAX_AUTOTUNE=1",
    "TORCH_LOGS=dynamo",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL",
)
DEFAULT: dict[str, Any] = {"threads": 1, "dynamo_disabled": False, "autotune": False, "tf32": False}


# When each rank has begun twice.
FAILS_ONCE = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time
    while sum(len(one.read_text().split()) for one in Path(folder).glob("begun-*")) < 4:
        time.sleep(0.01)
    raise RuntimeError("once")
"""


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def begun(folder: Path, rank: int) -> list[str]:
    return (folder / f"begun-{rank}").read_text().split()


def under_torchrun(folder: Path, *words: str) -> list[dict[str, Any]]:
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(SCRIPTS / "sets_before_import.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return answers(folder)


def under_outlast(
    folder: Path, *words: str, options: tuple[str, ...] = ()
) -> tuple[Run, list[dict[str, Any]]]:
    folder.mkdir()
    options = ("--nproc-per-node=2", *options)
    run = Run(folder.parent / "run", "sets_before_import.py", str(folder), *words, options=options, cold=True)
    with running(run):
        assert run.finish(200) == 0, run.console()
    return run, answers(folder)


@pytest.mark.long
def test_nothing_is_imported_at_the_first_statement(tmp_path: Path) -> None:
    theirs = under_torchrun(tmp_path / "theirs")
    run, mine = under_outlast(tmp_path / "mine")
    assert run.records("generation_started")[0]["start"] == "zygote"
    assert len(begun(tmp_path / "mine", 0)) == 1
    for expected, found in zip(theirs, mine, strict=True):
        found["first"]["modules"].remove("__mp_main__")  # multiprocessing's name for __main__
        del found["first"]["environment"]["TORCH_FR_BUFFER_SIZE"]  # of the flight recorder; see test_parity
        assert found == expected
        assert {name: found[name] for name in DEFAULT} == DEFAULT


@pytest.mark.long
def test_all_that_is_set_before_the_import_has_its_effect(tmp_path: Path) -> None:
    theirs = under_torchrun(tmp_path / "theirs", *ALL)
    run, mine = under_outlast(tmp_path / "mine", *ALL)
    for expected, found in zip(theirs, mine, strict=True):
        del expected["first"], found["first"]
        assert found == expected
        assert all(found[name] != value for name, value in DEFAULT.items()), found
    assert all(len(begun(tmp_path / "mine", rank)) == 2 for rank in range(2)), "each rank began again, once"
    assert len(set(begun(tmp_path / "mine", 0))) == 1, "in the same process"
    assert "OMP_NUM_THREADS" in run.console()
    assert sorted(one["rank"] for one in run.records("started_again")) == [0, 1]


@pytest.mark.long
def test_what_is_set_after_torch_and_before_its_compiler_has_its_effect(tmp_path: Path) -> None:
    words = ("import", "TORCHINDUCTOR_MAX_AUTOTUNE=1")
    theirs = under_torchrun(tmp_path / "theirs", *words)
    _, mine = under_outlast(tmp_path / "mine", *words)
    assert [one["autotune"] for one in mine] == [one["autotune"] for one in theirs] == [True, True]


@pytest.mark.long
def test_after_a_restart_the_zygote_has_imported_under_what_the_script_sets(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    script = tmp_path / "train.py"
    text = (SCRIPTS / "sets_before_import.py").read_text()
    script.write_text(text + FAILS_ONCE)
    run = Run(
        tmp_path / "run",
        str(script),
        str(folder),
        "OMP_NUM_THREADS=2",
        options=("--nproc-per-node=2",),
        cold=True,
    )
    with running(run):
        assert run.finish(200) == 0, run.console()
    assert [one["start"] for one in run.records("generation_started")] == ["zygote", "zygote"]
    assert [len(begun(folder, rank)) for rank in range(2)] == [3, 3], "twice at first, once after the restart"
    for found in answers(folder):
        assert found["threads"] == 2
        assert found["first"]["environment"]["OMP_NUM_THREADS"] == "1", "as the script finds it"


@pytest.mark.long
def test_ranks_that_set_different_values_start_cold(tmp_path: Path) -> None:
    run, mine = under_outlast(tmp_path / "mine", "OMP_NUM_THREADS=1RANK")
    assert [one["environment"]["OMP_NUM_THREADS"] for one in mine] == ["10", "11"]
    assert "OMP_NUM_THREADS" in run.console()


def test_hidden_modules_can_be_imported_in_every_way(tmp_path: Path) -> None:
    with running(Run(tmp_path / "run", "imports.py", cold=True)) as run:
        assert run.finish() == 0, run.console()
    assert run.records("generation_started")[0]["start"] == "zygote"
    assert "wrong: []" in run.console()
    assert run.records("started_again") == []
