"""Jobs whose ranks share one GPU, over gloo. On a CPU the same jobs run there, so that they can be tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import Run, running
from tests.support.reentering import finished, losses, one_a_generation, reentering, replaced, told

pytestmark = pytest.mark.timeout(420)


def played(folder: Path, device: str, what: str, ranks: int, *options: str) -> tuple[Run, set[str]]:
    """Run a job to its end; return it with the digests of its ranks."""
    folder.mkdir()
    words = (f"--nproc-per-node={ranks}", *options)
    with running(
        Run(folder / "run", "on_device.py", device, str(folder), what, options=words),
        PYTHONPATH=str(folder.parent),
    ) as run:
        assert run.finish() == 0, run.console()
    return run, {path.read_text() for path in folder.glob("digest-*")}


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "preload asks for CUDA"])
def test_a_rank_that_is_killed_is_started_again(tmp_path: Path, device: str, asks: bool) -> None:
    (tmp_path / "asks_for_cuda.py").write_text("import torch\ntorch.cuda.is_available()\n")
    run, _ = played(tmp_path / "job", device, "restarts", 4, *(["--preload=asks_for_cuda"] if asks else []))
    starts = [one["start"] for one in run.records("generation_started")]
    assert len(starts) == 2, run.console()
    cold = "cold: importing asks_for_cuda used CUDA, which a fork cannot use then"
    assert set(starts) == {cold if asks and device == "cuda" else "zygote"}


def test_states_of_a_killed_rank_come_back_bit_for_bit(tmp_path: Path, device: str) -> None:
    run, found = played(tmp_path / "killed", device, "states", 1)
    assert len(run.records("generation_started")) == 2, run.console()
    assert found == played(tmp_path / "calm", device, "calm", 1)[1]


@pytest.mark.long
def test_the_rank_that_the_others_wait_for_where_they_read_a_number_is_named(
    tmp_path: Path, device: str
) -> None:
    run, _ = played(tmp_path / "job", device, "hang", 4)
    assert [(one["fault"], one["rank"]) for one in run.records("fault_seen")] == [("hang", 1)], run.console()


@pytest.mark.long
def test_only_a_rank_that_cannot_go_on_is_replaced_in_process(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", device)
    (tmp_path / "calm").mkdir()
    with running(reentering(tmp_path / "calm")) as run:
        assert run.finish() == 0, run.console()
    (digest,) = {one["digest"] for one in told(tmp_path / "calm", "done")}
    (tmp_path / "faulty").mkdir()
    faults = one_a_generation(("raise", 1), ("SIGKILL", 2), ("illegal", 3))
    with running(reentering(tmp_path / "faulty", *faults)) as run:
        finished(run, (digest, losses(tmp_path / "calm")))
    expected = [set[int](), {2}, {3} if device == "cuda" else set()]
    assert [replaced(tmp_path / "faulty", number) for number in (1, 2, 3)] == expected, run.console()
