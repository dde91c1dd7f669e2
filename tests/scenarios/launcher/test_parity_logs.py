"""Streams go where torchrun sends them: files of ``--redirects`` and ``--tee``, the console, copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parity import LAUNCHERS, SCRIPTS, Launched, launch, skip_without

pytestmark = [pytest.mark.timeout(420), pytest.mark.long]
ECHO = str(SCRIPTS / "parity_echo.sh")
OUT, ERR = 1, 2
REDIRECTS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 0, 6: 0, 7: 1}
TEE = {4: 1, 5: 2, 6: 3, 7: 2}
RANKS = 8


def mapped(bits: dict[int, int]) -> str:
    return ",".join(f"{rank}:{bit}" for rank, bit in bits.items())


@pytest.fixture(scope="module")
def streams(launcher: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Return a launch in which each rank's streams go elsewhere."""
    done = launch(
        launcher,
        tmp_path_factory.mktemp(launcher),
        *("--nproc-per-node=8", "--no-python", "--role=trainer", "--rdzv-id=job7", "--log-dir=logs"),
        *(f"--redirects={mapped(REDIRECTS)}", "--tee", mapped(TEE), ECHO),
    )
    assert done.code == 0, done.stderr
    return done


@LAUNCHERS
@pytest.mark.parametrize("rank", range(RANKS))
class TestStreams:
    def test_files(self, streams: Launched, rank: int) -> None:
        folder = streams.logs() / "attempt_0" / str(rank)
        wanted = REDIRECTS.get(rank, 0) | TEE.get(rank, 0)
        found = {path.name: path.read_text() for path in folder.iterdir()}
        expected = {}
        if wanted & OUT:
            expected["stdout.log"] = f"out {rank}\nloss {rank}\n"
        if wanted & ERR:
            expected["stderr.log"] = f"err {rank}\n"
        assert found == expected

    @pytest.mark.parametrize(("stream", "word"), [(OUT, "out"), (ERR, "err")])
    def test_console(self, streams: Launched, rank: int, stream: int, word: str) -> None:
        text = streams.stdout if stream == OUT else streams.stderr
        hidden = REDIRECTS.get(rank, 0) & stream and not TEE.get(rank, 0) & stream
        prefix = f"[trainer{rank}]:" if TEE.get(rank, 0) & stream else ""
        lines = [line for line in text.splitlines() if line.endswith(f"{word} {rank}")]
        if hidden:
            assert lines == []
        elif prefix:
            assert lines == [f"{prefix}{word} {rank}"]
        else:  # the rank writes to the console itself, next to others
            assert len(lines) == 1


@LAUNCHERS
def test_the_folder_of_a_launch_has_its_own_name(streams: Launched) -> None:
    assert "_" in streams.logs().name
    assert sorted(path.name for path in streams.logs().iterdir()) == ["attempt_0"]
    assert sorted(path.name for path in (streams.logs() / "attempt_0").iterdir()) == list("01234567")


@pytest.fixture(scope="module")
def filtered(launcher: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Return a launch in which two of three ranks are shown, and some of their lines are copied."""
    skip_without(launcher, "--duplicate-stdout-filters")
    done = launch(
        launcher,
        tmp_path_factory.mktemp(launcher),
        *("--nproc-per-node=3", "--no-python", "--redirect=3", "-t", "3", "--log_dir=logs"),
        *("--local_ranks_filter=0,2", "--duplicate-stdout-filters=loss,x,,y", "--start_method=forkserver"),
        *("--duplicate_stderr_filters", "err 2", ECHO),
        variables={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/$local_rank>"},
    )
    assert done.code == 0, done.stderr
    return done


@LAUNCHERS
class TestFilters:
    @pytest.mark.parametrize("rank", range(3))
    def test_the_console_shows_some_ranks(self, filtered: Launched, rank: int) -> None:
        shown = [line for line in filtered.stdout.splitlines() if line.endswith(f"out {rank}")]
        assert shown == ([] if rank == 1 else [f"<default {rank}/{rank}>out {rank}"])

    @pytest.mark.parametrize("rank", range(3))
    def test_files_have_all_of_them(self, filtered: Launched, rank: int) -> None:
        folder = filtered.logs() / "attempt_0" / str(rank)
        assert (folder / "stderr.log").read_text() == f"err {rank}\n"
        assert (folder / "stdout.log").read_text() == f"out {rank}\nloss {rank}\n"

    def test_lines_of_stdout_are_copied(self, filtered: Launched) -> None:
        found = (filtered.logs() / "attempt_0" / "filtered_stdout.log").read_text()
        assert sorted(found.splitlines()) == ["<default 0/0>loss 0", "<default 2/2>loss 2"]

    def test_lines_of_stderr_are_copied(self, filtered: Launched) -> None:
        found = (filtered.logs() / "attempt_0" / "filtered_stderr.log").read_text()
        assert found.splitlines() == ["<default 2/2>err 2"]


@LAUNCHERS
@pytest.mark.parametrize("words", [["-r", "0", "-t", "0"], ["--log-dir=/dev/null"]], ids=" ".join)
def test_without_files_the_ranks_have_the_console(launcher: str, words: list[str], tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, "--nproc-per-node=1", "--no-python", *words, "--standalone", ECHO, "x")
    assert (done.code, done.stdout) == (0, "out 0\nloss 0\nno end"), done.stderr
    assert "err 0\n" in done.stderr
