"""Saves in memory under a launcher: whoever is killed, at most a step or two are done again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from outlast.checkpoint.tiers.memory_folder import default_root
from tests.support.jobs import mounted, needs_root
from tests.support.launching import Run, is_gone, running, until
from tests.support.processes import child_running
from tests.support.ranks import lines

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
    return default_root(json.loads((run.folder / "run.json").read_text())["run_id"], run.folder)


def saver_of(run: Run) -> int:
    """Return the pid of the launcher's saver once it runs."""

    def found() -> int:
        assert run.process is not None
        return child_running(run.process.pid, "outlast.checkpoint.writer")

    return int(until(found, "the saver"))


def copies_of(run: Run) -> list[int]:
    names = (path.name for path in (run.folder / "checkpoints").glob("step-*"))
    return sorted(int(name[5:14]) for name in names)


def test_a_killed_rank_costs_at_most_a_step(tmp_path: Path) -> None:
    with running(counting(tmp_path, "SIGKILL@1@250@1", steps=400)) as run:
        assert run.finish() == 0, run.console()
    (loaded,) = run.records("loaded")
    assert loaded["step"] >= 249
    assert "from memory" in loaded["reason"]
    assert copies_of(run) == [400]
    assert not memory_of(run).exists()


def test_a_killed_saver_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with running(counting(tmp_path, steps=100_000)) as run:
        run.wait_step(50)
        first = saver_of(run)
        os.kill(first, signal.SIGKILL)
        until(lambda: "the checkpoint writer ended; another one" in run.console(), "word of it")
        second = saver_of(run)
        assert second != first
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
        saver, at = saver_of(run), last_step(tmp_path)
        assert run.process is not None
        run.process.send_signal(number)
        run.finish()
        until(lambda: is_gone(saver), "the end of the saver")
    assert copies_of(run)[-1] >= at - 1
    assert not memory_of(run).exists()
    with running(counting(tmp_path, steps=last_step(tmp_path) + 5)) as again:
        assert again.finish() == 0, again.console()
    assert again.records("loaded")[-1]["step"] >= at - 1


def test_two_runs_of_one_id_on_one_node_have_nothing_in_common(tmp_path: Path) -> None:
    """As jobs in folders of one name have it, whose id is that name."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    runs = [counting(folder, "SIGKILL@0@60@1", steps=120, options=("--rdzv-id=run",)) for folder in folders]
    with running(runs[0]), running(runs[1]):
        assert [run.finish() for run in runs] == [0, 0], "\n".join(run.console() for run in runs)
    assert [copies_of(run)[-1] for run in runs] == [120, 120]
    assert [one["step"] >= 59 for run in runs for one in run.records("loaded")] == [True, True]


@pytest.mark.parametrize(("call", "late"), [(1, 0), (2, 0), (1, 1)])
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
        # a rank may have counted three refusals before the end: then its error names the copy
        assert any(name in run.console() for name in ("step 60", "step-000000060"))
        filling.unlink()
        with running(run):
            assert run.finish() == 0, run.console()
        assert (run.records("loaded")[-1]["step"], run.records("run_ended")[-1]["exit_code"]) == (60, 0)
        assert "step-000000060.g1" in os.listdir(run.folder / "checkpoints")
