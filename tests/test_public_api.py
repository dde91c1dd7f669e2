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
from outlast.config import CheckpointOptions, TripwireOptions
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
GONE = (
    "CallWrapper",
    "Checkpoints",
    "NaNDetector",
    "Numerics",
    "RerunStateMachine",
    "ShutdownHandler",
    "Tripwire",
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


@pytest.mark.parametrize("name", GONE)
def test_a_name_that_is_gone_is_an_ordinary_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'outlast' has no attribute '{name}'"):
        getattr(outlast, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'outlast'"):
        exec(f"from outlast import {name}")


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        f"import sys, {', '.join(FACADES)}, outlast.errors, outlast.config\n"
        "from outlast.compat import ShutdownHandler, get_slurm_info\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_table_of_the_configuration_has_a_class_of_one_naming_scheme() -> None:
    tables = {spec.name for spec in dataclasses.fields(config.Config)}
    assert tables == settings.TABLES.keys()
    assert {kind.__name__ for kind in settings.TABLES.values()} == set(config.__all__) - {"Config"}
    assert all(kind.__name__.endswith("Options") for kind in settings.TABLES.values())


class TestWhereTheConfigurationBeatsTheScript:
    def test_it_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        context = WorkerContext(checkpoints={"keep_last_n": 8, "timeout": 30.0})
        for _ in range(2):
            found = settings.in_force(CheckpointOptions(keep_last_n=5, buffers=4), "checkpoints", context)
        assert (found.keep_last_n, found.timeout, found.buffers) == (8, 30.0, 4)
        said = "[checkpoints] keep_last_n = 8 of the launcher's configuration is used; the script asks for 5"
        assert caplog.messages == [said]
        assert caplog.records[0].levelno == logging.WARNING

    @pytest.mark.parametrize("rank", [0, 1])
    def test_not_where_both_say_the_same_nor_on_other_ranks(
        self, rank: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        context = WorkerContext(rank=rank, tripwire={"tripwire_interval": 6})
        asked = TripwireOptions(tripwire_interval=6 if rank == 0 else 7)
        assert settings.in_force(asked, "tripwire", context).tripwire_interval == 6
        assert caplog.messages == []
