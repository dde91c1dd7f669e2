"""session.save wherever it is called: the resumed run is bitwise equal, or the call is refused."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, SCRIPTS, Run, running, until
from tests.support.ports import free_port

SCRIPT = SCRIPTS / "save_anywhere.py"
AT, TOTAL = 5, 12  # as in the script
PLACES = {
    "disk": (
        *("before", "first", "middle", "last", "twice", "after"),
        *("own", "own_twice", "own_middle", "own_fetched"),
    ),
    "memory": ("middle", "last", "twice", "own_twice", "accumulates"),
    "direct": ("last", "after", "own_middle"),
}
REFUSED = {"disk": ("wait", "break", "caught", "changed"), "memory": ("changed",), "direct": ("changed",)}


def train(*words: object) -> subprocess.CompletedProcess[str]:
    return warm.run([SCRIPT, *words], timeout=DEADLINE)


def ended(text: str) -> dict[str, Any]:
    (line,) = [one for one in text.splitlines() if one.startswith("ended ")]
    return dict(json.loads(line.removeprefix("ended ")))


@functools.cache
def calm(folder: Path, how: str) -> dict[str, Any]:
    done = train(folder / f"calm-{how}", how, "disk")
    assert done.returncode == 0, done.stderr
    return ended(done.stdout)


def cases(places: dict[str, tuple[str, ...]], *short: tuple[str, str]) -> list[Any]:
    """Return a row for each tier and place; all but some are long."""
    every = [(tier, one) for tier in places for one in places[tier]]
    return [pytest.param(*one, marks=[] if one in short else pytest.mark.long) for one in every]


@pytest.mark.parametrize(("tier", "where"), cases(PLACES, ("disk", "middle"), ("memory", "last")))
def test_a_killed_run_goes_on_from_the_step_that_was_saved(
    tier: str, where: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    how = where if where == "accumulates" else "nowhere"
    expected = calm(tmp_path_factory.getbasetemp(), how)
    words = (tmp_path / "run", where, tier, tmp_path / "killed")
    first = train(*words)
    assert first.returncode == -9, first.stderr
    second = train(*words)
    assert second.returncode == 0, second.stderr
    found = ended(second.stdout)
    saved = 0 if where == "before" else AT + 1
    assert found["restored"] >= saved if tier == "memory" else found["restored"] == saved
    assert found == {**expected, "restored": found["restored"]}


@pytest.mark.parametrize(("tier", "where"), cases(REFUSED, ("disk", "wait")))
def test_a_state_that_is_no_step_s_is_refused(tier: str, where: str, tmp_path: Path) -> None:
    done = train(tmp_path / "run", where, tier)
    assert done.returncode != 0
    assert "UsageError: " in done.stderr, done.stderr
    copies = [path.stem for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert copies == ([f"step-{AT + 1:09d}"] if where == "changed" else [])


@pytest.mark.long
def test_one_rank_alone_that_asks_within_a_step_saves_with_all(tmp_path: Path) -> None:
    results = []
    for words in (("nowhere", "disk"), ("middle", "disk", str(tmp_path / "mark"), "1")):
        folder = tmp_path / words[0]
        run = Run(folder, "save_anywhere.py", "-", *words, options=("--nproc-per-node", "2"))
        with running(run):
            assert run.finish() == 0, run.console()
        results.append({json.dumps({**ended_of(line), "restored": 0}) for line in lines_of(run)})
    assert results[0] == results[1]
    (loaded,) = run.records("loaded")
    assert loaded["step"] > AT, loaded


def lines_of(run: Run) -> list[str]:
    paths = sorted((run.folder / "logs").glob("gen-*/rank-*/stdout.log"))
    found = [line for path in paths for line in path.read_text().splitlines() if line.startswith("ended ")]
    assert len(found) == 2, run.console()
    return found


def ended_of(line: str) -> dict[str, Any]:
    return {name: value for name, value in ended(line).items() if name != "samples"}


@pytest.mark.long
def test_one_rank_alone_that_saves_between_steps_ends_with_an_error(tmp_path: Path) -> None:
    """The others cannot know of it: they go on, and what they would save is of another step."""
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, path in enumerate(outputs):
        command = [str(SCRIPT), str(tmp_path / "run"), "after", "direct", "", "0"]
        variables = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(path, "ab") as output:
            ranks.append(warm.start(command, output, output, variables))
    try:
        until(lambda: ranks[0].poll() is not None, outputs[0].read_text)
    finally:
        for one in ranks:
            one.send_signal(signal.SIGKILL)
    assert "ExchangeFailed: " in outputs[0].read_text()
    copies = [path.stem for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert copies == [f"step-{AT + 1:09d}"]  # of the end of the loop before
