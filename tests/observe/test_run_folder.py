"""What a run folder says of itself, and what is refused of another version's."""

from __future__ import annotations

from pathlib import Path

import pytest

import outlast
from outlast.errors import RunFolderUnusable
from outlast.observe.recorder import Recorder
from outlast.observe.run_folder import RunFolder
from outlast.recovery.policy.events import RunStarted, Saved


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.claim()
    return folder


def test_a_folder_of_another_format_is_refused_by_the_version_that_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "job", "format": 2, "outlast": "3.1"}')
    named = rf"{tmp_path}/run.json.* 2 .*3\.1.*{outlast.__version__}.* 1.*MANIFEST.json"
    with pytest.raises(RunFolderUnusable, match=named):
        opened(tmp_path)


@pytest.mark.parametrize("writer", ["", ', "outlast": 3', ', "outlast": "\\u0007"'])
def test_a_folder_of_another_format_is_refused_where_no_version_is_in_it(tmp_path: Path, writer: str) -> None:
    (tmp_path / "run.json").write_text(f'{{"run_id": "job", "format": 2{writer}}}')
    with pytest.raises(RunFolderUnusable, match=r"run\.json.* 2"):
        opened(tmp_path)


def test_a_state_of_another_format_is_refused_by_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.job_state.write_text('{"format": 7, "outlast": "0.0.4"}')
    with pytest.raises(RunFolderUnusable, match=r"job_state\.json.* 7 .*0\.0\.4"):
        folder.recall()


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("a+", "a", ""),
        ("a+", "b", "a"),
        ("a+ b", "a", ""),
        ("a+ b", "b", "a"),
        ("a+ b b", "c", "a"),
        ("a+ b+", "b", ""),
        ("a+ b+ c", "a", "b"),
        ("a b", "b", ""),  # the launch that saved is not in the log
        ("a b", "a", "b"),
        ("", "a", ""),
    ],
)
def test_a_launch_is_compared_with_the_newest_one_that_saved(
    tmp_path: Path, before: str, now: str, named: str
) -> None:
    folder = opened(tmp_path)
    (folder.checkpoints / "step-000000005.g1").mkdir(parents=True)
    recorder = Recorder(folder.events)
    for number, launch in enumerate(before.split()):
        command = (f"/{launch[0]}.py", "--lr", "1")
        recorder.record(RunStarted(1.0, 1.0, number, "r", "n", 1, "b", command, 1, ""))
        if launch.endswith("+"):
            for step in (4, 5):
                recorder.record(Saved(1.0, 1.0, number, step, f"step-{step}", 1, 0.1, "due"))
    differs = folder.other_launch((f"/{now}.py", "--lr", "1"))
    assert [name for name in "abc" if f"/{name}.py" in differs] == sorted({named, now} if named else ())
