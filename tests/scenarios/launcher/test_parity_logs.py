"""Streams go where torchrun sends them: files of ``--redirects`` and ``--tee``, the console, copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parity import LAUNCHERS, SCRIPTS, launch, skip_without

pytestmark = [pytest.mark.timeout(420), pytest.mark.long]
ECHO = str(SCRIPTS / "parity_echo.sh")
OUT, ERR = 1, 2
REDIRECTS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 0, 6: 0, 7: 1}
TEE = {4: 1, 5: 2, 6: 3, 7: 2}
RANKS = 8


def mapped(bits: dict[int, int]) -> str:
    return ",".join(f"{rank}:{bit}" for rank, bit in bits.items())


@LAUNCHERS
def test_streams(launcher: str, tmp_path: Path) -> None:
    """Each rank's streams go elsewhere."""
    done = launch(
        launcher,
        tmp_path,
        *("--nproc-per-node=8", "--no-python", "--role=trainer", "--rdzv-id=job7", "--log-dir=logs"),
        *(f"--redirects={mapped(REDIRECTS)}", "--tee", mapped(TEE), ECHO),
    )
    assert done.code == 0, done.stderr
    assert "_" in done.logs().name
    assert [path.name for path in done.logs().iterdir()] == ["attempt_0"]
    assert sorted(path.name for path in (done.logs() / "attempt_0").iterdir()) == list("01234567")
    for rank in range(RANKS):
        kept, shown = REDIRECTS.get(rank, 0), TEE.get(rank, 0)
        expected = {"stdout.log": f"out {rank}\nloss {rank}\n"} if (kept | shown) & OUT else {}
        expected |= {"stderr.log": f"err {rank}\n"} if (kept | shown) & ERR else {}
        folder = done.logs() / "attempt_0" / str(rank)
        assert {path.name: path.read_text() for path in folder.iterdir()} == expected
        for stream, word, text in ((OUT, "out", done.stdout), (ERR, "err", done.stderr)):
            lines = [line for line in text.splitlines() if line.endswith(f"{word} {rank}")]
            if shown & stream:
                assert lines == [f"[trainer{rank}]:{word} {rank}"]
            else:  # the rank writes to the console itself, next to others
                assert len(lines) == (not kept & stream), (rank, word)


@LAUNCHERS
def test_filters(launcher: str, tmp_path: Path) -> None:
    """Two of three ranks are shown, and some of their lines are copied."""
    skip_without(launcher, "--duplicate-stdout-filters")
    done = launch(
        launcher,
        tmp_path,
        *("--nproc-per-node=3", "--no-python", "--redirect=3", "-t", "3", "--log_dir=logs"),
        *("--local_ranks_filter=0,2", "--duplicate-stdout-filters=loss,x,,y", "--start_method=forkserver"),
        *("--duplicate_stderr_filters", "err 2", ECHO),
        variables={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/$local_rank>"},
    )
    assert done.code == 0, done.stderr
    logs = done.logs() / "attempt_0"
    for rank in range(3):
        shown = [line for line in done.stdout.splitlines() if line.endswith(f"out {rank}")]
        assert shown == ([] if rank == 1 else [f"<default {rank}/{rank}>out {rank}"])
        assert (logs / str(rank) / "stderr.log").read_text() == f"err {rank}\n"
        assert (logs / str(rank) / "stdout.log").read_text() == f"out {rank}\nloss {rank}\n"
    copied = (logs / "filtered_stdout.log").read_text().splitlines()
    assert sorted(copied) == ["<default 0/0>loss 0", "<default 2/2>loss 2"]
    assert (logs / "filtered_stderr.log").read_text().splitlines() == ["<default 2/2>err 2"]


@LAUNCHERS
@pytest.mark.parametrize("words", [["-r", "0", "-t", "0"], ["--log-dir=/dev/null"]], ids=" ".join)
def test_without_files_the_ranks_have_the_console(launcher: str, words: list[str], tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, "--nproc-per-node=1", "--no-python", *words, "--standalone", ECHO, "x")
    assert (done.code, done.stdout) == (0, "out 0\nloss 0\nno end"), done.stderr
    assert "err 0\n" in done.stderr
