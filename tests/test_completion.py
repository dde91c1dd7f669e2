"""The completion of commands and options, in the shells that are installed."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from outlast import cli, completion

WITHIN = 100.0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    found = list(completion.pages(cli.COMMANDS))
    (folder / "bash").write_text(completion._bash(found, zsh=False))
    (folder / "zsh").write_text(completion._bash(found, zsh=True))
    (folder / "fish").write_text(completion._fish(found))
    return folder


def completed(scripts: Path, *words: str) -> list[str]:
    """Return what a real bash offers for the last of the words."""
    code = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); complete -p outlast >&2; _outlast; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, str(scripts / "bash"), "outlast", *words],
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=True,
    )
    assert "-F _outlast outlast" in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["do"], ["doctor"]),
        (["--v"], ["--version"]),
        (["doctor", "--no"], ["--no-rehearsal"]),
        (["doctor", "--check", "sh"], ["shm"]),
        (["run", "--node-g"], ["--node-group", "--node-group-size"]),
        (["slurm", "su"], ["submit", "supervise"]),
        (["slurm", "lint", "--str"], ["--strict"]),
        (["health", "fi"], ["fit"]),
        (["health", "fit", "--pr"], ["--prior"]),
        (["chaos", "inject", "--fault", "rank_k"], ["rank_killed"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "train"], []),  # bash completes files then
        (["top", "--rdzv"], []),
    ],
)
def test_bash_offers_what_the_parsers_take(scripts: Path, words: list[str], offered: list[str]) -> None:
    assert completed(scripts, *words) == offered


def test_every_command_and_subcommand_has_its_options(scripts: Path) -> None:
    for page in completion.pages(cli.COMMANDS):
        assert set(completed(scripts, *page.path.split(), "--")) == {
            one for one in page.options if one.startswith("--")
        }


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_is_read_without_an_error(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-n", str(scripts / shell)], capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_is_told_where_an_option_belongs(scripts: Path) -> None:
    lines = (scripts / "fish").read_text().splitlines()
    [strict] = [line for line in lines if "seen_subcommand_from slurm; and" in line and "-l strict" in line]
    assert "__fish_seen_subcommand_from lint" in strict
    assert all(line.count("'") % 2 == 0 or "\\'" in line for line in lines)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_page_of_help_ends_with_examples_that_the_parsers_take(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    lines = [line for line in examples.splitlines() if line.startswith("  outlast ")]
    known = {page.path: page for page in completion.pages(cli.COMMANDS)}
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" > ")[0].partition(" -- ")[0])[1:]
        path = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        own = words[: words.index("train.py")] if "train.py" in words else words
        options = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert words[0] == command
        assert options <= {*known[path].options, "--help"}, line


def test_the_command_prints_the_script_and_refuses_other_shells(
    scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == (scripts / "bash").read_text()
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
