"""A job of several nodes whose agents talk under TLS."""

from __future__ import annotations

from pathlib import Path

from tests.support.agents import agents, certificate


def test_agents_with_tls_run_a_job_and_one_without_is_not_heard(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2", options=("--tls", certificate(tmp_path))) as found:
        found.start("n0")
        found.until_said("n0", "this node is the leader")
        found.options = ()
        found.start("bare")
        found.until(lambda: "no connection with" in found.console("bare"), "the refusal of TLS")
        assert "bare has joined" not in found.console("n0")


def test_a_job_under_tls_trains(tmp_path: Path) -> None:
    with agents(tmp_path / "job", "2:2", options=("--tls", certificate(tmp_path))) as found:
        found.start("n0", "n1")
        found.until_runs(2)
