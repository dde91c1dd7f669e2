"""Whose stack is looked at of a rank with several threads: that of the main thread."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.hang.agent.evidence import Count, Looks, _Look, stacks_of
from outlast.hang.policy.rank_state import GroupState
from tests.support.launching import until

SCRIPT = """
import faulthandler, signal, sys, threading
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "a"), all_threads=True)
def bystander(): threading.Event().wait()
def culprit():
    if sys.argv[2] == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print(flush=True)
    threading.Event().wait()
for _ in range(3):
    threading.Thread(target=bystander, daemon=True).start()
culprit()
"""
SPIED = """Thread 1 (idle): "MainThread"
    culprit (train.py:3)
    <module> (train.py:9)
Thread 2 (idle): "saver"
    bystander (saver.py:5)
"""


@pytest.mark.parametrize("main", ["answers", "deaf"])
def test_the_main_thread_is_looked_at_whichever_thread_answers(tmp_path: Path, main: str) -> None:
    stacks = tmp_path / "stacks"
    command = [sys.executable, "-c", SCRIPT, str(stacks), main]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGUSR1)
        until(
            lambda: stacks.read_text().rstrip().endswith("in <module>"),
            lambda: f"the end of {stacks.read_text()!r}",
        )
        child.kill()
    functions = [frame.rpartition(":")[2] for frame in stacks_of(stacks.read_text())[0]]
    assert functions[:2] == ["<module>", "culprit"]


def test_the_thread_that_is_named_as_the_main_one_is_looked_at_wherever_it_stands() -> None:
    assert stacks_of(SPIED)[0] == ("train.py:<module>", "train.py:culprit")


def test_ranks_that_were_stopped_and_run_now_are_known() -> None:
    looks = Looks()
    assert looks.continued({0: "T", 1: "T", 2: "S"}, {0: "T", 1: "T", 2: "S"}) == frozenset()
    assert looks.continued({0: "T", 1: "S", 2: "S"}, {0: "T", 1: "S", 2: "S"}) == {1}
    assert looks.continued({0: "T", 1: "S", 2: "T"}, {0: "T", 1: "S", 2: "S"}) == {2}
    assert looks.continued({0: "S"}, {0: "S"}) == {0}
    assert looks.continued({0: "S"}, {0: "S"}) == frozenset()


INSIDE = (GroupState("0", (0, 1), 62, 62),)


def steadiness(*places: tuple[bool, tuple[GroupState, ...] | None], every: float = 1.0) -> list[int]:
    """Look at an idle rank once at each place; return for how many looks it had done nothing."""
    looks = Looks()
    found = []
    for number, (waiting, groups) in enumerate(places):
        at = number * every
        look = _Look((0, 1, 1), at, Count(), at + 0.1, quiet=True, waiting=waiting, groups=groups)
        found.append(looks.compare(1, look)[0])
    return found


def test_a_rank_that_has_just_entered_a_collective_has_done_something() -> None:
    """It was in a pause. All ranks are in the collective now, and it is about to end."""
    before = (GroupState("0", (0, 1), 61),)
    assert steadiness((False, before), (False, before), (True, INSIDE), (True, INSIDE)) == [1, 2, 0, 1]
    assert steadiness((False, None), (True, None), (True, None), (True, INSIDE)) == [1, 0, 1, 2]


def test_a_look_right_after_another_one_proves_nothing() -> None:
    """The time of a second rank may be over a moment after that of the first."""
    assert steadiness(*[(False, INSIDE)] * 4, every=0.3) == [1, 1, 2, 2]


def test_a_rank_whose_interpreter_ends_is_not_killed_by_being_asked_for_its_stacks(tmp_path: Path) -> None:
    program = (
        "import faulthandler, os, sys; from outlast.worker import bootstrap;"
        "bootstrap.answer_with_stacks(sys.argv[1]); bootstrap.answer_with_stacks(sys.argv[1]);"
        "faulthandler.unregister(bootstrap.STACK_SIGNAL); os.kill(os.getpid(), bootstrap.STACK_SIGNAL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "stacks")], timeout=60, check=False)
    assert done.returncode == 0
