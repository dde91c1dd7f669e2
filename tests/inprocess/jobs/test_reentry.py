"""In-process restart for real: four gloo ranks, faults, and the result of a run without faults."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, Run, is_gone, running, runtime_folders, until
from tests.support.ranks import lines

STEPS = 24
WORLD = 4
LONG = 230.0  # for a run with many faults
HANG = "6"  # seconds: healthy ranks of a busy host may be silent for some
OFTEN = ("--max-restarts", "9")


def reentering(folder: Path, *faults: str, options: tuple[str, ...] = (), steps: int = STEPS) -> Run:
    arguments = (str(folder / "trace"), str(steps), "10", *faults)
    return Run(
        folder / "run", "reentering.py", *arguments, options=("--nproc-per-node", str(WORLD), *options)
    )


def told(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / "trace").glob("rank-*")):
        yield from (one for one in lines(path) if one["kind"] == kind)


def losses(folder: Path) -> dict[tuple[int, int], str]:
    """Return the loss of each rank and step; one that was computed twice must agree with itself."""
    found: dict[tuple[int, int], str] = {}
    for one in told(folder, "step"):
        key = (one["rank"], one["step"])
        assert found.setdefault(key, one["loss"]) == one["loss"], one
    return found


def processes(folder: Path, generation: int) -> dict[int, int]:
    return {one["rank"]: one["pid"] for one in told(folder, "entered") if one["generation"] == generation}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[tuple[int, int], str]]:
    folder = tmp_path_factory.mktemp("faultless")
    with running(reentering(folder)) as run:
        assert run.finish() == 0, run.console()
    (digest,) = {one["digest"] for one in told(folder, "done")}
    return digest, losses(folder)


def finished(run: Run, faultless: tuple[str, dict[tuple[int, int], str]], deadline: float = DEADLINE) -> None:
    """Check that the run ended well, with the very state and losses of the run without a fault."""
    folder = run.folder.parent
    assert run.finish(deadline) == 0, run.console()
    assert run.process is not None
    ends = list(told(folder, "done"))
    assert [one["digest"] for one in ends] == [faultless[0]] * WORLD, run.console()
    assert losses(folder) == faultless[1]
    assert runtime_folders(run.process.pid) == []


Faultless = tuple[str, dict[tuple[int, int], str]]


def one_a_generation(*faults: tuple[str, int]) -> list[str]:
    """Return faults (what, rank) as words: one in each generation, four steps after the one before."""
    return [f"{what}@{rank}@{4 * number + 1}@{number}" for number, (what, rank) in enumerate(faults, 1)]


def replaced(folder: Path, generation: int) -> set[int]:
    """Return the ranks that the generation after one has in other processes."""
    before, after = processes(folder, generation), processes(folder, generation + 1)
    assert set(before) == set(after) == set(range(WORLD))
    return {rank for rank in before if before[rank] != after[rank]}


@pytest.mark.timeout(420)
def test_a_rank_that_leaves_is_replaced_and_the_others_stay(tmp_path: Path, faultless: Faultless) -> None:
    """Whatever it leaves with; after an exception it stays, too."""
    leaves = (("raise", 1), ("SIGKILL", 0), ("SIGKILL", 2), ("exit0", 1), ("exit3", 1))
    with running(reentering(tmp_path, *one_a_generation(*leaves), options=OFTEN)) as run:
        finished(run, faultless, LONG)
    expected = [set[int](), {0}, {2}, {1}, {1}]
    assert [replaced(tmp_path, number) for number in range(1, 6)] == expected, run.console()
    faults = run.records("fault_seen")
    assert [one["rank"] for one in faults[:3]] == [1, 0, 2]  # whose peer exits may be the first to say so
    assert faults[0]["fault"] == "error"
    assert faults[0]["reason"].startswith("rank 1 raised RuntimeError: boom on rank 1")
    assert [one["action"] for one in run.records("action_taken")] == ["restart-in-process"] * 5 + ["stop"]
    (step,) = {one["step"] for one in told(tmp_path, "restored") if one["generation"] == 2}
    assert step in (4, 5)  # a rank may be called out before it has saved what another one has


def test_a_rank_whose_device_fails_is_replaced(tmp_path: Path, faultless: Faultless) -> None:
    with running(reentering(tmp_path, "sticky@1@5@1")) as run:
        finished(run, faultless)
    assert replaced(tmp_path, 1) == {1}, run.console()
    assert [one["action"] for one in run.records("action_taken")] == ["restart-in-process", "stop"]


def test_ranks_that_all_exit_with_0_inside_the_function_have_finished(tmp_path: Path) -> None:
    with running(reentering(tmp_path, *(f"exit0@{rank}@end@1" for rank in range(WORLD)))) as run:
        assert run.finish() == 0, run.console()
    assert list(told(tmp_path, "done")) == []
    assert run.records("fault_seen") == []
    assert {one["generation"] for one in told(tmp_path, "entered")} == {1}


def test_granularity_node_replaces_every_rank_of_the_node(tmp_path: Path, faultless: Faultless) -> None:
    with running(reentering(tmp_path, "raise@1@12@1", "SIGKILL@2@18@2"), GRANULARITY="node") as run:
        finished(run, faultless)
    first, second, third = (processes(tmp_path, number) for number in (1, 2, 3))
    assert first == second, "an exception costs no process"
    assert {one["watchdog"] for one in told(tmp_path, "entered")} == {"0"}
    assert not set(second.values()) & set(third.values()), run.console()
    kinds = [one["action"] for one in run.records("action_taken")]
    assert kinds == ["restart-in-process", "restart-in-process", "stop"]


def test_workers_of_a_dataloader_end_with_the_call_that_started_them(tmp_path: Path) -> None:
    results = []
    for name, faults in (("faultless", ()), ("faulty", ("raise@1@12@1", "SIGKILL@2@18@2"))):
        folder = tmp_path / name
        folder.mkdir()
        with running(reentering(folder, *faults), LOADER="2") as run:
            assert run.finish() == 0, run.console()
        (digest,) = {one["digest"] for one in told(folder, "done")}
        results.append((digest, losses(folder)))
        assert {one["children"] for one in told(folder, "entered")} == {0}, run.console()
    assert results[0] == results[1]
    assert processes(folder, 2) == processes(folder, 1)
    assert sum(processes(folder, 3)[rank] == pid for rank, pid in processes(folder, 1).items()) == WORLD - 1


def test_a_fault_in_place_is_told_with_its_step_however_seldom_pages_are_read(
    tmp_path: Path, faultless: Faultless
) -> None:
    options = ("--ft-workload-check-interval", "60")
    with running(reentering(tmp_path, "raise@1@15@1", options=options)) as run:
        finished(run, faultless)
    (fault,) = run.records("fault_seen")
    assert fault["step"] in (13, 14, 15), fault  # of the slowest rank


def test_a_rank_that_hangs_in_c_is_called_out(tmp_path: Path, faultless: Faultless) -> None:
    with running(reentering(tmp_path, "gil@1@15@1"), HANG=HANG) as run:
        finished(run, faultless)
    assert replaced(tmp_path, 1) == set(), run.console()
    assert [(one["fault"], one["rank"]) for one in run.records("fault_seen")] == [("hang", 1)]


def test_a_rank_that_is_stopped_later_than_others_began_to_wait_is_replaced_at_once(
    tmp_path: Path, faultless: Faultless
) -> None:
    with running(reentering(tmp_path, "late@1@15@1"), HANG=HANG) as run:
        finished(run, faultless)
    assert replaced(tmp_path, 1) == {1}, run.console()
    assert [(one["fault"], one["rank"]) for one in run.records("fault_seen")] == [("hang", 1)]


@pytest.mark.timeout(420)
def test_a_rank_that_hangs_is_called_out_or_replaced(tmp_path: Path, faultless: Faultless) -> None:
    hangs = [(what, 1) for what in ("sleep", "SIGSTOP", "spin", "deaf")]
    with running(reentering(tmp_path, *one_a_generation(*hangs), options=OFTEN), HANG=HANG) as run:
        finished(run, faultless, LONG)
    expected = [set[int](), {1}, {1}, {1}]
    assert [replaced(tmp_path, number) for number in range(1, 5)] == expected, run.console()
    assert [(one["fault"], one["rank"]) for one in run.records("fault_seen")] == [("hang", 1)] * 4


@pytest.mark.parametrize(
    "faults",
    [
        ("SIGKILL@3@save@1", "raise@1@15@2", "raise@2@entry@3"),
        ("SIGKILL@1@15@1", "SIGKILL@2@entry@2", "SIGKILL@0@end@3"),
        ("raise@1@15@1", "SIGKILL@2@load@2", "raise@2@end@3"),
    ],
)
def test_faults_where_it_hurts(tmp_path: Path, faultless: Faultless, faults: tuple[str, ...]) -> None:
    """In a save; another fault while ranks enter again, or load; after others have returned."""
    with running(reentering(tmp_path, *faults)) as run:
        finished(run, faultless)
    kinds = [one["action"] for one in run.records("action_taken")]
    assert kinds == ["restart-in-process"] * len(faults) + ["stop"], run.console()


def test_workers_go_when_the_agent_does_and_the_next_run_goes_on(
    tmp_path: Path, faultless: Faultless
) -> None:
    with running(reentering(tmp_path, "SIGSTOP@1@15@1")) as run:
        until(lambda: list(told(tmp_path, "fault")), "the fault")
        run.stop()
        until(lambda: all(map(is_gone, processes(tmp_path, 1).values())), "the end of the workers")
    with running(reentering(tmp_path)) as again:
        finished(again, faultless)


def said_without_an_agent(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    return warm.run([path], DEADLINE)


def test_a_function_without_an_agent_says_what_is_missing(tmp_path: Path) -> None:
    script = "import outlast\n@outlast.resilient\ndef train(): pass\ntrain()"
    said = said_without_an_agent(tmp_path, script).stderr
    assert "start the script with outlast run, or pass enabled=False" in said
    script = "import outlast\n@outlast.resilient(enabled=False)\ndef train(): print('trained')\ntrain()"
    assert said_without_an_agent(tmp_path, script).stdout == "trained\n"


def test_where_it_is_off_the_function_is_handed_what_it_asks_for(tmp_path: Path) -> None:
    script = """
import outlast
from outlast.inprocess import CallWrapper
@outlast.resilient(enabled=False)
def train(what, call: CallWrapper):
    with call.atomic():
        call.ping()
        print(what, call.rank, call.world_size, call.iteration, repr(call.reason))
train("trained")
"""
    done = said_without_an_agent(tmp_path, script)
    assert done.stdout == "trained 0 1 0 ''\n", done.stderr
