"""The zygote that is started before the agent is imported."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from outlast import settings
from outlast.launcher.command.options import parse_run
from outlast.launcher.workers.environment import common_environment
from outlast.launcher.workers.head_start import KEPT, HeadStart, program_of
from outlast.launcher.workers.own_source import needless
from outlast.launcher.workers.zygote import Zygote
from outlast.observe.run_folder import RunFolder


class Started:
    """A head start for a script, in a folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        (folder / "train.py").write_text("import torch\n")
        script = [str(folder / "train.py")]
        self.options = parse_run(["--run-dir", str(folder / "run"), *words, *script], settings.inherited())
        self.folder = RunFolder(self.options.run_dir)
        self.folder.claim()
        self.common = common_environment(self.options, settings.inherited())

    def begin(self) -> HeadStart:
        return HeadStart(self.options, self.folder, settings.inherited())


def ended(zygote: Zygote) -> bool:
    """Wait until a zygote has ended; return whether it was killed."""
    return zygote.process.wait(60) == -signal.SIGKILL


def take(job: Started, zygotes: HeadStart, **differing: str) -> Zygote:
    common = {**job.common, **differing}
    given = program_of(job.options), common, (job.options.preload, needless(job.options))
    return zygotes.zygote(*given, "", False, False)


def test_the_zygote_that_is_asked_for_is_the_one_that_was_started(tmp_path: Path) -> None:
    job = Started(tmp_path)
    with job.begin() as zygotes:
        first = zygotes._first
        found = take(job, zygotes)
        another = take(job, zygotes)
    assert found is first
    assert another is not first
    for one in (found, another):
        one.end()
        assert ended(one)


def test_one_that_was_started_otherwise_than_asked_for_is_ended(tmp_path: Path) -> None:
    job = Started(tmp_path)
    with job.begin() as zygotes:
        first = zygotes._first
        assert first is not None
        found = take(job, zygotes, TORCHELASTIC_TIMER_FILE="/somewhere")
    assert found is not first
    assert ended(first)
    found.end()
    assert ended(found)


def test_one_that_nobody_asks_for_is_ended(tmp_path: Path) -> None:
    job = Started(tmp_path)
    with contextlib.suppress(OSError), job.begin() as zygotes:
        first = zygotes._first
        raise OSError("the agent cannot be made")
    assert first is not None
    assert ended(first)


@pytest.mark.parametrize("words", [("--no-zygote",), ("--nnodes=2", "--node-rank=0", "--master-addr=here")])
def test_there_is_none_where_its_environment_is_not_known_or_ranks_start_cold(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert Started(tmp_path, *words).begin()._first is None


def test_there_is_none_where_an_earlier_launch_has_learned_imports(tmp_path: Path) -> None:
    job = Started(tmp_path, "--warm-imports")
    (job.folder.own / KEPT).write_text("{}")
    assert job.begin()._first is None
