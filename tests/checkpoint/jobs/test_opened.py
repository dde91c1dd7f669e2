"""What stands for a job that died is open in the process of the tests until its test ends, and no longer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tests.support.jobs import Job
from tests.support.launching import until
from tests.support.memory_nodes import Node, train_and_save
from tests.support.opened import closed_at_end


def is_open(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, and its threads that stage."""
    found = [one.name for one in threading.enumerate() if one.name in ("staging", "buffers")]
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the list itself
            continue
    return [one for one in found if one.startswith(str(folder)) or not one.startswith("/")]


def train_twice(folder: Path) -> None:
    """Train as two generations, of which the first one dies."""
    node, job = Node(folder), Job(0)
    train_and_save(node.join(job), job, range(1, 3), lambda _: False)
    train_and_save(node.join(job, generation=2), job, range(3, 5), lambda _: False)
    assert any(one.startswith(str(folder)) for one in is_open(folder))


def test_a_generation_that_died_is_closed_at_the_end_of_its_test(tmp_path: Path) -> None:
    before = is_open(tmp_path)
    with closed_at_end():
        train_twice(tmp_path)
    until(lambda: len(is_open(tmp_path)) <= len(before), "the end of what the test opened")
