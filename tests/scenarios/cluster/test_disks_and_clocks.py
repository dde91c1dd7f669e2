"""What a job of two nodes cannot trust: the file system of the run folder, and the clocks of its hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.agents import Agents
from tests.support.mounts import frozen, mounted, needs_root

_FAKETIME = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def _mentions(found: Agents, name: str) -> int:
    """Return how often an agent has named the run folder."""
    return found.console(name).count(str(found.run))


@needs_root
def test_a_run_folder_whose_file_system_hangs_stops_no_agent_and_costs_no_node(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    found = job("2:2", options=("--ping-timeout", "2", "--preflight", "off"))
    found.run.mkdir()
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(found.run, "-o", "loop", str(image)), frozen(found.run) as freeze:
        found.start_founder()
        found.start("n1")
        first = found.until_runs(2)
        found.until_commit(first)
        shown = {name: _mentions(found, name) for name in ("n0", "n1")}
        freeze()
        found.until(lambda: _mentions(found, "n0") > shown["n0"], "word of it")
        before = len(found.commits())  # each has asked for a lease, which pings renew every few seconds
        found.until(lambda: len(found.commits()) > before + 60, "commits while nothing can be written")
        found.order(f"exit:3 1 {first}")  # what it left to read is looked for in its log
        found.until(lambda: "restart-in-job" in found.console("n0"), "the order to restart")
        found.until(lambda: _mentions(found, "n1") > shown["n1"], "word of it")
        time.sleep(5.0)  # longer than an agent may be silent
        freeze(thaw=True)
        found.until_commit(found.until_runs(2, after=first))
        assert found.generations() == [first, first + 1], found.consoles()
        assert not found.lost("n0")
        assert not found.lost("n1")
        assert (found.run / "nodes" / "n1" / "logs" / f"gen-{first + 1:04d}" / "rank-00001").is_dir()
        found.order("exit:0 * *")
        assert found.finish() == {"n0": 0, "n1": 0}, found.consoles()
        found.nothing_left()


@pytest.mark.long
@pytest.mark.skipif(not _FAKETIME, reason="libfaketime is not installed")
def test_wrong_clocks_and_one_that_is_set_back_by_an_hour_change_nothing(
    job: Callable[..., Agents], tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    faked = {"LD_PRELOAD": str(_FAKETIME[0]), "DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}
    found = job("2:2")
    # Only the agents: with this library a rank's time.sleep fails.
    real = ("/usr/bin/env", "-u", "LD_PRELOAD")
    found.command = (found.command[0], *real, *found.command[1:])
    found.start_founder(environment={**faked, "FAKETIME_TIMESTAMP_FILE": str(clock)})
    found.start("n1", environment={**faked, "FAKETIME": "-400d"})
    assert found.finish("n1") == {"n1": 69}  # the preflight finds it
    found.start("n1", options=("--preflight", "off"), environment={**faked, "FAKETIME": "-400d"})
    first = found.until_runs(2)
    found.until_commit(first)
    times = {name: found.records(name, "run_started")[-1]["time"] for name in ("n0", "n1")}
    assert times["n0"] - times["n1"] > 399 * 86400
    assert found.generations() == [first], found.consoles()
    clock.write_text("-3600")
    os.kill(found.ranks(first, 2)[1], signal.SIGKILL)
    found.until_commit(found.until_runs(2, after=first))
    assert found.generations() == [first, first + 1], found.consoles()
    found.order("exit:0 * *")
    assert found.finish() == {"n0": 0, "n1": 0}, found.consoles()
    found.nothing_left()
