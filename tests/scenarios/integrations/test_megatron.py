"""A small GPT of megatron-core, killed in a save; it goes on from its newest whole checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.launching import SCRIPTS, Run, running

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core: not installed; no extra brings it, pip install megatron-core does",
)
PARTS = ("weights", "moments", "rates", "draws")


def job(folder: Path, way: str) -> Run:
    """Return a job of two ranks that import NVRx's modules from outlast."""
    folder.mkdir()
    arguments = (str(SCRIPTS / "megatron_core.py"), str(folder), way, "6", "0")
    return Run(folder / "run", "outlast.compat.nvrx", *arguments, options=("--nproc-per-node", "2", "-m"))


def found(folder: Path, *names: str) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for name in names for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with running(job(folder, "none")) as run:
        assert run.finish() == 0, run.console()
    return folder


@pytest.mark.long
def test_megatron_core_goes_on_without_what_is_refused_and_reads_the_checkpoint(undisturbed: Path) -> None:
    assert found(undisturbed, "nvrx") == ["False", "False"]
    assert found(undisturbed, "theirs") == found(undisturbed, "weights")


@pytest.mark.parametrize(
    ("way", "resumed"),
    [("killed", "iter_0000004"), pytest.param("damaged", "iter_0000002", marks=pytest.mark.long)],
)
def test_a_killed_job_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, undisturbed: Path, way: str, resumed: str
) -> None:
    folder = tmp_path / "job"
    with running(job(folder, way)) as run:
        assert run.finish() == 0, run.console()
    assert found(folder, "resumed") == [resumed] * 2
    assert found(folder, *PARTS) == found(undisturbed, *PARTS)
    assert {6, 8} <= {one["step"] for one in run.records("script_saved")}
