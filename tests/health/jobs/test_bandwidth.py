"""Bytes cross between two nodes both ways and are timed; who has no token, or no listener, is told so."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from outlast.errors import ExitCode, UsageError
from outlast.health.agent import bandwidth
from outlast.health.agent.bandwidth import Bandwidth
from tests.support.ports import free_port

PATIENCE = 120.0
HOST = "127.0.0.1"


def served(pool: ThreadPoolExecutor, port: int, token: str, patience: float = PATIENCE) -> Future[Bandwidth]:
    return pool.submit(bandwidth.serve, (HOST, port), token, time.monotonic() + patience)


def test_both_sides_measure_both_ways() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        there = served(pool, port, "secret")
        here = bandwidth.measure((HOST, port), "secret", time.monotonic() + PATIENCE, chunks=8)
        assert here.error == there.result(PATIENCE).error == ""
        assert min(here.sent, here.received, there.result().sent, there.result().received) > 0
        assert here.peer == f"{HOST}:{port}"


def test_a_node_without_the_token_is_sent_away_and_the_next_one_served() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        there = served(pool, port, "secret")
        refused = bandwidth.measure((HOST, port), "another", time.monotonic() + PATIENCE, chunks=1)
        assert "token" in refused.error
        assert bandwidth.measure((HOST, port), "secret", time.monotonic() + PATIENCE, chunks=1).error == ""
        assert there.result(PATIENCE).error == ""


def test_more_than_was_agreed_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        there = served(pool, port, "", patience=3)
        many = bandwidth.MOST_CHUNKS + 1
        found = bandwidth.measure((HOST, port), "", time.monotonic() + PATIENCE, chunks=many)
        assert "4096" in found.error
        assert "4096" in there.result(PATIENCE).error


def test_nobody_listens_and_nobody_comes() -> None:
    port = free_port()
    soon = time.monotonic() + 1.0
    assert "Connection refused" in bandwidth.measure((HOST, port), "", soon).error
    assert bandwidth.serve((HOST, port), "", time.monotonic() + 0.3).error


def test_a_name_that_does_not_resolve() -> None:
    found = bandwidth.measure(("no-such-node.invalid", 5000), "", time.monotonic() + PATIENCE)
    assert found.error


def test_a_peer_that_falls_silent_costs_the_deadline_and_no_more() -> None:
    with socket.create_server((HOST, 0)) as listener:
        found = bandwidth.measure((HOST, listener.getsockname()[1]), "", time.monotonic() + 0.5)
    assert "timed out" in found.error


def test_nothing_is_served_to_the_world_without_a_token() -> None:
    with pytest.raises(UsageError, match="token"):
        bandwidth.serve(("0.0.0.0", free_port()), "", time.monotonic() + PATIENCE)


def test_two_commands_measure_each_other(tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    token.write_text("secret\n")
    skipped = [
        f"--skip={name}" for name in ("torch", "shm", "memory", "disk", "address", "processes", "open-files")
    ]
    base = [sys.executable, "-m", "outlast", "preflight", "--json", "--run-dir", str(tmp_path), *skipped]
    base += ["--token-file", str(token)]
    with subprocess.Popen(
        [*base, "--bandwidth-serve", f"{HOST}:{port}"], stdout=subprocess.PIPE, text=True
    ) as server:
        client = subprocess.run(
            [*base, "--bandwidth-to", f"{HOST}:{port}", "--bandwidth-mib", "4", "--limit", "bandwidth=1e15"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said, _ = server.communicate(timeout=PATIENCE)
    assert client.returncode == ExitCode.NODE_UNFIT
    assert re.search(rf"MB/s .*{HOST}:{port}.*1000000000 MB/s", client.stdout)
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["check"] for row in rows if "check" in row].count("bandwidth") == 2
