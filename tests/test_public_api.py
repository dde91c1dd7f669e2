"""What users import: a dozen names in ``outlast``, the rest in modules of their own, all of it on demand."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import subprocess
import sys

import pytest

import outlast
from outlast import config, errors, settings
from outlast.config import CheckpointOptions
from outlast.settings import WorkerContext

FACADES = (
    "outlast",
    "outlast.checkpoint",
    "outlast.compat",
    "outlast.compat.kempnerforge",
    "outlast.consistency",
    "outlast.inprocess",
    "outlast.rerun",
)


def public(module: str) -> list[str]:
    names = importlib.import_module(module).__all__
    return [name for name in names if name != "__version__"]


@pytest.mark.parametrize("module", FACADES)
def test_dir_shows_each_public_name_and_each_can_be_had(module: str) -> None:
    found = importlib.import_module(module)
    names = public(module)
    assert names
    assert names == sorted(set(names))
    assert [name for name in dir(found) if not name.startswith("_")] == names
    for name in names:
        assert getattr(found, name).__name__ == name


def test_the_package_has_about_a_dozen_names() -> None:
    assert 10 <= len(public("outlast")) <= 14


def test_errors_that_users_catch_are_the_same_everywhere() -> None:
    for name in ("CheckpointMismatch", "NoUsableCheckpoint", "OutlastError", "SaveFailed", "UsageError"):
        found = getattr(outlast, name)
        assert found is getattr(errors, name)
        assert issubclass(found, outlast.OutlastError)


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"'outlast'.*'Checkpoints'"):
        outlast.Checkpoints  # noqa: B018
    with pytest.raises(ImportError, match=r"'Checkpoints'.*'outlast'"):
        from outlast import Checkpoints  # noqa: F401


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        f"import sys, {', '.join(FACADES)}, outlast.errors, outlast.config\n"
        "from outlast.compat import ShutdownHandler, get_slurm_info\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    assert run.stdout.strip() == "[]"


def test_every_table_of_the_configuration_has_a_class_of_one_naming_scheme() -> None:
    tables = {spec.name for spec in dataclasses.fields(config.Config)}
    assert tables == settings.TABLES.keys()
    assert {kind.__name__ for kind in settings.TABLES.values()} == set(config.__all__) - {"Config"}
    assert all(kind.__name__.endswith("Options") for kind in settings.TABLES.values())


@pytest.mark.parametrize(("rank", "asked", "logged"), [(0, 5, 1), (0, 8, 0), (1, 5, 0)])
def test_where_the_configuration_beats_the_script_rank_0_logs_it_once(
    rank: int, asked: int, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    context = WorkerContext(rank=rank, checkpoints={"keep_last_n": 8, "timeout": 30.0})
    for _ in range(2):
        found = settings.in_force(CheckpointOptions(keep_last_n=asked, buffers=4), "checkpoints", context)
    assert (found.keep_last_n, found.timeout, found.buffers) == (8, 30.0, 4)
    assert [one.levelno for one in caplog.records] == [logging.WARNING] * logged
    assert all("keep_last_n = 8" in line and "5" in line for line in caplog.messages)
