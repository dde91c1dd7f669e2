"""What a launch runs, and the arguments in which two launches differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outlast.observe.policy.launches import arguments_that_differ, unwrapped


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("cProfile -o out train.py --lr 1", "train.py --lr 1"),
        ("cProfile train.py", "train.py"),
        ("cProfile -m pkg.train x", "pkg.train x"),
        ("coverage run -m pkg.train", "pkg.train"),
        ("python -u train.py data.py", "train.py data.py"),
        ("/usr/bin/python3.11 -m cProfile train.py", "train.py"),
        ("python -W ignore -c code x", "-c code x"),
        ("bash run.sh a", "run.sh a"),
        ("env A=1 python train.py", "train.py"),
        ("python", "python"),
        ("pkg.train configs/large.py", "pkg.train configs/large.py"),
        ("mytool run.sh", "mytool run.sh"),
    ],
)
def test_the_script_behind_a_runner_is_found(command: str, script: str) -> None:
    assert unwrapped(command.split()) == tuple(script.split())


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("--lr 1e-2 --steps 5", "--steps 5 --lr 1e-2", ()),
        ("--lr 1e-2", "--lr 1e-4", ("--lr 1e-4 ", "--lr 1e-2")),
        ("--lr -1", "--lr -2", ("--lr -2 ", "--lr -1")),
        ("", "--fast", ("--fast ", "none")),
        ("a b", "a c", ("c ", "b")),
        ("--lr=1 --x", "--lr=2 --x", ("--lr=2 ", "--lr=1")),
    ],
)
def test_arguments_that_differ_are_named_on_both_sides(before: str, now: str, named: Sequence[str]) -> None:
    text = arguments_that_differ(before.split(), now.split())
    assert bool(text) == bool(named)
    assert all(one in text for one in named)
    assert "--x" not in text
    assert "--steps" not in text


def test_many_long_arguments_make_no_long_line() -> None:
    assert len(arguments_that_differ([], [f"--{at}={'x' * 1000}" for at in range(1000)])) < 1500
