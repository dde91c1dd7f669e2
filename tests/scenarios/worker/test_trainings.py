"""Several trainings in one script: each has a name and checkpoints of its own, or is refused."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Run, running

STEPS = (10, 9, 8)


def folds(run: Run, rank: int) -> list[list[str]]:
    """Return what a rank printed of each training, over all generations: number, restored, trained, state."""
    paths = sorted((run.folder / "logs").glob(f"gen-*/rank-{rank:05d}/stdout.log"))
    lines = [line.split() for path in paths for line in path.read_text().splitlines()]
    return [words[1:] for words in lines if words[:1] == ["fold"]]


def test_a_killed_training_goes_on_and_complete_ones_are_skipped(tmp_path: Path) -> None:
    found = []
    for words in (("NAMED",), ("NAMED", str(tmp_path / "mark"))):
        run = Run(tmp_path / str(len(words)), "folds.py", *words, options=("--nproc-per-node", "2"))
        with running(run):
            assert run.finish() == 0, run.console()
        found.append([folds(run, rank) for rank in range(2)])
    for calm, killed in zip(*found, strict=True):
        assert [one[:3] for one in calm] == [[str(fold), "0", str(count)] for fold, count in enumerate(STEPS)]
        first, again, *rest = killed
        assert first == calm[0]
        assert again == ["0", "10", "0", calm[0][3]], "its final state is there again, and nothing is trained"
        assert [one[3] for one in rest] == [one[3] for one in calm[1:]]
        assert int(rest[0][1]) in (3, 6)
        assert int(rest[0][1]) + int(rest[0][2]) == STEPS[1]
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["fold-0", "fold-1", "fold-2"]
    loaded = {one["checkpoint"].partition(":")[0] for one in run.records("loaded")}
    assert loaded == {"fold-0", "fold-1"}


def test_a_second_training_without_a_name_is_refused(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "1", "--max-restarts", "0")
    with running(Run(tmp_path / "run", "folds.py", "PLAIN", options=options)) as run:
        assert run.finish() != 0
    assert [one[0] for one in folds(run, 0)] == ["0"]
    (fault,) = run.records("fault_seen")
    assert "UsageError" in fault["signature"]
