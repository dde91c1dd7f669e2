"""Copies in memory under a launcher: whoever is killed, at most a step or two are done again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.launching import Run, is_gone, running, until
from tests.support.mounts import mounted, needs_root
from tests.support.processes import child_running
from tests.support.ranks import copies, lines
from tests.support.saved_steps import flip

EVERY_STEP = "[checkpoints]\nnon_persistent_save_interval = 1\n"


def counting(tmp_path: Path, *faults: str, steps: int = 100_000, options: tuple[str, ...] = ()) -> Run:
    config = tmp_path / "outlast.toml"
    config.write_text(EVERY_STEP)
    arguments = (str(tmp_path / "trace"), str(steps), "1000", *faults)
    given = ("--nproc-per-node", "2", "--config", str(config), *options)
    return Run(tmp_path / "run", "counting.py", *arguments, options=given)


def last_step(tmp_path: Path) -> int:
    """Return the last step that every rank has done, by its trace."""
    return min(lines(path)[-1]["step"] for path in (tmp_path / "trace").glob("rank-*"))


def memory_of(run: Run) -> Path:
    return Path(json.loads((run.folder / "memory.json").read_text())["memory"])


def writer_of(run: Run) -> int:
    """Return the pid of the launcher's checkpoint writer once it runs."""

    def found() -> int:
        assert run.process is not None
        return child_running(run.process.pid, "writer")

    return int(until(found, "the writer"))


def test_a_killed_rank_costs_at_most_a_step(tmp_path: Path) -> None:
    with running(counting(tmp_path, "SIGKILL@1@250@1", steps=400)) as run:
        assert run.finish() == 0, run.console()
    (loaded,) = run.records("loaded")
    assert loaded["step"] >= 249
    assert [place.split("/")[0] for place in loaded["places"]] == ["memory"]
    assert copies(run.folder) == [400]
    assert not memory_of(run).exists()


def test_a_writer_that_is_killed_again_and_again_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(50)
        for _ in range(2):
            first = writer_of(run)
            os.kill(first, signal.SIGKILL)
            until(lambda first=first: writer_of(run) not in (0, first), "another writer")
            run.wait_step(last_step(tmp_path) + 2)
        at = last_step(tmp_path)
        os.kill(run.pids()[1], signal.SIGKILL)
        until(lambda: run.records("loaded"), "the load")
    assert run.records("loaded")[0]["step"] >= at - 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_launcher_ends_the_newest_state_goes_from_memory_to_disk(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(counting(tmp_path)) as run:
        run.wait_step(120)
        memory = memory_of(run)
        writer, at = writer_of(run), last_step(tmp_path)
        assert run.process is not None
        run.process.send_signal(number)
        run.finish()
        until(lambda: is_gone(writer), "the end of the writer")
    assert copies(run.folder)[-1] >= at - 1
    assert not memory.exists()
    with running(counting(tmp_path, steps=last_step(tmp_path) + 5)) as again:
        assert again.finish() == 0, again.console()
    assert again.records("loaded")[-1]["step"] >= at - 1


def test_a_damaged_copy_in_memory_gives_way_to_one_on_disk(tmp_path: Path) -> None:
    """The ranks stand still after a step whose copy is in memory alone, until one of them is killed."""
    trace = tmp_path / "trace"
    options = ("--nproc-per-node", "2")
    run = Run(tmp_path / "run", "replicated.py", str(trace), "10", "hold=8", options=options)
    with running(run):
        run.until(lambda: len(list(trace.glob("held-*.g1"))) == 2)
        newest = memory_of(run) / "memory" / "step-000000009.g1"
        run.until(lambda: newest.exists() and copies(run.folder) == [4, 8])
        flip(newest / "rank-00001-of-00002.safetensors")
        os.kill(run.pids()[1], signal.SIGKILL)
        (trace / "go").touch()
        assert run.finish() == 0, run.console()
    (loaded,) = run.records("loaded")
    assert loaded["step"] in (4, 8)
    assert [one["checkpoint"] for one in run.records("quarantined")] == [f"memory/{newest.name}"]


def test_a_memory_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    with running(counting(tmp_path)) as run:
        run.wait_step(50)
        memory = memory_of(run)
        shutil.rmtree(memory, ignore_errors=True)
        at = last_step(tmp_path)
        run.until(lambda: list((memory / "memory").glob("step-*")))
        run.wait_step(at + 20)
        os.kill(run.pids()[1], signal.SIGKILL)
        run.until(lambda: run.records("loaded"))
    assert run.records("loaded")[0]["step"] > at


@pytest.mark.long
def test_two_runs_of_one_id_on_one_node_have_nothing_in_common(tmp_path: Path) -> None:
    """As jobs in folders of one name have it, whose id is that name."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    runs = [counting(folder, "SIGKILL@0@60@1", steps=120, options=("--rdzv-id=run",)) for folder in folders]
    with running(runs[0]), running(runs[1]):
        assert [run.finish() for run in runs] == [0, 0], "\n".join(run.console() for run in runs)
    assert [copies(run.folder)[-1] for run in runs] == [120, 120]
    assert [one["step"] >= 59 for run in runs for one in run.records("loaded")] == [True, True]


@pytest.mark.parametrize(
    ("call", "late"), [(1, 0), *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, 0), (1, 1)))]
)
def test_an_object_that_cannot_give_its_state_fails_its_own_rank_first(
    tmp_path: Path, call: int, late: int
) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    with running(Run(tmp_path / "run", "unsaveable.py", "1", str(call), str(late), options=options)) as run:
        assert run.finish() == 1, run.console()
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("error", 1), fault
    assert fault["signature"] == "RuntimeError: cannot say what I hold"


@needs_root
def test_a_job_whose_last_state_is_in_memory_only_says_so_and_is_completed_by_the_same_command(
    tmp_path: Path,
) -> None:
    disk, filling = tmp_path / "disk", tmp_path / "disk" / "fill"
    disk.mkdir()
    config = tmp_path / "config.toml"
    config.write_text("[checkpoints]\nmax_failed_seconds = 0\n")
    with mounted(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        run = Run(
            disk / "run",
            "counting.py",
            *(str(tmp_path / "trace"), "60", "25", "fill@0@55@1", str(filling)),
            options=("--nproc-per-node", "2", "--config", str(config)),
        )
        run.output = tmp_path / "output"
        with running(run):
            assert run.finish() == 74, run.console()
        (ended,) = run.records("run_ended")[-1:] or [{"exit_code": 74}]  # unless there was no room for it
        assert ended["exit_code"] == 74
        assert "60" in run.console().splitlines()[-1] or "step-000000060" in run.console()
        filling.unlink()
        with running(run):
            assert run.finish() == 0, run.console()
        assert (run.records("loaded")[-1]["step"], run.records("run_ended")[-1]["exit_code"]) == (60, 0)
        assert "step-000000060.g1" in os.listdir(run.folder / "checkpoints")
