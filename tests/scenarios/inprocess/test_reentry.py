"""In-process restart for real: four gloo ranks, faults, and the result of a run without faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import DEADLINE, is_gone, running, until
from tests.support.reentering import (
    WORLD,
    Result,
    actions,
    faults_seen,
    finished,
    generations,
    one_a_generation,
    processes,
    reentering,
    replaced,
    result,
    told,
)

pytestmark = pytest.mark.timeout(420)
LONG = 230.0  # for a run with many faults
HANG = "6"  # seconds: healthy ranks of a busy host may be silent for some
OFTEN = ("--max-restarts", "9")


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("faultless")
    with running(reentering(folder)) as run:
        assert run.finish() == 0, run.console()
    return result(folder)


def test_after_an_exception_all_ranks_stay_and_the_step_is_known_however_seldom_pages_are_read(
    tmp_path: Path, faultless: Result
) -> None:
    options = ("--ft-workload-check-interval", "60")
    with running(reentering(tmp_path, "raise@1@15@1", options=options)) as run:
        finished(run, faultless)
    assert replaced(tmp_path, 1) == set(), run.console()
    assert actions(run) == ["restart-in-process", "stop"]
    (fault,) = run.records("fault_seen")
    assert (fault["fault"], fault["rank"]) == ("error", 1)
    assert "RuntimeError: boom on rank 1" in fault["reason"]
    assert fault["step"] in (13, 14, 15), fault  # of the slowest rank


@pytest.mark.long
def test_a_rank_that_leaves_is_replaced_and_the_others_stay(tmp_path: Path, faultless: Result) -> None:
    """Whatever it leaves with; after an exception it stays, too."""
    leaves = (("raise", 1), ("SIGKILL", 0), ("sticky", 2), ("exit0", 1), ("exit3", 1))
    with running(reentering(tmp_path, *one_a_generation(*leaves), options=OFTEN)) as run:
        finished(run, faultless, LONG)
    expected = [set[int](), {0}, {2}, {1}, {1}]
    assert [replaced(tmp_path, number) for number in range(1, 6)] == expected, run.console()
    assert actions(run) == ["restart-in-process"] * 5 + ["stop"]
    (step,) = {one["step"] for one in told(tmp_path, "restored", generation=2)}
    assert step in (4, 5)  # a rank may be called out before it has saved what another one has


def test_ranks_that_all_exit_with_0_inside_the_function_have_finished(tmp_path: Path) -> None:
    with running(reentering(tmp_path, *(f"exit0@{rank}@end@1" for rank in range(WORLD)))) as run:
        assert run.finish() == 0, run.console()
    assert list(told(tmp_path, "done")) == []
    assert run.records("fault_seen") == []
    assert generations(tmp_path) == [1]


@pytest.mark.long
def test_granularity_node_replaces_every_rank_of_the_node(tmp_path: Path, faultless: Result) -> None:
    with running(reentering(tmp_path, "raise@1@12@1", "SIGKILL@2@18@2"), GRANULARITY="node") as run:
        finished(run, faultless)
    assert [replaced(tmp_path, number) for number in (1, 2)] == [set(), set(range(WORLD))], run.console()
    assert {one["watchdog"] for one in told(tmp_path, "entered")} == {"0"}
    assert actions(run) == ["restart-in-process", "restart-in-process", "stop"]


@pytest.mark.long
def test_workers_of_a_dataloader_end_with_the_call_that_started_them(tmp_path: Path) -> None:
    results = []
    for name, faults in (("faultless", ()), ("faulty", ("raise@1@12@1", "SIGKILL@2@18@2"))):
        folder = tmp_path / name
        folder.mkdir()
        with running(reentering(folder, *faults), LOADER="2") as run:
            assert run.finish() == 0, run.console()
        results.append(result(folder))
        assert {one["children"] for one in told(folder, "entered")} == {0}, run.console()
    assert results[0] == results[1]
    assert [replaced(folder, number) for number in (1, 2)] == [set(), {2}]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hangs", "gone"),
    [
        (["gil@1@15@1"], [set()]),  # it is called out
        (["late@1@15@1"], [{1}]),  # it is stopped later than others began to wait
        (one_a_generation(("sleep", 1), ("SIGSTOP", 1), ("spin", 1), ("deaf", 1)), [set(), {1}, {1}, {1}]),
    ],
    ids=["in C", "stopped late", "others"],
)
def test_a_rank_that_hangs_is_called_out_or_replaced(
    tmp_path: Path, faultless: Result, hangs: list[str], gone: list[set[int]]
) -> None:
    with running(reentering(tmp_path, *hangs, options=OFTEN), HANG=HANG) as run:
        finished(run, faultless, LONG)
    assert [replaced(tmp_path, number) for number in range(1, 1 + len(hangs))] == gone, run.console()
    assert faults_seen(run) == [("hang", 1)] * len(hangs)


@pytest.mark.long
@pytest.mark.parametrize(
    "faults",
    [
        ("SIGKILL@3@save@1", "raise@1@15@2", "raise@2@entry@3"),
        ("SIGKILL@1@15@1", "SIGKILL@2@entry@2", "SIGKILL@0@end@3"),
        ("raise@1@15@1", "SIGKILL@2@load@2", "raise@2@end@3"),
    ],
)
def test_faults_where_it_hurts(tmp_path: Path, faultless: Result, faults: tuple[str, ...]) -> None:
    """In a save; another fault while ranks enter again, or load; after others have returned."""
    with running(reentering(tmp_path, *faults)) as run:
        finished(run, faultless)
    assert actions(run) == ["restart-in-process"] * len(faults) + ["stop"], run.console()


@pytest.mark.long
def test_workers_go_when_the_agent_does_and_the_next_run_goes_on(tmp_path: Path, faultless: Result) -> None:
    with running(reentering(tmp_path, "SIGSTOP@1@15@1")) as run:
        until(lambda: list(told(tmp_path, "fault")), "the fault")
        run.stop()
        until(lambda: all(map(is_gone, processes(tmp_path, 1).values())), "the end of the workers")
    with running(reentering(tmp_path)) as again:
        finished(again, faultless)


DISABLED = """
import outlast
from outlast.inprocess import CallWrapper
@outlast.resilient(enabled=False)
def train(what, call: CallWrapper):
    with call.atomic():
        call.ping()
        print(what, call.rank, call.world_size, call.iteration, repr(call.reason))
train("trained")
"""


def test_without_an_agent_a_function_is_refused_unless_it_is_switched_off(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import outlast\n@outlast.resilient\ndef train(): pass\ntrain()")
    refused = warm.run([script], DEADLINE)
    assert refused.returncode != 0
    assert "enabled=False" in refused.stderr
    script.write_text(DISABLED)
    done = warm.run([script], DEADLINE)
    assert done.stdout == "trained 0 1 0 ''\n", done.stderr
