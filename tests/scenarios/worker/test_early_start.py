"""The first ranks of a script that does not use torch do not wait for the zygote's import of it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.launching import SCRIPTS, Run, running

OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "1")


def held(folder: Path) -> dict[str, str]:
    """Return variables with which torch is imported only after both ranks have begun."""
    path = os.pathsep.join(filter(None, (str(SCRIPTS / "slow_torch"), os.environ.get("PYTHONPATH", ""))))
    return {
        "PYTHONPATH": path,
        "HELD_BY": str(folder / "go-on"),
        "IMPORT_BEGAN": str(folder / "import-began"),
    }


def launched(folder: Path, *words: str) -> Run:
    run = Run(folder / "run", "early.py", str(folder), *words, options=OPTIONS)
    with running(run, **held(folder)):
        assert run.finish() == 0, run.console()
    return run


def test_ranks_begin_before_torch_is_imported_and_restart_from_a_zygote_that_has_it(tmp_path: Path) -> None:
    run = launched(tmp_path)
    for rank in range(2):
        waited, _, state = (tmp_path / f"begun-1-{rank}").read_text().partition(" ")
        assert waited == "False"
        assert state.startswith("True ")  # garbage is collected
        assert state == (tmp_path / f"begun-2-{rank}").read_text().partition(" ")[2]
    assert [one["start"] for one in run.records("generation_started")] == ["zygote", "zygote"]


def test_ranks_that_use_torch_all_the_same_meet(tmp_path: Path) -> None:
    run = launched(tmp_path, "meets")
    ports = [{(tmp_path / f"met-{again}-{rank}").read_text() for rank in range(2)} for again in (1, 2)]
    assert [len(one) for one in ports] == [1, 1]
    assert {one["start"] for one in run.records("generation_started")} == {"zygote"}


def test_a_store_that_was_promised_is_served_cold_where_no_zygote_lives(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "early.py", str(tmp_path), "meets", "once", options=("--max-restarts", "0"))
    with running(run, DIES="1", **held(tmp_path)):
        assert run.finish() == 0, run.console()
    assert (tmp_path / "met-1-0").exists()


def test_a_store_that_was_promised_and_cannot_be_served_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "early.py", str(tmp_path), "stays", options=OPTIONS)
    with running(run, STARTS_THREAD="1", NO_HOST="1", **held(tmp_path)):
        run.until(lambda: "ImportError: not here" in run.console())
        (tmp_path / "over").touch()
        assert run.finish() == 0, run.console()
    first, second = (one["start"] for one in run.records("generation_started"))
    assert first == "zygote"
    assert second.startswith("cold:")
