"""An unknown option is answered with what was meant, also where Megatron's name for it is another one."""

from __future__ import annotations

import pytest

from outlast.errors import UsageError
from outlast.launcher.command.parser import parse


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--replication-factor", "replication_factor is a key of [checkpoints] in the file of --config"),
        ("--non-persistent-ckpt-type=local", "non_persistent_save_interval is a key of [checkpoints]"),
        ("--exit_signal_handler", "enable_exit_handler is a key of [preemption]"),
        ("--rerun-mode=disabled", "rerun_mode is a key of [rerun]"),
        ("--calc-ft-timeouts", "did you mean --ft-calc-ft-timeouts?"),
        ("--num-in-job-restarts=3", "did you mean --max-restarts?"),
        ("--nproc-pre-node=2", "did you mean --nproc-per-node?"),
    ],
)
def test_an_option_of_megatrons_comes_with_what_it_is_here(flag: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([flag, "train.py"], {})
    assert f"; {hint}" in str(caught.value)


def test_all_unknown_options_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--foo", "--max-restarts", "2", "--bar=3", "train.py", "--baz"], {})
    assert [word in str(caught.value) for word in ("--foo", "--bar", "--baz")] == [True, True, False]
