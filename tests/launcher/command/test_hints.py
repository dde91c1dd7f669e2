"""An unknown option is answered with what was meant, also where Megatron's name for it is another one."""

from __future__ import annotations

import pytest

from outlast.errors import UsageError
from outlast.launcher.command.parser import parse


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--replication-factor", "replication_factor"),
        ("--non-persistent-ckpt-type=local", "non_persistent_save_interval"),
        ("--exit_signal_handler", "enable_exit_handler"),
        ("--rerun-mode=disabled", "rerun_mode"),
        ("--calc-ft-timeouts", "--ft-calc-ft-timeouts"),
        ("--num-in-job-restarts=3", "--max-restarts"),
        ("--nproc-pre-node=2", "--nproc-per-node"),
    ],
)
def test_an_option_of_megatrons_comes_with_what_it_is_here(flag: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse([flag, "train.py"], {})


def test_all_unknown_options_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--foo", "--max-restarts", "2", "--bar=3", "train.py", "--baz"], {})
    assert [word in str(caught.value) for word in ("--foo", "--bar", "--baz")] == [True, True, False]
