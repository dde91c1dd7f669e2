"""Starts that fail because something outside of the program is away for a while."""

from __future__ import annotations

import signal
from pathlib import Path

from outlast.errors import ExitCode
from tests.support.launching import Run, running, until

ONE = ("--nproc-per-node", "1")


def test_an_outage_at_a_restart_is_waited_out_whatever_fails_because_of_it(tmp_path: Path) -> None:
    """A missing module is final only where the program never trained."""
    with running(Run(tmp_path / "run", "outage.py", "40", "ImportError", "OSError", "-", options=ONE)) as run:
        assert run.finish() == 0, run.console()
    actions = run.records("action_taken")
    assert [one["action"] for one in actions] == ["restart-in-job"] * 3 + ["stop"]
    assert [one["wait"] for one in actions] == [0.0, 2.0, 2.0, 0.0], actions
    started = run.records("generation_started")
    for action, following in zip(actions, started[1:], strict=False):
        assert following["clock"] >= action["clock"] + action["wait"]
    assert len(run.records("loaded")) == 1


def test_a_signal_ends_the_wait_for_a_start(tmp_path: Path) -> None:
    with running(Run(tmp_path / "run", "outage.py", "40", "OSError", options=ONE)) as run:
        until(lambda: any(one["wait"] >= 10 for one in run.records("action_taken")), run.console)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143, run.console()
    assert len(run.records("generation_started")) == 3


def test_a_wrong_keyword_costs_one_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Model:\n    def __init__(self, width):\n        ...\n\n\nModel(widht=3)\n")
    with running(Run(tmp_path / "run", str(script), options=ONE)) as run:
        assert run.finish() == int(ExitCode.DO_NOT_REQUEUE), run.console()
    assert len(run.records("generation_started")) == 1, run.console()
    assert [one["action"] for one in run.records("action_taken")] == ["stop"]
